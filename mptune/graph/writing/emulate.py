"""The FP32 model that rounds as FP16 would: what a plan's error is on any machine, without FP16 kernels.

Every value that the plan puts in FP16 (node outputs, inputs that cross a boundary, weights) goes through an explicit
pair of Casts to FP16 and back. Running the FP16-typed model on a provider without FP16 kernels is no substitute: it
computes in FP32 and drops the roundings between nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mptune.files import write_bytes
from mptune.graph.casting.name_sets import Marked
from mptune.graph.casting.value_types import Flow, Resolution, new_suffix
from mptune.graph.grouping.groups import LayerGroup
from mptune.graph.grouping.op_kinds import DATA_MOVEMENT
from mptune.graph.loading.model import Model, Node
from mptune.graph.plan import PrecisionPlan
from mptune.graph.writing.assemble import Changes, Parts, cast_node, chunks_of
from mptune.graph.writing.constants import Shelf, banked, inline
from mptune.graph.writing.rewrite import FP16, FP32
from mptune.graph.writing.segments import Reads, Spelling
from mptune.graph.writing.weights import WeightBank

_CHOOSES = DATA_MOVEMENT - {"Cast", "Dropout"} | {"Concat", "Gather", "GatherElements", "GatherND", "Relu"}
"""Operators whose every output value is one of their input values, or zero."""


def needs_rounding(flow: Flow, node: Node) -> bool:
    """Whether what a node computes from FP16 values may be no FP16 value: else a rounding would change nothing."""
    if not node.rounds:
        return False
    floats = {slot for slot, name in enumerate(node.inputs) if name and flow.model.info(name).is_float32}
    return node.op_type not in _CHOOSES or not floats <= set(flow.rules[node.index].inputs)


class _Rounded(Spelling):
    """Every value stays FP32, and is FP16's nearest where the plan has it in FP16."""

    retyped = False

    def __init__(self, model: Model, rough: Marked) -> None:
        self._rough = rough
        self._raw = new_suffix(model, "raw")
        self.half_suffix = new_suffix(model, "half")
        self._rounded = new_suffix(model, "rounded")

    def constant(self, name: str) -> str:
        return name + self._rounded

    def computed(self, name: str) -> str:
        return name + self._raw if name in self._rough else name

    def in_fp16(self, name: str, is_half: bool) -> str:
        return name if is_half else name + self._rounded

    def in_fp32(self, name: str, is_half: bool) -> str:
        return name

    def behind(self, name: str, is_half: bool) -> bytes:
        source, half = self.computed(name) if is_half else name, name + self.half_suffix
        to_fp32 = cast_node(half, self.in_fp16(name, is_half), FP32, name + self._rounded)
        return cast_node(source, half, FP16, half) + to_fp32

    def rounded_constant(self, name: str) -> bytes:
        """A constant that is stored in FP16, in FP32 again."""
        return cast_node(name + self.half_suffix, self.constant(name), FP32, self.constant(name))


class Emulator:
    """Writes emulations of one model's plans. Made once; each plan then costs milliseconds."""

    def __init__(self, model: Model, groups: Sequence[LayerGroup], bank: WeightBank | None = None) -> None:
        self.flow = Flow(model, groups)
        rough = (
            node.outputs[slot]
            for node, rule in zip(model.nodes, self.flow.rules, strict=True)
            if needs_rounding(self.flow, node)
            for slot in rule.outputs
        )
        self._rough = self.flow.values.marked(rough)
        self._spelling = _Rounded(model, self._rough)
        self._parts = Parts(self.flow, self._spelling, self.flow.may_cross | self._rough.flags)
        source = inline if bank is None else banked(bank)
        self._shelf = Shelf(self.flow, bank, source, self._spelling.half_suffix)

    def write(self, plan: PrecisionPlan, path: Path) -> Path:
        """Write the emulation to ``path``, which must lie in the weight bank's folder.

        Raises:
            PlanError: the plan does not fit the model.
            RunError: the file cannot be written, or the disk is full.
        """
        resolution = self.flow.resolve(plan)
        half, crossing = resolution.half.flags, resolution.crossing.flags
        for cast in self.flow.own_casts:  # they all stay here, and need what they read
            if cast.source in self.flow.constants:
                resolution.constants_fp32.add(cast.source)
        constants, dropped = self._shelf.take(resolution)
        rounded = [self._spelling.rounded_constant(name) for name in resolution.constants_fp16]
        changes = Changes({Reads.FP16: self._narrow(resolution)}, lead=rounded, dropped=dropped)
        behind = np.where(half, self._rough.flags, crossing)
        return write_bytes(path, chunks_of(self._parts.put_together(resolution, behind, constants, changes)))

    def _narrow(self, resolution: Resolution) -> dict[str, str]:
        """What FP16 nodes read in place of the results of the model's own Casts to FP32."""
        rounded = {}
        for name, root in resolution.folds.narrow.items():
            if root in resolution.constants_fp16:
                rounded[name] = self._spelling.constant(root)
            else:
                crosses = root in resolution.crossing and root not in resolution.half
                rounded[name] = self._spelling.in_fp16(root, False) if crosses else name
        return rounded
