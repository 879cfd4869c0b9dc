"""Errors of the chosen plan, by emulation, at other sizes than that of the search's samples."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from mptune.data.archive import read_samples
from mptune.data.forms.samples import Feed
from mptune.data.metrics.parts import find_parts
from mptune.diagnosis.limits import columns_of, error_of
from mptune.diagnosis.runner import Runner
from mptune.engines.workload import Workload
from mptune.errors import BaselineError
from mptune.finding import Finding, OutputColumns, Where
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.loading.tensors import TensorInfo
from mptune.graph.plan import PrecisionPlan
from mptune.settings import ShapeRange
from mptune.tuning.evaluation import Evaluation

Sizes = dict[str, tuple[int, ...]]

Origin = Literal["samples", "given", "declared", "possible"]

_SAMPLES, _POSSIBLE_SAMPLES = 4, 2
"""So many are taken at each size that somebody named, and at each that nobody did."""

_FACTORS = (0.5, 2.0)

_MOST_VALUES = 1 << 22
"""Of all inputs of a sample, at a size that nobody named: a picture of 1182 x 1182. Beyond, memory may not be there."""


@dataclass(frozen=True)
class SizedSamples:
    """Samples of one size."""

    sizes: Sizes
    """Input -> shape, of inputs that take several."""
    feeds: tuple[Feed, ...]
    origin: Origin
    """``samples`` of the search; ``given`` by the user for this size; resized to a size that ``--shapes`` ``declared``,
    or to one that the model takes, as far as its inputs say (``possible``)."""


def size_text(sizes: Sizes) -> str:
    """A size for a message: ``image 1x3x64x64, mask 1x64``."""
    return ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in sizes.items())


def sized_samples(
    samples: Sequence[Feed], inputs: Sequence[TensorInfo], shapes: Sequence[ShapeRange], given: Sequence[Sequence[Feed]]
) -> list[SizedSamples]:
    """The first samples of the search, then those of each other size."""
    few = tuple(samples[:_SAMPLES])
    every = [SizedSamples(sizes_of(few[0], inputs), few, "samples")]
    every += [
        SizedSamples(sizes_of(samples_of_size[0], inputs), tuple(samples_of_size[:_SAMPLES]), "given")
        for samples_of_size in given
    ]
    dims = {info.name: tuple(info.shape or ()) for info in inputs}

    def add(sizes: Sizes, origin: Origin, count: int) -> None:
        feeds = tuple(resized(few[:count], k, sizes, dims) for k in range(min(count, len(few))))
        of_all = sizes_of(feeds[0], inputs)
        if all(samples_of_size.sizes != of_all for samples_of_size in every):
            every.append(SizedSamples(of_all, feeds, origin))

    for end in ("smallest", "usual", "largest"):
        declared = {shape.name: getattr(shape, end) for shape in shapes}
        if declared and all(math.prod(shape) for shape in declared.values()):
            add(declared, "declared", _SAMPLES)
    free = {} if given else _free_axes(inputs, shapes)
    own = every[0].sizes
    for factor in _FACTORS if free else ():
        possible = {
            name: tuple(max(1, int(size * factor)) if k in axes else size for k, size in enumerate(own[name]))
            for name, axes in free.items()
            if name in own and all(own[name])
        }
        if sum(math.prod(shape) for shape in possible.values()) <= _MOST_VALUES:
            add(possible, "possible", _POSSIBLE_SAMPLES)
    return every


def sizes_of(feed: Feed, inputs: Sequence[TensorInfo]) -> Sizes:
    """The shapes of the inputs that take several."""
    dynamic = [info.name for info in inputs if info.shape is None or not all(isinstance(d, int) for d in info.shape)]
    return {name: tuple(np.shape(feed[name])) for name in dynamic if name in feed}


def _free_axes(inputs: Sequence[TensorInfo], shapes: Sequence[ShapeRange]) -> dict[str, list[int]]:
    """Input -> axes of any size beside the batch that no range of shapes is about."""
    named = {shape.name for shape in shapes}
    every = {info.name: info.shape for info in inputs if info.shape}
    bound = {dim for name, shape in every.items() if name in named for dim in shape}
    bound |= {shape[0] for shape in every.values()}  # the batch: rows are compared with rows alone
    free = {
        name: [k for k, dim in enumerate(shape) if k and not isinstance(dim, int) and (not dim or dim not in bound)]
        for name, shape in every.items()
        if name not in named
    }
    return {name: axes for name, axes in free.items() if axes}


def resized(samples: Sequence[Feed], number: int, sizes: Sizes, dims: Mapping[str, Sequence[object]]) -> Feed:
    """One sample at other sizes (input -> shape); rows of a larger batch come from the samples after it.

    Inputs that share the name of a dimension (``dims``) have its size, too.
    """
    named: dict[object, int] = {}
    for name, shape in sizes.items():
        named.update({dim: size for dim, size in zip(dims[name], shape, strict=True) if isinstance(dim, str)})
    feed = {}
    for name, array in samples[number].items():
        declared = list(dims.get(name, ()))
        if not declared or len(declared) != array.ndim:
            feed[name] = array
            continue
        wanted = sizes.get(name) or tuple(named.get(dim, size) for dim, size in zip(declared, array.shape, strict=True))
        feed[name] = _at(samples, number, name, wanted, has_batch=not isinstance(declared[0], int))
    return feed


def _at(samples: Sequence[Feed], number: int, name: str, shape: tuple[int, ...], *, has_batch: bool) -> np.ndarray:
    array = samples[number][name]
    if has_batch and shape[0] > array.shape[0]:
        others = [samples[(number + k) % len(samples)][name] for k in range(math.ceil(shape[0] / array.shape[0]))]
        same = [other for other in others if other.shape[1:] == array.shape[1:]]
        repeated = same * math.ceil(shape[0] / sum(other.shape[0] for other in same))
        array = np.concatenate(repeated)[: shape[0]]
    for axis, size in enumerate(shape):
        old = array.shape[axis]
        if old != size and old:
            nearest = np.arange(size) if axis == 0 and has_batch else ((np.arange(size) + 0.5) * old / size).astype(int)
            array = np.take(array, nearest, axis=axis)
    return np.ascontiguousarray(array)


FAR_ABOVE = 3.0
"""How much larger the error at another size is, to depend on the size."""

_FAR_SMALLER = 1e-6
"""Columns whose values are this share of the largest ones are rounding themselves."""

_LEAST_ERROR = 1e-3
"""Relative errors below this are what FP16 gives anyway."""

Swept = tuple[SizedSamples, float]
"""Samples of one size, and the plan's error on them."""


def emulated_errors(
    grouped: GroupedModel, plan: PrecisionPlan, sized: Sequence[SizedSamples], ignored: Sequence[str] = ()
) -> tuple[list[Swept], list[str]]:
    """The emulated error of a plan at each size; ``inf`` where outputs are not finite.

    Second, a warning for each size that somebody named, and that the model does not run at.
    """
    swept: list[Swept] = []
    warnings: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="mptune-sweep-") as folder,
        Runner(grouped.model, sized[0].feeds, Path(folder) / "model", 1, grouped=grouped) as runner,
    ):
        half_model = runner.emulation(plan)
        for of_size in sized:
            try:
                exact, half = (runner.on("sized", of_size.feeds, model) for model in (None, half_model))
            except BaselineError as error:
                if of_size.origin != "possible":  # nobody said that the model takes it
                    warnings.append(f"errors at {size_text(of_size.sizes)} are not known: {error.message}")
                continue
            swept.append((of_size, relative_error(half, exact, ignored)))
    return swept, warnings


def relative_error(half: Sequence[Feed], exact: Sequence[Feed], ignored: Sequence[str] = ()) -> float:
    """Root mean square difference over root mean square value, of the output or column that is worst; ``inf`` for NaN.

    Not over the standard deviation between samples, as the objective: of the few samples here that says little.
    Outputs whose shape depends on values, and columns far smaller than the others, are passed over.
    """
    worst = 0.0
    for name, parts in find_parts(exact).items():
        got, wanted = ([np.asarray(sample[name]) for sample in outputs] for outputs in (half, exact))
        if name in ignored or any(a.shape != b.shape for a, b in zip(got, wanted, strict=True)):
            continue
        for columns in parts.ranges or (None,):
            if columns is not None and max(parts.scales[k] for k in columns) <= _FAR_SMALLER * max(parts.scales):
                continue
            pair = (columns_of(arrays, parts.axis, columns) for arrays in (got, wanted))
            worst = max(worst, error_of(*pair, about_zero=True))
    return worst


def chosen_sweep(
    workload: Workload,
    grouped: GroupedModel,
    chosen: Evaluation | None,
    shapes: Sequence[ShapeRange],
    given: Sequence[Sequence[Feed]] = (),
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """``sweep`` of the chosen plan of a run; nothing where there is none, or all of it is FP32."""
    has_sizes = given or shapes or _free_axes(grouped.model.inputs, shapes)
    if chosen is None or not chosen.plan.reduced_groups or not has_sizes:
        return (), ()
    samples = read_samples(workload.workspace.samples("search"))
    return sweep(grouped, chosen.plan, samples, shapes, chosen.ignored, given)


def sweep(
    grouped: GroupedModel,
    plan: PrecisionPlan,
    samples: Sequence[Feed],
    shapes: Sequence[ShapeRange],
    ignored: Sequence[str] = (),
    given: Sequence[Sequence[Feed]] = (),
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """``size-dependent`` for the worst size, where its error is far above that at the size of the search's samples.

    Second, warnings of ``emulated_errors``.
    """
    sized = sized_samples(samples, grouped.model.inputs, shapes, given)
    if len(sized) < 2:
        return (), ()
    swept, warnings = emulated_errors(grouped, plan, sized, ignored)
    base = next((error for of_size, error in swept if of_size.origin == "samples"), math.inf)
    others = [(of_size, error) for of_size, error in swept if of_size.origin != "samples"]
    worst, error = max(others, key=lambda each: each[1], default=(sized[0], 0.0))
    if not math.isfinite(base) or error <= max(FAR_ABOVE * base, _LEAST_ERROR):
        return (), tuple(warnings)
    size, own = size_text(worst.sizes), size_text(sized[0].sizes)
    finding = Finding.of(
        "size-dependent",
        "search",
        Where(inputs=tuple(worst.sizes), outputs=tuple(OutputColumns(each.name) for each in grouped.model.outputs)),
        {"error": error, "error_at_size_of_data": base, "size": size, "size_of_data": own},
        kind=worst.origin,
        plan=plan.fingerprint,
        shown="not finite" if math.isinf(error) else f"{error:.1e}",
        times=None if math.isinf(error) or not base else error / base,
    )
    return (finding,), tuple(warnings)
