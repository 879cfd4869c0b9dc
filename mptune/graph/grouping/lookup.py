"""Producers and readers of values, with Identity, Dropout and Casts between FP32 and FP16 looked through.

Also which values are static: computed from constants alone, so that a runtime folds them before it runs.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
import onnx

from mptune.graph.loading.model import Model, Node
from mptune.graph.loading.tensors import fixed_shape
from mptune.graph.loading.value_dependent import computed_beforehand, shape_facts
from mptune.graph.op_rules import FLOAT_TYPES
from mptune.graph.ops import ALIASES


class Lookup:
    """One model's values by producer and readers. Made once, read by every pattern."""

    def __init__(self, model: Model) -> None:
        self.model = model
        constants = (name for name, constant in model.initializers.items() if not constant.overridable)
        outputs = (name for index in computed_beforehand(model) for name in model.nodes[index].outputs if name)
        self.static = frozenset((*constants, *outputs))
        """Constants, and what is computed from them alone."""
        self.alias_nodes: dict[int, Node] = {}
        self._root: dict[str, str] = {}
        self._outputs = {output.name for output in model.outputs}
        for node in model.nodes:
            if self._is_alias(node):
                self.alias_nodes[node.index] = node
                self._root[node.outputs[0]] = self.root(node.inputs[0])

    def _is_alias(self, node: Node) -> bool:
        if not node.is_standard or not node.inputs or not node.outputs or node.inputs[0] in self.static:
            return False
        if node.op_type == "Cast":
            return all(self.model.info(t).dtype in FLOAT_TYPES for t in (node.inputs[0], node.outputs[0]))
        return node.op_type in ALIASES and not any(node.outputs[1:])

    def root(self, tensor: str) -> str:
        """The value that ``tensor`` is another name of."""
        return self._root.get(tensor, tensor)

    def producer(self, tensor: str) -> Node | None:
        """The node that computes a value; None for graph inputs and static values."""
        root = self.root(tensor)
        if root in self.static:
            return None
        index = self.model.producer.get(root)
        return None if index is None else self.model.nodes[index]

    def readers(self, tensor: str) -> list[Node]:
        """The nodes that read a value under any of its names, each once; Shape and Size do not count."""
        indices = [index for name in self._names(tensor) for index in self.model.consumers.get(name, ())]
        nodes = [self.model.nodes[index] for index in dict.fromkeys(indices) if index not in self.alias_nodes]
        return [node for node in nodes if node.op_type not in ("Shape", "Size")]

    def _names(self, tensor: str) -> list[str]:
        """The name of a value, and those that aliases give it."""
        names = [tensor]
        for name in names:  # grows
            readers = self.model.consumers.get(name, ())
            names += [self.alias_nodes[index].outputs[0] for index in readers if index in self.alias_nodes]
        return names

    def only_reader(self, node: Node) -> Node | None:
        """The one node that reads a node's result; None where there are several, or it leaves the model."""
        if not node.outputs or self.is_output(node.outputs[0]):
            return None
        readers = self.readers(node.outputs[0])
        return readers[0] if len(readers) == 1 else None

    def is_output(self, tensor: str) -> bool:
        """Whether a value leaves the model under any of its names."""
        return not self._outputs.isdisjoint(self._names(tensor))

    def is_static(self, tensor: str) -> bool:
        """Whether a value is computed from constants alone."""
        return self.root(tensor) in self.static

    def size(self, tensor: str) -> int | None:
        """Number of elements; None where a dimension is not known."""
        shape = fixed_shape(self.model.info(tensor).shape)
        return None if shape is None else math.prod(shape)

    def is_scalar(self, tensor: str) -> bool:
        """Whether a value is static and a single number."""
        return self.is_static(tensor) and self.size(self.root(tensor)) == 1

    def is_single(self, tensor: str) -> bool:
        """Whether a value is a single number per model run, static or computed from shapes: a scale, not a mask."""
        shape = self.model.info(tensor).shape
        return shape is not None and all(dim == 1 for dim in shape)

    def is_vector(self, tensor: str) -> bool:
        """Whether a value is static with at most one dimension that is not 1: a bias, a scale per channel."""
        shape = self.model.info(self.root(tensor)).shape
        return self.is_static(tensor) and shape is not None and sum(dim != 1 for dim in shape) <= 1

    def number(self, tensor: str) -> float | None:
        """The value of a constant that is a single number."""
        constant = self.model.initializers.get(self.root(tensor))
        if constant is None or math.prod(constant.shape) != 1:
            return None
        value = np.asarray(constant.numpy()).reshape(-1)[0]
        return float(value) if np.issubdtype(value.dtype, np.number) else None

    def other(self, node: Node, tensor: str) -> str:
        """The other operand of a binary node; "" where it has not exactly two, or both are ``tensor``."""
        if len(node.inputs) != 2:
            return ""
        first, second = (self.root(i) for i in node.inputs)
        wanted = self.root(tensor)
        if first == wanted:
            return "" if second == wanted else node.inputs[1]
        return node.inputs[0] if second == wanted else ""

    def varying(self, node: Node) -> list[str]:
        """The inputs of a node that are not static."""
        return [i for i in node.inputs if i and not self.is_static(i)]

    def with_aliases(self, nodes: Collection[int]) -> frozenset[int]:
        """The nodes, with the aliases of what they compute and those that nothing else reads."""
        indices = set(nodes)
        for index in nodes:
            node = self.model.nodes[index]
            stack = list(node.outputs)
            while stack:
                for reader in self.model.consumers.get(stack.pop(), ()):
                    if reader in self.alias_nodes and reader not in indices:
                        indices.add(reader)
                        stack += self.model.nodes[reader].outputs
            for at in node.inputs:
                while (maker := self.model.producer.get(at, -1)) in self.alias_nodes and maker not in indices:
                    if self.is_output(at) or not all(r.index in nodes for r in self.readers(at)):
                        break
                    indices.add(maker)
                    at = self.model.nodes[maker].inputs[0]
        return frozenset(indices)


def folded_values(look: Lookup) -> frozenset[str]:
    """Static values and, where every input has a fixed shape, what is computed from shapes alone: constants, too."""
    is_fixed = all(fixed_shape(info.shape) is not None for info in look.model.inputs)
    return look.static | shape_facts(look.model).folded if is_fixed else look.static


def reduced_axes(model: Model, node: Node, rank: int) -> tuple[int, ...]:
    """Over which axes a reduction goes, ascending; none where they are all, or not known."""
    stated = attribute(node, "axes")
    axes = list(stated) if isinstance(stated, (list, tuple)) else []
    if len(node.inputs) > 1 and node.inputs[1] in model.initializers:
        axes = model.initializers[node.inputs[1]].numpy().ravel().tolist()
    return tuple(sorted(int(axis) % rank for axis in axes)) if rank else ()


def attribute(node: Node, name: str) -> object:
    """The value of an attribute; None where it is not stated."""
    stated = next((a for a in node.proto.attribute if a.name == name), None)
    return None if stated is None else onnx.helper.get_attribute_value(stated)


def float_attribute(node: Node, name: str, default: float) -> float:
    """The value of a float attribute; the default where it is not stated."""
    stated = attribute(node, name)
    return float(stated) if isinstance(stated, float) else default
