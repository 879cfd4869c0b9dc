"""A model taken apart once into serialised pieces, from which variants are put together in milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import compress
from typing import NamedTuple

import numpy as np
import onnx

from mptune.graph.casting.name_sets import Flags, Positions
from mptune.graph.casting.value_types import Flow, Resolution
from mptune.graph.loading.model import Model
from mptune.graph.loading.tensors import Initializer
from mptune.graph.writing import wire
from mptune.graph.writing.segments import Reads, Segment, Segmenter, Spelling
from mptune.graph.writing.weights import WeightBank, inline_tensor

SELF_CONTAINED_LIMIT = 1_900_000_000
"""Bytes up to which one file holds the model: protobuf messages end at 2 GiB."""

_OPENINGS = 1 << 12
"""Sizes of nodes below this have their opening in the table."""


@dataclass(frozen=True)
class Changes:
    """Where a variant differs from what its ``Spelling`` says: names and nodes by exception.

    Attributes:
        names: new names of the values that the model's own Casts read and compute, by who reads them.
        behind: value -> the nodes that stand right after its producer instead.
        lead: nodes before all others.
        dropped: indices of nodes that the variant leaves out.
    """

    names: Mapping[Reads, Mapping[str, str]] = field(default_factory=dict)
    behind: Mapping[str, bytes] = field(default_factory=dict)
    lead: Sequence[bytes] = ()
    dropped: Collection[int] = ()


class _Renamable(NamedTuple):
    """A segment whose input a change may rename: its position among the segments, and its node's index."""

    position: int
    node: int
    segment: Segment


class Parts:
    """The pieces of one model in all their forms, and the frame around them.

    A node is an opening, which depends on its size, and its segments; behind it stand the nodes that make other forms
    of its outputs. Which form each piece takes is arithmetic on the plan's flags, so a plan costs a few passes over
    arrays, one selection from a table and one joining of bytes.
    """

    def __init__(self, flow: Flow, spelling: Spelling, may_stand_behind: Flags) -> None:
        """Take the model apart; ``may_stand_behind``: values that some plan makes another form of, [flow.values]."""
        self.flow = flow
        segmenter = Segmenter(flow, spelling)
        segments: list[Segment] = []
        owner: list[int] = []
        self._renamable: list[_Renamable] = []
        for node in flow.model.nodes:
            for segment in segmenter.segments(node):
                if segment.name in segmenter.cast_names:
                    self._renamable.append(_Renamable(len(segments), node.index, segment))
                segments.append(segment)
                owner.append(node.index)
        self._owner = np.array(owner, np.intp)
        self._value = np.array([flow.values.position.get(segment.name, -1) for segment in segments], np.intp)
        self._first = np.searchsorted(self._owner, np.arange(len(flow.model.nodes)))
        self._behind_value = np.flatnonzero(may_stand_behind)
        names = [*compress(flow.values, may_stand_behind.tolist())]
        behind = [spelling.behind(name, is_half) for name in names for is_half in (False, True)]
        self._fill_table([form for segment in segments for form in segment.forms], behind)
        self._order_pieces(names)
        self._frame, self._graph_rest = _frame(flow.model)

    def _fill_table(self, forms: Sequence[wire.Piece], behind: Sequence[bytes]) -> None:
        """Nothing, openings by size, each segment's four forms, the two forms of what stands behind each value."""
        openings = (wire.opening(wire.GRAPH_NODE, size) for size in range(1, _OPENINGS))
        table = [b"", *openings, *forms, *behind]
        self._table = wire.Table(table)
        self._segments_at = np.arange(_OPENINGS, _OPENINGS + len(forms), 4)
        self._behind_at = np.arange(_OPENINGS + len(forms), len(table), 2)

    def _order_pieces(self, names: Sequence[str]) -> None:
        """How openings, segments and what stands behind these values follow each other in the file, and the inverse."""
        behind = np.array([self.flow.model.producer.get(name, -1) for name in names], np.intp)
        nodes = np.arange(len(self._first))
        self._node_of = np.concatenate((nodes, self._owner, behind))
        kinds = np.repeat((0, 1, 2), (len(nodes), len(self._owner), len(behind)))
        self._order = np.lexsort((kinds, self._node_of))
        self._place = np.empty_like(self._order)
        self._place[self._order] = np.arange(len(self._order))

    def put_together(
        self, resolution: Resolution, behind: Flags, constants: wire.Piece, changes: Changes
    ) -> list[wire.Piece]:
        """The serialised variant in pieces.

        Args:
            resolution: the plan's.
            behind: values that nodes stand behind, [flow.values].
            constants: all initializers, as fields of the graph.
            changes: what else is different.
        """
        half = np.append(resolution.half.flags, False)  # the last serves segments of no value (-1)
        segments = self._segments_at + 2 * resolution.fp16_nodes[self._owner] + half[self._value]
        sizes = self._table.sizes[segments]
        renamed = self._renamed(resolution.fp16_nodes, changes)
        for position, piece in renamed.items():
            sizes[position] = len(piece)
        sizes = np.add.reduceat(sizes, self._first)
        openings = np.where(sizes < _OPENINGS, sizes, 0)
        shown = np.where(behind[self._behind_value], self._behind_at + half[self._behind_value], 0)
        chosen = np.concatenate((openings, segments, shown))
        if changes.dropped:
            gone = np.zeros(len(sizes) + 1, np.bool_)
            gone[[*changes.dropped]] = True
            chosen[gone[self._node_of]] = 0
        instead = {int(self._place[at]): piece for at, piece in self._exceptions(sizes, renamed, changes)}
        nodes = self._table.selected(chosen[self._order], instead)
        graph = [*changes.lead, nodes, constants, self._graph_rest]
        return [self._frame + wire.opening(wire.MODEL_GRAPH, wire.total_size(graph)), *graph]

    def _exceptions(
        self, sizes: Positions, renamed: Mapping[int, wire.Piece], changes: Changes
    ) -> Iterator[tuple[int, wire.Piece]]:
        """What stands in the place of a piece from the table: its position among all pieces, and itself."""
        for node in np.flatnonzero(sizes >= _OPENINGS).tolist():
            if node not in changes.dropped:
                yield node, wire.opening(wire.GRAPH_NODE, int(sizes[node]))
        for position, piece in renamed.items():
            yield len(sizes) + position, piece
        for name, nodes in changes.behind.items():
            number = np.searchsorted(self._behind_value, self.flow.values.position[name])
            yield len(sizes) + len(self._owner) + int(number), nodes

    def _renamed(self, fp16_nodes: Flags, changes: Changes) -> dict[int, wire.Piece]:
        """Segment -> what stands in its place where a change renames its input."""
        renamed = {}
        for position, node, segment in self._renamable:
            is_fp16 = bool(fp16_nodes[node])
            name = changes.names.get(segment.reads[is_fp16], {}).get(segment.name)
            if name is not None and node not in changes.dropped:
                renamed[position] = segment.renamed(name, is_fp16)
        return renamed


def _frame(model: Model) -> tuple[bytes, bytes]:
    """What stands around the nodes and constants: of the model, and of its graph."""
    graph = onnx.GraphProto()
    source = model.proto.graph
    graph.name = source.name or "graph"
    if source.HasField("doc_string"):
        graph.doc_string = source.doc_string
    graph.input.extend(source.input)
    graph.output.extend(source.output)
    graph.sparse_initializer.extend(source.sparse_initializer)
    graph.quantization_annotation.extend(source.quantization_annotation)
    # Old types would be wrong now. Only where ONNX cannot infer them are they kept: nothing changes type there.
    opaque = {out for node in model.nodes if not node.is_standard for out in node.outputs}
    graph.value_info.extend(v for v in source.value_info if v.name in opaque)
    frame = _without_graph(model.proto)
    frame.ir_version = max(frame.ir_version, 4)  # from 4 on, initializers need not be inputs
    return frame.SerializeToString(deterministic=True), graph.SerializeToString(deterministic=True)


def _without_graph(proto: onnx.ModelProto) -> onnx.ModelProto:
    frame = onnx.ModelProto()
    for descriptor, value in proto.ListFields():
        if descriptor.name in ("graph", "functions"):
            continue
        if hasattr(value, "extend"):
            getattr(frame, descriptor.name).extend(value)
        else:
            setattr(frame, descriptor.name, value)
    return frame


def cast_node(tensor: str, result: str, to: int, name: str) -> bytes:
    """A Cast, as a field of the graph."""
    names = wire.string(wire.NODE_INPUT, tensor) + wire.string(wire.NODE_OUTPUT, result)
    return wire.field(wire.GRAPH_NODE, names + wire.string(wire.NODE_NAME, name) + _cast_rest(to))


@cache
def _cast_rest(to: int) -> bytes:
    """What all Casts to one type have in common."""
    proto = onnx.NodeProto(op_type="Cast")
    proto.attribute.add(name="to", type=onnx.AttributeProto.INT, i=to)
    return bytes(proto.SerializeToString(deterministic=True))


def bank_source(bank: WeightBank) -> Callable[[Initializer, str, bool], onnx.TensorProto]:
    """Constants by reference into the bank; small ones inline."""

    def source(constant: Initializer, name: str, half: bool) -> onnx.TensorProto:
        return bank.tensor(constant, name, half) or inline_tensor(constant, name, half)

    return source


def chunks_of(pieces: Iterable[wire.Piece]) -> Iterator[bytes]:
    """The bytes of pieces, those of a large constant a chunk at a time."""
    for piece in pieces:
        if isinstance(piece, bytes):
            yield piece
        else:
            yield from piece
