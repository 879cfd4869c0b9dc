"""The latency of one session against the baseline's, and how well it is known within these two sessions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_RESAMPLES = 400
_LEAST_MS = 1e-9
"""A clock that is too coarse gives 0, which has no logarithm."""


@dataclass(frozen=True)
class SessionTiming:
    """The latency of one session of a plan, relative to the session of the baseline that it was timed in turn with.

    Attributes:
        baseline: which session of the baseline; all candidates of one worker process share it.
        log_ratio: ``log(median / median of the baseline)``.
        sd: standard error of ``log_ratio`` within these two sessions.
    """

    baseline: str
    log_ratio: float
    sd: float

    @classmethod
    def of_values(cls, baseline: str, values_ms: Sequence[float], baseline_ms: Sequence[float]) -> SessionTiming:
        """From values taken in turn, ``values_ms[i]`` right after ``baseline_ms[i]``."""
        values, others = (
            np.maximum(np.asarray(taken, dtype=np.float64), _LEAST_MS) for taken in (values_ms, baseline_ms)
        )
        ratio = float(np.median(values)) / float(np.median(others))
        return cls(baseline, math.log(ratio), log_ratio_sd(values, others))

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return {"baseline": self.baseline, "log_ratio": self.log_ratio, "sd": self.sd}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> SessionTiming:
        """Inverse of ``to_json``."""
        return cls(str(document["baseline"]), float(document["log_ratio"]), float(document["sd"]))


def log_ratio_sd(values_ms: Sequence[float] | Floats, baseline_ms: Sequence[float] | Floats, seed: int = 0) -> float:
    """Standard error of the log ratio of two medians whose values were taken in turn.

    The bootstrap (Efron 1979) draws rounds, a value of each engine: what a device does in one round is common to both
    and cancels. Deterministic for a seed; 0 for a single round.
    """
    values, baseline = np.asarray(values_ms, dtype=np.float64), np.asarray(baseline_ms, dtype=np.float64)
    rounds = np.random.default_rng(seed).integers(0, len(values), size=(_RESAMPLES, len(values)))
    medians = np.median(values[rounds], axis=1), np.median(baseline[rounds], axis=1)
    return float(np.std(np.log(medians[0] / medians[1]), ddof=1)) if len(values) > 1 else 0.0
