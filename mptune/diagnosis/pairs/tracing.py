"""Where two models begin to differ: every value that both compute, in topological order, in slices that fit memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import onnx

from mptune.diagnosis.comparison import finding
from mptune.diagnosis.limits import HEADROOM
from mptune.diagnosis.pairs.structure import Alignment, Difference, changes_of
from mptune.diagnosis.runner import Runner
from mptune.diagnosis.sides import Sides
from mptune.engines.jobs.outputs import TraceJob
from mptune.files import write_bytes
from mptune.finding import Finding, Where
from mptune.graph.hazards.find import pinned_by_hazards
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.widened import write_changed, write_widened

SLICE_BYTES = 1 << 28
"""Values of one model and one sample that are kept at once, bytes."""

_EXACT = 1e-7
"""Relative difference of values that are computed node by node in the same way: nothing, or the last bit."""
_RESTRUCTURED = 1e-5
"""The same where the two compute the value with other nodes."""
_NO_ROUNDING = 1e-2
"""Where the candidate has FP16 or BF16, what is not beyond this is taken for a rounding."""
_FLOATS = frozenset({"float", "float16", "double"})


def first_difference(
    sides: Sides,
    right: Runner,
    alignment: Alignment,
    harmless: Sequence[Difference] = (),
    limit: float | None = None,
) -> Finding | None:
    """Find the first value along the graph whose error is beyond a limit, by default that of FP32 rounding.

    The left model is given ``harmless`` constants and attributes as the right one has them.
    """
    left, plan = sides.runner, sides.plan
    is_same = all(d.kind != "structure" for d in alignment.differences)
    level = limit if limit is not None else _EXACT if is_same else _RESTRUCTURED
    slices = list(_slices(left, _pairs(left, right, alignment)))
    errors: dict[int, Sequence[float]] = {}
    first, kind = None, ""
    if plan.reduced_groups:
        unsound = pinned_by_hazards(left.hazards) if plan.fp16_groups else ()
        rounded = plan.replace({g: Precision.FP32 for g in unsound if plan.precision[g] is Precision.FP16})
        first = _search(left, right, slices, errors, level, rounded, harmless)
        kind = "reduced" if first else "rounding"
    first = first or _search(left, right, slices, errors, level, None, harmless)
    if first is None:
        return None
    value, error, before, compared = first
    node = left.model.nodes[left.model.producer[value]].name
    group = left.grouped.owners.get(node, "")
    names = {each.id: each.name for each in left.grouped.groups}
    return finding(
        "first-difference",
        f"{kind} infinite" if math.isinf(error) else kind,
        (),
        {"error": error, "error_before": before, "values_compared": compared},
        Where((node,), (group,) if group else (), (value,)),
        name=f"group {names[group]} ({group})" if group else "no group",
    )


def _pairs(left: Runner, right: Runner, alignment: Alignment) -> list[tuple[str, str]]:
    """Values that both compute, in the topological order of the left model."""
    pairs = []
    for node in left.model.nodes:
        for out in node.outputs:
            other = alignment.values.get(out)
            if other is None or out in left.model.initializers or other not in right.model.producer:
                continue
            if left.model.info(out).dtype in _FLOATS and right.model.info(other).dtype in _FLOATS:
                pairs.append((out, other))
    return pairs


def _slices(left: Runner, pairs: Sequence[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Consecutive pairs whose values fit ``SLICE_BYTES``, at least one each."""
    shapes = left.shapes
    slice_: list[tuple[str, str]] = []
    total = 0
    for pair in pairs:
        size = 4 * math.prod(shapes.get(pair[0], (1 << 20,)))
        if slice_ and total + size > SLICE_BYTES:
            yield slice_
            slice_, total = [], 0
        slice_.append(pair)
        total += size
    if slice_:
        yield slice_


First = tuple[str, float, float, int]
"""A value of the left model, its error, the largest error before it, and how many were compared."""


def _search(
    left: Runner,
    right: Runner,
    slices: Sequence[Sequence[tuple[str, str]]],
    errors: dict[int, Sequence[float]],
    level: float,
    plan: PrecisionPlan | None,
    harmless: Sequence[Difference],
) -> First | None:
    """The first value beyond a level, and beyond twice what the roundings of a plan make there.

    ``errors`` of a slice are kept, by its number.
    """
    before, compared = 0.0, 0
    least = level if plan is None else max(level, _NO_ROUNDING)
    count = sum(map(len, slices))
    for number, pairs in enumerate(slices):
        if number not in errors:
            left.begin(f"comparing {count} inner values, {100 * compared // count} % done")
            errors[number] = _errors(left, right, pairs, harmless)
        is_within = max(errors[number], default=0.0) <= least
        rounding = {} if plan is None or is_within else _rounding(left, plan, pairs)
        for pair, error in zip(pairs, errors[number], strict=True):
            compared += 1
            if error > max(least, HEADROOM * rounding.get(pair[0], 0.0)):
                return pair[0], error, before, compared
            before = max(before, error)
    return None


def _errors(
    left: Runner, right: Runner, pairs: Sequence[tuple[str, str]], harmless: Sequence[Difference]
) -> tuple[float, ...]:
    exact = write_widened(left.model, left.context.bank, left.scratch("exact"), _names(pairs, 0))
    left_path = write_changed(exact, left.scratch("trace"), *changes_of(harmless), is_part=True)
    right_path = write_widened(right.model, right.context.bank, right.scratch("trace"), _names(pairs, 1))
    same = {i.name for i in right.model.inputs} <= {i.name for i in left.model.inputs}
    others = None if same else right.samples_path
    errors = left.call(TraceJob(left_path, right_path, tuple(pairs), left.samples_path, right_samples=others))
    for path in (exact, left_path, right_path):
        path.unlink()
    return errors


def _rounding(left: Runner, plan: PrecisionPlan, pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Value -> the error that the roundings of a plan make in it, emulated; where the emulation has it."""
    left.begin("emulating the roundings of inner values")
    exact = write_widened(left.model, left.context.bank, left.scratch("exact"), _names(pairs, 0))
    path = left.emulation(plan)
    proto = onnx.load(path, load_external_data=False)
    made = {out for node in proto.graph.node for out in node.output}
    names = [name for name in _names(pairs, 0) if name in made]
    del proto.graph.output[:]
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    write_bytes(path, [proto.SerializeToString(deterministic=True)])
    same = tuple((name, name) for name in names)
    return dict(zip(names, left.call(TraceJob(exact, path, same, left.samples_path)), strict=True))


def _names(pairs: Sequence[tuple[str, str]], side: int) -> list[str]:
    return list(dict.fromkeys(pair[side] for pair in pairs))
