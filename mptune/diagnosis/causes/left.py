"""What an explanation leaves of the difference of recorded outputs, beside what rounding would."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mptune.diagnosis.causes.feeds.change import Feed
from mptune.diagnosis.patterns.scaled import CLEAR, column_scale, rms
from mptune.diagnosis.sides import Side

MOST_SAMPLES = 4
"""The samples that differ most are run again for each explanation that leaves little of the first of them."""
WORTH_MORE = 0.3
"""Share of the difference of one sample that an explanation leaves at most to be tried on more."""
_FP32_LEAVES = 1e-3
"""Share that other FP32 roundings may leave of a small difference."""


@dataclass(frozen=True)
class Left:
    """What is left of some samples' difference.

    Attributes:
        share: of the difference, in the worst output; infinite where one cannot be compared.
        rounding: share that rounding to FP16 would leave there at most.
        count: samples.
    """

    share: float
    rounding: float
    count: int

    @property
    def is_exact(self) -> bool:
        """Whether it is no more than rounding makes."""
        return self.share <= self.rounding

    def is_clearly_below(self, other: Left) -> bool:
        """Whether another explanation leaves twice as much, beyond what FP32 leaves."""
        return max(self.share, _FP32_LEAVES) < other.share / 2


def most_different(unexplained: Sequence[Side]) -> list[int]:
    """Indices of the samples that differ, those that differ most first."""
    count = len(unexplained[0].wanted)
    squares, least = np.zeros(count), np.zeros(count)
    for side in unexplained:
        known = [w.astype(np.float64).ravel() for w in side.wanted if w.dtype.kind in "fiub"]
        spread = float(np.nanvar(np.concatenate(known))) if known else 0.0
        compared = side.compared()
        half = (compared.exact if compared is not None else _FP32_LEAVES) ** 2
        for k, (got, wanted) in enumerate(zip(side.got, side.wanted, strict=True)):
            if got.shape != wanted.shape or got.dtype.kind not in "fiub":
                return []
            apart = np.asarray(got, np.float64) - np.asarray(wanted, np.float64)
            squares[k] += float((apart**2).sum()) / (spread or 1.0)
            least[k] += half * apart.size
    return [int(k) for k in np.argsort(-squares, kind="stable") if least[k] < squares[k] < math.inf]


def left_of(unexplained: Sequence[Side], samples: Sequence[int], made: Sequence[Feed]) -> Left:
    """What is left where the model gives other outputs, in the worst output.

    Args:
        unexplained: the outputs.
        samples: indices of the samples.
        made: outputs for these, by name, that may be what was recorded; none where there are none.
    """
    worst = Left(0.0 if made else math.inf, 1.0, len(samples))
    for side in unexplained if made else ():
        share, rounding = _left(side, samples, [np.asarray(outputs[side.name]) for outputs in made])
        if share / rounding > worst.share / worst.rounding or worst.share == 0:
            worst = Left(share, rounding, len(samples))
    return worst


def left_text(share: float, count: int) -> str:
    """What is left of the difference, on how many samples, in words."""
    samples = "sample that differs most" if count == 1 else f"{count} samples that differ most"
    return f"{100 * share:.2g} % of the difference is left, on the {samples}"


def residual(unexplained: Sequence[Side], samples: Sequence[int], made: Sequence[Feed] | None) -> np.ndarray | None:
    """What is left, value by value, in units of the columns' spread; None where shapes differ.

    Args:
        unexplained: the outputs.
        samples: indices of the samples.
        made: outputs for these; None takes the reference.
    """
    parts = []
    for side in unexplained:
        for position, k in enumerate(samples):
            again = side.wanted[k] if made is None else np.asarray(made[position][side.name])
            if not side.got[k].shape == side.wanted[k].shape == again.shape:
                return None
            apart = (again.astype(np.float64) - side.got[k].astype(np.float64)) / _scale(side, k)
            parts.append(np.where(np.isfinite(apart), apart, 0.0).ravel())
    return np.concatenate(parts) if parts else None


def _scale(side: Side, k: int) -> np.ndarray | float:
    wanted = np.asarray(side.wanted[k], np.float64)
    return column_scale(wanted) if wanted.ndim > 1 else 1.0


def _left(side: Side, samples: Sequence[int], made: Sequence[np.ndarray]) -> tuple[float, float]:
    """Share that is left, and share that rounding may leave."""
    before = after = rounded = 0.0
    for k, again in zip(samples, made, strict=True):
        got, wanted = side.got[k], side.wanted[k]
        if not got.shape == wanted.shape == again.shape or got.dtype.kind not in "fiub":
            return math.inf, 1.0
        scale = _scale(side, k)
        one, two, three = (np.asarray(each, np.float64) for each in (got, wanted, again))
        before += float((((one - two) / scale) ** 2).sum())
        after += float((((one - three) / scale) ** 2).sum())
        rounded += _rounding(side, k, scale)
    if not before > 0 or not math.isfinite(after):
        return math.inf, 1.0
    return math.sqrt(after / before), max(min(2 * math.sqrt(rounded / before), CLEAR), _FP32_LEAVES)


def _rounding(side: Side, k: int, scale: np.ndarray | float) -> float:
    """Squared difference that FP16 throughout makes in a sample, emulated; 0 where that is not known."""
    exact = np.asarray(side.sides.runner.exact[k][side.name], np.float64)
    emulated = np.asarray(side.sides.emulated[k][side.name], np.float64)
    if exact.shape != emulated.shape or exact.shape != side.wanted[k].shape or not np.isfinite(emulated).all():
        return 0.0
    return rms((emulated - exact) / scale) ** 2 * exact.size
