"""Findings about parts of a model that no plan changes: what is FP16 or quantised already, or out of reach.

``shapes`` are those of ``mptune.targets.costs.group_costs``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from mptune.finding import Finding, FindingOrigin, Where
from mptune.findings.engine import NOTHING
from mptune.findings.wording import listed
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.patterns import QUANTISED
from mptune.graph.loading.model import Model, Node
from mptune.graph.loading.tensors import all_graphs, subgraphs
from mptune.graph.op_rules import is_quantised, node_rule, schema_of
from mptune.graph.ops import FLOAT_TYPES, INTEGER_PRODUCTS, MOVEMENT, QUANTISING, anchor_kind
from mptune.graph.plan import REDUCED, Precision
from mptune.targets.costs import (
    Shape,
    ShapeTable,
    group_costs,
    is_of_runtime,
    node_flops,
    share_of,
    ungrouped_cost,
)

OUT_OF_REACH = "operators-out-of-reach"
NEGLIGIBLE = 0.01
"""Operators whose types are known and that have less of the FLOPs than this are no finding."""

_NAMED = 4
_ON_INTEGERS = INTEGER_PRODUCTS | {"QLinearConv", "QLinearMatMul"}


def nothing_to_tune(grouped: GroupedModel, origin: FindingOrigin) -> tuple[Finding, ...]:
    """The finding that a model has no group to tune, or none with a layer, and why; none where it has one."""
    nodes = grouped.model.nodes
    free = [group for group in grouped.groups if group.pinned is None]
    loops = [node for node in nodes if node.has_subgraph and _has_layer(node)]
    kind = ""
    if loops and not any(anchor_kind(op) for group in free for op in group.ops):
        kind = "subgraphs"
    elif free:
        return ()
    elif any(group.kind == QUANTISED for group in grouped.groups) or any(map(is_quantised, nodes)):
        kind = "quantised"
    return (
        Finding.of(
            NOTHING,
            origin,
            Where(nodes=tuple(node.name for node in loops) if kind == "subgraphs" else ()),
            {"free_groups": len(free)},
            kind=kind,
            operators=" and ".join(dict.fromkeys(node.op_type for node in loops)),
        ),
    )


def _has_layer(node: Node) -> bool:
    """Whether a graph inside a node holds an operator that would start a group."""
    graphs = (graph for outer in subgraphs(node.proto) for graph in all_graphs(outer))
    return any(anchor_kind(inner.op_type) for graph in graphs for inner in graph.node)


def already_mixed_findings(
    grouped: GroupedModel, shapes: Mapping[str, Shape], origin: FindingOrigin
) -> tuple[Finding, ...]:
    """The finding that nodes compute in FP16 or BF16 whatever a plan says; none where no node does."""
    model = grouped.model
    computed = {node.index: precisions for node in model.nodes if (precisions := _precisions(model, node))}
    computing = [node for node in model.nodes if node.index in computed]
    reduced = [node for node in computing if computed[node.index].intersection(REDUCED)]
    if not reduced:
        return ()
    table = ShapeTable(model, shapes)
    flops = {node.index: node_flops(node, table)[0] for node in computing if not node.has_subgraph}
    share = share_of(reduced, flops)
    counts = Counter(precision for node in reduced for precision in computed[node.index])
    return (
        Finding.of(
            "already-mixed",
            origin,
            Where(nodes=tuple(node.name for node in reduced)),
            {
                **{f"{precision}_layers": counts[precision] for precision in REDUCED if precision in counts},
                "layers": len(computing),
                "flops_share": share,
                "other_groups": len(grouped.groups),
            },
            kind="compared" if origin == "compare" else "",
            reduced=len(reduced),
            precisions=" or ".join(precision.name for precision in REDUCED if precision in counts),
        ),
    )


def holds_bf16(model: Model) -> bool:
    """Whether a node of the model's own computes in BF16."""
    return any(Precision.BF16 in _precisions(model, node) for node in model.nodes)


def _precisions(model: Model, node: Node) -> frozenset[Precision]:
    """Of the floating-point values that a node computes; none of a Cast, a view, and of what dequantises."""
    if node.op_type in MOVEMENT or node.op_type in QUANTISING or node.op_type in ("Cast", "Constant"):
        return frozenset()
    dtypes = {model.info(out).dtype for out in node.outputs if out}
    return frozenset(FLOAT_TYPES[dtype] for dtype in dtypes if dtype in FLOAT_TYPES)


def quantised_findings(
    grouped: GroupedModel, shapes: Mapping[str, Shape], origin: FindingOrigin
) -> tuple[Finding, ...]:
    """The finding that quantised parts stay as they are; none where the model has none."""
    parts = [group for group in grouped.groups if group.kind == QUANTISED]
    operators = [n for n in grouped.model.nodes if n.name not in grouped.owners and _computes_in_integers(n)]
    if not parts and not operators:
        return ()
    costs = group_costs(grouped, shapes)
    flops = sum(costs[group.id].flops for group in parts)
    total = sum(cost.flops for cost in costs.values()) + ungrouped_cost(grouped, shapes).flops
    table = ShapeTable(grouped.model, shapes)
    flops += sum(node_flops(node, table)[0] for node in operators)
    share = flops / total if total else 0.0
    nodes = tuple(name for group in parts for name in group.nodes)
    rest = len(grouped.groups) - len(parts)
    return (
        Finding.of(
            "quantised-parts",
            origin,
            Where(nodes=nodes or tuple(n.name for n in operators), groups=tuple(group.id for group in parts)),
            {
                "parts": len(parts),
                "nodes": len(nodes),
                "operators": len(operators),
                "flops_share": share,
                "other_groups": rest,
            },
            is_both=bool(parts and operators),
            together=len(parts) + len(operators),
            is_whole=not rest,
        ),
    )


def _computes_in_integers(node: Node) -> bool:
    """Whether an operator takes quantised values for its operands."""
    if node.op_type.endswith("QuantizeLinear") or node.op_type == "DequantizeLinear":
        return False
    return is_quantised(node) or (node.is_standard and node.op_type in _ON_INTEGERS)


def out_of_reach_findings(
    grouped: GroupedModel, shapes: Mapping[str, Shape], origin: FindingOrigin
) -> tuple[Finding, ...]:
    """The finding that some nodes keep their precision whatever a plan says; none where that is not so.

    Quantised operators, those of ai.onnx.ml and subgraphs are reported elsewhere.
    """
    model = grouped.model
    computed = (out for node in model.nodes for out in node.outputs if out)
    undefined = frozenset(name for name in computed if model.info(name).dtype == "undefined")
    others = [node for node in model.nodes if node.name not in grouped.owners]
    untyped = [node for node in others if not undefined.isdisjoint((*node.inputs, *node.outputs))]
    fixed = [node for node in others if _has_no_fp16_form(model, node)]
    nodes = tuple({node.index: node for node in (*untyped, *fixed)}.values())
    if not nodes:
        return ()
    table = ShapeTable(model, shapes)
    flops = {node.index: _least_flops(model, node, table) for node in model.nodes if not node.has_subgraph}
    share = share_of(nodes, flops)
    if not untyped and share < NEGLIGIBLE:
        return ()
    causes = [node for node in nodes if _is_foreign(model, node)] or list(nodes)
    operators = Counter(n.op_type if n.is_standard else f"{n.domain}.{n.op_type}" for n in causes)
    first = causes[0]
    kind = "fixed" if not untyped else "unknown" if schema_of(model, first) is None else "untyped"
    is_own = not any(is_of_runtime(node) or node.is_standard for node in causes)
    named = [f"{name} ({count})" if count > 1 else name for name, count in operators.most_common()]
    return (
        Finding.of(
            OUT_OF_REACH,
            origin,
            Where(nodes=tuple(node.name for node in nodes)),
            {
                "nodes": len(nodes),
                "untyped_nodes": len(untyped),
                "operators": ", ".join(operators),
                "flops_share": share,
                "first": first.name,
            },
            kind=kind + " own" * is_own,
            named=listed(named, _NAMED, " and {others} other operators"),
            failure=model.runtime.failure,
            rule=node_rule(model, first).fixed,
        ),
    )


def _is_foreign(model: Model, node: Node) -> bool:
    """Whether ONNX does not define a node's operator: what comes after it has no type because of it."""
    rule = node_rule(model, node)
    return schema_of(model, node) is None or (not node.is_standard and rule.fixed is not None)


def _has_no_fp16_form(model: Model, node: Node) -> bool:
    """Whether an operator that ONNX does not define computes with FP32 values, and takes nothing else."""
    if node.is_standard or node.domain == "ai.onnx.ml" or node.has_subgraph or is_quantised(node):
        return False
    return any(name and model.info(name).is_float32 for name in (*node.inputs, *node.outputs))


def _least_flops(model: Model, node: Node, shapes: ShapeTable) -> float:
    """FLOPs of a node; of a product of unknown shape those of one row, by its weight."""
    flops, is_matrix = node_flops(node, shapes)
    if not is_matrix:
        return flops
    return max(flops, 2.0 * max((shapes.elements(n) for n in node.inputs if n in model.initializers), default=0))
