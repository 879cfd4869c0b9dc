"""Errors of the chosen plan at the other sizes that ``--shapes`` declares, by emulation on resized samples.

A search judges plans at the size of its data. Sums, norms and positions grow with the size, so a plan that is right
there may overflow at another. Samples are resized by taking the nearest value along each axis, and rows of a batch from
one sample after another: what is compared is FP32 with FP16 on the same inputs, whatever they show.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mptune.data.archive import read_samples
from mptune.data.metrics.accuracy import compare_outputs
from mptune.data.metrics.parts import ADD_IN_SQUARES, WORST_PART
from mptune.data.numbers import decode_float, encode_float
from mptune.diagnosis.runner import Runner
from mptune.engines.workload import Workload
from mptune.errors import BaselineError
from mptune.files import write_json
from mptune.finding import CODES, Finding, OutputColumns, Where
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.plan import PrecisionPlan
from mptune.settings import ShapeRange
from mptune.tuning.evaluation import Evaluation

SWEEPS_JSON = "sweeps.json"
"""Name of the file in the run's data directory."""

FAR_ABOVE = 3.0
"""How much larger the error at another size is, to depend on the size."""

_LEAST_ERROR = 1e-3
"""Relative errors below this are what FP16 gives anyway."""

_SAMPLES = 4
"""So many are taken at each size."""

Feed = Mapping[str, np.ndarray]
Sizes = dict[str, tuple[int, ...]]


def declared_sizes(shapes: Sequence[ShapeRange], samples: Sequence[Feed]) -> tuple[Sizes, ...]:
    """The smallest, usual and largest sizes of all inputs together, without that of the samples."""
    ends = [{one.name: shape for one, shape in zip(shapes, every, strict=True)} for every in _ends(shapes)]
    known = [{one.name: samples[0][one.name].shape for one in shapes if one.name in samples[0]}]
    found: list[Sizes] = []
    for sizes in ends:
        if sizes not in known and sizes not in found and all(math.prod(shape) for shape in sizes.values()):
            found.append(sizes)
    return tuple(found)


def _ends(shapes: Sequence[ShapeRange]) -> list[list[tuple[int, ...]]]:
    return [
        [one.smallest for one in shapes],
        [one.usual for one in shapes],
        [one.largest for one in shapes],
    ]


def resized(samples: Sequence[Feed], number: int, sizes: Sizes, dims: Mapping[str, Sequence[object]]) -> Feed:
    """One sample at other sizes.

    Args:
        samples: rows of a larger batch come from the ones after this.
        number: of the sample.
        sizes: input -> shape.
        dims: input -> its declared dimensions: inputs that share the name of one have its size, too.
    """
    named: dict[object, int] = {}
    for name, shape in sizes.items():
        named.update({dim: size for dim, size in zip(dims[name], shape, strict=True) if isinstance(dim, str)})
    found = {}
    for name, array in samples[number].items():
        declared = list(dims.get(name, ()))
        if len(declared) != array.ndim:
            found[name] = array
            continue
        wanted = sizes.get(name) or tuple(named.get(dim, size) for dim, size in zip(declared, array.shape, strict=True))
        found[name] = _at(samples, number, name, wanted, has_batch=not isinstance(declared[0], int))
    return found


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


def sweep(
    grouped: GroupedModel,
    plan: PrecisionPlan,
    samples: Sequence[Feed],
    shapes: Sequence[ShapeRange],
    metric: str,
    ignored: Sequence[str] = (),
) -> list[tuple[Sizes, float]]:
    """The emulated error of a plan at the size of the samples, and at each of the declared sizes.

    Args:
        grouped: the model and the groups of the plan.
        plan: what is emulated.
        samples: of the search.
        shapes: the declared sizes.
        metric: a statistic of outputs.
        ignored: outputs that do not count.

    Raises:
        BaselineError: the model does not run at one of the sizes.
    """
    few = list(samples[:_SAMPLES])
    dims = {info.name: tuple(info.shape or ()) for info in grouped.model.inputs}
    own = {one.name: tuple(few[0][one.name].shape) for one in shapes if one.name in few[0]}
    every = [own, *declared_sizes(shapes, few)]
    feeds = [few, *([resized(few, k, sizes, dims) for k in range(len(few))] for sizes in every[1:])]
    with tempfile.TemporaryDirectory(prefix="mptune-sweep-") as folder:
        flat = [feed for group in feeds for feed in group]
        with Runner(grouped.model, flat, Path(folder) / "model", 1, grouped=grouped) as runner:
            exact, half = runner.exact, runner.emulated(plan)
    found = []
    for k, sizes in enumerate(every):
        part = slice(k * len(few), (k + 1) * len(few))
        error = compare_outputs(half[part], exact[part]).without(ignored)
        value = error.value(metric)
        found.append((sizes, value if error.non_finite == 0 and math.isfinite(value) else math.inf))
    return found


def chosen_sweep(
    workload: Workload, grouped: GroupedModel, chosen: Evaluation, shapes: Sequence[ShapeRange]
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """``kept_sweep`` of the chosen plan of a run."""
    workspace = workload.workspace
    place, samples = workspace.data_dir / SWEEPS_JSON, workspace.samples("search")
    return kept_sweep(place, grouped, chosen.plan, samples, shapes, chosen.metric, chosen.ignored)


def kept_sweep(
    place: Path,
    grouped: GroupedModel,
    plan: PrecisionPlan,
    samples: Path,
    shapes: Sequence[ShapeRange],
    metric: str,
    ignored: Sequence[str] = (),
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """What ``sweep`` shows of a plan, as findings and warnings; done once for a plan and its sizes, and kept in a file.

    Args:
        place: the file.
        grouped: as of ``sweep``.
        plan: as of ``sweep``.
        samples: the file of search samples.
        shapes: as of ``sweep``; one that is no range is none here.
        metric: as of ``sweep``.
        ignored: as of ``sweep``.

    Raises:
        RunError: the file cannot be written.
        DataError: the samples cannot be read.
    """
    if not any(len({one.smallest, one.usual, one.largest}) > 1 for one in shapes):
        return (), ()
    metric = metric if metric in ADD_IN_SQUARES else WORST_PART  # what others make of outputs may not be a ratio
    key = {"plan": plan.fingerprint, "shapes": [str(one) for one in shapes], "metric": metric, "ignored": list(ignored)}
    found = _load(place, key)
    if found is None:
        try:
            found = sweep(grouped, plan, read_samples(samples), shapes, metric, ignored)
        except BaselineError as error:
            return (), (f"errors at the other sizes of --shapes are not known: {error.message}",)
        rows = [[{n: list(s) for n, s in sizes.items()}, encode_float(error)] for sizes, error in found]
        write_json(place, {**key, "errors": rows})
    return sweep_findings(plan, found, [output.name for output in grouped.model.outputs]), ()


def _load(place: Path, key: Mapping[str, object]) -> list[tuple[Sizes, float]] | None:
    try:
        document = json.loads(place.read_text(encoding="utf-8"))
        if {name: document[name] for name in key} != key:
            return None
        rows = document["errors"]
        return [({n: tuple(s) for n, s in sizes.items()}, decode_float(error)) for sizes, error in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def sweep_findings(
    plan: PrecisionPlan, found: Sequence[tuple[Sizes, float]], outputs: Sequence[str]
) -> tuple[Finding, ...]:
    """``size-dependent`` for the worst size, where its error is far above that at the size of the data."""
    (own, base), *others = found
    if not others or not math.isfinite(base):
        return ()
    worst, error = max(others, key=lambda row: row[1])
    if error <= max(FAR_ABOVE * base, _LEAST_ERROR):
        return ()
    code = "size-dependent"
    shown = "not finite" if math.isinf(error) else f"{error:.1e}"
    times = "" if math.isinf(error) or not base else f", {error / base:.3g} times as large"
    return (
        Finding(
            code=code,
            severity=CODES[code].severity,
            origin="search",
            where=Where(inputs=tuple(worst), outputs=tuple(OutputColumns(name) for name in outputs)),
            evidence={"error": error, "error_at_size_of_data": base, "size": _text(worst), "size_of_data": _text(own)},
            text=f"plan {plan.fingerprint}: its emulated error is {shown} at {_text(worst)}{times}, and {base:.1e} at"
            f" the size of the data, {_text(own)}",
            cure=f"search on data of the size that is deployed: --data with {_text(worst)}",
        ),
    )


def _text(sizes: Sizes) -> str:
    return ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in sizes.items())
