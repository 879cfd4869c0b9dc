"""What is asked of single nodes while the model runs on data, and what their values were seen to be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from mptune.graph.grouping.lookup import Lookup, attribute
from mptune.graph.hazards.constants import guarded_by_constant
from mptune.graph.loading.model import Model, Node
from mptune.graph.plan import REDUCED, Precision
from mptune.json_form import decode_float, encode_float

ProbeKind = Literal[
    "sum",
    "softmax",
    "largest",
    "comparison",
    "guard",
    "pole",
    "variance",
    "batch-norm",
]

_ROUNDING: frozenset[ProbeKind] = frozenset(("sum", "softmax", "largest", "comparison", "pole"))

"""Kinds whose operands are rounded: asked once for each reduced precision."""

_SUMS = frozenset({"Add", "Sub"})

_COMPARISONS = frozenset({"Greater", "Less", "GreaterOrEqual", "LessOrEqual", "Equal"})

_LARGEST = frozenset({"ArgMax", "ArgMin"})

_POLES: Mapping[str, int] = {
    "Log": 0,
    "Sqrt": 0,
    "Reciprocal": 0,
    "Div": 1,
    "Pow": 0,
}

"""Operator -> which of its inputs may not reach zero, or fall below it."""

_WHERE_SINCE = 9


@dataclass(frozen=True)
class Probe:
    """One question about one node.

    Attributes:
        node: its name.
        key: the FP32 value that the answer is filed under.
        value: of a guard, the value that the constant guards; of a pole, the operand that may not reach it; of a
            variance, that whose variance it is.
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


@dataclass(frozen=True)
class ProbeRecord:
    """The answer.

    Attributes:
        scalars: fact -> its value on each sample, in the order of the samples;
            ``mptune.graph.writing.observe`` lists the facts.
        vectors: fact -> its mean over the samples, [channels].
    """

    kind: ProbeKind
    node: str
    scalars: Mapping[str, tuple[float, ...]] = field(default_factory=dict, hash=False)
    vectors: Mapping[str, tuple[float, ...]] = field(default_factory=dict, hash=False)
    precision: Precision = Precision.FP16

    def to_json(self) -> dict[str, Any]:
        """All fields; numbers that are not finite are texts."""
        return {
            "kind": self.kind,
            "node": self.node,
            "precision": str(self.precision),
            "scalars": {name: [encode_float(x) for x in values] for name, values in self.scalars.items()},
            "vectors": {name: [encode_float(x) for x in values] for name, values in self.vectors.items()},
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ProbeRecord:
        """Inverse of ``to_json``."""
        if document["kind"] not in get_args(ProbeKind):
            raise ValueError(f"no such probe: {document['kind']!r}")
        scalars, vectors = (
            {name: tuple(decode_float(x) for x in values) for name, values in document[what].items()}
            for what in ("scalars", "vectors")
        )
        # Runs that were begun before BF16 was asked about do not say.
        precision = Precision(document.get("precision", Precision.FP16))
        return cls(document["kind"], document["node"], scalars, vectors, precision)


def find_probes(model: Model, precisions: Sequence[str]) -> tuple[Probe, ...]:
    """The questions that a model's nodes give rise to, in topological order."""
    look, reduced = Lookup(model), [precision for precision in REDUCED if precision in precisions]
    return tuple(
        replace(probe, precision=precision)
        for node in model.nodes
        for probe in _of_node(look, node)
        for precision in (reduced if probe.kind in _ROUNDING else REDUCED[:1])
    )


def _of_node(look: Lookup, node: Node) -> Sequence[Probe]:
    model = look.model
    if not node.is_standard or not node.inputs or not node.outputs or not look.varying(node):
        return ()
    first, out = node.inputs[0], node.outputs[0]
    if not first or not model.info(first).is_float32 or 0 in (model.info(first).shape or ()):
        return ()
    probes: list[Probe] = []
    if node.op_type in _SUMS and all(model.info(i).is_float32 for i in node.inputs):
        probes.append(Probe("sum", node.name, out))
    if guarded := guarded_by_constant(look, node):
        probes.append(Probe("guard", node.name, out, guarded))
    if pole := _pole(look, node):
        probes.append(Probe("pole", node.name, out, pole))
    if node.op_type == "Softmax":
        probes.append(Probe("softmax", node.name, out))
    elif node.op_type in _LARGEST:
        probes.append(Probe("largest", node.name, _computed(look, first)))
    elif node.op_type in _COMPARISONS:
        second = node.inputs[1]
        key = second if look.is_static(first) else first
        probes.append(Probe("comparison", node.name, _computed(look, key)))
    elif node.op_type == "InstanceNormalization" and len(model.info(first).shape or ()) > 2:
        probes.append(Probe("variance", node.name, out, first))
    elif node.op_type == "BatchNormalization" and _has_own_statistics(look, node):
        probes.append(Probe("batch-norm", node.name, out, first))
    return [probe for probe in probes if probe.key]


def _computed(look: Lookup, tensor: str) -> str:
    """The value, which is observed where it is an input or computed; "" for a constant."""
    return "" if tensor in look.model.initializers else tensor


def _pole(look: Lookup, node: Node) -> str:
    """The computed operand at whose zero a node's result is infinite, or below which it is NaN; "" if none."""
    at = _POLES.get(node.op_type)
    if at is None or look.model.opset < _WHERE_SINCE:
        return ""
    if look.is_static(node.inputs[at]) or not look.model.info(node.inputs[at]).is_float32:
        return ""
    power = look.number(node.inputs[1]) if node.op_type == "Pow" else None
    if node.op_type == "Pow" and (power is None or (power > 0 and power == int(power))):
        return ""
    return node.inputs[at]


def _has_own_statistics(look: Lookup, node: Node) -> bool:
    """Whether a BatchNormalization's mean and variance are constants that training has moved off 0 and 1."""
    if attribute(node, "training_mode") == 1 or not all(look.is_static(i) for i in node.inputs[3:5]):
        return False
    constants = [look.model.initializers.get(i) for i in node.inputs[3:5]]
    if not look.model.info(node.inputs[0]).shape or any(c is None or c.nbytes == 0 for c in constants):
        return False
    mean, variance = (c.numpy() for c in constants if c is not None)
    return bool((mean != 0).any() or (variance != 1).any())


@dataclass(frozen=True)
class SeenValue:
    """One FP32 value over all samples.

    Attributes:
        lowest: smallest finite value, signed; 0 where some are not finite and all others are above it.
        sample: position of the sample with the largest magnitude among those that were run.
        beyond: how many samples hold a magnitude beyond FP16's largest value.
    """

    lowest: float = 0.0
    highest: float = 0.0
    sample: int = 0
    beyond: int = 0
    samples: int = 1


@dataclass(frozen=True)
class Seen:
    """What one run of the model over the samples showed.

    Attributes:
        shapes: FP32 value -> its shape on the first sample.
        indices: index in the data of each sample that was run; empty where they are all of the data.
    """

    values: Mapping[str, SeenValue] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    records: tuple[ProbeRecord, ...] = ()
    indices: tuple[int, ...] = ()

    def of(self, *kinds: ProbeKind) -> Iterator[ProbeRecord]:
        """The answers to some kinds of probes."""
        return (record for record in self.records if record.kind in kinds)

    def sample(self, position: int) -> int:
        """Index in the data of a sample that was run."""
        return self.indices[position] if position < len(self.indices) else position

    def to_json(self) -> dict[str, Any]:
        """Everything but the shapes, which are kept elsewhere."""
        return {
            "values": {
                tensor: [encode_float(seen.lowest), encode_float(seen.highest), seen.sample, seen.beyond, seen.samples]
                for tensor, seen in self.values.items()
            },
            "records": [record.to_json() for record in self.records],
            "indices": list(self.indices),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Seen:
        """Inverse of ``to_json``."""
        values = {
            tensor: SeenValue(decode_float(low), decode_float(high), *map(int, counts))
            for tensor, (low, high, *counts) in document["values"].items()
        }
        return cls(values, shapes, tuple(map(ProbeRecord.from_json, document["records"])), tuple(document["indices"]))
