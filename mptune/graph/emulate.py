"""The FP32 model that rounds as FP16 would: what a plan's error is on any machine, without FP16 kernels.

Every value that the plan puts in FP16 (node outputs, inputs that cross a boundary, weights) goes through an explicit
pair of Casts to FP16 and back. Running the FP16-typed model on a provider without FP16 kernels is no substitute: it
computes in FP32 and drops the roundings between nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mptune.graph.assemble import (
    Parts,
    Spelling,
    Variant,
    cast_node,
    write_pieces,
)
from mptune.graph.constants import Shelf, banked, inline
from mptune.graph.flow import Flow, Resolution, new_suffix
from mptune.graph.groups import LayerGroup
from mptune.graph.model import Model
from mptune.graph.plan import PrecisionPlan
from mptune.graph.rewrite import FP16, FP32
from mptune.graph.weights import WeightBank


class Emulator:
    """Writes emulations of one model's plans. Made once; each plan then costs milliseconds."""

    def __init__(self, model: Model, groups: Sequence[LayerGroup], bank: WeightBank | None = None) -> None:
        self.flow = Flow(model, groups)
        self._model = model
        self._raw = new_suffix(model, "raw")
        self._half = new_suffix(model, "half")
        self._rounded = new_suffix(model, "rounded")
        constants = {c: c + self._rounded for c in self.flow.constants}
        outputs = {t: t + self._raw for t in self.flow.narrowable}
        self._parts = Parts(self.flow, Spelling(constants, outputs, retyped=False))
        self._shelf = Shelf(self.flow, bank, inline if bank is None else banked(bank), self._half)

    def write(self, plan: PrecisionPlan, path: Path) -> Path:
        """Write the emulation to ``path``, which must lie in the weight bank's folder.

        Raises:
            PlanError: the plan does not fit the model.
            RunError: the file cannot be written, or the disk is full.
        """
        resolution = self.flow.resolve(plan)
        # The model's own Casts all stay here, and need what they read.
        own = {c.source for c in self.flow.own_casts} & self.flow.constants
        resolution = replace(resolution, constants_fp32=resolution.constants_fp32 | own)
        return write_pieces(path, self._parts.put_together(resolution, self._variant(resolution)))

    def _variant(self, resolution: Resolution) -> Variant:
        after = {t: self._round(t + self._raw, t, t) for t in resolution.half}
        rounded = [t for t in resolution.crossing if t not in resolution.half]
        after |= {t: self._round(t, t + self._rounded, t) for t in rounded}
        lead = [after[t] for t in rounded if t not in self._model.producer]
        constants, dropped = self._shelf.take(resolution)
        for name in self._model.initializers:
            if name in resolution.constants_fp16:
                lead.append(cast_node(name + self._half, name + self._rounded, FP32, name + self._rounded))
        follow = {t: t + self._rounded for t in rounded}
        for name, root in resolution.folds.narrow.items():
            if root in follow or root in resolution.constants_fp16:
                follow[name] = root + self._rounded
        return Variant(follow, {}, {}, after, lead, constants, dropped)

    def _round(self, source: str, result: str, stem: str) -> bytes:
        """To FP16 and back."""
        half = stem + self._half
        return cast_node(source, half, FP16, half) + cast_node(half, result, FP32, stem + self._rounded)
