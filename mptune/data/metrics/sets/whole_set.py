"""Task metrics over a whole set of samples, with labels: built-in ones and a user's ``function(outputs, references,
inputs, labels)``.

A value is an error, the smaller the better, unless the metric is one of ``larger_is_better``: then the error is the
reference's value less the plan's, and the metric's own value is kept beside it under ``own_value``.

Of a built-in metric the value is taken again without each of up to 8 parts of the samples, and stored as one
pseudo-value per sample (the delete-a-group jackknife: Kott, J. Official Statistics 17, 2001), whose mean is the value.
A user's function is called once, and its value stands for every sample: how well it is known is not said.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from mptune.data.metrics.table import METRICS, Metric
from mptune.errors import DataError

Arrays: TypeAlias = Mapping[str, np.ndarray]

SetFunction: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]], float]
"""``function(outputs, references, inputs, labels) -> float`` over all samples: each maps names to an array with the
samples' rows concatenated along axis 0, or to a list with an array per sample where their shapes differ."""

_GROUPS = 8
"""Parts of the samples that are left out in turn, at most."""


def own_value(spec: str) -> str:
    """The statistic under which a set metric's own value stands, beside its error."""
    return f"{spec}:value"


def takes_whole_set(function: Callable[..., Any]) -> bool:
    """Whether a function asks for ``(outputs, references, inputs, labels)``: four arguments that must be given."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) >= 4 and len([p for p in positional if p.default is p.empty]) >= 3


def together(samples: Sequence[Arrays]) -> dict[str, Any]:
    """All samples as one: name -> rows along axis 0, or a list of arrays where they cannot be concatenated."""
    names = samples[0].keys() if samples else ()
    return {name: _joined([np.asarray(sample[name]) for sample in samples]) for name in names}


def _joined(arrays: list[np.ndarray]) -> np.ndarray | list[np.ndarray]:
    if any(array.ndim == 0 for array in arrays):
        return np.stack(arrays) if len({array.shape for array in arrays}) == 1 else arrays
    if len({array.shape[1:] for array in arrays}) > 1:
        return arrays
    return np.concatenate(arrays)


@dataclass(frozen=True)
class SampleSetArrays:
    """What a set metric is computed from, sample by sample; labels are empty dictionaries where there are none."""

    outputs: Sequence[Arrays]
    references: Sequence[Arrays]
    inputs: Sequence[Arrays]
    labels: Sequence[Arrays]

    def of_reference(self) -> SampleSetArrays:
        """The same with the reference in the place of the outputs."""
        return SampleSetArrays(self.references, self.references, self.inputs, self.labels)

    def without(self, left_out: range) -> SampleSetArrays:
        """The same without some samples."""
        kept = [k for k in range(len(self.outputs)) if k not in left_out]
        return SampleSetArrays(*([part[k] for k in kept] for part in self.parts))

    @property
    def parts(self) -> tuple[Sequence[Arrays], ...]:
        """The four arguments of a set metric, sample by sample."""
        return self.outputs, self.references, self.inputs, self.labels

    def arguments(self) -> tuple[dict[str, Any], ...]:
        """The four arguments of a set metric."""
        return tuple(together(part) for part in self.parts)


def set_values(metric: Metric, data: SampleSetArrays, call: Callable[[SampleSetArrays], float]) -> tuple[float, ...]:
    """The metric's own value, as ``call`` computes it, as one number per sample whose mean it is."""
    count = len(data.outputs)
    whole = call(data)
    groups = min(count, _GROUPS)
    if metric.name not in METRICS or groups < 2 or not math.isfinite(whole):
        return (whole,) * count
    without = np.array([call(data.without(range(group, count, groups))) for group in range(groups)])
    if not np.isfinite(without).all():
        return (whole,) * count
    # So scaled that the standard error of the mean over the samples is the one over the groups.
    scale = math.sqrt((count - 1) / (groups - 1)) * (groups - 1)
    values = np.array([scale * (without.mean() - without[k % groups]) for k in range(count)])
    return tuple(float(value) for value in whole + values - values.mean())


def errors_of(
    metric: Metric, data: SampleSetArrays, call: Callable[[SampleSetArrays], float], reference: Sequence[float] = ()
) -> dict[str, tuple[float, ...]]:
    """The statistics of one set metric: its error and its own value, one number per sample.

    ``reference`` are the ``set_values`` of the reference, where the metric is larger for better plans.
    """
    values = set_values(metric, data, call)
    if not metric.larger_is_better:
        return {metric.name: values, own_value(metric.name): values}
    if len(reference) != len(values):
        raise DataError(f"the metric {metric.name} has no value of the reference", "start the run again with --fresh")
    differences = tuple(wanted - value for wanted, value in zip(reference, values, strict=True))
    return {metric.name: differences, own_value(metric.name): values}
