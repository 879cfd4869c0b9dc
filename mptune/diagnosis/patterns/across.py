"""What a difference has in common over all samples: numbers added or multiplied that do not depend on the inputs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mptune.diagnosis.patterns.bounds import LEFT

_FEWEST = 6
"""Of fewer samples, numbers that are fitted to each value are chance."""
_VALUES_FOR_EACH = 4
"""Values of a sample, for a number of its own."""
_NAMED = 3
_SAME = 1e-4
_MOST_FACTOR = 100.0


def same_in_all(got: np.ndarray, wanted: np.ndarray) -> str:
    """Whether an output is the same in every sample, and its reference is not, in words; "" else.

    Args:
        got: of each sample, (samples, ...), float64, finite.
        wanted: the same of the reference.
    """
    varies = _deviation(wanted)
    if len(wanted) < _FEWEST or varies <= _SAME * float(np.linalg.norm(wanted)) or _deviation(got) > _SAME * varies:
        return ""
    return "it is the same in all samples: as where no input reaches it"


def common_difference(got: np.ndarray, wanted: np.ndarray) -> str:
    """Whether its difference, or its factor, is the same in every sample, in words; "" where neither is.

    Args:
        got: of each sample, (samples, ...), float64, finite.
        wanted: the same of the reference.
    """
    apart = got - wanted
    distance = float(np.linalg.norm(apart))
    if len(wanted) < _FEWEST or not distance or _deviation(wanted) <= _SAME * float(np.linalg.norm(wanted)):
        return ""
    squares = (wanted**2).sum(axis=0)
    factors = np.divide((got * wanted).sum(axis=0), squares, out=np.ones_like(squares), where=squares > 0)
    added, times = _deviation(apart), float(np.linalg.norm(got - factors * wanted))
    if min(added, times) > LEFT * distance or (times <= added and np.abs(factors).max() > _MOST_FACTOR):
        return ""
    if added < times:
        shown = _numbers(apart.mean(axis=0), 0.0)
        return f"the difference is the same in every sample ({shown}): something that depends on no input is added"
    return f"it is the reference times factors that are the same in every sample ({_numbers(factors, 1.0)})"


def _deviation(values: np.ndarray) -> float:
    """Norm of the samples' deviations from their mean."""
    return float(np.linalg.norm(values - values.mean(axis=0)))


def own_factor(got: np.ndarray, wanted: np.ndarray) -> str:
    """Whether each sample is its reference times, or plus, a number of its own, in words; "" where it is not.

    Args:
        got: of each sample, (samples, ...), float64, finite.
        wanted: the same of the reference.
    """
    count = len(wanted)
    if count < _FEWEST or wanted[0].size < _VALUES_FOR_EACH:
        return ""
    a, b = got.reshape(count, -1), wanted.reshape(count, -1)
    distance = float(np.linalg.norm(a - b))
    squares = (b**2).sum(axis=1)
    factors = np.divide((a * b).sum(axis=1), squares, out=np.ones(count), where=squares > 0)
    if distance and np.linalg.norm(a - factors[:, None] * b) <= LEFT * distance and (factors > 0).all():
        lengths = np.sqrt(squares)
        unit = (
            ", which all have the same length: it was not normalised" if np.ptp(lengths) <= _SAME * lengths[0] else ""
        )
        ends = f"from {factors.min():.4g} to {factors.max():.4g}"
        return f"each sample is its reference times a factor of its own ({ends}){unit}"
    offsets = (a - b).mean(axis=1)
    if distance and np.linalg.norm(a - b - offsets[:, None]) <= LEFT * distance:
        ends = f"from {offsets.min():.4g} to {offsets.max():.4g}"
        return f"each sample is its reference plus a number of its own ({ends})"
    return ""


def with_an_input(got: np.ndarray, wanted: np.ndarray, inputs: Mapping[str, np.ndarray]) -> str:
    """Whether an output is its reference and an input of its shape, each with a factor, in words; "" where it is not.

    Args:
        got: of each sample, (samples, ...), float64, finite.
        wanted: the same of the reference.
        inputs: name -> of each sample.
    """
    for name, given in inputs.items():
        if given.shape != wanted.shape or not np.isfinite(given).all():
            continue
        both = np.stack([wanted.ravel(), given.ravel()], axis=1)
        factors = np.linalg.lstsq(both, got.ravel(), rcond=None)[0]
        rest = float(np.linalg.norm(got.ravel() - both @ factors))
        is_used = np.linalg.norm(factors[1] * given) > LEFT * np.linalg.norm(got)
        if is_used and rest <= LEFT * min(float(np.linalg.norm(got - wanted)), float(np.linalg.norm(got - got.mean()))):
            sign = "plus" if factors[1] > 0 else "minus"
            own = "the reference" if abs(factors[0] - 1) < LEFT else f"{factors[0]:.3g} times the reference"
            own = "" if abs(factors[0]) < LEFT else f"{own} {sign} "
            return f"it is {own}{abs(factors[1]):.3g} times the input {name!r}"
    return ""


def _numbers(values: np.ndarray, neutral: float) -> str:
    """The numbers that differ from a neutral one, few by themselves, more by their ends."""
    scale = float(np.abs(values - neutral).max()) or 1.0
    moved = values[np.abs(values - neutral) > LEFT * scale]
    steps = np.unique(np.round(moved / (LEFT * scale)))
    share = "" if moved.size == values.size else f", in {moved.size} of {values.size} values"
    if len(steps) <= _NAMED:
        shown = ", ".join(f"{np.mean(moved[np.round(moved / (LEFT * scale)) == step]):.4g}" for step in steps)
        return f"{shown}{share}"
    return f"from {moved.min():.4g} to {moved.max():.4g}{share}"
