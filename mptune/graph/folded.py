"""What ONNX Runtime computes from shapes and constants before a run, computed once for all plans of a search.

An exported Swin-T has 6,170 nodes, of which 5,589 compute shapes, window masks and their constants. ONNX Runtime folds
them each time that a session opens, which takes most of that time. So a search folds them once, by ONNX Runtime itself
(``mptune.engines.ort.fusions``), and the models of its trials hold the results. What ONNX Runtime does not fold stays:
a session computes the same kernels either way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import onnx

from mptune.files import write_bytes
from mptune.graph.facts import facts_of
from mptune.graph.groups import GroupedModel
from mptune.graph.loading.model import Model, Node, new_node, with_nodes
from mptune.graph.loading.reading import without_weights
from mptune.graph.loading.tensors import declaration
from mptune.graph.ops import SHAPE_OF
from mptune.graph.value_types import new_suffix, value_types

_WORTHWHILE = 100  # at least this many nodes, without Constants, are worth a session of their own that folds them
_LARGEST_CONSTANT = 1 << 14
"""Constants of more bytes are weights: an input takes their place where ONNX Runtime folds a model."""
_MOST_BYTES = 1 << 22  # larger results are not held: every trial's model would have them
FoldedValues = Mapping[str, onnx.TensorProto]  # results of shape arithmetic that ONNX Runtime has folded, by name


def is_worthwhile(model: Model) -> bool:
    """Whether a session that folds what computes shapes saves time."""
    return sum(model.nodes[index].op_type != "Constant" for index in facts_of(model).folded_nodes) >= _WORTHWHILE


def write_without_weights(grouped: GroupedModel, path: Path) -> Path:
    """Write the model with inputs in place of its weights: folding depends on shapes and small constants alone.

    What its typed models read of folded values are outputs, so that ONNX Runtime gives them.
    """
    model, fixed = grouped.model, _fixed(grouped)
    slim = without_weights(model.proto, [n.proto for n in model.nodes], model.initializers, _LARGEST_CONSTANT)
    read = {name for node in model.nodes if node.index not in fixed for name in (*node.inputs, *node.captures)}
    read -= {value.name for value in slim.graph.output} | model.initializers.keys()
    names = [name for index in sorted(fixed) for name in model.nodes[index].outputs if name in read]
    slim.graph.output.extend(declaration(model.info(name)) for name in names)
    return write_bytes(path, [slim.SerializeToString(deterministic=True)])


def read_folded(path: Path, model: Model) -> FoldedValues:
    """The values in the file that ONNX Runtime wrote from what ``write_without_weights`` gave it."""
    proto = onnx.load(path, load_external_data=False)
    computed = {name for index in facts_of(model).folded_nodes for name in model.nodes[index].outputs}
    constants = {t.name: t for t in proto.graph.initializer if t.name in computed - model.initializers.keys()}
    return {name: tensor for name, tensor in constants.items() if tensor.ByteSize() <= _MOST_BYTES}


def folded_model(grouped: GroupedModel, values: FoldedValues, wanted: Collection[str] = ()) -> GroupedModel:
    """The model with Constant nodes of these values in place of what computes them; ``wanted`` are read as well."""
    if not values:
        return grouped
    model, fixed = grouped.model, _fixed(grouped)
    outputs, suffix = {info.name for info in model.outputs}, new_suffix(model, "folded")
    read, nodes = outputs.union(wanted, value_types(grouped).own.sources.values()), list[Node]()
    for node in reversed(model.nodes):  # what only left out nodes read is left out, too
        names = read.intersection(node.outputs) if node.index in fixed else set[str]()
        if names and names <= values.keys() - outputs:
            for name in sorted(names):
                nodes.append(new_node("Constant", (), name, name + suffix, value=values[name]))
        elif names or node.index not in fixed:
            nodes.append(node)
            read.update(name for name in (*node.inputs, *node.captures) if name)
    constants = {n: c for n, c in model.initializers.items() if n in read or not model.consumers.get(n)}
    return replace(grouped, model=with_nodes(model, reversed(nodes), constants))


def _fixed(grouped: GroupedModel) -> set[int]:
    """Indices of the folded nodes whose results are the same under any plan."""
    model, types = grouped.model, value_types(grouped)
    reduced = {index for index, rule in enumerate(types.rules) if rule.precisions and types.group_of[index] >= 0}
    folded, stack = set(facts_of(model).folded_nodes), [*reduced, *types.own.casts]
    folded.difference_update(stack)
    while stack:  # what depends on what a plan computes in a reduced precision, but for its shape
        for name in model.nodes[stack.pop()].outputs:
            for index in model.consumers.get(name, ()):
                if index in folded and model.nodes[index].op_type not in SHAPE_OF:
                    folded.remove(index)
                    stack.append(index)
    return folded
