"""The model with its FP32 values as outputs, as many at a time as memory holds: what they are is observed on data."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx.helper

from mptune.files import write_bytes
from mptune.graph.folded import FoldedValues
from mptune.graph.hazards.masks import softmax_rows
from mptune.graph.hazards.probes import ProbedNode, probed_nodes
from mptune.graph.loading.model import Model, needed_nodes
from mptune.graph.writing.model_file import MIN_IR_VERSION
from mptune.graph.writing.weights import WeightBank, inline_tensor

_PART_BYTES = 1 << 29
"""Memory for the values of one part on one sample, bytes; a larger value is a part of its own."""
_MOST_OUTPUTS = 1000
"""Of one session: opening it takes time quadratic in their number."""
_UNKNOWN_BYTES = _PART_BYTES // 48
"""Taken for a value whose size is not known before the run."""


@dataclass(frozen=True)
class ObservedPart:
    """Values that are observed in one session.

    Attributes:
        rows: FP32 value -> the axes of a row, where a softmax is taken of it; no axes elsewhere.
        nodes: those whose facts are filed under these values.
        sample_bytes: memory of what the session gives on one sample, about.
    """

    rows: Mapping[str, tuple[int, ...]]
    nodes: tuple[ProbedNode, ...] = ()
    sample_bytes: int = 0

    @property
    def outputs(self) -> list[str]:
        """What the session gives: these values, and what the nodes read."""
        return sorted(frozenset(self.rows).union(*(node.reads for node in self.nodes)))


def observed_tensors(model: Model) -> tuple[str, ...]:
    """The FP32 values that are observed: graph inputs and everything computed, in topological order."""
    names = [i.name for i in model.inputs]
    names += [out for node in model.nodes for out in node.outputs if out and out not in model.initializers]
    return tuple(n for n in names if model.info(n).is_float32 and 0 not in (model.info(n).shape or ()))


def observed_parts(model: Model, shapes: Mapping[str, tuple[int, ...]]) -> list[ObservedPart]:
    """The values in parts that memory holds; ``shapes`` are those on the largest sample, as far as they are known."""
    rows, nodes = softmax_rows(model), dict[str, list[ProbedNode]]()
    for probed in probed_nodes(model):
        nodes.setdefault(probed.key, []).append(probed)
    parts, sizes, outputs = list[list[str]](), list[int](), set[str]()
    for tensor in observed_tensors(model):
        reads = frozenset((tensor,)).union(*(probed.reads for probed in nodes.get(tensor, ())))
        more = sum(4 * math.prod(shapes[name]) if name in shapes else _UNKNOWN_BYTES for name in reads - outputs)
        if not parts or sizes[-1] + more > _PART_BYTES or len(outputs | reads) > _MOST_OUTPUTS:
            parts.append([])
            sizes.append(0)
            outputs = set()
        parts[-1].append(tensor)
        outputs |= reads
        sizes[-1] += more
    return [
        ObservedPart({n: rows.get(n, ()) for n in part}, tuple(p for n in part for p in nodes.get(n, ())), size)
        for part, size in zip(parts, sizes, strict=True)
    ]


def write_with_outputs(
    model: Model, bank: WeightBank | None, path: Path, tensors: Sequence[str], folded: FoldedValues | None = None
) -> None:
    """Write the model with these values, of the main graph, as its only outputs, and what computes them.

    Args:
        bank: holds its weights, in the folder of ``path``; None writes them into the file.
        folded: values that are constants already, in place of the nodes that compute them.
    """
    proto = without_outputs(model, bank, "watch", tensors, folded)
    proto.graph.output.extend(declared(model, name) for name in tensors)
    write_bytes(path, [proto.SerializeToString(deterministic=True)])


def declared(model: Model, name: str) -> onnx.ValueInfoProto:
    """A value of the model as an output, of any shape."""
    code = onnx.TensorProto.DataType.Value(model.info(name).dtype.upper())
    return onnx.helper.make_tensor_value_info(name, code, None)


def without_outputs(
    model: Model,
    bank: WeightBank | None,
    name: str,
    wanted: Collection[str] | None = None,
    folded: FoldedValues | None = None,
) -> onnx.ModelProto:
    """The model as it is, but for its outputs; large constants lie in the bank.

    ``wanted``: values that are read; what computes none of them is left out, too. None wants all.
    """
    left_out = (folded or FoldedValues()).unread(model, wanted or ())
    nodes = model.nodes if wanted is None else needed_nodes(model, wanted)
    nodes = [node for node in nodes if node.index not in left_out.nodes]
    read = None if wanted is None else {*wanted, *(n for node in nodes for n in (*node.inputs, *node.captures))}
    proto = onnx.ModelProto(ir_version=max(model.proto.ir_version, MIN_IR_VERSION))
    proto.opset_import.extend(model.proto.opset_import)
    graph = proto.graph
    graph.name = name
    graph.input.extend(model.proto.graph.input)
    graph.sparse_initializer.extend(model.proto.graph.sparse_initializer)
    for node in nodes:
        graph.node.add().CopyFrom(node.proto)
        graph.node[-1].name = node.name
    graph.initializer.extend(value for value in left_out.values if read is None or value.name in read)
    stored = inline_tensor if bank is None else bank.tensor_or_inline
    for constant in model.initializers.values():
        is_read = read is None or constant.overridable or constant.name in read
        if is_read and constant.node_index is None and constant.name not in left_out.unread:
            graph.initializer.append(stored(constant, constant.name))
    return proto
