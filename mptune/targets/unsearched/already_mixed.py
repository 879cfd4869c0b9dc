"""The finding that a model computes in FP16 or BF16 already, and how much of it does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from mptune.finding import Finding, FindingOrigin, Where
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.op_kinds import DATA_MOVEMENT
from mptune.graph.loading.model import Model, Node
from mptune.graph.loading.value_dependent import QUANTISING
from mptune.graph.op_rules import FLOAT_TYPES
from mptune.graph.plan import REDUCED, Precision
from mptune.targets.costs import Shape, ShapeTable, node_flops, share_of


def already_mixed_findings(
    grouped: GroupedModel, shapes: Mapping[str, Shape], origin: FindingOrigin
) -> tuple[Finding, ...]:
    """The finding that nodes compute in FP16 or BF16 whatever a plan says; none where no node does.

    Args:
        grouped: the model and its layer groups.
        shapes: as of ``group_costs``.
        origin: what looked.
    """
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
    if node.op_type in DATA_MOVEMENT or node.op_type in QUANTISING or node.op_type in ("Cast", "Constant"):
        return frozenset()
    dtypes = {model.info(out).dtype for out in node.outputs if out}
    return frozenset(FLOAT_TYPES[dtype] for dtype in dtypes if dtype in FLOAT_TYPES)
