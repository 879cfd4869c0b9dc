"""Findings about a target that is not here, and about parts of a model that no plan changes.

``shapes`` are those of ``mptune.targets.costs.group_costs``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from mptune.finding import Finding, FindingOrigin, Where
from mptune.findings.engine import ALREADY_MIXED, NOTHING, TARGET_CODE
from mptune.findings.wording import listed
from mptune.graph.facts import is_quantised, node_rule, schema_of
from mptune.graph.groups import GroupedModel
from mptune.graph.loading.model import Model, Node
from mptune.graph.loading.tensors import all_graphs, subgraphs
from mptune.graph.ops import FLOAT_TYPES, INTEGER_PRODUCTS, MOVEMENT, QUANTISING, RECURRENT, anchor_kind
from mptune.graph.patterns import QUANTISED
from mptune.graph.plan import REDUCED, Precision
from mptune.targets.costs import Shape, ShapeTable, group_costs, is_of_runtime, node_flops, ungrouped_cost
from mptune.targets.roofline import roofline
from mptune.targets.target import Target

OUT_OF_REACH = "operators-out-of-reach"

NEGLIGIBLE = 0.01  # operators whose types are known and that have less of the FLOPs than this are no finding
_TF32_COUNTS = 0.01  # share of all-FP32's latency that TF32 saves, below which nothing is said of it
_RECURRENT_RATIOS = (3, 13)  # measured over emulated errors of three LSTMs, ONNX Runtime's CUDA provider on an H200
_ON_INTEGERS = INTEGER_PRODUCTS | {"QLinearConv", "QLinearMatMul"}


def not_measured(device: str) -> Finding:
    """The finding of a search whose latencies are predicted."""
    return Finding.from_code(TARGET_CODE, "search", Where(), {"target": device})


def not_here_findings(
    predicted: Finding, grouped: GroupedModel, target: Target | None, shapes: Mapping[str, Shape], *, tf32: bool = False
) -> tuple[Finding, ...]:
    """What a search says of a device that is not here, once it has seen the model.

    That latency is ``predicted``, with the latency that all-FP32 would have with TF32, TensorRT's default; and of which
    operators the emulated errors are too small. Without a target, as where a finished search is read again, the
    prediction's finding stays as it is.
    """
    findings = [predicted]
    if target is not None and target.tf32_tflops is not None:
        terms = roofline(grouped, target, shapes, tf32=True)
        tf32_ms = terms.base_ms - terms.tf32_gain_ms
        if terms.tf32_gain_ms > _TF32_COUNTS * terms.base_ms:
            numbers = {"target": predicted.evidence["target"], "fp32_ms": terms.base_ms, "tf32_ms": tf32_ms}
            ratio, kind = terms.base_ms / tf32_ms, "beside TF32"
            findings = [Finding.from_code(TARGET_CODE, "search", Where(), numbers, kind=kind, ratio=ratio, tf32=tf32)]
    groups = [group for group in grouped.groups if not RECURRENT.isdisjoint(group.ops) and group.pinned is None]
    if groups:
        low, high = _RECURRENT_RATIOS
        operators = ", ".join(sorted({op for group in groups for op in group.ops} & RECURRENT))
        where = Where(groups=tuple(group.id for group in groups))
        evidence: dict[str, int | float | str] = {"operators": operators, "low": low, "high": high}
        findings.append(Finding.from_code("emulation-differs", "search", where, evidence, kind="recurrent"))
    return tuple(findings)


def nothing_to_tune(grouped: GroupedModel, origin: FindingOrigin) -> tuple[Finding, ...]:
    """The finding that a model has no group to tune, or none with a layer, and why; none where it has one."""
    nodes = grouped.model.nodes
    free = [group for group in grouped.groups if group.pinned is None]
    loops = [  # nodes with a graph inside that holds an operator that would start a group
        node
        for node in nodes
        if node.has_subgraph
        and any(anchor_kind(n.op_type) for outer in subgraphs(node.proto) for g in all_graphs(outer) for n in g.node)
    ]
    kind = ""
    if loops and not any(anchor_kind(op) for group in free for op in group.ops):
        kind = "subgraphs"
    elif free:
        return ()
    elif any(group.kind == QUANTISED for group in grouped.groups) or any(map(is_quantised, nodes)):
        kind = "quantised"
    where = Where(nodes=tuple(node.name for node in loops) if kind == "subgraphs" else ())
    operators = " and ".join(dict.fromkeys(node.op_type for node in loops))
    return (Finding.from_code(NOTHING, origin, where, {"free_groups": len(free)}, kind=kind, operators=operators),)


def already_mixed_findings(
    grouped: GroupedModel, shapes: Mapping[str, Shape], origin: FindingOrigin
) -> tuple[Finding, ...]:
    """The finding that nodes compute in FP16 or BF16 whatever a plan says; none where no node does."""
    model = grouped.model
    computing = {node.index: precisions for node in model.nodes if (precisions := _precisions(model, node))}
    layers = [model.nodes[index] for index in computing]
    reduced = [node for node in layers if computing[node.index].intersection(REDUCED)]
    if not reduced:
        return ()
    counts = Counter(precision for node in reduced for precision in computing[node.index])
    evidence = {
        **{f"{precision}_layers": counts[precision] for precision in REDUCED if precision in counts},
        "layers": len(layers),
        "flops_share": _flops_share(reduced, layers, model, shapes),
        "other_groups": len(grouped.groups),
    }
    where = Where(nodes=tuple(node.name for node in reduced))
    kind = "compared" if origin == "compare" else ""
    names = " or ".join(precision.name for precision in REDUCED if precision in counts)
    return (
        Finding.from_code(ALREADY_MIXED, origin, where, evidence, kind=kind, reduced=len(reduced), precisions=names),
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


def _flops_share(nodes: Sequence[Node], whole: Sequence[Node], model: Model, shapes: Mapping[str, Shape]) -> float:
    """The share of the FLOPs of some nodes that others have; 0 where there are none.

    A product of unknown shape has at least the FLOPs of one row, by its weight. Subgraphs are not counted.
    """
    table = ShapeTable(model, shapes)
    flops = {}
    for node in (node for node in whole if not node.has_subgraph):
        weights = [table.elements(name) for name in node.inputs if name in model.initializers]
        count, is_matrix = node_flops(node, table)
        flops[node.index] = max(count, 2.0 * max(weights, default=0)) if is_matrix else count
    total = sum(flops.values())
    return sum(flops.get(node.index, 0.0) for node in nodes) / total if total else 0.0


def quantised_findings(
    grouped: GroupedModel, shapes: Mapping[str, Shape], origin: FindingOrigin
) -> tuple[Finding, ...]:
    """The finding that quantised parts stay as they are; none where the model has none."""
    parts = [group for group in grouped.groups if group.kind == QUANTISED]

    def computes_in_integers(node: Node) -> bool:
        if node.op_type.endswith("QuantizeLinear") or node.op_type == "DequantizeLinear":
            return False
        return is_quantised(node) or (node.is_standard and node.op_type in _ON_INTEGERS)

    operators = [n for n in grouped.model.nodes if n.name not in grouped.owners and computes_in_integers(n)]
    if not parts and not operators:
        return ()
    costs, table = group_costs(grouped, shapes), ShapeTable(grouped.model, shapes)
    total = sum(cost.flops for cost in costs.values()) + ungrouped_cost(grouped, shapes).flops
    flops = sum(costs[group.id].flops for group in parts) + sum(node_flops(node, table)[0] for node in operators)
    nodes = tuple(name for group in parts for name in group.nodes)
    rest = len(grouped.groups) - len(parts)
    evidence = {
        "parts": len(parts),
        "nodes": len(nodes),
        "operators": len(operators),
        "flops_share": flops / total if total else 0.0,
        "other_groups": rest,
    }
    where = Where(nodes=nodes or tuple(n.name for n in operators), groups=tuple(group.id for group in parts))
    return (Finding.from_code("quantised-parts", origin, where, evidence),)


def out_of_reach_findings(
    grouped: GroupedModel, shapes: Mapping[str, Shape], origin: FindingOrigin
) -> tuple[Finding, ...]:
    """The finding that some nodes keep their precision whatever a plan says; none where that is not so.

    Quantised operators, those of ai.onnx.ml and subgraphs are reported elsewhere.
    """
    model = grouped.model

    def has_no_fp16_form(node: Node) -> bool:
        """Whether an operator that ONNX does not define computes with FP32 values, and takes nothing else."""
        if node.is_standard or node.domain == "ai.onnx.ml" or node.has_subgraph or is_quantised(node):
            return False
        return any(name and model.info(name).is_float32 for name in (*node.inputs, *node.outputs))

    # Which nodes: those of values whose type nobody can infer, and those with an operator that knows FP32 only.
    computed = (out for node in model.nodes for out in node.outputs if out)
    undefined = frozenset(name for name in computed if model.info(name).dtype == "undefined")
    others = [node for node in model.nodes if node.name not in grouped.owners]
    untyped = [node for node in others if not undefined.isdisjoint((*node.inputs, *node.outputs))]
    nodes = tuple({node.index: node for node in (*untyped, *filter(has_no_fp16_form, others))}.values())
    if not nodes:
        return ()

    share = _flops_share(nodes, model.nodes, model, shapes)
    if not untyped and share < NEGLIGIBLE:
        return ()

    # Which of them is the cause: what comes after an operator that ONNX does not define has no type because of it.
    def is_foreign(node: Node) -> bool:
        return schema_of(model, node) is None or (not node.is_standard and node_rule(model, node).fixed is not None)

    causes = [node for node in nodes if is_foreign(node)] or list(nodes)
    first = causes[0]
    kind = "fixed" if not untyped else "unknown" if schema_of(model, first) is None else "untyped"
    is_own = not any(is_of_runtime(node) or node.is_standard for node in causes)
    operators = Counter(n.op_type if n.is_standard else f"{n.domain}.{n.op_type}" for n in causes)
    named = [f"{name} ({count})" if count > 1 else name for name, count in operators.most_common()]
    evidence: dict[str, int | float | str] = {
        "nodes": len(nodes),
        "untyped_nodes": len(untyped),
        "operators": ", ".join(operators),
        "flops_share": share,
        "first": first.name,
    }
    where, rule = Where(nodes=tuple(node.name for node in nodes)), node_rule(model, first).fixed
    words = listed(named, 4, " and {others} other operators")
    kind, failure = kind + " own" * is_own, model.runtime.failure
    return (
        Finding.from_code(OUT_OF_REACH, origin, where, evidence, kind=kind, named=words, failure=failure, rule=rule),
    )
