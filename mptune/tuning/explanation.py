"""Explanation: why groups stay FP32 in each plan of a front, and what every group costs and gains; with its JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mptune.json_form import JsonForm

EXPLANATION_FORMAT = 1


class Reason(str, Enum):
    """Why a group of a plan is FP32.

    A pinned group has a finding, or the pattern of the search space that pins it. ``FAILED``: no plan with it in FP16
    gave finite outputs. ``UNKNOWN``: the search did not ask for its figures, as with another sampler.
    """

    PINNED = "pinned"
    FAILED = "failed"
    ERROR = "one-group error"
    BOUNDARIES = "not worth its boundaries"
    UNTRIED = "not tried"
    UNKNOWN = "not known"


REASON_WORDS = {
    Reason.PINNED: "pinned",
    Reason.FAILED: "failed",
    Reason.ERROR: "error",
    Reason.BOUNDARIES: "Casts",
    Reason.UNTRIED: "not tried",
    Reason.UNKNOWN: "unknown",
}
"""Reasons in a word each, as every view names them."""


@dataclass(frozen=True)
class Kept(JsonForm):
    """A group that a plan keeps in FP32.

    Attributes:
        group: its id.
        name: its readable name.
        reason: why, in a word.
        why: the same with figures or the pin's reason, one line.
        one_group_error: the objective error with this group alone in FP16; ``inf`` where that is not finite or fails,
            None where it was not taken.
        saves_ms: what FP16 here would save this plan, the Casts counted in; negative where it would cost time. None
            where it is not known.
        finding: code of the finding that says why (``mptune.finding.CODES``); None where only the reason does.
    """

    group: str
    name: str
    reason: Reason
    why: str
    one_group_error: float | None = None
    saves_ms: float | None = None
    finding: str | None = None

    @property
    def word(self) -> str:
        """Why it is FP32, in a word: the code of its finding, else the reason."""
        return self.finding or REASON_WORDS[self.reason]

    @property
    def because(self) -> str:
        """Why it is FP32, one line, as every view says it."""
        return f"{self.word}: {self.why}" if self.finding or self.reason is Reason.PINNED else self.why


@dataclass(frozen=True)
class GroupWorth(JsonForm):
    """What one group costs and gains in FP16.

    Attributes:
        group: its id.
        name: its readable name.
        kind: its kind, such as ``matmul``.
        one_group_error: as in ``Kept``.
        gain_ms: what it takes less in FP16, its Casts not counted; None where it is not known.
        casts_ms: what the Casts around it cost while all its neighbours are FP32; None where it is not known.
        error_per_ms: ``one_group_error / gain_ms``; None where either is not known or it gains nothing.
        fp16_points: in how many points of the front it is FP16 or BF16.
        points: how many points the front has.
        verdict: what the chosen plan does with it: ``FP16``, ``BF16``, or ``FP32: `` and the reason.
        is_pinned: its precision was not searched.
        finding: code of the finding that speaks against FP16 here; None where there is none.
    """

    group: str
    name: str
    kind: str
    one_group_error: float | None
    gain_ms: float | None
    casts_ms: float | None
    error_per_ms: float | None
    fp16_points: int
    points: int
    verdict: str
    is_pinned: bool = False
    finding: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Every key always there, null where unknown; that it is pinned is its verdict."""
        fields = super().to_json()
        del fields["is_pinned"]
        return fields


@dataclass(frozen=True)
class Explanation:
    """Why the plans of a front are what they are. Empty where the run holds nothing to explain them with.

    Attributes:
        kept: plan fingerprint -> its FP32 groups, for every plan that the front shows: the largest one-group error
            first, those without one last, in the order of the model.
        groups: all layer groups; those that FP16 pays for most come first, by error per millisecond gained.
        gains_from: where the gains come from, such as ``roofline and 48 builds``; None where they are not known.
    """

    kept: Mapping[str, tuple[Kept, ...]] = field(default_factory=dict)
    groups: tuple[GroupWorth, ...] = ()
    gains_from: str | None = None

    def of(self, fingerprint: str) -> tuple[Kept, ...]:
        """The FP32 groups of a plan; empty where nothing is known of it."""
        return self.kept.get(fingerprint, ())

    def to_json(self, metric: str) -> dict[str, Any]:
        """What ``mptune report RUN --explain --json`` prints; the metric is what the errors are."""
        return {
            "format": EXPLANATION_FORMAT,
            "metric": metric,
            "gains_from": self.gains_from,
            "groups": [group.to_json() for group in self.groups],
            "plans": {plan: [kept.to_json() for kept in groups] for plan, groups in self.kept.items()},
        }


def reason_counts(kept: Iterable[Kept], most: int | None = None) -> str:
    """FP32 groups by finding or reason, such as ``2 overflow, 12 error, 1 more``; at most ``most`` words are listed."""
    counts = Counter(group.word for group in kept)
    parts = [f"{count} {word}" for word, count in counts.items()]
    rest = sum(list(counts.values())[most:]) if most is not None else 0
    return ", ".join([*parts[:most], f"{rest} more"] if rest else parts)
