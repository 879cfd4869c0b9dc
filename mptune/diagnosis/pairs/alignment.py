"""Two models side by side: which node of one is which of the other, and the first in which they differ.

Casts between floating-point types, ``x - 0`` and a Clip to a type's range before them are looked through, the
floating-point type that a Cast gives does not count, and a constant that is the other's, rounded, is the same: what
FP16 and BF16 do is found from values, not from structure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import onnx
import onnx.defs
import onnx.helper

from mptune.diagnosis.pairs.constants import ConstantDifference, constant_difference, is_same_number
from mptune.graph.loading.model import Model, Node
from mptune.graph.loading.once import once
from mptune.graph.plan import LARGEST, REDUCED, Precision

_FLOATS = frozenset({"float", "float16", "double", "bfloat16"})
_FLOAT_CODES = frozenset(onnx.TensorProto.DataType.Value(name.upper()) for name in _FLOATS)
_SHOWN = 60
"""Characters of a value in a text."""

_REDUCED = {"float16": Precision.FP16, "bfloat16": Precision.BF16}
"""Types of values -> the precisions that compute them."""


@dataclass(frozen=True)
class Difference:
    """One attribute, constant or input of a node that is not the same in both models.

    Attributes:
        kind: ``attribute``, ``constant`` or ``structure``.
        node: name of the node of the left model.
        text: what differs, from left to right.
        what: the attribute, the constant's slot, or what of the structure.
        left: value on the left, as text.
        right: value on the right.
        root: the constant that ``what`` is, before Casts; "" where it is none.
        constant: what differs between constants; None where something else does.
        attributes: the attribute -> its value on the right; None where it is not there.
    """

    kind: str
    node: str
    text: str
    what: str
    left: str
    right: str
    root: str = ""
    constant: ConstantDifference | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def change(self) -> float:
        """Relative change, at most 2; infinite where it is not known."""
        return math.inf if self.constant is None else self.constant.change


@dataclass(frozen=True)
class Alignment:
    """Two models side by side.

    Attributes:
        values: value of the left model -> the same of the right one; computed values only.
        differences: in the topological order of the left model.
        reduced: name of each node of the left model that computes in FP16 or BF16 on the right -> which.
    """

    values: Mapping[str, str]
    differences: tuple[Difference, ...]
    reduced: Mapping[str, Precision]


def align(left: Model, right: Model, inputs: Mapping[str, str]) -> Alignment:
    """Align two models.

    Args:
        left: one model.
        right: the other.
        inputs: input of the left model -> input of the right one.
    """
    return _Aligner(left, right, inputs).run()


class _Aligner:
    def __init__(self, left: Model, right: Model, inputs: Mapping[str, str]) -> None:
        self.left, self.right = left, right
        sparse, theirs = ({one.values.name: one for one in m.proto.graph.sparse_initializer} for m in (left, right))
        # roots on the left -> roots on the right
        self.same = dict(inputs) | {name: name for name, one in sparse.items() if theirs.get(name) == one}
        self.used: set[int] = set()
        self.by_name = {node.name: node for node in right.nodes}

    def run(self) -> Alignment:
        values: dict[str, str] = {}
        differences: list[Difference] = []
        reduced: dict[str, Precision] = {}
        for node in self.left.nodes:
            if _is_float_cast(self.left, node) or (node.op_type == "Constant" and node.is_standard):
                continue
            partner = self._partner(node)
            if partner is None:
                differences.append(self._missing(node))
                continue
            self.used.add(partner.index)
            differences += self._differences(node, partner)
            for ours, theirs in zip(node.outputs, partner.outputs, strict=False):
                if ours and theirs:
                    self.same[_root(self.left, ours)] = _root(self.right, theirs)
                    values[ours] = self._value(ours, theirs)
            for dtype in (self.right.info(out).dtype for out in partner.outputs if out):
                if dtype in _REDUCED:
                    reduced[node.name] = _REDUCED[dtype]
        for node in self.left.nodes:
            if _is_float_cast(self.left, node) and node.outputs[0] in self.right.tensors:
                values.setdefault(node.outputs[0], node.outputs[0])
        return Alignment(values, tuple(differences), reduced)

    def _value(self, ours: str, theirs: str) -> str:
        """The right value under the left one's name where that is the same but for Casts: what the readers get."""
        is_there = ours in self.right.producer and _root(self.right, ours) == _root(self.right, theirs)
        return ours if is_there else theirs

    def _partner(self, node: Node) -> Node | None:
        candidates: dict[int, Node] = {}
        named = self.by_name.get(node.name)
        if named is not None:
            candidates[named.index] = named
        for out in node.outputs:
            if out in self.right.producer:
                maker = self.right.nodes[self.right.producer[_root(self.right, out)]] if self._computed(out) else None
                if maker is not None:
                    candidates[maker.index] = maker
        for reader in self._readers(node):
            candidates[reader.index] = reader
        fitting = [c for c in candidates.values() if c.index not in self.used and c.op_type == node.op_type]
        return max(fitting, key=lambda other: (self._likeness(node, other), -other.index), default=None)

    def _computed(self, value: str) -> bool:
        return _root(self.right, value) in self.right.producer

    def _readers(self, node: Node) -> list[Node]:
        """Nodes of the right model that read what the left node reads."""
        found: dict[int, Node] = {}
        for name in node.inputs:
            root = self.same.get(_root(self.left, name))
            if root is None:
                continue
            for value in self._aliases.get(root, (root,)):
                for index in self.right.consumers.get(value, ()):
                    found[index] = self.right.nodes[index]
        return list(found.values())

    @cached_property
    def _aliases(self) -> Mapping[str, tuple[str, ...]]:
        """Root on the right -> all values that are the same but for Casts."""
        found: dict[str, list[str]] = {}
        for name in [*(i.name for i in self.right.inputs), *self.right.producer]:
            found.setdefault(_root(self.right, name), []).append(name)
        return {root: tuple(names) for root, names in found.items()}

    def _likeness(self, node: Node, other: Node) -> tuple[int, int, int, int]:
        wired = sum(self._is_same_input(a, b) for a, b in zip(node.inputs, other.inputs, strict=False))
        differs = next(self._differences(node, other), None)
        named = int(node.name == other.name) + int(bool(set(node.outputs) & set(other.outputs) - {""}))
        return int(differs is None), named, wired, int(len(node.inputs) == len(other.inputs))

    def _is_same_input(self, ours: str, theirs: str) -> bool:
        if not ours or not theirs:
            return ours == theirs
        a, b = _root(self.left, ours), _root(self.right, theirs)
        if a in self.left.initializers or b in self.right.initializers:
            return a in self.left.initializers and b in self.right.initializers
        return self.same.get(a) == b

    def _differences(self, node: Node, other: Node) -> Iterator[Difference]:
        ours, theirs = _attributes(self.left, node), _attributes(self.right, other)
        for name in sorted(ours.keys() | theirs.keys()):
            a, b = ours.get(name), theirs.get(name)
            if name == "to" and {a, b} <= _FLOAT_CODES:
                continue
            if not _is_equal(a, b):
                text = f"attribute {name!r} is {_shown(a)} in one model and {_shown(b)} in the other"
                yield Difference("attribute", node.name, text, name, _shown(a), _shown(b), attributes={name: b})
        count = max(len(node.inputs), len(other.inputs))
        for slot in range(count):
            found = self._input_difference(node, other, slot)
            if found is not None:
                yield found

    def _input_difference(self, node: Node, other: Node, slot: int) -> Difference | None:
        ours = node.inputs[slot] if slot < len(node.inputs) else ""
        theirs = other.inputs[slot] if slot < len(other.inputs) else ""
        if not self._is_same_input(ours, theirs):
            a, b = self._described(self.left, ours), self._described(self.right, theirs)
            text = f"input {slot} is {a} in one model and {b} in the other"
            return Difference("structure", node.name, text, f"input {slot}", a, b)
        a, b = _root(self.left, ours) if ours else "", _root(self.right, theirs) if theirs else ""
        if a in self.left.initializers and b in self.right.initializers:
            one, two = self.left.initializers[a].numpy(), self.right.initializers[b].numpy()
            found = constant_difference(np.asarray(one), np.asarray(two))
            if found is not None:
                text = f"constant {ours!r} (input {slot}): {found.text}"
                return Difference("constant", node.name, text, ours, _shown(one), _shown(two), a, found)
        return None

    def _missing(self, node: Node) -> Difference:
        named = self.by_name.get(node.name)
        if named is not None and named.index not in self.used:
            self.used.add(named.index)
            for ours, theirs in zip(node.outputs, named.outputs, strict=False):
                self.same[_root(self.left, ours)] = _root(self.right, theirs)
            text = f"the operator is {node.op_type} in one model and {named.op_type} in the other"
            return Difference("structure", node.name, text, "operator", node.op_type, named.op_type)
        text = f"{node.op_type} has no counterpart in the other model"
        return Difference("structure", node.name, text, "operator", node.op_type, "none")

    def _described(self, model: Model, value: str) -> str:
        root = _root(model, value) if value else ""
        if root in model.producer and root not in model.initializers:
            return f"{root!r} ({model.nodes[model.producer[root]].op_type})"
        return repr(root) if root else "none"


def _is_float_cast(model: Model, node: Node) -> bool:
    """Whether a node only gives a value another floating-point type, or name."""
    if not node.is_standard or not node.inputs:
        return False
    if node.op_type == "Identity" or _subtracts_nothing(model, node) or _limits_to_range(model, node):
        return True
    kinds = {model.info(node.inputs[0]).dtype, model.info(node.outputs[0]).dtype}
    return node.op_type == "Cast" and kinds <= _FLOATS


def _subtracts_nothing(model: Model, node: Node) -> bool:
    """Whether a node is ``x - 0``, as a mixed model has before some recurrent layers."""
    zero = model.initializers.get(node.inputs[1]) if node.op_type == "Sub" else None
    return zero is not None and not any(zero.shape) and not np.any(zero.numpy())


def _limits_to_range(model: Model, node: Node) -> bool:
    """Whether a node limits a value to FP16's or BF16's range before it is cast, as a mixed model has at masks."""
    readers = [model.nodes[index] for index in model.consumers.get(node.outputs[0], ())]
    if node.op_type != "Clip" or not readers or any(reader.op_type != "Cast" for reader in readers):
        return False
    limits = [model.initializers[name].numpy() for name in node.inputs[1:] if name in model.initializers]
    limits += [np.float32(attribute.f) for attribute in node.proto.attribute]
    largest = {float(np.float32(LARGEST[precision])) for precision in REDUCED}
    return len(limits) == 2 and {float(abs(limit)) for limit in limits if limit.size == 1} <= largest


def _root(model: Model, value: str) -> str:
    """The value before all Casts between floating-point types."""
    while value in model.producer and value not in model.initializers:
        node = model.nodes[model.producer[value]]
        if not _is_float_cast(model, node):
            return _first_casts(model).get(value, value)
        value = node.inputs[0]
    return value


@once
def _first_casts(model: Model) -> Mapping[str, str]:
    """Integers cast to a floating-point type -> the result of the first such Cast of the same integers.

    A mixed model casts them once for each type that it needs.
    """
    first: dict[str, str] = {}
    found: dict[str, str] = {}
    for node in model.nodes:
        if node.op_type == "Cast" and node.is_standard and model.info(node.outputs[0]).dtype in _FLOATS:
            found[node.outputs[0]] = first.setdefault(node.inputs[0], node.outputs[0])
    return found


def _attributes(model: Model, node: Node) -> dict[str, Any]:
    """Attributes with the defaults of the operator filled in."""
    found: dict[str, Any] = {}
    if node.is_standard and onnx.defs.has(node.op_type, model.opset):
        schema = onnx.defs.get_schema(node.op_type, model.opset)
        for name, info in schema.attributes.items():
            if info.default_value.type:
                found[name] = onnx.helper.get_attribute_value(info.default_value)
    if node.op_type == "ConstantOfShape" and node.is_standard:  # the only default that is a tensor
        found["value"] = onnx.numpy_helper.from_array(np.zeros(1, np.float32))
    for attribute in node.proto.attribute:
        found[attribute.name] = onnx.helper.get_attribute_value(attribute)
    return found


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, onnx.TensorProto) and isinstance(b, onnx.TensorProto):
        return constant_difference(onnx.numpy_helper.to_array(a), onnx.numpy_helper.to_array(b)) is None
    if a is None or b is None:
        return a is b
    if hasattr(a, "SerializeToString") and hasattr(b, "SerializeToString"):
        return bool(a.SerializeToString(deterministic=True) == b.SerializeToString(deterministic=True))
    if isinstance(a, float) and isinstance(b, float):
        return is_same_number(a, b)
    return bool(a == b)


def _shown(value: Any) -> str:
    if isinstance(value, onnx.TensorProto):
        value = onnx.numpy_helper.to_array(value)
    if isinstance(value, np.ndarray) and value.size > 8:
        return f"{value.dtype} of shape {list(value.shape)}"
    if isinstance(value, float):
        return f"{value:.7g}"  # what FP32 holds: an attribute of 1e-5 is 9.999999747378752e-06 as a Python number
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return " ".join(text.split())[:_SHOWN]
