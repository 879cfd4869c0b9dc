"""Errors of the chosen plan, by emulation, at other sizes than that of the search's samples."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from mptune.data.archive import read_samples
from mptune.data.forms.samples import Feed, feed_digest
from mptune.data.metrics.parts import find_parts
from mptune.diagnosis.runner import Runner
from mptune.engines.workload import Workload
from mptune.errors import BaselineError
from mptune.files import write_json
from mptune.finding import Finding, OutputColumns, Where
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.loading.tensors import TensorInfo
from mptune.graph.plan import PrecisionPlan
from mptune.json_form import decode_float, encode_float
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

    for sizes in declared_sizes(shapes, few):
        add(sizes, "declared", _SAMPLES)
    if not given:
        for sizes in _possible_sizes(every[0].sizes, inputs, shapes):
            if sum(math.prod(shape) for shape in sizes.values()) <= _MOST_VALUES:
                add(sizes, "possible", _POSSIBLE_SAMPLES)
    return every


def has_sizes(inputs: Sequence[TensorInfo], shapes: Sequence[ShapeRange], given: Sequence[Sequence[Feed]]) -> bool:
    """Whether there may be another size than that of the samples."""
    declared = any(len({shape.smallest, shape.usual, shape.largest}) > 1 for shape in shapes)
    return bool(given) or declared or bool(_free_axes(inputs, shapes))


def sizes_of(feed: Feed, inputs: Sequence[TensorInfo]) -> Sizes:
    """The shapes of the inputs that take several."""
    dynamic = [info.name for info in inputs if info.shape is None or not all(isinstance(d, int) for d in info.shape)]
    return {name: tuple(np.shape(feed[name])) for name in dynamic if name in feed}


def declared_sizes(shapes: Sequence[ShapeRange], samples: Sequence[Feed]) -> tuple[Sizes, ...]:
    """The smallest, usual and largest sizes of all inputs together, without that of the samples."""
    of_samples = {shape.name: samples[0][shape.name].shape for shape in shapes if shape.name in samples[0]}
    ends = [{shape.name: getattr(shape, end) for shape in shapes} for end in ("smallest", "usual", "largest")]
    declared: list[Sizes] = []
    for sizes in ends:
        if sizes not in (of_samples, *declared) and all(math.prod(shape) for shape in sizes.values()):
            declared.append(sizes)
    return tuple(declared)


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


def _possible_sizes(own: Sizes, inputs: Sequence[TensorInfo], shapes: Sequence[ShapeRange]) -> list[Sizes]:
    axes = _free_axes(inputs, shapes)
    return [
        {
            name: tuple(
                max(1, int(size * factor)) if axis in axes[name] else size for axis, size in enumerate(own[name])
            )
            for name in axes
            if name in own and all(own[name])
        }
        for factor in _FACTORS
        if axes
    ]


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
        if len(declared) != array.ndim:
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


SWEEPS_JSON = "sweeps.json"
"""Name of the file in the run's data directory."""

FAR_ABOVE = 3.0
"""How much larger the error at another size is, to depend on the size."""

_FAR_SMALLER = 1e-6
"""Columns whose values are this share of the largest ones are rounding themselves."""

_LEAST_ERROR = 1e-3
"""Relative errors below this are what FP16 gives anyway."""

Swept = tuple[Sizes, str, float]
"""A size, where its samples are from (``SizedSamples.origin``), and the error there."""


def sweep(
    grouped: GroupedModel, plan: PrecisionPlan, sized: Sequence[SizedSamples], ignored: Sequence[str] = ()
) -> tuple[list[Swept], list[str]]:
    """The emulated error of a plan at each size, those of the search first; ``inf`` where outputs are not finite.

    Second, a warning for each size that somebody named, and that the model does not run at.
    """

    def errors(sets: Sequence[SizedSamples]) -> list[Swept]:
        flat = [feed for of_size in sets for feed in of_size.feeds]
        with (
            tempfile.TemporaryDirectory(prefix="mptune-sweep-") as folder,
            Runner(grouped.model, flat, Path(folder) / "model", 1, grouped=grouped) as runner,
        ):
            exact, half = runner.exact, runner.emulated(plan)
        swept: list[Swept] = []
        start = 0
        for of_size in sets:
            part = slice(start, start + len(of_size.feeds))
            start = part.stop
            swept.append((of_size.sizes, of_size.origin, relative_error(half[part], exact[part], ignored)))
        return swept

    try:
        return errors(sized), []
    except BaselineError as error:
        if len(sized) < 2:
            return [], [f"errors at other sizes are not known: {error.message}"]
    swept: list[Swept] = []
    warnings: list[str] = []
    for of_size in sized:
        try:
            swept += errors([of_size])
        except BaselineError as error:
            if of_size.origin != "possible":  # nobody said that the model takes it
                warnings.append(f"errors at {size_text(of_size.sizes)} are not known: {error.message}")
    return swept, warnings


def relative_error(half: Sequence[Feed], exact: Sequence[Feed], ignored: Sequence[str] = ()) -> float:
    """Root mean square difference over root mean square value, of the output or column that is worst; ``inf`` for NaN.

    Not over the standard deviation between samples, as the objective: of the few samples here that says little.
    Outputs whose shape depends on values, and columns far smaller than the others, are passed over.
    """
    worst = 0.0
    for name, part in find_parts(exact).items():
        pairs = [(np.asarray(got[name]), np.asarray(wanted[name])) for got, wanted in zip(half, exact, strict=True)]
        if name in ignored or any(got.shape != wanted.shape for got, wanted in pairs):
            continue
        squares, sizes = np.zeros(1), np.zeros(1)
        for got, wanted in pairs:
            others = tuple(axis for axis in range(wanted.ndim) if not part.is_split or axis != part.axis)
            finite = np.where(np.isfinite(wanted), wanted, 0.0).astype(np.float64)
            with np.errstate(all="ignore"):  # NaN and Inf are results here
                gap = np.where(np.isfinite(wanted), got - finite, 0.0)
                squares, sizes = squares + (gap**2).sum(axis=others), sizes + (finite**2).sum(axis=others)
        kept = sizes > _FAR_SMALLER**2 * np.max(sizes)
        if not np.isfinite(squares).all():
            return math.inf
        worst = max(worst, math.sqrt(np.max(squares[kept] / sizes[kept], initial=0.0)))
    return worst


def chosen_sweep(
    workload: Workload,
    grouped: GroupedModel,
    chosen: Evaluation | None,
    shapes: Sequence[ShapeRange],
    given: Sequence[Sequence[Feed]] = (),
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """``kept_sweep`` of the chosen plan of a run; nothing where there is none, or all of it is FP32."""
    if chosen is None or not chosen.plan.reduced_groups:
        return (), ()
    workspace = workload.workspace
    place, samples = workspace.data_dir / SWEEPS_JSON, workspace.samples("search")
    return kept_sweep(place, grouped, chosen.plan, samples, shapes, chosen.ignored, given)


def kept_sweep(
    place: Path,
    grouped: GroupedModel,
    plan: PrecisionPlan,
    samples: Path,
    shapes: Sequence[ShapeRange],
    ignored: Sequence[str] = (),
    given: Sequence[Sequence[Feed]] = (),
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Findings and warnings of ``sweep``; done once for a plan and its sizes, and kept in a file (``place``)."""
    inputs = grouped.model.inputs
    if not has_sizes(inputs, shapes, given):
        return (), ()
    key = {
        "plan": plan.fingerprint,
        "shapes": [str(samples_of_size) for samples_of_size in shapes],
        "error": "relative",
        "ignored": list(ignored),
        "given": [hashlib.sha256(b"".join(map(feed_digest, samples_of_size))).hexdigest() for samples_of_size in given],
    }
    kept = _load(place, key)
    if kept is None:
        sized = sized_samples(read_samples(samples), inputs, shapes, given)
        if len(sized) < 2:
            return (), ()
        kept = sweep(grouped, plan, sized, ignored)
        rows = [[{n: list(s) for n, s in sizes.items()}, origin, encode_float(e)] for sizes, origin, e in kept[0]]
        write_json(place, {**key, "errors": rows, "warnings": kept[1]})
    swept, warnings = kept
    return sweep_findings(plan, swept, [output.name for output in grouped.model.outputs]), tuple(warnings)


def _load(place: Path, key: Mapping[str, object]) -> tuple[list[Swept], list[str]] | None:
    try:
        document = json.loads(place.read_text(encoding="utf-8"))
        if {name: document[name] for name in key} != key:
            return None
        rows = [({n: tuple(s) for n, s in z.items()}, str(o), decode_float(e)) for z, o, e in document["errors"]]
        return rows, [str(text) for text in document["warnings"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def sweep_findings(plan: PrecisionPlan, swept: Sequence[Swept], outputs: Sequence[str]) -> tuple[Finding, ...]:
    """``size-dependent`` for the worst size, where its error is far above that at the size of the search's samples."""
    base = next((error for _, origin, error in swept if origin == "samples"), math.inf)
    own = next((size_text(sizes) for sizes, origin, _ in swept if origin == "samples"), "")
    others = [row for row in swept if row[1] != "samples"]
    if not others or not math.isfinite(base):
        return ()
    worst, origin, error = max(others, key=lambda row: row[2])
    if error <= max(FAR_ABOVE * base, _LEAST_ERROR):
        return ()
    size = size_text(worst)
    return (
        Finding.of(
            "size-dependent",
            "search",
            Where(inputs=tuple(worst), outputs=tuple(OutputColumns(name) for name in outputs)),
            {"error": error, "error_at_size_of_data": base, "size": size, "size_of_data": own},
            kind=origin,
            plan=plan.fingerprint,
            shown="not finite" if math.isinf(error) else f"{error:.1e}",
            times=None if math.isinf(error) or not base else error / base,
        ),
    )
