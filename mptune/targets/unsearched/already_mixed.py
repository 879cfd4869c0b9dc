"""The finding that a model computes in FP16 already, and how much of it does."""

from __future__ import annotations

from collections.abc import Mapping

from mptune.finding import CODES, Finding, FindingOrigin, Where
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.op_kinds import DATA_MOVEMENT
from mptune.graph.loading.model import Model, Node
from mptune.graph.loading.value_dependent import QUANTISING
from mptune.targets.flops import Shape, ShapeTable, node_flops, share_of

_CODE = "already-mixed"


def already_mixed_findings(
    grouped: GroupedModel, shapes: Mapping[str, Shape], origin: FindingOrigin
) -> tuple[Finding, ...]:
    """The finding that nodes compute in FP16 whatever a plan says; none where no node does.

    Args:
        grouped: the model and its layer groups.
        shapes: as of ``group_costs``.
        origin: what looked.
    """
    model = grouped.model
    computing = [node for node in model.nodes if _computes(model, node)]
    half = [node for node in computing if any(model.info(out).dtype == "float16" for out in node.outputs if out)]
    if not half:
        return ()
    table = ShapeTable(model, shapes)
    flops = {node.index: node_flops(node, table)[0] for node in computing if not node.has_subgraph}
    share = share_of(half, flops)
    what = f"1 of {len(computing)} layers is" if len(half) == 1 else f"{len(half)} of {len(computing)} layers are"
    groups = len(grouped.groups)
    return (
        Finding(
            code=_CODE,
            severity=CODES[_CODE].severity,
            origin=origin,
            where=Where(nodes=tuple(node.name for node in half)),
            evidence={
                "fp16_layers": len(half),
                "layers": len(computing),
                "flops_share": share,
                "other_groups": groups,
            },
            text=f"{what} FP16 already, {share:.0%} of the FLOPs, and no plan changes that: only the other"
            f" {groups} groups are searched, and the reference holds the rounding of these layers",
            cure="give the FP32 model that it was made from",
        ),
    )


def _computes(model: Model, node: Node) -> bool:
    """Whether a node computes floating-point values: it is no Cast, no view, and dequantises nothing."""
    if node.op_type in DATA_MOVEMENT or node.op_type in QUANTISING or node.op_type in ("Cast", "Constant"):
        return False
    return any(model.info(out).dtype in ("float", "float16") for out in node.outputs if out)
