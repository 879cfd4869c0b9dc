"""Which samples an emulated error is taken on, and in which parts they are best taken one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class EmulatedSamples:
    """The samples of an emulated error.

    Attributes:
        parts: their numbers in the search samples, from 0 on, in consecutive parts, none empty.
        per_plan: samples that the evaluation of one plan runs: what is emulated between plans is measured by it. None
            where opening sessions is what takes the time: then everything is best taken at once.
    """

    parts: tuple[range, ...]
    per_plan: int | None

    @property
    def count(self) -> int:
        """Of all parts together."""
        return self.parts[-1].stop


def in_parts(count: int) -> tuple[range, ...]:
    """The first ``count`` samples in parts that double what is known: 1, 1, 2, 4, ..."""
    ends = [0, 1]
    while ends[-1] < count:
        ends.append(min(2 * ends[-1], count))
    return tuple(range(start, end) for start, end in pairwise(ends))
