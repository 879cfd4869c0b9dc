"""The finding that operators are out of reach: their types are unknown, or they have no FP16 form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from mptune.finding import Finding, FindingOrigin, Where
from mptune.findings.wording import listed
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.loading.model import Model, Node
from mptune.graph.op_rules import is_quantised, node_rule, schema_of
from mptune.targets.costs import Shape, ShapeTable, is_of_runtime, node_flops, share_of
from mptune.targets.unsearched import OUT_OF_REACH

NEGLIGIBLE = 0.01
"""Operators whose types are known and that have less of the FLOPs than this are no finding."""

_NAMED = 4


def out_of_reach_findings(
    grouped: GroupedModel, shapes: Mapping[str, Shape], origin: FindingOrigin
) -> tuple[Finding, ...]:
    """The finding that some nodes keep their precision whatever a plan says; none where that is not so.

    Quantised operators, those of ai.onnx.ml and subgraphs are reported elsewhere.

    Args:
        grouped: the model and its layer groups.
        shapes: as of ``group_costs``.
        origin: what looked.
    """
    model = grouped.model
    computed = (out for node in model.nodes for out in node.outputs if out)
    undefined = frozenset(name for name in computed if model.info(name).dtype == "undefined")
    untyped = [node for node in model.nodes if node.name not in grouped.owners and _is_untyped(model, node, undefined)]
    fixed = [node for node in model.nodes if node.name not in grouped.owners and _has_no_fp16_form(model, node)]
    nodes = tuple({node.index: node for node in (*untyped, *fixed)}.values())
    if not nodes:
        return ()
    table = ShapeTable(model, shapes)
    flops = {node.index: _least_flops(node, table) for node in model.nodes if not node.has_subgraph}
    share = share_of(nodes, flops)
    if not untyped and share < NEGLIGIBLE:
        return ()
    causes = [node for node in nodes if _is_foreign(model, node)] or list(nodes)
    operators = Counter(_operator(node) for node in causes)
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


def _is_untyped(model: Model, node: Node, undefined: frozenset[str]) -> bool:
    return not undefined.isdisjoint((*node.inputs, *node.outputs))


def _has_no_fp16_form(model: Model, node: Node) -> bool:
    """Whether an operator that ONNX does not define computes with FP32 values, and takes nothing else."""
    if node.is_standard or node.domain == "ai.onnx.ml" or node.has_subgraph or is_quantised(node):
        return False
    return any(name and model.info(name).is_float32 for name in (*node.inputs, *node.outputs))


def _least_flops(node: Node, shapes: ShapeTable) -> float:
    """FLOPs of a node; of a product of unknown shape those of one row, by its weight."""
    flops, is_matrix = node_flops(node, shapes)
    if not is_matrix:
        return flops
    return max(flops, 2.0 * max((shapes.elements(n) for n in node.inputs if n in shapes.constants), default=0))


def _operator(node: Node) -> str:
    return node.op_type if node.is_standard else f"{node.domain}.{node.op_type}"
