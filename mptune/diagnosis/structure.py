"""Two models side by side: which node is which, what differs, what that does to the outputs, and where it begins."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx.defs
import onnx.helper

from mptune.diagnosis.rows import FP32_ROUNDING
from mptune.diagnosis.runner import Outputs, Runner
from mptune.diagnosis.sides import HEADROOM, Sides, figure_of
from mptune.engines.outputs import TraceJob
from mptune.errors import BaselineError
from mptune.files import write_bytes
from mptune.finding import Finding, OutputColumns, Where
from mptune.graph.hazards.find import pinned_by_hazards
from mptune.graph.loading.model import Model, Node, once
from mptune.graph.plan import REDUCED, Precision, PrecisionPlan
from mptune.graph.writing.variants import write_widened
from mptune.graph.writing.weights import round_values

_FLOATS = frozenset({"float", "float16", "double", "bfloat16"})
_FLOAT_CODES = frozenset(onnx.TensorProto.DataType.Value(name.upper()) for name in _FLOATS)
_REDUCED = {precision.dtype: precision for precision in REDUCED if precision.stored is precision}  # by type of values
_SHOWN = 60  # characters of a value in a text
_NO_EFFECT = 1e-6  # an error up to this is what another order of FP32 additions makes
_LEAST_SHARE = 0.1  # of the whole difference, that a cause makes alone
_MOST_TRIALS = 64  # runs of the model with constants and attributes of the candidate
_MOST_NAMED = 4
_MOST_BYTES = 1 << 30  # of constants that are changed together: protobuf ends at 2 GiB
_SLICE_BYTES = 1 << 28  # inner values of one model and one sample that are kept at once
_EXACT = 1e-7  # relative difference of values that are computed node by node in the same way: nothing, or the last bit
_RESTRUCTURED = 1e-5  # the same where the two compute the value with other nodes
_NO_ROUNDING = 1e-2  # where the candidate has FP16 or BF16, what is not beyond this is taken for a rounding
_TRACED = frozenset({"float", "float16", "double"})


class Difference(NamedTuple):
    """One attribute, constant or input of a node that is not the same in both models."""

    kind: str  # attribute, constant or structure
    node: str
    what: str  # the attribute, the constant, or what of the structure
    text: str
    value: Any = None  # the attribute on the right; or the constant, the right one where the two differ
    root: str = ""  # the constant before Casts
    change: float = math.inf  # root mean square of that by the larger constant's; infinite where it is not known


class Alignment(NamedTuple):
    """Two models side by side."""

    values: Mapping[str, str]  # value of the left model -> the same of the right one; computed values only
    differences: tuple[Difference, ...]  # in the topological order of the left model
    reduced: Mapping[str, Precision]  # node of the left model that is FP16 or BF16 on the right -> which


def constant_difference(a: np.ndarray, b: np.ndarray) -> tuple[str, np.ndarray | None, float] | None:
    """Text, values and change of two constants that differ (``Difference``).

    None where one is the other, or the other rounded to FP16 or BF16, which may have made the largest finite value of
    what is beyond these (``round_values``).
    """
    a, b = (each.astype(np.float32) if each.dtype.name == "bfloat16" else each for each in (a, b))  # of ml_dtypes
    if a.shape != b.shape:
        return f"shape {list(a.shape)} in one model and {list(b.shape)} in the other", None, math.inf
    if a.dtype.kind not in "fiub" or b.dtype.kind not in "fiub":
        return None if np.array_equal(a, b) else ("other values", None, math.inf)
    pairs = [(a, b)]
    with np.errstate(over="ignore", invalid="ignore"):
        for values, others in ((a, b), (b, a)):
            if values.dtype.kind == "f":
                wide = values.astype(np.float32)
                pairs += [(round_values(wide, precision), others) for precision in (Precision.FP16, Precision.BF16)]
        exact = [(x.astype(np.float64), y.astype(np.float64)) for x, y in pairs]
        x, y = exact[0]
        # The one rounding that explains most values counts.
        differs = ~max(((c == d) | (np.isnan(c) & np.isnan(d)) for c, d in exact), key=np.count_nonzero)
        apart = np.abs(x - y)[differs]
        share = float(np.linalg.norm(apart) / max(np.linalg.norm(x), np.linalg.norm(y), 1e-300))
    if not differs.any():
        return None
    largest = float(apart[np.isfinite(apart)].max(initial=0.0))
    text = f"{int(differs.sum())} of {a.size} values differ, by up to {largest:.3g}"
    if lost := int((~np.isfinite(y) & np.isfinite(x)).sum()):
        text += f", and {lost} are NaN or Inf in the candidate"
    return text, np.where(differs, b, a).astype(a.dtype), share if math.isfinite(share) else math.inf


def align(left: Model, right: Model) -> Alignment:
    """Align two models, node by node in topological order; inputs by name, else by position."""
    ours, theirs = ([info.name for info in model.inputs] for model in (left, right))
    same = dict(zip(ours, ours if set(theirs) <= set(ours) else theirs, strict=True))  # roots, left -> right, so far
    used, by_name = set[int](), {node.name: node for node in right.nodes}
    readers: dict[str, list[Node]] = {}  # of the right model, by the root that they read
    for node in right.nodes:
        for name in filter(None, node.inputs):
            readers.setdefault(_root(right, name), []).append(node)

    def is_same(mine: str, its: str) -> bool:
        """Whether two inputs are the same value, or both are constants, which are compared apart."""
        if not mine or not its:
            return mine == its
        a, b = _root(left, mine), _root(right, its)
        is_constant = a in left.initializers, b in right.initializers
        return all(is_constant) or (not any(is_constant) and same.get(a, a) == b)

    def differences_of(node: Node, other: Node) -> Iterator[Difference]:
        """What two nodes differ in: attributes, inputs, constants."""
        attributes = _attributes(left, node), _attributes(right, other)
        for name in sorted(attributes[0].keys() | attributes[1].keys()):
            a, b = (each.get(name) for each in attributes)
            if not _is_equal(a, b) and not (name == "to" and {a, b} <= _FLOAT_CODES):
                text = f"attribute {name!r} is {_shown(a)} in one model and {_shown(b)} in the other"
                yield Difference("attribute", node.name, name, text, b)
        for slot, (mine, its) in enumerate(zip_longest(node.inputs, other.inputs, fillvalue="")):
            if not is_same(mine, its):
                text = f"input {slot} is {mine or 'none'!r} in one model and {its or 'none'!r} in the other"
                yield Difference("structure", node.name, f"input {slot}", text)
            elif mine and (root := _root(left, mine)) in left.initializers:
                constants = left.initializers[root].numpy(), right.initializers[_root(right, its)].numpy()
                if (constant := constant_difference(*constants)) is not None:
                    text, values, change = constant
                    text = f"constant {mine!r} (input {slot}): {text}"
                    yield Difference("constant", node.name, mine, text, values, root, change)

    def partner_of(node: Node) -> Node | None:
        """The unused node of the right model that is most like a node: by name, results, or what it reads."""
        candidates = [by_name[node.name]] if node.name in by_name else []
        results = (_root(right, out) for out in node.outputs if out in right.producer)
        candidates += [right.nodes[right.producer[root]] for root in results if root in right.producer]
        for name in filter(None, node.inputs):
            candidates += readers.get(same.get(_root(left, name), ""), [])

        def likeness(other: Node) -> tuple[bool, int, int, int]:
            is_equal = next(differences_of(node, other), None) is None
            named = (node.name == other.name) + bool({*node.outputs} & {*other.outputs} - {""})
            wired = sum(map(is_same, node.inputs, other.inputs))
            return is_equal, named, wired, -other.index

        candidates = [each for each in candidates if each.index not in used and each.op_type == node.op_type]
        return max(candidates, key=likeness, default=None)

    values, differences, reduced = dict[str, str](), list[Difference](), dict[str, Precision]()
    for node in left.nodes:
        if _is_float_cast(left, node) or (node.op_type == "Constant" and node.is_standard):
            continue
        partner = partner_of(node)
        if partner is None:
            text = f"{node.op_type} has no counterpart in the other model"
            differences.append(Difference("structure", node.name, "operator", text))
            continue
        differences += differences_of(node, partner)
        used.add(partner.index)
        for mine, its in zip(node.outputs, partner.outputs, strict=False):
            if mine and its:
                root = same[_root(left, mine)] = _root(right, its)
                # The right value under the left one's name, where that is the same but for Casts, is what readers get.
                values[mine] = mine if mine in right.producer and _root(right, mine) == root else its
        for dtype in (right.info(out).dtype for out in partner.outputs if out):
            if dtype in _REDUCED:
                reduced[node.name] = _REDUCED[dtype]
    return Alignment(values, tuple(differences), reduced)


def _is_float_cast(model: Model, node: Node) -> bool:
    """Whether a node only gives a value another floating-point type, or name, as mptune's own models have them.

    These limit a value to FP16's or BF16's range before it is cast, as at masks, and subtract 0 before some recurrent
    layers.
    """
    if not node.is_standard or node.op_type not in ("Cast", "Clip", "Identity", "Sub"):
        return False
    constants = [model.initializers[name].numpy() for name in node.inputs[1:] if name in model.initializers]
    if node.op_type == "Sub":
        return bool(constants) and constants[0].ndim == 0 and not constants[0].any()
    if node.op_type == "Clip":
        readers = {model.nodes[index].op_type for index in model.consumers.get(node.outputs[0], ())}
        limits = [*constants, *(np.float32(attribute.f) for attribute in node.proto.attribute)]
        largest = {float(np.float32(precision.largest)) for precision in REDUCED}
        is_range = len(limits) == 2 and {float(abs(limit)) for limit in limits if limit.size == 1} <= largest
        return is_range and readers == {"Cast"}
    kinds = {model.info(node.inputs[0]).dtype, model.info(node.outputs[0]).dtype}
    return node.op_type == "Identity" or kinds <= _FLOATS


def _root(model: Model, value: str) -> str:
    """The value before all Casts between floating-point types."""
    return _roots(model).get(value, value)


@once
def _roots(model: Model) -> Mapping[str, str]:
    """Values that Casts alone make of others -> the first of these.

    A mixed model casts integers once for each type that it needs: the result of the first such Cast stands for all.
    """
    roots, first = dict[str, str](), dict[str, str]()
    for node in model.nodes:
        if _is_float_cast(model, node):
            roots[node.outputs[0]] = roots.get(node.inputs[0], node.inputs[0])
        elif node.op_type == "Cast" and node.is_standard and model.info(node.outputs[0]).dtype in _FLOATS:
            roots[node.outputs[0]] = first.setdefault(node.inputs[0], node.outputs[0])
    return {value: root for value, root in roots.items() if value not in model.initializers}


def _attributes(model: Model, node: Node) -> dict[str, Any]:
    """Attributes with the defaults of the operator filled in."""
    attributes: dict[str, Any] = {}
    if node.is_standard and onnx.defs.has(node.op_type, model.opset):
        defaults = {k: a.default_value for k, a in onnx.defs.get_schema(node.op_type, model.opset).attributes.items()}
        attributes = {k: onnx.helper.get_attribute_value(each) for k, each in defaults.items() if each.type}
    if node.op_type == "ConstantOfShape" and node.is_standard:  # the only default that is a tensor
        attributes["value"] = onnx.numpy_helper.from_array(np.zeros(1, np.float32))
    return attributes | {each.name: onnx.helper.get_attribute_value(each) for each in node.proto.attribute}


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, onnx.TensorProto) and isinstance(b, onnx.TensorProto):
        return constant_difference(onnx.numpy_helper.to_array(a), onnx.numpy_helper.to_array(b)) is None
    if isinstance(a, float) and isinstance(b, float) and max(abs(a), abs(b)) >= Precision.FP16.largest:
        return constant_difference(np.float32(a), np.float32(b)) is None  # a limit holds what is beyond it
    return bool(a == b)


def _shown(value: Any) -> str:
    if isinstance(value, onnx.TensorProto):
        value = onnx.numpy_helper.to_array(value)
    if isinstance(value, float):
        return f"{value:.7g}"  # what FP32 holds: an attribute of 1e-5 is 9.999999747378752e-06 as a Python number
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return " ".join(text.split())[:_SHOWN]


def with_candidate_plan(sides: Sides, alignment: Alignment) -> Sides:
    """The sides with the groups that the candidate computes in FP16 or BF16, where there are some."""
    grouped = sides.runner.grouped
    groups = {grouped.owners[n]: precision for n, precision in alignment.reduced.items() if n in grouped.owners}
    return replace(sides, plan=grouped.uniform(Precision.FP32).replace(groups))


def structure_finding(sides: Sides, alignment: Alignment) -> Finding | None:
    """The nodes whose differences change an output, the largest effect first; None where none does.

    Constants and attributes are tried in the model in FP32, together and then one by one: what they do is not seen from
    the outputs of a candidate in FP16, which differ anyway. Another structure is not tried; it makes what they leave.
    """
    runner, exact = sides.runner, sides.runner.exact
    differing = [side for side in sides.outputs if side.error > _NO_EFFECT]
    if not differing or not alignment.differences:
        return None
    worst = max(differing, key=lambda side: side.excess)
    judged = [side for side in differing if not side.is_within] or differing
    rounded = sides.errors(runner.emulated(sides.plan) if sides.plan.reduced_groups else exact, exact)

    def share_of(got: Outputs, wanted: Outputs, least: float) -> tuple[float, float]:
        """The largest share of an output's difference that two runs differ by, where rounding makes less; the error."""
        errors, shares, largest = sides.errors(got, wanted), [0.0], 0.0
        for side in judged:
            error, rounding = (figure_of(e, side.name, side.limit, is_absolute=False) for e in (errors, rounded))
            largest = max(largest, error)
            # A change that is no larger than what the plan's rounding makes may be how other constants round.
            if error > max(least, HEADROOM * rounding if math.isfinite(rounding) else 0.0):
                shares.append(error / (side.error if math.isfinite(side.error) else 1.0))
        return max(shares), largest

    def with_changes(differences: Collection[Difference]) -> Outputs | None:
        """The model's outputs with these as in the candidate; None where it does not run."""
        constants = {each.root: each.value for each in differences if each.kind == "constant"}
        attributes = [(each.node, each.what, each.value) for each in differences if each.kind == "attribute"]
        if not differences or sum(array.nbytes for array in constants.values()) > _MOST_BYTES:
            return None
        try:
            return runner.changed(constants, attributes)
        except (BaselineError, KeyError):
            return None

    tried, untried = dict[tuple[str, ...], Difference](), list[Difference]()
    for each in sorted(alignment.differences, key=lambda each: -each.change):
        if each.kind == "attribute" or each.value is not None:
            tried.setdefault((each.root,) if each.root else (each.node, each.what), each)
        else:
            untried.append(each)
    outputs = with_changes(tried.values()) if tried else exact
    together, together_error = (math.inf, math.inf) if outputs is None else share_of(outputs, exact, _NO_EFFECT)
    causes = list[tuple[float, Difference, float | None]]()  # share, and the error that it makes alone where tried
    for each in list(tried.values())[:_MOST_TRIALS] if together >= _LEAST_SHARE else ():
        alone = outputs if len(tried) == 1 else with_changes([each])
        if alone is None:
            untried.append(each)
        else:
            share, error = share_of(alone, exact, _NO_EFFECT)
            causes.append((share, each, error))
    causes = sorted((c for c in causes if c[0] >= _LEAST_SHARE), key=lambda c: -c[0])[:_MOST_NAMED]
    if untried:
        explained = with_changes([each for _, each, _ in causes]) or exact
        share, _ = share_of(sides.candidate, explained, FP32_ROUNDING)
        causes += [(share, untried[0], None)] if share >= _LEAST_SHARE else []
        causes.sort(key=lambda c: -c[0])
    if not causes and together < _LEAST_SHARE:
        return None

    owners, nodes = runner.grouped.owners, tuple(dict.fromkeys(each.node for _, each, _ in causes))
    groups = tuple(dict.fromkeys(owners[node] for node in nodes if node in owners))
    where = Where(nodes, groups, outputs=tuple(OutputColumns(side.name) for side in differing))
    evidence: dict[str, int | float | str] = {"differences": len(causes) or len(tried), "together": together_error}
    words = {}
    if causes:
        _, cause, alone_error = causes[0]
        evidence = {"differences": len(causes), "kind": cause.kind, "what": cause.what}
        evidence |= {} if alone_error is None else {"alone": alone_error}
        others = [f"{each.node} ({each.what if e is None else f'{e:.3g}'})" for _, each, e in causes[1:]]
        words = {"node": cause.node, "difference": cause.text, "others": ", ".join(others)}
    return worst.finding("attribute-differs", {**evidence, **worst.evidence}, where, **words)


def first_difference(sides: Sides, right: Runner, alignment: Alignment, limit: float | None = None) -> Finding | None:
    """Find the first value along the graph whose error is beyond a limit, by default that of FP32 rounding.

    Where the candidate has FP16 or BF16, the first value that differs by more than these make comes before it.
    """
    left, plan = sides.runner, sides.plan
    is_alike = all(difference.kind != "structure" for difference in alignment.differences)
    level = limit if limit is not None else _EXACT if is_alike else _RESTRUCTURED
    is_reduced = bool(plan.reduced_groups)
    unsound = pinned_by_hazards(left.hazards) if plan.fp16_groups else ()
    plan = plan.replace({g: Precision.FP32 for g in unsound if plan.precision[g] is Precision.FP16})
    least = max(level, _NO_ROUNDING) if is_reduced else level

    # Values that both compute, in topological order, consecutive ones together as far as ``_SLICE_BYTES`` go.
    slices, room, count = list[list[tuple[str, str]]](), 0, 0
    for value in (out for node in left.model.nodes for out in node.outputs):
        other = alignment.values.get(value, "")
        if value in left.model.initializers or other not in right.model.producer:
            continue
        if {left.model.info(value).dtype, right.model.info(other).dtype} <= _TRACED:
            size = 4 * math.prod(left.observed.shapes.get(value, (1 << 20,)))
            if not slices or size > room:
                slices.append([])
                room = _SLICE_BYTES
            slices[-1].append((value, other))
            room, count = room - size, count + 1

    trace = list[tuple[str, float, float]]()  # a value, its error, and that which roundings make at most
    is_same = {info.name for info in right.model.inputs} <= {info.name for info in left.model.inputs}
    for pairs in slices:
        left.begin(f"comparing {count} inner values, {100 * len(trace) // count} % done")
        ours, theirs = (list(dict.fromkeys(names)) for names in zip(*pairs, strict=True))
        left_path = write_widened(left.model, left.context.bank, left.context.scratch("trace"), ours)
        right_path = write_widened(right.model, right.context.bank, right.context.scratch("trace"), theirs)
        others = None if is_same else right.samples_path
        errors = left.call(TraceJob(left_path, right_path, tuple(pairs), left.samples_path, right_samples=others))
        rounding = _roundings(left, plan, ours, left_path) if is_reduced and max(errors) > least else {}
        for (value, _), error in zip(pairs, errors, strict=True):
            trace.append((value, error, max(least, HEADROOM * rounding.get(value, 0.0))))
        for path in (left_path, right_path):
            path.unlink()
        if any(error > most for _, error, most in trace):
            break
    first = next((k for k, (_, error, _) in enumerate(trace) if error > level), None)
    place = next((k for k, (_, error, most) in enumerate(trace) if error > most), first)
    if place is None:
        return None
    value, error, most = trace[place]
    node = left.model.nodes[left.model.producer[value]].name
    group = next((each for each in left.grouped.groups if each.id == left.grouped.owners.get(node)), None)
    where = Where((node,), () if group is None else (group.id,), (value,))
    before = max((error for _, error, _ in trace[:place]), default=0.0)
    evidence = {"error": error, "error_before": before, "values_compared": place + 1}
    kind = "" if not is_reduced else "reduced" if error > most else "rounding"
    name = "no group" if group is None else f"group {group.name} ({group.id})"
    return Finding.from_code("first-difference", "compare", where, evidence, kind=kind, name=name)


def _roundings(left: Runner, plan: PrecisionPlan, values: Sequence[str], exact: Path) -> dict[str, float]:
    """Value -> the error that the roundings of a plan make in it, emulated; where the emulation has it."""
    left.begin("emulating the roundings of inner values")
    path = left.emulator.write(plan, left.context.scratch("rounded"))
    proto = onnx.load(path, load_external_data=False)
    computed = {out for node in proto.graph.node for out in node.output}
    names = [value for value in values if value in computed]
    del proto.graph.output[:]
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    write_bytes(path, [proto.SerializeToString(deterministic=True)])
    job = TraceJob(exact, path, tuple(zip(names, names, strict=True)), left.samples_path)
    return dict(zip(names, left.call(job), strict=True))
