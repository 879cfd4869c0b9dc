"""What ONNX Runtime computes from shapes and constants before a run, computed once for all plans of a search.

An exported Swin-T has 6,170 nodes, of which 5,589 compute shapes, window masks and their constants. ONNX Runtime folds
them each time that a session opens, which takes most of that time. So a search folds them once, by ONNX Runtime itself
(``mptune.engines.ort.fusions``), and the models of its trials hold the results. What ONNX Runtime does not fold stays:
a session computes the same kernels either way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import onnx
import onnx.helper

from mptune.files import write_bytes
from mptune.graph.casting.value_types import new_suffix, value_types
from mptune.graph.facts import facts_of
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.loading.model import Model, Node, with_nodes
from mptune.graph.loading.reading import without_weights
from mptune.graph.ops import SHAPE_OF

_WORTHWHILE = 100
"""At least this many nodes, without Constants, are worth a session of their own that folds them."""
_LARGEST_CONSTANT = 1 << 14
"""Constants of more bytes are weights: an input takes their place where ONNX Runtime folds a model."""
_MOST_BYTES = 1 << 22
"""Larger results are not held: every trial's model would have them."""

FoldedValues = Mapping[str, onnx.TensorProto]
"""Results of shape arithmetic that ONNX Runtime has folded, by name."""


def is_worthwhile(model: Model) -> bool:
    """Whether a session that folds what computes shapes saves time."""
    return sum(model.nodes[index].op_type != "Constant" for index in facts_of(model).folded_nodes) >= _WORTHWHILE


def write_without_weights(model: Model, path: Path) -> Path:
    """Write the model with inputs in place of its weights: folding depends on shapes and small constants alone."""
    slim = without_weights(model.proto, [n.proto for n in model.nodes], model.initializers, _LARGEST_CONSTANT)
    return write_bytes(path, [slim.SerializeToString(deterministic=True)])


def read_folded(path: Path, model: Model) -> FoldedValues:
    """The values in the file that ONNX Runtime wrote from what ``write_without_weights`` gave it."""
    proto = onnx.load(path, load_external_data=False)
    computed = {name for index in facts_of(model).folded_nodes for name in model.nodes[index].outputs}
    constants = {t.name: t for t in proto.graph.initializer if t.name in computed - model.initializers.keys()}
    return {name: tensor for name, tensor in constants.items() if tensor.ByteSize() <= _MOST_BYTES}


def with_values(
    model: Model, values: FoldedValues, wanted: Collection[str] = (), staying: Collection[int] = ()
) -> Model:
    """The model with Constant nodes of these values in place of what computes them.

    Args:
        wanted: values that are read beside the model's outputs.
        staying: indices of nodes that stay, and so does what depends on their results but for the shape.
    """
    if not values:
        return model
    folded = set(facts_of(model).folded_nodes)
    stack = list(folded.intersection(staying))
    folded -= {*staying}
    while stack:
        for name in model.nodes[stack.pop()].outputs:
            for index in model.consumers.get(name, ()):
                if index in folded and model.nodes[index].op_type not in SHAPE_OF:
                    folded.remove(index)
                    stack.append(index)
    # Back from what is read, as far as it is computed: most of it is folded.
    reads = [{name for name in (*node.inputs, *node.captures) if name} for node in model.nodes]
    outputs = {info.name for info in model.outputs}
    read = outputs.union(wanted, *(names for index, names in enumerate(reads) if index not in folded))
    waiting = list(read)
    while waiting:
        name = waiting.pop()
        index = model.producer.get(name, -1)
        if index in folded and (name not in values or name in outputs):
            folded.remove(index)
            waiting += reads[index] - read
            read |= reads[index]
    suffix, nodes = new_suffix(model, "folded"), list[Node]()
    for node in model.nodes:
        if node.index not in folded:
            nodes.append(node)
            continue
        for name in read.intersection(node.outputs) & values.keys():
            proto = onnx.helper.make_node("Constant", [], [name], name=name + suffix, value=values[name])
            nodes.append(Node(-1, proto.name, proto.op_type, "", (), (name,), (), proto))
    unread = {name for name in model.initializers.keys() - read if model.consumers.get(name)}
    return with_nodes(model, nodes, {n: c for n, c in model.initializers.items() if n not in unread})


def folded_model(grouped: GroupedModel, values: FoldedValues) -> GroupedModel:
    """The model whose typed models compute less: what no plan computes in a reduced precision is constant."""
    types = value_types(grouped)
    reduced = {i for i, rule in enumerate(types.rules) if rule.precisions and types.group_of[i] >= 0}
    model = with_values(grouped.model, values, types.own.sources.values(), reduced | types.own.casts.keys())
    return GroupedModel(model, grouped.groups)
