"""Where two models begin to differ: every value that both compute, in topological order, in slices that fit memory."""

from __future__ import annotations

import math

import onnx

from mptune.diagnosis.runner import Runner
from mptune.diagnosis.sides import HEADROOM, Sides
from mptune.diagnosis.structure import Alignment
from mptune.engines.outputs import TraceJob
from mptune.files import write_bytes
from mptune.finding import Finding, Where
from mptune.graph.hazards.find import pinned_by_hazards
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.variants import write_widened

_SLICE_BYTES = 1 << 28  # values of one model and one sample that are kept at once
_EXACT = 1e-7  # relative difference of values that are computed node by node in the same way: nothing, or the last bit
_RESTRUCTURED = 1e-5  # the same where the two compute the value with other nodes
_NO_ROUNDING = 1e-2  # where the candidate has FP16 or BF16, what is not beyond this is taken for a rounding
_FLOATS = frozenset({"float", "float16", "double"})

Pairs = list[tuple[str, str]]  # values of the left model, each with the same of the right one


def first_difference(sides: Sides, right: Runner, alignment: Alignment, limit: float | None = None) -> Finding | None:
    """Find the first value along the graph whose error is beyond a limit, by default that of FP32 rounding.

    Where the candidate has FP16 or BF16, the first value that differs by more than these make comes before it.
    """
    left, plan = sides.runner, sides.plan
    is_same = all(difference.kind != "structure" for difference in alignment.differences)
    level = limit if limit is not None else _EXACT if is_same else _RESTRUCTURED
    rounded: PrecisionPlan | None = None
    if plan.reduced_groups:
        unsound = pinned_by_hazards(left.hazards) if plan.fp16_groups else ()
        rounded = plan.replace({g: Precision.FP32 for g in unsound if plan.precision[g] is Precision.FP16})

    # A value, its error, the largest error before it, and how many were compared.
    first: tuple[str, float, float, int] | None = None
    beyond: tuple[str, float, float, int] | None = None  # by more than rounding
    slices = _slices(left, right, alignment)
    before, compared, count = 0.0, 0, sum(map(len, slices))
    for pairs in slices:
        left.begin(f"comparing {count} inner values, {100 * compared // count} % done")
        errors = _errors(left, right, pairs)
        rounding: dict[str, float] = {}
        if rounded is not None and max(errors) > max(level, _NO_ROUNDING):
            rounding = _roundings(left, rounded, pairs)
        for (value, _), error in zip(pairs, errors, strict=True):
            compared += 1
            place = value, error, before, compared
            first = place if first is None and error > level else first
            if rounded is not None and error > max(level, _NO_ROUNDING, HEADROOM * rounding.get(value, 0.0)):
                beyond = beyond or place
            before = max(before, error)
        if beyond is not None or (first is not None and rounded is None):
            break
    if first is None:
        return None
    value, error, before, compared = beyond or first
    node = left.model.nodes[left.model.producer[value]].name
    group = next((each for each in left.grouped.groups if each.id == left.grouped.owners.get(node)), None)
    return Finding.of(
        "first-difference",
        "compare",
        Where((node,), () if group is None else (group.id,), (value,)),
        {"error": error, "error_before": before, "values_compared": compared},
        kind="reduced" if beyond else "rounding" if rounded is not None else "",
        name="no group" if group is None else f"group {group.name} ({group.id})",
    )


def _slices(left: Runner, right: Runner, alignment: Alignment) -> list[Pairs]:
    """Values that both compute, in topological order, consecutive ones together as far as ``_SLICE_BYTES`` go."""
    slices: list[Pairs] = [[]]
    total = 0
    for value in (out for node in left.model.nodes for out in node.outputs):
        other = alignment.values.get(value, "")
        if value in left.model.initializers or other not in right.model.producer:
            continue
        if left.model.info(value).dtype in _FLOATS and right.model.info(other).dtype in _FLOATS:
            size = 4 * math.prod(left.observed.shapes.get(value, (1 << 20,)))
            if slices[-1] and total + size > _SLICE_BYTES:
                slices.append([])
                total = 0
            slices[-1].append((value, other))
            total += size
    return [each for each in slices if each]


def _errors(left: Runner, right: Runner, pairs: Pairs) -> tuple[float, ...]:
    ours, theirs = (list(dict.fromkeys(names)) for names in zip(*pairs, strict=True))
    left_path = write_widened(left.model, left.context.bank, left.scratch("trace"), ours)
    right_path = write_widened(right.model, right.context.bank, right.scratch("trace"), theirs)
    is_same = {info.name for info in right.model.inputs} <= {info.name for info in left.model.inputs}
    others = None if is_same else right.samples_path
    errors = left.call(TraceJob(left_path, right_path, tuple(pairs), left.samples_path, right_samples=others))
    for path in (left_path, right_path):
        path.unlink()
    return errors


def _roundings(left: Runner, plan: PrecisionPlan, pairs: Pairs) -> dict[str, float]:
    """Value -> the error that the roundings of a plan make in it, emulated; where the emulation has it."""
    left.begin("emulating the roundings of inner values")
    exact = write_widened(left.model, left.context.bank, left.scratch("trace"), [value for value, _ in pairs])
    path = left.emulator.write(plan, left.scratch("rounded"))
    proto = onnx.load(path, load_external_data=False)
    computed = {out for node in proto.graph.node for out in node.output}
    names = [value for value, _ in pairs if value in computed]
    del proto.graph.output[:]
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    write_bytes(path, [proto.SerializeToString(deterministic=True)])
    job = TraceJob(exact, path, tuple((name, name) for name in names), left.samples_path)
    return dict(zip(names, left.call(job), strict=True))
