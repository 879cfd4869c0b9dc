"""Carry out a plan: the same model with FP16 constants and explicit Casts.

*Requires* a model from ``load_model`` and groups from ``find_groups``. *Ensures*: the interface is unchanged; each
value is cast at most once per type, right after its producer; constants are converted, never cast at run time; shape,
index and boolean values are untouched; the same plan gives the same bytes; the all-FP32 plan changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from mptune.graph.assemble import (
    SELF_CONTAINED_LIMIT,
    Parts,
    TensorSource,
    Variant,
    bank_source,
    beside_source,
    cast_node,
    initializer,
    write_bytes,
)
from mptune.graph.flow import Flow, Resolution, new_suffix
from mptune.graph.groups import LayerGroup, find_groups
from mptune.graph.model import Model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.weights import WeightBank, inline_tensor

FP32 = onnx.TensorProto.FLOAT
FP16 = onnx.TensorProto.FLOAT16


class Rewriter:
    """Writes typed models of one model. Made once; each plan then costs milliseconds."""

    def __init__(self, model: Model, groups: Sequence[LayerGroup], bank: WeightBank | None = None) -> None:
        self.flow = Flow(model, groups)
        self._model = model
        self._parts = Parts(self.flow)
        self._bank = bank
        self._to_fp16 = new_suffix(model, "fp16")
        self._to_fp32 = new_suffix(model, "fp32")

    def write(self, plan: PrecisionPlan, path: Path) -> Path:
        """Write the typed model to ``path``, which must lie in the weight bank's folder.

        Raises:
            PlanError: the plan does not fit the model.
            RunError: the file cannot be written, or the disk is full.
        """
        source = inline_tensor if self._bank is None else bank_source(self._bank)
        return write_bytes(path, self.serialize(plan, source))

    def export(self, plan: PrecisionPlan, path: Path) -> Path:
        """Write the typed model self-contained; past 2 GiB its weights lie in ``path`` + ``.data``.

        Raises:
            PlanError: the plan does not fit the model.
            RunError: the file cannot be written, or the disk is full.
        """
        weight_bytes = sum(c.nbytes for c in self._model.initializers.values())
        small = weight_bytes <= SELF_CONTAINED_LIMIT
        return write_bytes(path, self.serialize(plan, inline_tensor if small else beside_source(path)))

    def node_precisions(self, plan: PrecisionPlan) -> dict[str, Precision]:
        """The precision of every node that has one, by node name."""
        return self.flow.node_precisions(plan)

    def boundaries(self, plan: PrecisionPlan) -> int:
        """How many Casts the plan needs: one for each value that crosses."""
        return len(self.flow.resolve(plan).crossing)

    def serialize(self, plan: PrecisionPlan, source: TensorSource) -> bytes:
        """The typed model as bytes, its constants as ``source`` gives them."""
        resolution = self.flow.resolve(plan)
        return self._parts.put_together(resolution, self._variant(resolution, source))

    def _variant(self, resolution: Resolution, source: TensorSource) -> Variant:
        half, named = resolution.half, self.flow.named_fp32
        to_fp16, to_fp32 = self._to_fp16, self._to_fp32
        moved = {t: t + to_fp16 for t in half & named}  # FP16 values that must leave their name to an FP32 copy
        follow = dict(moved)
        other: dict[str, str] = {}
        after: dict[str, bytes] = {}
        for t in resolution.crossing:
            if t not in half:
                follow[t] = t + to_fp16
                after[t] = cast_node(t, t + to_fp16, FP16, t + to_fp16)
            elif t in named:
                after[t] = cast_node(t + to_fp16, t, FP32, t + to_fp32)
            else:
                other[t] = t + to_fp32
                after[t] = cast_node(t, t + to_fp32, FP32, t + to_fp32)
        follow.update((c, c + to_fp16) for c in resolution.constants_fp16)
        constants, dropped = self._constants(resolution, source)
        lead = [after[t] for t in resolution.crossing if t not in self._model.producer]
        return Variant(follow, other, moved, moved, after, lead, constants, dropped, retyped=True)

    def _constants(self, resolution: Resolution, source: TensorSource) -> tuple[list[bytes], set[int]]:
        kept, dropped = kept_constants(self.flow, resolution, source, self._bank)
        halves = (c for name, c in self._model.initializers.items() if name in resolution.constants_fp16)
        kept += [initializer(source(c, c.name + self._to_fp16, True)) for c in halves]
        return kept, dropped


def kept_constants(
    flow: Flow, resolution: Resolution, source: TensorSource, bank: WeightBank | None
) -> tuple[list[bytes], set[int]]:
    """Constants that stay as they are, and the indices of Constant nodes that are not needed as nodes."""
    kept: list[bytes] = []
    dropped: set[int] = set()
    for name, constant in flow.model.initializers.items():
        needed = name not in flow.constants or name in resolution.constants_fp32
        banked = bank is not None and name in bank.fp32
        if constant.node_index is not None and (banked or not needed):
            dropped.add(constant.node_index)
        if needed and (constant.node_index is None or banked):
            kept.append(initializer(source(constant, name, False)))
    return kept, dropped


def rewrite(model: Model, plan: PrecisionPlan, groups: Sequence[LayerGroup] | None = None) -> onnx.ModelProto:
    """The typed model in memory, self-contained; ``groups`` default to fusion granularity.

    Raises:
        PlanError: the plan does not fit the model.
    """
    rewriter = Rewriter(model, find_groups(model) if groups is None else groups)
    return onnx.load_model_from_string(rewriter.serialize(plan, inline_tensor))
