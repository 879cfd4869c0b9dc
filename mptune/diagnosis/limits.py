"""The error of an output and how much of it is within tolerance."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mptune.data.metrics.parts import OutputParts
from mptune.diagnosis.patterns.roundings import FP32_ROUNDING
from mptune.errors import SettingsError
from mptune.settings import Tolerance

HEADROOM = 2.0
"""Without a tolerance, the limit is this times the emulated all-FP16 error (``default_limit``)."""
MOST_LIMIT = 0.1
"""Without a tolerance, no limit is larger."""
FALLBACK_LIMIT = 1e-2
"""The limit where the emulated all-FP16 error is not finite."""


@dataclass(frozen=True)
class Limit:
    """How far a part of an output may lie from its reference."""

    value: float
    is_absolute: bool = False
    """Of the largest absolute difference, in the output's own unit."""
    columns: tuple[int, ...] | None = None
    """None: the whole output."""

    def to_json(self) -> dict[str, Any]:
        """The limit as ``compare --json`` prints it."""
        columns = None if self.columns is None else list(self.columns)
        return {"value": self.value, "unit": "absolute" if self.is_absolute else "relative", "columns": columns}

    def text(self, figure: float) -> str:
        """A figure of what is limited, as ``--tolerance`` takes it: ``0.01``, or ``abs:0.5``."""
        return f"abs:{figure:.3g}" if self.is_absolute else f"{figure:.3g}"

    def sentence(self, figure: float) -> str:
        """The same in a sentence: ``an error of 0.01``, or ``a largest absolute difference of 0.5``."""
        return f"{'a largest absolute difference' if self.is_absolute else 'an error'} of {figure:.3g}"


def parse_tolerances(
    given: Sequence[str] | Mapping[str, float | str], outputs: Sequence[str]
) -> dict[str, tuple[Tolerance, ...]]:
    """Read ``OUTPUT[COLUMNS]=X`` and ``OUTPUT[COLUMNS]=abs:X`` (``mptune.settings.Tolerance``)."""
    tolerances: dict[str, tuple[Tolerance, ...]] = {}
    for tolerance in Tolerance.parse_all(given):
        if tolerance.output not in outputs:
            raise SettingsError(
                f"names {tolerance.output!r}, which is no output",
                f"there are {', '.join(outputs)}",
                setting="tolerance",
            )
        tolerances[tolerance.output] = (*tolerances.get(tolerance.output, ()), tolerance)
    return tolerances


def limits_of(
    name: str,
    tolerances: Sequence[Tolerance],
    parts: OutputParts | None,
    rest: float | None,
    default: Callable[[tuple[int, ...] | None], float],
) -> list[Limit]:
    """The limit of each part of an output: where no tolerance is, ``rest`` (``--max-error``), else ``default``."""
    count = 0 if parts is None or parts.axis is None else len(parts.scales)
    for tolerance in tolerances:
        if tolerance.columns is not None and max(tolerance.columns) >= count:
            columns_text = f"it has {count} columns, from 0 to {count - 1}" if count else "it has no columns"
            raise SettingsError(f"{tolerance}: output {name!r} has no such column", columns_text, setting="tolerance")
    limits = [Limit(tolerance.limit, tolerance.is_absolute, tolerance.columns) for tolerance in tolerances]
    if any(tolerance.columns is None for tolerance in tolerances):
        return limits
    named = {column for tolerance in tolerances for column in tolerance.columns or ()}
    left: list[tuple[int, ...] | None]
    if parts is not None and parts.is_split:
        every = (tuple(k for k in columns if k not in named) for columns in parts.ranges)
        left = [columns for columns in every if columns]
    elif named:
        columns = tuple(k for k in range(count) if k not in named)
        left = [columns] if columns else []
    else:
        left = [None]
    return [*limits, *(Limit(default(c) if rest is None else rest, columns=c) for c in left)]


def columns_of(arrays: Sequence[np.ndarray], axis: int | None, columns: Sequence[int] | None) -> list[np.ndarray]:
    """Some columns of arrays; arrays that do not have them as they are."""
    if columns is None or axis is None:
        return list(arrays)
    return [np.take(a, columns, axis=axis) if a.ndim > axis and a.shape[axis] > max(columns) else a for a in arrays]


def _differences(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> list[np.ndarray] | None:
    """Of each sample where the reference is finite, flat; None where shapes or other finite values differ."""
    differences = []
    for a, b in zip(got, wanted, strict=True):
        if a.shape != b.shape:
            return None
        is_finite = np.isfinite(b)
        differences.append(np.asarray(a, np.float64)[is_finite] - np.asarray(b, np.float64)[is_finite])
        if not np.isfinite(differences[-1]).all():
            return None
    return differences


def largest_of(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    """Largest absolute difference; inf where shapes or finite values differ."""
    differences = _differences(got, wanted)
    return math.inf if differences is None else max((float(np.abs(d).max(initial=0)) for d in differences), default=0.0)


def error_of(
    got: Sequence[np.ndarray], wanted: Sequence[np.ndarray], *, about_zero: bool = False, least: float = 0.0
) -> float:
    """Root mean square difference of a sample by the standard deviation over all samples; the mean over the samples.

    Where the standard deviation is 0, by the root mean square; where that is 0, too, the absolute error. Values that
    are not finite where the reference is finite make it infinite, as does another shape. ``about_zero`` divides by the
    root mean square in any case, where a zero says that a row is not there; nothing is divided by less than ``least``.
    """
    finite = [np.asarray(array, np.float64)[np.isfinite(array)] for array in wanted]
    values = np.concatenate(finite) if finite else np.zeros(0)
    size = float(np.sqrt(np.mean(values**2))) if values.size else 0.0
    spread = float(values.std()) if values.size else 0.0
    scale = max(spread if spread > 1e-6 * size and not about_zero else size, least) or 1.0
    differences = _differences(got, wanted)
    if differences is None:
        return math.inf
    errors = [math.sqrt(float(np.mean(d**2))) / scale if d.size else 0.0 for d in differences]
    return float(np.mean(errors)) if errors else 0.0


def default_limit(emulated: float) -> float:
    """The limit where none is given: twice the error of all-FP16, and no more than a small part of the spread.

    A value beyond FP16's range, or a decision that falls the other way, is no rounding: an error that is as large as
    that of a broken FP16 model does not agree.
    """
    if not math.isfinite(emulated):
        return FALLBACK_LIMIT
    return min(max(HEADROOM * emulated, FP32_ROUNDING), MOST_LIMIT)
