"""What is asked of single nodes while the model runs on data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mptune.graph.facts import Facts, attribute, facts_of
from mptune.graph.hazards.seen import ProbeKind
from mptune.graph.loading.model import Model, Node
from mptune.graph.ops import CENTRING_NORMS, COMPARISONS, EXTREMES
from mptune.graph.plan import REDUCED, Precision

_POLES: Mapping[str, int] = {
    "Log": 0,
    "Sqrt": 0,
    "Reciprocal": 0,
    "Div": 1,
    "Pow": 0,
}

"""Operator -> which of its inputs may not reach zero, or fall below it."""

_SINCE = 11

"""The first operator set whose Equal takes floats."""


@dataclass(frozen=True)
class Probe:
    """One question about one node.

    Attributes:
        node: its name.
        key: the FP32 value that the answer is filed under.
        value: of a pole, the operand that may not reach it; of a BatchNormalization, what it normalises.
        outputs: fact -> scalar output of the observing model that answers it.
        vectors: fact -> output of rank 1.
    """

    kind: ProbeKind
    node: str
    key: str
    value: str = ""
    precision: Precision = Precision.FP16
    outputs: Mapping[str, str] = field(default_factory=dict, hash=False)
    vectors: Mapping[str, str] = field(default_factory=dict, hash=False)


def find_probes(model: Model, precisions: Sequence[str]) -> tuple[Probe, ...]:
    """The questions about a model's nodes, in topological order; those about roundings once for each precision."""
    facts, reduced = facts_of(model), [precision for precision in REDUCED if precision in precisions]
    return tuple(
        replace(probe, precision=precision)
        for node in model.nodes
        for probe in (_of_node(facts, node) if model.opset >= _SINCE else ())
        for precision in (REDUCED[:1] if probe.kind == "batch-norm" else reduced)
    )


def _of_node(facts: Facts, node: Node) -> Sequence[Probe]:
    model = facts.model
    if not node.is_standard or not node.inputs or not node.outputs or not facts.varying(node):
        return ()
    first, out = node.inputs[0], node.outputs[0]
    if not first or not model.info(first).is_float32 or 0 in (model.info(first).shape or ()):
        return ()
    probes: list[Probe] = []
    if node.op_type in ("Add", "Sub") and all(model.info(i).is_float32 for i in node.inputs):
        probes.append(Probe("sum", node.name, out))
    if node.op_type in CENTRING_NORMS:
        probes.append(Probe("norm", node.name, out))
    if pole := _pole(facts, node):
        probes.append(Probe("pole", node.name, out, pole))
    if node.op_type == "Softmax":
        probes.append(Probe("softmax", node.name, out))
    elif node.op_type in EXTREMES:
        probes.append(Probe("largest", node.name, _computed(facts, first)))
    elif node.op_type in COMPARISONS:
        second = node.inputs[1]
        key = second if facts.is_static(first) else first
        probes.append(Probe("comparison", node.name, _computed(facts, key)))
    elif node.op_type == "BatchNormalization" and _has_own_statistics(facts, node):
        probes.append(Probe("batch-norm", node.name, out, first))
    return [probe for probe in probes if probe.key]


def _computed(facts: Facts, tensor: str) -> str:
    """The value, which is observed where it is an input or computed; "" for a constant."""
    return "" if tensor in facts.model.initializers else tensor


def _pole(facts: Facts, node: Node) -> str:
    """The computed operand at whose zero a node's result is infinite, or below which it is NaN; "" if none."""
    at = _POLES.get(node.op_type)
    if at is None or facts.is_static(node.inputs[at]) or not facts.model.info(node.inputs[at]).is_float32:
        return ""
    power = facts.number(node.inputs[1]) if node.op_type == "Pow" else None
    if node.op_type == "Pow" and (power is None or (power > 0 and power == int(power))):
        return ""
    return node.inputs[at]


def is_root(facts: Facts, node: Node) -> bool:
    """Whether a pole's operand may be zero, and not below it."""
    return node.op_type == "Sqrt" or (node.op_type == "Pow" and (facts.number(node.inputs[1]) or 0.0) > 0)


def _has_own_statistics(facts: Facts, node: Node) -> bool:
    """Whether a BatchNormalization's mean and variance are constants that training has moved off 0 and 1."""
    if attribute(node, "training_mode") == 1 or not all(facts.is_static(i) for i in node.inputs[3:5]):
        return False
    constants = [facts.model.initializers.get(i) for i in node.inputs[3:5]]
    if not facts.model.info(node.inputs[0]).shape or any(c is None or c.nbytes == 0 for c in constants):
        return False
    mean, variance = (c.numpy() for c in constants if c is not None)
    return bool((mean != 0).any() or (variance != 1).any())
