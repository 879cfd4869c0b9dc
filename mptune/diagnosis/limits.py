"""The error of an output and how much of it is within tolerance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mptune.diagnosis.patterns.scaled import FP32_ROUNDING
from mptune.errors import SettingsError

HEADROOM = 2.0
"""Without a tolerance, the limit is this times the emulated all-FP16 error."""
FALLBACK_LIMIT = 1e-2
"""The limit where the all-FP16 error is not finite."""

_HINT = "--tolerance OUTPUT=X, X in the unit of the error; OUTPUT=abs:X for the largest absolute difference"


@dataclass(frozen=True)
class Tolerance:
    """How far an output may lie from its reference.

    Attributes:
        limit: largest error.
        absolute: the limit is on the largest absolute difference, in the output's own unit.
    """

    limit: float
    absolute: bool = False


def parse_tolerances(given: Sequence[str] | Mapping[str, float | str], outputs: Sequence[str]) -> dict[str, Tolerance]:
    """Read ``OUTPUT=X`` and ``OUTPUT=abs:X``; the name ends at the last ``=``.

    Args:
        given: texts, or output -> X.
        outputs: names that there are.

    Raises:
        SettingsError: no such output, or X is no positive number.
    """
    pairs = given.items() if isinstance(given, Mapping) else [text.rpartition("=")[::2] for text in given]
    found = {}
    for name, value in pairs:
        text = str(value)
        absolute = text.startswith("abs:")
        try:
            limit = float(text.removeprefix("abs:"))
        except ValueError:
            raise SettingsError(f"--tolerance {name}={text} is not understood", _HINT) from None
        if not (math.isfinite(limit) and limit > 0):
            raise SettingsError(f"--tolerance {name}={text}: {limit:g} is no limit above 0", _HINT)
        if name not in outputs:
            raise SettingsError(f"--tolerance: there is no output {name!r}", f"there are {', '.join(outputs)}")
        found[name] = Tolerance(limit, absolute)
    return found


def error_of(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    """Root mean square difference of a sample by the standard deviation over all samples; the mean over the samples.

    Where the standard deviation is 0, by the root mean square; where that is 0, too, the absolute error. Values that
    are not finite where the reference is finite make it infinite, as does another shape.
    """
    finite = [np.asarray(array, np.float64)[np.isfinite(array)] for array in wanted]
    values = np.concatenate(finite) if finite else np.zeros(0)
    size = float(np.sqrt(np.mean(values**2))) if values.size else 0.0
    spread = float(values.std()) if values.size else 0.0
    scale = spread if spread > 1e-6 * size else size or 1.0
    errors = []
    for a, b in zip(got, wanted, strict=True):
        if a.shape != b.shape:
            return math.inf
        known = np.isfinite(b)
        difference = np.asarray(a, np.float64)[known] - np.asarray(b, np.float64)[known]
        if not np.isfinite(difference).all():
            return math.inf
        errors.append(math.sqrt(float(np.mean(difference**2))) / scale if difference.size else 0.0)
    return float(np.mean(errors)) if errors else 0.0


def default_limit(emulated: float) -> float:
    """The limit where none is given.

    Args:
        emulated: error of the model with FP16 wherever FP16 can be right.
    """
    return max(HEADROOM * emulated, FP32_ROUNDING) if math.isfinite(emulated) else FALLBACK_LIMIT
