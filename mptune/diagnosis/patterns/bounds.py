"""An output that is its reference within bounds: limited, cut off below a threshold, rounded to steps."""

from __future__ import annotations

import math

import numpy as np

LEFT = 0.02
"""Share of the difference that a relation leaves at most."""
_MOST_STEPS = 256
"""Different values that INT8 has."""
FEW_BITS = (("BF16", 7), ("FP8 (E4M3)", 3), ("FP8 (E5M2)", 2))
"""Types and the bits of their mantissas beside the leading one."""
_HALF = 0.52
"""Of a step, that rounding moves a value by at most, with what FP32 adds."""
_FEWEST_ROUNDED = 16
_FEWEST = 3
"""So many values are beyond a limit, or below a threshold, for it to be one."""


def gives(made: np.ndarray, got: np.ndarray, wanted: np.ndarray) -> bool:
    """Whether an array is the output: little of the difference is left, and little of the output's own spread."""
    if not np.isfinite(made).all():
        return False
    rest = float(np.linalg.norm(got - made))
    return rest <= LEFT * float(np.linalg.norm(got - wanted)) and rest <= LEFT * float(np.linalg.norm(got - got.mean()))


def bounded(got: np.ndarray, wanted: np.ndarray) -> str:
    """Which limits, threshold or steps make an output of its reference, in words; "" where none do.

    Args:
        got: of the output, float64, finite.
        wanted: the same of the reference.
    """
    low, high = float(got.min()), float(got.max())
    below, above = int((wanted < low).sum()) >= _FEWEST, int((wanted > high).sum()) >= _FEWEST
    limits = ""
    if below or above:
        limits = f"to {low:.4g}..{high:.4g}" if below and above else f"to at {'least' if below else 'most'} "
        limits += "" if below and above else f"{low if below else high:.4g}"
    if step := step_of(got, wanted):
        return _in_steps(step, limits)
    for name, bits in FEW_BITS:
        if is_rounded(got, wanted, bits):
            return f"it is the reference rounded to {name}"
    if limits and gives(np.clip(wanted, low, high), got, wanted):
        return f"it is the reference limited {limits}"
    cut, size = (got == 0) & (wanted != 0), np.abs(wanted)
    if int(cut.sum()) >= _FEWEST and gives(np.where(cut, 0.0, wanted), got, wanted):
        kept, gone = float(size[~cut & (wanted != 0)].min(initial=np.inf)), float(size[cut].max())
        if gone < kept < np.inf:
            what = "values" if wanted.min() >= 0 else "magnitudes"
            return f"it is the reference with {what} of {gone:.4g} and below set to zero, and from {kept:.4g} on kept"
    return ""


def is_rounded(got: np.ndarray, wanted: np.ndarray, bits: int) -> bool:
    """Whether all values have so many bits beside the leading one, and are those next to the reference's.

    Zeros tell nothing of bits; where the reference has as few bits itself, nothing is shown.
    """
    fraction, exponent = np.frexp(got)
    step = np.ldexp(1.0, exponent - bits - 1)
    has_few = np.ldexp(fraction, bits + 1) % 1 == 0
    near = np.abs(got - wanted) <= _HALF * step
    is_known = got != 0
    if int(is_known.sum()) < _FEWEST_ROUNDED or not has_few.all() or not near[is_known].all():
        return False
    theirs = np.ldexp(np.frexp(wanted)[0], bits + 1) % 1 == 0
    return float(np.mean(theirs[is_known])) < 0.5


def _in_steps(step: float, limits: str) -> str:
    if limits:
        return (
            f"it is the reference rounded to multiples of {step:.4g} and limited {limits}: as by an INT8 output whose"
            " range is smaller than the reference's"
        )
    decimals = -math.log10(step)
    if abs(decimals - round(decimals)) < 1e-3 and decimals > 0.5:
        return f"it is the reference rounded to multiples of {step:.4g}, as where it is written with few decimals"
    return f"it is the reference rounded to multiples of {step:.4g}, as by an INT8 or integer output"


def step_of(got: np.ndarray, wanted: np.ndarray) -> float:
    """The step that all values are multiples of and the reference is rounded to; 0 where there is none."""
    values = np.unique(got)
    if not 3 <= len(values) <= _MOST_STEPS:
        return 0.0
    step = float(np.diff(values).min())
    counts = values / step
    if np.abs(counts - np.round(counts)).max() > 1e-2 * max(1.0, np.abs(counts).max() / 128):
        return 0.0
    inside = np.abs(got) < np.abs(values).max()
    return step if np.abs(got - wanted)[inside].max(initial=0.0) <= 0.51 * step else 0.0
