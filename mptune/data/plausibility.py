"""Are calibration samples real inputs? Random numbers, constants and duplicates in their place are findings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from mptune.data.forms.samples import LazySamples, feed_digest
from mptune.finding import Finding, Where

_MIN_VALUES = 1024
_MIN_RANK = 3
"""Vectors of features may well be uncorrelated; images, sounds, sequences and feature maps are not."""
_MAX_VALUES = 1 << 20
_MAX_CORRELATION = 0.05
"""Neighbours in a natural image correlate at 0.9 and more; in N independent values by about 1 / sqrt(N)."""
_MIN_LENGTH = 4
_MOST_READ = 64
"""Of samples that are read when they are needed, so many show what the values look like."""
_TOLERANCE = 0.05


def data_findings(samples: Sequence[Mapping[str, np.ndarray]], states: Collection[str] = ()) -> tuple[Finding, ...]:
    """What is wrong with samples as calibration data: random numbers, constants, duplicates.

    ``states`` are inputs that hold a recurrent state, which may well start as one number in every sample.
    """
    few = samples.spread(_MOST_READ) if isinstance(samples, LazySamples) else samples
    feature_maps = {
        name: [sample[name] for sample in few]
        for name, first in (few[0].items() if few else ())
        if first.dtype.kind == "f" and first.ndim >= _MIN_RANK
    }
    return (*_random(feature_maps), *_constant(feature_maps, states), *_duplicates(samples))


def _constant(inputs: Mapping[str, Sequence[np.ndarray]], states: Collection[str]) -> list[Finding]:
    """Inputs but states with one value everywhere, unless another one varies."""
    findings = []
    for name, arrays in inputs.items():
        if sum(array.size for array in arrays) < _MIN_VALUES:
            continue
        value = next(array for array in arrays if array.size).reshape(-1)[:1]
        if not all((array == value).all() for array in arrays):
            return []
        if name not in states:
            evidence: dict[str, float | str] = {"value": float(value[0]), "samples": len(arrays)}
            findings.append(Finding.of("constant-data", "search", Where(inputs=(name,)), evidence))
    return findings


def _duplicates(samples: Sequence[Mapping[str, np.ndarray]]) -> list[Finding]:
    """Samples that equal an earlier one in every input."""
    first: dict[bytes, int] = {}
    repeated = []
    digests = samples.digests() if isinstance(samples, LazySamples) else map(feed_digest, samples)
    for number, digest in enumerate(digests):
        if first.setdefault(digest, number) != number:
            repeated.append(number)
    if not repeated:
        return []
    evidence = {"samples": len(samples), "duplicates": len(repeated)}
    return [Finding.of("duplicate-samples", "search", Where(samples=tuple(repeated)), evidence)]


def _random(inputs: Mapping[str, Sequence[np.ndarray]]) -> list[Finding]:
    """The inputs that look like random numbers, unless another one looks real, as an image beside diffusion's noise."""
    findings = []
    for name, arrays in inputs.items():
        distribution, correlation = _looks_random(arrays)
        if not distribution:
            return []
        evidence: dict[str, float | str] = {"distribution": distribution, "correlation": correlation}
        findings.append(Finding.of("random-data", "search", Where(inputs=(name,)), evidence))
    return findings


def _looks_random(arrays: Sequence[np.ndarray]) -> tuple[str, float]:
    """The distribution that the values may come from, "" for none, and the largest correlation of neighbours."""
    budget = max(1, _MAX_VALUES // len(arrays))
    few = [array for array in arrays if array.size <= budget] or [arrays[0]]
    values = np.concatenate([np.asarray(array, np.float64).reshape(-1) for array in few])
    if values.size < _MIN_VALUES or not np.isfinite(values).all():
        return "", 0.0
    rank = min(array.ndim for array in few)
    distribution = _distribution(values)
    if not distribution:
        return "", 0.0
    correlation = max(abs(float(np.mean([_correlation(array, axis) for array in few]))) for axis in range(1, rank))
    return distribution if correlation < _MAX_CORRELATION else "", correlation


def _distribution(values: np.ndarray) -> str:
    """The generator that the values may come from, by range, mean, deviation and kurtosis; "" for none."""
    mean, deviation = float(values.mean()), float(values.std())
    if deviation == 0:
        return ""
    kurtosis = float((((values - mean) / deviation) ** 4).mean())  # 3 for normal, 1.8 for uniform values
    if abs(mean) < _TOLERANCE and abs(deviation - 1) < _TOLERANCE and abs(kurtosis - 3) < 0.3:
        return "standard normal"
    low, high = float(values.min()), float(values.max())
    centre, spread = (low + high) / 2, high - low
    flat = abs(mean - centre) < _TOLERANCE * spread and abs(deviation - spread / 12**0.5) < _TOLERANCE * spread
    return "uniform" if flat and abs(kurtosis - 1.8) < 0.1 else ""


def _correlation(array: np.ndarray, axis: int) -> float:
    """Correlation of neighbouring values along an axis."""
    if array.shape[axis] < _MIN_LENGTH:
        return 0.0
    values = np.moveaxis(np.asarray(array, np.float64), axis, 0)
    a, b = values[:-1], values[1:]
    scale = float(a.std() * b.std())
    return float(((a - a.mean()) * (b - b.mean())).mean()) / scale if scale > 0 else 0.0
