"""Layer groups: nodes that always share a precision, the unit of the search.

Indivisible patterns are found first, by structure and not by names (``patterns``). Each pattern and each remaining
heavy node (convolution, matrix product, norm, ...) starts a group. Everything else joins the group of the latest
producer that it reads, as a fused epilogue would; what reads no group (masks, constants' views) joins its reader.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from mptune.errors import PlanError
from mptune.graph.model import Model, Node
from mptune.graph.op_rules import NodeRule, node_rule
from mptune.graph.patterns import find_patterns

Granularity = Literal["fusion", "op"]

ANCHOR_KINDS: Mapping[str, str] = {
    **dict.fromkeys(("Conv", "ConvTranspose", "DeformConv"), "conv"),
    **dict.fromkeys(("MatMul", "Gemm", "Einsum"), "matmul"),
    **dict.fromkeys(
        (
            "LayerNormalization",
            "InstanceNormalization",
            "GroupNormalization",
            "RMSNormalization",
            "BatchNormalization",
            "LpNormalization",
            "LRN",
            "MeanVarianceNormalization",
        ),
        "norm",
    ),
    **dict.fromkeys(("Softmax", "LogSoftmax"), "softmax"),
    "Attention": "attention",
    **dict.fromkeys(("LSTM", "GRU", "RNN"), "rnn"),
    **dict.fromkeys(
        (
            "ReduceMean",
            "ReduceSum",
            "ReduceSumSquare",
            "ReduceL1",
            "ReduceL2",
            "ReduceLogSum",
            "ReduceLogSumExp",
            "ReduceProd",
            "CumSum",
            "GlobalAveragePool",
            "GlobalLpPool",
        ),
        "reduce",
    ),
    **dict.fromkeys(("Resize", "Upsample", "GridSample", "RoiAlign", "AffineGrid"), "resample"),
}
"""Operators that start a group at fusion granularity, and the kind of group that they start."""

_KEEPS_MASKS_OUT = frozenset({"attention", "softmax"})
_FOLDS_INTO = frozenset({"conv", "matmul"})
"""A BatchNormalization right after one of these is folded into it by every runtime."""


@dataclass(frozen=True)
class LayerGroup:
    """Nodes that always share a precision.

    Attributes:
        id: ``g000``, ``g001``, ... in topological order; the same for the same model on every machine.
        name: readable, from the scopes in the node names.
        kind: what started it: conv, matmul, norm, softmax, attention, rnn, reduce, resample or elementwise.
        nodes: node names in topological order.
        ops: operator -> how many of it.
        pinned: why the group cannot be FP16 under any plan; None where it is free.
    """

    id: str
    name: str
    kind: str
    nodes: tuple[str, ...]
    ops: Mapping[str, int]
    pinned: str | None = None


def find_groups(model: Model, granularity: Granularity = "fusion") -> tuple[LayerGroup, ...]:
    """Partition the nodes that have a precision into groups.

    Raises:
        PlanError: an unknown granularity.
    """
    if granularity not in get_args(Granularity):
        raise PlanError(f"unknown granularity {granularity!r}", f"one of: {', '.join(get_args(Granularity))}")
    rules = [node_rule(model, node) for node in model.nodes]
    owner = _assign(model, rules, granularity)
    members: dict[int, list[Node]] = {}
    for node in model.nodes:
        if owner.leader[node.index] >= 0:
            members.setdefault(owner.leader[node.index], []).append(node)
    ordered = sorted(members.items())
    names = _unique([_group_name(model.nodes[leader], nodes) for leader, nodes in ordered])
    width = max(3, len(str(len(ordered))))
    return tuple(
        LayerGroup(
            f"g{position:0{width}d}",
            name,
            owner.kind.get(leader, "elementwise"),
            tuple(n.name for n in nodes),
            dict(Counter(n.op_type for n in nodes)),
        )
        for position, ((leader, nodes), name) in enumerate(zip(ordered, names, strict=True))
    )


@dataclass(frozen=True)
class _Owner:
    """Node index -> index of the node that leads its group (-1: no precision), and the leaders' kinds."""

    leader: list[int]
    kind: dict[int, str]


def _assign(model: Model, rules: list[NodeRule], granularity: Granularity) -> _Owner:
    has_precision = [bool(rule.inputs or rule.outputs) for rule in rules]
    leader = [-1] * len(model.nodes)
    kind: dict[int, str] = {}
    for pattern in find_patterns(model):
        inside = [i for i in pattern.nodes if has_precision[i]]
        for i in inside:
            leader[i] = pattern.anchor
        if inside:
            kind[pattern.anchor] = pattern.kind
    sources = []
    for node in model.nodes:
        i = node.index
        if not has_precision[i] or leader[i] >= 0:
            continue
        producers = [leader[p] for p in _float_producers(model, node) if leader[p] >= 0]
        anchor_kind = ANCHOR_KINDS.get(node.op_type)
        latest = max(producers, default=-1)
        if node.op_type == "BatchNormalization" and latest >= 0 and kind.get(latest) in _FOLDS_INTO:
            anchor_kind = None
        if granularity == "op" or anchor_kind is not None:
            leader[i] = i
            kind[i] = anchor_kind or "elementwise"
        elif producers:
            leader[i] = latest
        else:
            sources.append(i)
    _join_readers(model, sources, leader, kind)
    return _Owner(leader, kind)


def _join_readers(model: Model, sources: list[int], leader: list[int], kind: dict[int, str]) -> None:
    """Give nodes that read no group the group of their readers; where these differ, a group of their own.

    Masks stay apart from the softmax that they feed: (1 - mask) * -1e9 must be FP32 where the attention need not be.
    """
    pending = set(sources)
    for i in sources:  # connected sources that feed nothing in a group yet share one leader
        earlier = [leader[p] for p in _float_producers(model, model.nodes[i]) if p in pending and leader[p] >= 0]
        leader[i] = max(earlier, default=i)
    for i in reversed(sources):
        readers = {leader[c] for out in model.nodes[i].outputs for c in model.consumers.get(out, ()) if leader[c] >= 0}
        if len(readers) == 1 and (kind.get(min(readers)) not in _KEEPS_MASKS_OUT or _is_single(model, model.nodes[i])):
            leader[i] = readers.pop()


def _is_single(model: Model, node: Node) -> bool:
    """Whether a node computes single values: a scale, not a mask."""
    shapes = [model.info(out).shape for out in node.outputs if out]
    return all(shape is not None and all(dim == 1 for dim in shape) for shape in shapes)


def _float_producers(model: Model, node: Node) -> list[int]:
    return [model.producer[i] for i in node.inputs if i in model.producer and model.info(i).is_float32]


def _group_name(leader: Node, nodes: list[Node]) -> str:
    """The scope of the leading node: what the exporter called the module."""
    scope = _module_scope(leader)
    if scope:
        return scope
    parts = [p for p in leader.name.split("/") if p]
    if len(parts) > 1:
        return "/".join(parts[:-1])
    return leader.name or f"{leader.op_type}_{nodes[0].index}"


def _module_scope(node: Node) -> str:
    """The innermost module in the metadata that torch's exporter writes; "" where there is none."""
    for entry in node.proto.metadata_props:
        if entry.key == "pkg.torch.onnx.name_scopes":
            try:
                scopes = ast.literal_eval(entry.value)
            except (ValueError, SyntaxError):
                return ""
            modules = [s for s in scopes[:-1] if isinstance(s, str) and s]
            return modules[-1].replace(".", "/") if modules else ""
    return ""


def _unique(names: list[str]) -> list[str]:
    """Number repeated names, in order."""
    seen: Counter[str] = Counter()
    total = Counter(names)
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if total[name] == 1 else f"{name}#{seen[name]}")
    return result
