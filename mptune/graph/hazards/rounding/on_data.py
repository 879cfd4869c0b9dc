"""Hazards that running the model on data shows: steps that are lost, differences that cancel, decisions that change.

Every figure is of the nodes' operands rounded to FP16 or BF16 and back, on the samples
(``mptune.graph.hazards.probes``). What FP16 breaks BF16 breaks too, with fewer digits; that is said once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from mptune.graph.casting.value_types import ValueTypes
from mptune.graph.grouping.lookup import Lookup
from mptune.graph.grouping.op_kinds import DATA_MOVEMENT
from mptune.graph.grouping.patterns import Pattern
from mptune.graph.hazards.constants import comes_to_softmax
from mptune.graph.hazards.hazard import KEPT, MAX, Hazard, group_of, kept_out, largest, spacing
from mptune.graph.hazards.interface import state_pairs
from mptune.graph.hazards.probes import ProbeRecord
from mptune.graph.hazards.rounding.poles import pole_hazards
from mptune.graph.hazards.seen import Seen
from mptune.graph.loading.model import Node
from mptune.graph.plan import Precision

_LOST_SHARE = 0.5
_CANCELLATION_FACTOR = 32.0
_CANCELLATION_ERROR: Mapping[Precision, float] = {Precision.FP16: 0.01, Precision.BF16: 0.03}
"""Relative error of a difference that rounding its operands makes: FP16's own rounding is 2.8e-4 in the mean, BF16's
2.3e-3. At eight times FP16's limit BF16 would only fail where FP16 does."""
_MOVED_WEIGHTS: Mapping[Precision, float] = {Precision.FP16: 0.01, Precision.BF16: 0.02}
"""Share of a softmax's weight that rounding its logits moves, in the mean over the rows. Of 64 normal logits of a
standard deviation of 3 to 10 BF16 moves 0.3 to 0.4 %."""
_MOVED_ROWS: Mapping[Precision, float] = {Precision.FP16: 0.05, Precision.BF16: 0.1}
"""Share of the rows that rounding decides otherwise. Of normal scores of 10 classes BF16 decides 0.2 % otherwise, of
1,000 classes 1.2 %."""
_FEWEST_MOVED = 2.0
_ELEMENTWISE = frozenset(
    (
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Pow",
        "Neg",
        "Abs",
        "Sqrt",
        "Exp",
        "Log",
        "Tanh",
        "Sigmoid",
        "Erf",
        "Relu",
        "Clip",
        "Min",
        "Max",
        "Identity",
        "Cast",
        "Softplus",
    )
)
_MAX_STEPS = 64


def on_data_hazards(types: ValueTypes, look: Lookup, patterns: tuple[Pattern, ...], seen: Seen) -> list[Hazard]:
    """Stagnation, cancellation and spacing, for the groups that would hold the operands in FP16 or BF16."""
    nodes = {node.name: node for node in types.model.nodes}
    inside = {index for pattern in patterns if pattern.kind in ("activation", "norm") for index in pattern.nodes}
    hazards: list[Hazard] = []
    for record in seen.records:
        node = nodes[record.node]
        group = group_of(types, node)
        if group is None or _overflows(seen, node, record.precision):
            continue
        if types.group_of[node.index] in types.lacking(record.precision):
            continue
        if record.kind == "sum":
            lost = None if node.index in inside else _stagnation(look, seen, record, node, group.id)
            hazards += [hazard for hazard in (lost, _cancellation(seen, record, node, group.id)) if hazard]
        elif record.kind == "pole":
            hazards += pole_hazards(seen, record, node, group.id)
        elif record.kind in ("softmax", "largest", "comparison"):
            hazards += _spacing(seen, record, node, group.id)
    in_fp16 = {(hazard.code, hazard.node) for hazard in hazards if hazard.precision is Precision.FP16}
    hazards = [h for h in hazards if h.precision is Precision.FP16 or (h.code, h.node) not in in_fp16]
    return hazards + [
        other for hazard in hazards for other in _of_operands(types, look, nodes[hazard.node or ""], hazard)
    ]


def _of_operands(types: ValueTypes, look: Lookup, node: Node, hazard: Hazard) -> Iterator[Hazard]:
    """The same for the groups that compute what a node reads: rounded there, it is as wrong as rounded here."""
    if hazard.code not in ("cancellation", "spacing") or hazard.kind == "pole":
        return
    done = {hazard.group}
    for name in look.varying(node):
        source = look.producer(name)
        for _ in range(_MAX_STEPS):
            if source is None or source.op_type not in DATA_MOVEMENT or not source.inputs:
                break
            source = look.producer(source.inputs[0])
        group = None if source is None or not types.model.info(name).is_float32 else group_of(types, source)
        if source is None or group is None or types.group_of[source.index] in types.lacking(hazard.precision):
            continue
        if group.id not in done:
            done.add(group.id)
            yield replace(hazard, group=group.id, node=None)


def _overflows(seen: Seen, node: Node, precision: Precision) -> bool:
    """Whether an operand lies beyond the precision: that is an overflow, and rounded figures say nothing more."""
    values = (seen.values[name] for name in (*node.inputs, *node.outputs) if name in seen.values)
    return any(max(abs(value.lowest), abs(value.highest)) > MAX[precision] for value in values)


def _stagnation(look: Lookup, seen: Seen, record: ProbeRecord, node: Node, group: str) -> Hazard | None:
    sides = zip(("first", "second"), ("second", "first"), node.inputs, reversed(node.inputs), strict=True)
    for step, base, moved, kept in sides:
        if not _is_counted_up(look, node, kept) and (
            look.is_static(moved) or look.is_vector(kept) or look.is_single(kept) or comes_to_softmax(look, node)
        ):
            continue
        if node.op_type == "Sub" and step == "first":
            continue  # what is left is the negated base: a difference, not a step
        steps, lost = (record.scalars[f"{step}_{what}"] for what in ("steps", "lost"))
        if not sum(steps) or sum(lost) < _LOST_SHARE * sum(steps) or _follows(look, moved, kept):
            continue
        worst = max(range(len(lost)), key=lambda k: lost[k])
        size, at = (_root_mean(record.scalars[side]) for side in (step, base))
        share, name, apart = sum(lost) / sum(steps), record.precision.name, spacing(at, record.precision)
        kept_so = KEPT if record.precision is Precision.FP16 else "the group is kept out of BF16"
        return Hazard(
            "error",
            "stagnation",
            group,
            node.name,
            node.outputs[0],
            at,
            f"{node.op_type} of {moved!r} (root mean square {size:.3g}) to {kept!r} ({at:.4g}): {name}'s spacing is"
            f" {apart:.3g} there, and on {share:.0%} of the elements {name} gives back {kept!r} unchanged",
            f"{kept_so}: the error of one step does not show what many lose",
            "stagnation",
            {
                "share": share,
                "elements": int(sum(steps)),
                "step": size,
                "base": at,
                "spacing": apart,
            },
            (seen.sample(worst),),
            record.precision,
        )
    return None


def _is_counted_up(look: Lookup, node: Node, kept: str) -> bool:
    """Whether what a node adds to comes back as its input in the next step: a counter, a clock, a running sum."""
    outputs = {given: output for output, given in state_pairs(look.model)}
    return look.root(outputs.get(look.root(kept), "")) == look.root(node.outputs[0])


def _follows(look: Lookup, moved: str, kept: str) -> bool:
    """Whether the step is made of the other side element by element, as x + 0.04 x**3 is: nothing is added up."""
    wanted, stack, done = look.root(kept), [moved], set[str]()
    while stack and len(done) < _MAX_STEPS:
        at = look.root(stack.pop())
        if at == wanted:
            return True
        node = look.producer(at)
        if at not in done and node is not None and node.op_type in _ELEMENTWISE and len(look.varying(node)) > 0:
            done.add(at)
            stack += look.varying(node)
    return False


def _cancellation(seen: Seen, record: ProbeRecord, node: Node, group: str) -> Hazard | None:
    first, second, result, error = (sum(record.scalars[name]) for name in ("first", "second", "result", "error"))
    if not all(map(math.isfinite, (first, second, result, error))) or result <= 0:
        return None
    factor = (math.sqrt(first) + math.sqrt(second)) / math.sqrt(result)
    relative = math.sqrt(error / result)
    if factor < _CANCELLATION_FACTOR or relative < _CANCELLATION_ERROR[record.precision]:
        return None
    worst = largest(record.scalars["error"])
    return Hazard(
        "warning",
        "cancellation",
        group,
        node.name,
        node.outputs[0],
        factor,
        f"{node.op_type} of values {factor:.0f} times as large as its result: relative errors grow by that factor, and"
        f" rounding the operands to {record.precision.name} changes the result by {relative:.1%}",
        f"{kept_out(record.precision)}, with what computes its operands",
        "cancellation",
        {"factor": factor, "relative_error": relative},
        (seen.sample(worst),),
        record.precision,
    )


_ANSWERS = {"Equal": "what Equal finds equal"}
_DECIDED: Mapping[str, Callable[[str, float], str]] = {
    "softmax": lambda op, share: f"{share:.1%} of the weight of its rows moves to other elements",
    "largest": lambda op, share: f"{op} chooses another element in {share:.1%} of the rows",
    "comparison": lambda op, share: f"{share:.1%} of {_ANSWERS.get(op, f'the answers of {op}')} change",
}


def _spacing(seen: Seen, record: ProbeRecord, node: Node, group: str) -> list[Hazard]:
    moved, rows = sum(record.scalars["moved"]), sum(record.scalars["rows"])
    if not rows or not math.isfinite(moved):
        return []
    share = moved / rows
    is_softmax = record.kind == "softmax"
    if share < (_MOVED_WEIGHTS if is_softmax else _MOVED_ROWS)[record.precision] or (
        not is_softmax and moved < _FEWEST_MOVED
    ):
        return []
    worst = largest(record.scalars["moved"])
    magnitude = record.scalars["magnitude"][worst]
    gap = record.scalars["gap"][worst]
    name, apart = record.precision.name, spacing(magnitude, record.precision)
    away = "" if not math.isfinite(gap) else f", and the next value is {gap:.3g} away on average"
    return [
        Hazard(
            "warning",
            "spacing",
            group,
            node.name,
            node.inputs[0],
            magnitude,
            f"values reach {magnitude:.4g}, where {name}'s spacing is {apart:.3g}{away}: once they are rounded,"
            f" {_DECIDED[record.kind](node.op_type, share)}",
            f"{kept_out(record.precision)}, with what computes its operands",
            "spacing",
            {"magnitude": magnitude, "spacing": apart, **({"gap": gap} if math.isfinite(gap) else {}), "share": share},
            (seen.sample(worst),),
            record.precision,
        )
    ]


def _root_mean(squares: tuple[float, ...]) -> float:
    return math.sqrt(sum(squares) / max(1, len(squares)))
