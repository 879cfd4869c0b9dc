"""Whether recorded outputs are those of the same samples fed in another way (``feeds``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mptune.diagnosis.causes.feeds.change import FeedChange
from mptune.diagnosis.causes.feeds.fed_back import fed_back
from mptune.diagnosis.causes.left import Left, left_text, most_different
from mptune.diagnosis.causes.trials import MOST_CHECKED, Trials
from mptune.diagnosis.patterns.in_time import which_samples
from mptune.diagnosis.sides import Side, Sides
from mptune.finding import Finding, Where

_MOST_EXPLAINED = 0.9
"""Of the samples, by a way that leaves more than rounding does."""
_MOST_WAYS = 2
"""Ways of some samples each that are named."""


@dataclass(frozen=True)
class Preparation:
    """What was found.

    Attributes:
        findings: one for each way.
        is_exact: the ways leave no more than rounding does.
        is_whole: they explain every sample that was tried.
    """

    findings: tuple[Finding, ...] = ()
    is_exact: bool = False
    is_whole: bool = False

    @property
    def explains_all(self) -> bool:
        """Whether nothing is left to be explained."""
        return self.is_exact and self.is_whole


def other_preparation(sides: Sides, unexplained: Sequence[Side], *, is_quick: bool = False) -> Preparation:
    """How the inputs have to be changed for the model to give what was recorded; no findings where no way is known.

    Args:
        sides: of the comparison; the right one is recorded.
        unexplained: the outputs that no other cause explains.
        is_quick: try the most frequent ways only.
    """
    feeds = [dict(feed) for feed in sides.runner.samples]
    found = _preparation(Trials(sides, unexplained, feeds, is_quick=is_quick))
    if found.findings or is_quick or (own := fed_back(sides, feeds)) is None:
        return found
    return _preparation(Trials(sides, unexplained, own.feeds, is_quick=False), own.words)


def _preparation(trials: Trials, base: str = "") -> Preparation:
    """What is found, where all that is fed has something changed to begin with, in words."""
    differing = worst = most_different(trials.unexplained)
    findings: list[Finding] = []
    is_exact = True
    while worst and len(findings) < _MOST_WAYS:
        found = trials.best(worst)
        if found is None:
            break
        way, left = found
        checked = sorted(worst[i] for i in np.linspace(0, len(worst) - 1, min(len(worst), MOST_CHECKED)).astype(int))
        explained = trials.explained(way, checked)
        if not explained or (not left.is_exact and len(explained) < _MOST_EXPLAINED * len(checked)):
            break
        others = [k for k in checked if k not in explained and way.feed(k) is not None]
        findings.append(_finding(trials, way, base, left, explained, checked, differing, is_whole=not others))
        is_exact = is_exact and left.is_exact
        worst = [k for k in worst if k in others]
    return Preparation(tuple(findings), bool(findings) and is_exact, not worst)


def _finding(
    trials: Trials,
    way: FeedChange,
    base: str,
    left: Left,
    explained: Sequence[int],
    checked: Sequence[int],
    differing: Sequence[int],
    *,
    is_whole: bool,
) -> Finding:
    count = len(trials.sides.runner.samples)
    samples: tuple[int, ...] = ()
    on = left_text(left.share, left.count)
    if not is_whole:
        samples = tuple(explained)
        on += f"; so it is for {which_samples(samples)}, and not for all {len(checked)} that differ"
    elif len(checked) < len(differing) <= MOST_CHECKED:
        samples = tuple(explained)
        on += "; so it is for the others that differ"
    elif len(differing) < count:
        samples = tuple(sorted(differing))
        on += f"; {which_samples(samples)} of {count} {'differs' if len(samples) == 1 else 'differ'}"
    evidence = {"left_share": left.share, "rounding_share": left.rounding, "samples": left.count}
    outputs = tuple(side.where for side in trials.unexplained)
    where = Where(inputs=way.inputs, outputs=outputs, samples=samples)
    if left.is_exact:
        given = f"the model gives what was recorded {way.words}{base} ({on})"
        text = f"{given}: {way.meaning}; precision is not the problem"
    else:
        text = (
            f"the model comes near to what was recorded {way.words}{base} ({on}; rounding would leave"
            f" {100 * left.rounding:.2g} %): perhaps {way.meaning}, in this way or a similar one"
        )
    return Finding("data-do-not-fit", "warning", "compare", where, evidence, text, way.cure)
