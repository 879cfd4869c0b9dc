"""Runs the model on samples that are fed in other ways, and finds the way that gives what was recorded."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

import numpy as np

from mptune.diagnosis.causes.feeds.change import Feed, FeedChange
from mptune.diagnosis.causes.feeds.changes import feed_changes, further_changes, input_groups
from mptune.diagnosis.causes.feeds.entries import rounded_changes
from mptune.diagnosis.causes.feeds.fed_back import fed_back_changes
from mptune.diagnosis.causes.feeds.fitted import Family, families, fit
from mptune.diagnosis.causes.left import MOST_SAMPLES, WORTH_MORE, Left, left_of, residual
from mptune.diagnosis.patterns.bounds import LEFT
from mptune.diagnosis.sides import Side, Sides
from mptune.errors import BaselineError

_MOST_SECONDS = 60.0
"""Ways that are seldom, and fitted ones, are tried for so long."""
_FED_AT_A_TIME_BYTES = 256 * 2**20
MOST_CHECKED = 64
"""Samples that differ, on which a way that was found is tried."""
_NOTHING_ELSE = 0.002
"""Share that a way leaves at most for no other to be looked for: FP16 leaves that much beside another preparation."""
_MOST_COMPARED = 8
"""Ways that explain some samples, of which the one that explains most is looked for."""
_FEWEST_FOR_FIT = 3
"""Samples that differ, of which numbers can be told."""
_CHECKED_FOR_FIT = 16
_MOST_EXPLAINED = 0.9


class Trials:
    """Runs the model on samples that are fed in other ways."""

    def __init__(self, sides: Sides, unexplained: Sequence[Side], feeds: Sequence[Feed], *, is_quick: bool) -> None:
        """Take what is compared.

        Args:
            sides: of the comparison.
            unexplained: the outputs to explain.
            feeds: the samples, or what is fed in their place to begin with.
            is_quick: try the most frequent ways only.
        """
        self._stages = (self._known,) if is_quick else (self._known, self._further, self._fitted)
        self.sides, self.unexplained = sides, unexplained
        self._feeds = feeds
        self._number = 0
        self._deadline = math.inf

    def best(self, worst: Sequence[int]) -> tuple[FeedChange, Left] | None:
        """The way that leaves least on the samples that differ most; None where each leaves too much.

        What leaves no more than rounding does ends the search: later stages are tried for what is not explained yet.
        Where no way explains these samples, the one that explains most of the samples, exactly, among them the first.
        """
        found: tuple[FeedChange, Left] | None = None
        of_some: list[tuple[FeedChange, Left]] = []
        for stage in self._stages:
            for way, left, alone in self._likely(list(stage(worst)), worst):
                if (left.is_exact or left.share <= way.clear) and (found is None or left.is_clearly_below(found[1])):
                    found = way, left
                elif alone.is_exact and alone.share <= LEFT:
                    of_some.append((way, alone))
            if found is not None and found[1].share <= _NOTHING_ELSE:
                return found
        if not of_some or (found is not None and found[1].is_exact):
            return found
        counts = [len(self.explained(way, worst[:MOST_CHECKED])) for way, _ in of_some[:_MOST_COMPARED]]
        return of_some[counts.index(max(counts))]

    def explained(self, way: FeedChange, samples: Sequence[int]) -> list[int]:
        """Those of the samples whose difference a way explains."""
        known = [k for k in samples if way.feed(k) is not None]
        made = self._made([(way, [k]) for k in known])
        shares = (left_of(self.unexplained, [k], outputs) for k, (_, outputs) in zip(known, made, strict=True))
        return [k for k, one in zip(known, shares, strict=True) if one.is_exact or one.share <= way.clear]

    def _known(self, worst: Sequence[int]) -> Iterator[FeedChange]:
        yield from feed_changes(self._feeds)
        yield from fed_back_changes(self.sides, self._feeds)

    def _further(self, worst: Sequence[int]) -> Iterator[FeedChange]:
        self._deadline = time.monotonic() + _MOST_SECONDS
        yield from further_changes(self._feeds)
        if not all(side.is_within for side in self.unexplained):  # within the limit a rounding is no fault
            yield from rounded_changes(self._feeds, input_groups(self._feeds))

    def _fitted(self, worst: Sequence[int]) -> Iterator[FeedChange]:
        samples = worst[:MOST_SAMPLES]
        if len(samples) < _FEWEST_FOR_FIT:
            return
        before = residual(self.unexplained, samples, None)
        if before is None:
            return
        for family in families(self._feeds, input_groups(self._feeds)):
            numbers = fit(
                family,
                lambda tried, family=family: self._residuals(family, tried, worst[:1]),  # type: ignore[misc]
                lambda tried, family=family: self._residuals(family, tried, samples),  # type: ignore[misc]
                float(np.linalg.norm(before)),
            )
            if numbers is not None and self._is_general(way := family.way(self._feeds, numbers), worst):
                yield way
                ((_, outputs),) = self._made([(way, samples)])
                if left_of(self.unexplained, samples, outputs).share <= _NOTHING_ELSE:
                    break
        self._deadline = math.inf  # what was found is looked at

    def _is_general(self, way: FeedChange, worst: Sequence[int]) -> bool:
        """Whether numbers that were fitted on some samples hold for most of the others."""
        others = worst[MOST_SAMPLES : MOST_SAMPLES + _CHECKED_FOR_FIT]
        return len(self.explained(way, others)) >= _MOST_EXPLAINED * len(others)

    def _residuals(
        self, family: Family, tried: Sequence[np.ndarray], samples: Sequence[int]
    ) -> list[np.ndarray | None]:
        made = self._made([(family.way(self._feeds, numbers), samples) for numbers in tried], has_deadline=True)
        return [residual(self.unexplained, samples, outputs) if outputs else None for _, outputs in made]

    def _likely(self, ways: Sequence[FeedChange], worst: Sequence[int]) -> Iterator[tuple[FeedChange, Left, Left]]:
        """Ways that leave little of the sample that differs most, with what they leave of more samples, and of it."""
        first = [(way, one) for way in ways if (one := self._covered(way, worst, 1))]
        shares = [
            (way, left_of(self.unexplained, samples, outputs).share if outputs else math.inf)
            for (way, outputs), (_, samples) in zip(self._made(first, has_deadline=True), first, strict=True)
        ]
        likely = [way for way, share in shares if share <= max(WORTH_MORE, way.clear)]
        pairs = [(way, self._covered(way, worst, MOST_SAMPLES)) for way in likely]
        for (way, outputs), (_, samples) in zip(self._made(pairs), pairs, strict=True):
            if not outputs:
                continue
            left = left_of(self.unexplained, samples, outputs)
            yield way, left, left_of(self.unexplained, samples[:1], outputs[:1])

    def _covered(self, way: FeedChange, worst: Sequence[int], count: int) -> list[int]:
        """The first samples of these that a way changes, at most so many."""
        found = []
        for k in worst:
            fed = way.feed(k)
            if fed is not None and any(not np.array_equal(fed[name], self._feeds[k][name]) for name in way.inputs):
                found.append(k)
                if len(found) == count:
                    break
        return found

    def _made(
        self, pairs: Sequence[tuple[FeedChange, Sequence[int]]], *, has_deadline: bool = False
    ) -> list[tuple[FeedChange, tuple[Feed, ...]]]:
        """What the model gives for some samples fed in each way; nothing where it does not run, or time is up."""
        found: list[tuple[FeedChange, tuple[Feed, ...]]] = []
        for portion in self._portions(pairs):
            if has_deadline and time.monotonic() > self._deadline:
                found += [(way, ()) for way, _ in portion]
                continue
            feeds = [[feed for k in samples if (feed := way.feed(k)) is not None] for way, samples in portion]
            found += [(way, outputs) for (way, _), outputs in zip(portion, self._outputs(feeds), strict=True)]
        return found

    def _portions(
        self, pairs: Sequence[tuple[FeedChange, Sequence[int]]]
    ) -> Iterator[list[tuple[FeedChange, Sequence[int]]]]:
        """Ways of which so much is fed at a time as a process may well hold; each feeds as much as the samples have."""
        portion: list[tuple[FeedChange, Sequence[int]]] = []
        room = _FED_AT_A_TIME_BYTES
        for way, samples in pairs:
            size = sum(array.nbytes for k in samples for array in self._feeds[k].values())
            if portion and size > room:
                yield portion
                portion, room = [], _FED_AT_A_TIME_BYTES
            portion.append((way, samples))
            room -= size
        if portion:
            yield portion

    def _outputs(self, feeds: Sequence[Sequence[Feed]]) -> list[tuple[Feed, ...]]:
        """What the model gives for each way's feeds; where it does not run on all together, each half again."""
        self._number += 1
        try:
            flat = tuple(self.sides.runner.on(f"prepared-{self._number}", [feed for way in feeds for feed in way]))
        except BaselineError:
            if len(feeds) == 1:
                return [()]
            half = len(feeds) // 2
            return [*self._outputs(feeds[:half]), *self._outputs(feeds[half:])]
        ends = np.cumsum([len(of_way) for of_way in feeds])
        return [flat[end - len(of_way) : end] for end, of_way in zip(ends, feeds, strict=True)]
