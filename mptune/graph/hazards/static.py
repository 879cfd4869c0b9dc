"""What a model alone shows: constants and epsilons that FP16 cannot hold, norms written out, broadcasts; and of its
inputs and outputs, rows that values select and state that a step hands to the next."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mptune.finding import Finding, FindingOrigin, OutputColumns, Where
from mptune.findings.reference import OPSET_RAISED, WRONG_SHAPE
from mptune.findings.wording import Severity, listed
from mptune.graph.facts import Facts, facts_of, origin, walk
from mptune.graph.hazards import hazard
from mptune.graph.hazards.hazard import FP16_MAX, FP16_NORMAL, FP16_TINY, Hazard, HazardPlace, ObservedValues, group_of
from mptune.graph.hazards.masks import masks_of
from mptune.graph.loading.model import Model, Node
from mptune.graph.loading.tensors import TensorInfo, all_graphs, fill_value, fixed_shape
from mptune.graph.ops import BOUNDS, COPIES, ELEMENTWISE, GLUE, GUARDS, MOVEMENT, RECURRENT, RESHAPES
from mptune.graph.patterns import find_patterns
from mptune.graph.value_types import ValueTypes
from mptune.graph.writing.weights import chunks, fp16_rounding

_VANISHING_SHARE, _MOSTLY_VANISHING_SHARE = 0.01, 0.5
_BEFORE_DIVISION = GLUE | {"Sqrt", "Mul"}
_SQUARE_LIMIT = 256.0  # squares of larger values leave FP16's range: 256**2 = 65536
_OPERATORS = {"LayerNorm written out": (17, "LayerNormalization"), "RMSNorm written out": (23, "RMSNormalization")}
"""Name of a pattern -> the operator that it could be, and the opset that has it. An L2 norm is no normalisation that
has an operator with statistics in FP32."""
_INT32 = np.iinfo(np.int32)
_PUTS_TOGETHER = RESHAPES | {"Concat", "Cast"}  # what exporters put between such an end and its Slice


# -- constants and epsilons -------------------------------------------------------------------------------------------


def constant_hazards(types: ValueTypes, observed: ObservedValues) -> list[Hazard]:
    """Weights, epsilons and other constants that overflow or vanish: one hazard per group that reads them."""
    model, hazards, limiting = types.model, list[Hazard](), masks_of(types.model).limiting
    cast = {name for name, c in model.initializers.items() if c.overridable and c.dtype == "float"}
    for name in sorted(types.convertible_constants() | cast):
        rounding, size = fp16_rounding(model.initializers[name]), math.prod(model.initializers[name].shape)
        absmax, share, done = rounding.absmax, rounding.vanished / max(1, size), set[tuple[str, bool]]()
        words = {"overflowed": rounding.overflowed, "vanished": rounding.vanished, "size": size}
        for node in hazard.touching(types, name):
            group, limits = group_of(types, node), bool(rounding.overflowed) and node.index in limiting
            if group is None or (group, limits) in done:
                continue
            done.add((group, limits))
            place = HazardPlace(node.name, group, name)
            if rounding.overflowed:
                wording = "constant" if size == 1 else "constants"
                hazards += _overflow(model, place, absmax, wording, [node], words)
            elif size == 1 and absmax < FP16_NORMAL and (reads := _divides(types.facts, node))[0]:
                # A hazard unless data show that what it guards stays away from zero. One that is subnormal still guards
                # a square root; what is divided by it alone leaves FP16's range, which only data can show.
                guarded = [observed.ranges[v] for v in types.facts.varying(node) if v in observed.ranges]
                seen = {"smallest": min(values.smallest for values in guarded)} if guarded else {}
                if is_zero := absmax <= FP16_TINY / 2:
                    is_harmless = seen.get("smallest", 0.0) >= FP16_NORMAL
                else:
                    is_harmless = reads[1] or seen.get("smallest", math.inf) > absmax or absmax * FP16_MAX >= 1
                if is_harmless:
                    continue
                # Of values of both signs the smallest magnitude is unknown; a bound lifts all negative ones.
                of_one_sign = (min(v.highest, -v.lowest) < FP16_NORMAL or node.op_type in BOUNDS for v in guarded)
                is_reached = is_zero and seen.get("smallest", math.inf) <= FP16_TINY / 2 and any(of_one_sign)
                evidence = {"epsilon": absmax, "fp16_smallest": FP16_TINY, **seen}
                severity: Severity = "error" if is_reached else "warning"
                about: Any = ("constant" if is_zero else "subnormal", severity, absmax, {"fp16_normal": FP16_NORMAL})
                hazards.append(Hazard("vanishing-epsilon", place, evidence, *about))
            elif share > _VANISHING_SHARE:
                severity = "warning" if share > _MOSTLY_VANISHING_SHARE else "info"
                hazards.append(Hazard("vanishing-epsilon", place, {}, "weights", severity, absmax, words))
    for node in model.nodes:
        group = group_of(types, node)
        if group is not None and node.is_standard and node.op_type == "ConstantOfShape":  # filled at run time
            value, output = abs(float(fill_value(node.proto).reshape(-1)[0])), node.outputs[0]
            if FP16_MAX < value < math.inf:
                place = HazardPlace(node.name, group, output)
                hazards += _overflow(model, place, value, "filled", types.facts.readers(output), {})
    return hazards


def _divides(facts: Facts, node: Node) -> tuple[bool, bool]:
    """Whether a node adds a constant to, or takes its maximum with, what is divided by later; and a root on the way.

    Through glue, roots and products only.
    """
    divides = is_rooted = False
    for tensor in facts.onward(node.outputs[:1] if node.op_type in GUARDS | {"Sub"} else (), _BEFORE_DIVISION):
        for reader in facts.readers(tensor):
            power = facts.number(reader.inputs[1]) or 0.0 if reader.op_type == "Pow" else 0.0
            is_divisor = reader.op_type == "Div" and facts.root(reader.inputs[1]) == facts.root(tensor)
            divides |= is_divisor or power < 0 or reader.op_type in ("Reciprocal", "Log")
            is_rooted |= reader.op_type == "Sqrt" or abs(power) == 0.5
    return divides, is_rooted


def _overflow(
    model: Model, place: HazardPlace, absmax: float, wording: str, readers: Sequence[Node], words: Mapping[str, object]
) -> list[Hazard]:
    """A finite constant beyond FP16, which is held as FP16's largest finite value.

    To a limit, and a mask on the way to a softmax or the like, that means the same. Anything else is changed by it.
    One that is an input, too, is cast while the model runs, and becomes infinite, which is the same to a limit only.
    """
    is_cast = place.tensor in model.initializers and model.initializers[place.tensor].overridable
    evidence = {"absmax": absmax, "fp16_max": FP16_MAX, "held_as": math.inf if is_cast else FP16_MAX}
    limits = bool(readers) and all(node.index in masks_of(model).limiting for node in readers)
    if limits and all(node.op_type in (BOUNDS if is_cast else BOUNDS | {"Where"}) for node in readers):
        return []
    if limits and not is_cast:
        return [Hazard("mask", place, evidence, wording, "info", absmax, words)]
    return [Hazard("overflow", place, evidence, wording, "warning", absmax, words)]


# -- structure --------------------------------------------------------------------------------------------------------


def norm_hazards(types: ValueTypes, observed: ObservedValues) -> list[Hazard]:
    """Norms that were written out: their squares overflow in FP16 where a newer opset's operator keeps them in FP32.

    Such a norm takes one mean over the channels, beside an epsilon. A root mean square over several axes is the energy
    of an image, one without an epsilon or of a sum is a length; InstanceNormalization has always been there.
    """
    facts, hazards = types.facts, []
    for pattern in find_patterns(types.model):
        node, (opset, operator) = facts.producer(pattern.squares), _OPERATORS.get(pattern.name, (0, ""))
        means = [reader for reader in facts.readers(pattern.squares) if reader.op_type in ("ReduceMean", "ReduceSum")]
        if node is None or types.group_of[node.index] < 0 or types.model.opset >= opset or len(means) != 1:
            continue
        rank, axes = len(types.model.info(means[0].inputs[0]).shape or ()), facts.reduced_axes(means[0])
        guards = [n for n in map(types.model.nodes.__getitem__, pattern.nodes) if n.op_type in GUARDS]
        if operator == "LayerNormalization":
            is_norm = bool(axes) and not (rank > 3 and axes == tuple(range(2, rank)))
        else:
            is_norm = means[0].op_type == "ReduceMean" and len(axes) == 1 and axes[0] in (1, rank - 1)
            is_norm = is_norm and any(name and facts.is_scalar(name) for guard in guards for name in guard.inputs)
        if not is_norm:
            continue
        square, evidence = observed.absmax.get(pattern.squares), {"opset": types.model.opset, "operator_opset": opset}
        seen = {} if square is None else {"largest_square": square}
        words = {"pattern": pattern.name, "square_limit": _SQUARE_LIMIT, "operator": operator}
        place = HazardPlace(node.name, types.groups[types.group_of[node.index]].id, pattern.squares)
        about: Any = ("warning" if square is None else "info", square or _SQUARE_LIMIT, words)
        hazards.append(Hazard("norm-written-out", place, {**evidence, **seen}, "", *about))
    return hazards


def broadcast_hazards(types: ValueTypes) -> list[Hazard]:
    """Broadcasts of computed values in a model whose batch is fixed at 1.

    TensorRT has been seen to give wrong values there, where the same model with a dynamic batch is right.
    """
    model, hazards = types.model, list[Hazard]()
    planes = {tuple(info.shape[2:]) for info in model.inputs if info.shape and len(info.shape) == 4}
    is_fixed = any(info.shape and info.shape[0] == 1 for info in model.inputs)
    for node in model.nodes if is_fixed else ():
        if node.op_type not in ELEMENTWISE or not node.is_standard:
            continue
        operands, output = types.facts.varying(node), model.info(node.outputs[0])
        fixed, result = [fixed_shape(model.info(name).shape) for name in operands], fixed_shape(output.shape)
        shapes = [shape for shape in fixed if shape is not None]
        if len(shapes) < max(2, len(operands)) or result is None or not output.is_float32:
            continue
        # Operands stretch each other, one is stretched over more than one axis, or is a plane of a whole image. Gates,
        # biases and scales of channels, tokens or whole tensors are stretched everywhere, and are right everywhere:
        # what has one axis of its own at most, or the channels and no pixel.
        is_stretched = result not in shapes
        for shape in shapes:
            aligned = (1,) * (len(result) - len(shape)) + shape
            own = [axis for axis, size in enumerate(aligned) if size > 1]
            over = [axis for axis, size in enumerate(aligned) if size == 1 < result[axis]]
            is_plane = len(result) == 4 and over == [1] and own == [2, 3] and result[2:] in planes
            is_stretched = is_stretched or is_plane or (len(over) > 1 and len(own) > 1)
        if is_stretched:
            group = types.group_of[node.index]
            place = HazardPlace(node.name, types.groups[group].id if group >= 0 else None, node.outputs[0])
            text, about = " with ".join(str([*shape]) for shape in shapes), {"operator": node.op_type}
            evidence: dict[str, int | str] = {"batch": 1, "operands": text, "result": str([*result])}
            hazards.append(Hazard("broadcast", place, evidence, value=float(math.prod(result)), words=about))
    return hazards


def int64_hazards(facts: Facts) -> list[Hazard]:
    """INT64 constants that INT32 cannot hold, which TensorRT before 10 clamps (its parser's own warning).

    What is only a start or an end of Slices is none, directly or through operators that assemble them: past the end
    of an axis all values mean the same, and exporters write INT64_MAX for "to the end".
    """
    hazards = []

    def is_bound(value: str) -> bool:
        readers = facts.readers(value)
        ends = [reader for reader in readers if reader.op_type not in _PUTS_TOGETHER]
        is_end = all(r.op_type == "Slice" and value not in (r.inputs[0], *r.inputs[3:]) for r in ends)
        return is_end and bool(readers) and not facts.is_output(value)

    for name, constant in facts.model.initializers.items():
        if constant.dtype != "int64" or constant.nbytes == 0:
            continue
        ends = [end for part in chunks(constant) for end in (int(part.max(initial=0)), int(part.min(initial=0)))]
        beyond = max(ends) if max(ends) > _INT32.max else min(ends)
        if _INT32.min <= beyond <= _INT32.max:
            continue
        if not all(map(is_bound, facts.onward([name], _PUTS_TOGETHER))):
            place = HazardPlace(next((node.name for node in facts.readers(name)), None), None, name)
            evidence = {"value": beyond, "int32_max": _INT32.max}
            hazards.append(Hazard("int64-range", place, evidence, value=float(beyond)))
    return hazards


# -- inputs and outputs -----------------------------------------------------------------------------------------------

_BEFORE = frozenset(("past", "prev", "previous", "old", "last", "init", "initial"))
_AFTER = frozenset(("present", "next", "new", "cur", "current", "updated", "update"))
_DIRECTIONS = _BEFORE | _AFTER | {"in", "out", "input", "output"}
"""Words that tell the state before a step from that after it, and nothing else of it."""
_WHOLE_CACHE = re.compile("key_?values|k_?v_?cache|kv|cache", re.IGNORECASE)
"""``past_key_values.0.key`` is ``present.0.key`` afterwards: what stands for the whole cache tells nothing."""
_STATES = slice(5, 7)  # the inputs of a recurrent operator that hold the state before its first step
_UPDATES = MOVEMENT | COPIES | {"Add", "Sub", "Mul", "Sum", "Where"}  # take a state that is written out onward
_SHOWN = 3


def interface_findings(model: Model, origin: FindingOrigin, fed: Sequence[tuple[str, str]] = ()) -> tuple[Finding, ...]:
    """Shapes that depend on values, state that is not ``fed`` back yet, constants that are inputs, an old opset."""
    facts, findings = facts_of(model), list[Finding]()

    def add(code: str, where: Where, evidence: Mapping[str, Any], **words: Any) -> None:
        findings.append(Finding.from_code(code, origin, where, evidence, **words))

    def shown(items: Iterable[str]) -> str:
        return listed([*items], _SHOWN, " and {others} more")

    names = [output.name for output in facts.row_outputs if not output.is_selection]
    deciding = {name for output in facts.row_outputs for name in output.nodes if not output.is_selection}
    nodes = [node for node in facts.deciding_nodes if not names or node.name in deciding]
    if nodes:
        where = Where(nodes=tuple(node.name for node in nodes), outputs=tuple(map(OutputColumns, names)))
        words = {"operators": shown(f"{n.op_type} {n.name!r}" for n in nodes), "names": shown(map(repr, names))}
        counts = {"nodes": len(nodes), "outputs": len(names)}
        add("value-dependent-shape", where, counts, kind="" if names else "inside", **words)
    selected = [output for output in facts.row_outputs if output.is_selection]
    if selected:
        names, selecting = [output.name for output in selected], tuple(dict.fromkeys(o.nodes[0] for o in selected))
        where = Where(nodes=selecting, outputs=tuple(map(OutputColumns, names)))
        words = {"names": shown(map(repr, names)), "operators": shown(f"TopK {name!r}" for name in selecting)}
        add("rows-selected", where, {"outputs": len(names)}, **words)
    done = {name for pair in fed for name in pair}
    pairs = [pair for pair in state_pairs(model) if not done.intersection(pair)]
    if pairs:
        outputs, inputs = zip(*pairs, strict=True)
        where = Where(outputs=tuple(map(OutputColumns, outputs)), inputs=inputs)
        evidence = {"pairs": len(pairs), **{f"to {given}": output for output, given in pairs}}
        options = ["--feedback " + shlex.quote(f"{output}:{given}") for output, given in pairs[:_SHOWN]]
        words = {"options": " ".join(options) + " and so on" * (len(pairs) > _SHOWN)}
        add("state-fed-back", where, evidence, shown=shown(f"{output} -> {given}" for output, given in pairs), **words)
    constants = tuple(name for name, constant in model.initializers.items() if constant.overridable)
    if constants:
        counts = {"constants": len(constants)}
        add("overridable-constants", Where(inputs=constants), counts, names=shown(map(repr, constants)))
    if model.raised_from is not None:
        add(OPSET_RAISED, Where(), {"opset": model.raised_from, "raised_to": model.opset})
    for name in model.reshaped:
        add(WRONG_SHAPE, Where(outputs=(OutputColumns(name),)), {"shape": str([*(model.info(name).shape or ())])})
    return tuple(findings)


def state_pairs(model: Model) -> tuple[tuple[str, str], ...]:
    """Outputs and the inputs that they become in the next step, in the order of the outputs.

    Names agree but for words such as past and present, or but for the step that they end on (``h0`` and ``hn``). Types
    and ranks agree, and sizes but for one axis along which a cache grows. Whatever their names, an output continues the
    one input that a recurrence takes it from (``_continued``). One that only passes an input on is no state.
    """
    pairs: dict[str, str] = {}
    is_image_to_image = len(model.inputs) < 2 and len(model.outputs) < 2
    for names_agree, growing in () if is_image_to_image else ((_same_but_direction, 1), (_same_but_step, 0)):
        for output in model.outputs:
            left = [given for given in model.inputs if given.name not in (*pairs.values(), output.name)]
            fitting = [g.name for g in left if names_agree(output.name, g.name) and _same_shape(output, g, growing)]
            if output.name not in pairs and len(fitting) == 1:
                pairs[output.name] = fitting[0]
    pairs = {name: given for name, given in pairs.items() if origin(model, name, MOVEMENT)[0] != given}
    continued = {output.name: _continued(model, output) for output in model.outputs if output.name not in pairs}
    for name, names in continued.items():
        if len(names) == 1 == sum(names[0] in each for each in continued.values()) and names[0] not in pairs.values():
            pairs[name] = names[0]
    return tuple((output.name, pairs[output.name]) for output in model.outputs if output.name in pairs)


def _continued(model: Model, output: TensorInfo) -> list[str]:
    """The inputs that an output continues, by a recurrent operator's initial state, or by sums and gates with others.

    With the latter the first input is the data, a single image is no state, and as many outputs as other inputs have
    this shape: noise and residuals are added to what is none.
    """
    facts, recurrent = facts_of(model), list[Node]()

    def before(value: str) -> Sequence[str]:
        node = facts.producer(value)
        if node is None or node.op_type not in RECURRENT:
            return node.inputs if node is not None and node.op_type in _UPDATES else ()
        recurrent.append(node)
        # Y_h continues the first state, as Y does where nothing reads that, and Y_c the second.
        number = list(node.outputs).index(facts.root(value))
        is_last = number or not any(facts.readers(name) or facts.is_output(name) for name in node.outputs[1:2])
        return node.inputs[_STATES][number == 2 :][:1] if is_last else ()

    reached = {facts.root(value) for value in walk([output.name], before)}
    if recurrent:
        return [given.name for given in model.inputs if given.name in reached and _same_shape(output, given, 0)]
    kind = (output.shape, output.dtype)
    alike = [given.name for given in model.inputs[1:] if (given.shape, given.dtype) == kind]
    is_even = len(alike) == sum((other.shape, other.dtype) == kind for other in model.outputs)
    is_image = len(model.outputs) == 1 and len(output.shape or ()) == 4
    if not output.shape or None in output.shape or not output.is_float32 or is_image or not is_even:
        return []
    every = {*walk([output.name], lambda value: node.inputs if (node := facts.producer(value)) else ())}
    return [name for name in alike if name in reached and len(every.intersection(i.name for i in model.inputs)) > 1]


def _same_but_direction(output: str, given: str) -> bool:
    """``past_state`` becomes ``new_state``."""
    apart = (re.sub("(?<=[a-z])(?=[A-Z])", "_", _WHOLE_CACHE.sub("", name)).lower() for name in (output, given))
    mine, its = (re.findall(r"[a-z]+|\d+", name.replace("states", "state")) for name in apart)
    stem, other = ([word for word in words if word not in _DIRECTIONS] for words in (mine, its))
    if not stem:  # nothing but "past" and "present", not "input" and "output"
        return not other and not _AFTER.isdisjoint(mine) and not _BEFORE.isdisjoint(its)
    return stem == other and len(stem) < max(len(mine), len(its))


def _same_but_step(output: str, given: str) -> bool:
    """``h0`` becomes ``hn`` or ``h1``, ``h_t`` becomes ``h_t1``, ``state`` becomes ``stateN``."""
    after, stem = re.fullmatch(r"(.+?)_?(n|N|t1|0|1|t|T)", output), re.sub(r"_?(0|t)$", "", given)
    return after is not None and after[1] == stem and (stem != given or after[2] in ("n", "N", "t1"))


def _same_shape(output: TensorInfo, given: TensorInfo, growing: int) -> bool:
    """Whether types agree and all but ``growing`` axes may have the same size; a symbolic size may be any."""
    mine, its = output.shape, given.shape
    if output.dtype != given.dtype or mine is None or its is None or len(mine) != len(its) or not mine:
        return False
    return sum(isinstance(x, int) and isinstance(y, int) and x != y for x, y in zip(mine, its, strict=True)) <= growing


def state_inputs(model: Model) -> frozenset[str]:
    """Inputs that hold a state: fed back from an output, or where a recurrent operator begins."""
    nodes = [node for graph in all_graphs(model.proto.graph) for node in graph.node]
    moved = {name: node.input for node in nodes if node.op_type in MOVEMENT | COPIES for name in node.output}
    start = [given for _, given in state_pairs(model)]
    start += [name for node in nodes if node.op_type in RECURRENT for name in node.input[_STATES]]
    states = {*walk(start, lambda name: moved.get(name, ()))}
    return frozenset(info.name for info in model.inputs if info.name in states)
