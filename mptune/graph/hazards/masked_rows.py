"""Rows of a softmax that are masked whole: all their elements lie beyond FP16's range, and become -inf in it.

In FP32 a row of -3.4e38 has even weights, as the largest element is taken off first; in FP16 it is -inf everywhere, and
-inf less -inf is NaN (IEEE 754-2008, 7.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mptune.finding import CODES, Finding, FindingOrigin, Where
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.lookup import Lookup, attribute
from mptune.graph.hazards.hazard import FP16_MAX
from mptune.graph.loading.model import Model, Node

_SOFTMAX = frozenset({"Softmax", "LogSoftmax"})
_COERCED_BELOW = 13
"""Softmax of an older operator set takes all axes from ``axis`` on as one, and ``axis`` is 1 where it is not stated."""

_IN_FP16 = (
    "In FP16 all are -inf, and their softmax is NaN, where the mask is an input, or where scores below -16 are added to"
    " one that is held as -65504"
)
_IN_FP32 = "They are -inf, and their softmax is NaN, in FP32 already: precision is not the problem"

_MASK_INPUTS: Mapping[tuple[str, str], int] = {
    ("", "Attention"): 3,
    ("com.microsoft", "Attention"): 5,
    ("com.microsoft", "MultiHeadAttention"): 5,
    ("com.microsoft", "GroupQueryAttention"): 10,
}
"""(domain, operator) -> the input that is added to the scores inside the operator."""


@dataclass(frozen=True)
class MaskedRows:
    """What was seen of one value that a softmax is taken of.

    Attributes:
        rows: how many rows had no element within FP16's range, over all samples.
        sample: index of the first sample with one.
        samples: how many samples have one.
    """

    rows: int
    sample: int
    samples: int = 1


def softmax_rows(model: Model) -> dict[str, tuple[int, ...]]:
    """FP32 values that a softmax is taken of, or that are added to its scores -> the axes of a row, ascending."""
    look = Lookup(model)
    found: dict[str, tuple[int, ...]] = {}
    for node in model.nodes:
        for tensor, axes in _reads(look, node):
            if tensor and axes and model.info(tensor).is_float32 and not look.is_static(tensor):
                found.setdefault(tensor, axes)
    return found


def _reads(look: Lookup, node: Node) -> list[tuple[str, tuple[int, ...]]]:
    if node.op_type in _SOFTMAX and node.is_standard:
        return [(node.inputs[0], _axes(look.model, node))]
    if node.op_type == "Exp" and node.is_standard:
        return _written_out(look, node)
    mask = mask_input(node)
    return [(mask, (-1,))] if mask else []


def mask_input(node: Node) -> str:
    """What an attention operator adds to its scores; "" where a node is none, or has no mask."""
    slot = _MASK_INPUTS.get(("" if node.is_standard else node.domain, node.op_type))
    return "" if slot is None or len(node.inputs) <= slot else node.inputs[slot]


def _axes(model: Model, node: Node) -> tuple[int, ...]:
    stated = attribute(node, "axis")
    if model.opset >= _COERCED_BELOW:
        return (stated if isinstance(stated, int) else -1,)
    shape = model.info(node.inputs[0]).shape
    if shape is None:
        return ()
    first = (stated if isinstance(stated, int) else 1) % max(1, len(shape))
    return tuple(range(first, len(shape)))


def _written_out(look: Lookup, node: Node) -> list[tuple[str, tuple[int, ...]]]:
    """``exp(x - max(x))``: x, where the largest is taken along the last axis."""
    shift = look.producer(node.inputs[0])
    if shift is None or shift.op_type != "Sub":
        return []
    largest = look.producer(shift.inputs[1])
    if largest is None or largest.op_type != "ReduceMax" or look.root(largest.inputs[0]) != look.root(shift.inputs[0]):
        return []
    rank = len(look.model.info(shift.inputs[0]).shape or ())
    stated = attribute(largest, "axes")
    axes = list(stated) if isinstance(stated, (list, tuple)) else []
    if len(largest.inputs) > 1 and largest.inputs[1] in look.model.initializers:
        axes = look.model.initializers[largest.inputs[1]].numpy().ravel().tolist()
    return [(shift.inputs[0], (-1,))] if len(axes) == 1 and int(axes[0]) in (-1, rank - 1) else []


def masked_row_findings(
    grouped: GroupedModel,
    seen: Mapping[str, MaskedRows],
    origin: FindingOrigin,
    indices: Sequence[int] = (),
    known: Sequence[Finding] = (),
) -> tuple[Finding, ...]:
    """A finding for each value that had rows masked whole.

    Args:
        grouped: the model and its layer groups.
        seen: value -> its masked rows on the samples.
        origin: what looked.
        indices: index in the data of each sample that was seen; empty where they are all of the data.
        known: findings of the same model in FP32, where the softmax may be NaN already.
    """
    broken = {node for one in known if one.code == "reference-not-finite" for node in one.where.nodes}
    model, owners = grouped.model, grouped.owners
    found = []
    for tensor, masked in seen.items():
        readers = [model.nodes[i] for i in model.consumers.get(tensor, ())]
        nodes = [n for n in readers if n.op_type in _SOFTMAX | {"Sub"} or (n.domain, n.op_type) in _MASK_INPUTS]
        groups = tuple(dict.fromkeys(owners[node.name] for node in nodes if node.name in owners))
        sample = indices[masked.sample] if indices else masked.sample
        place = f"in sample {sample}"
        if masked.samples > 1:
            place = f"in {masked.samples} samples, first in sample {sample}"
        many = "1 row is" if masked.rows == 1 else f"{masked.rows} rows are"
        found.append(
            Finding(
                code="mask",
                severity=CODES["mask"].severity,
                origin=origin,
                where=Where(tuple(n.name for n in nodes), groups, (tensor,), samples=(sample,)),
                evidence={"masked_rows": masked.rows, "limit": -FP16_MAX},
                text=f"value {tensor!r}: {many} masked whole on the calibration data, {place}: "
                f"every element lies below {-FP16_MAX:g}. "
                + (_IN_FP32 if broken.intersection(node.name for node in nodes) else _IN_FP16),
                cure="mask with a value that FP16 holds (-1e4), or give rows that are not masked whole",
            )
        )
    return tuple(found)
