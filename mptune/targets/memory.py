"""How much memory a model needs: its weights, and the most that is alive at once of what it computes.

A walk over the nodes in topological order: a value is alive from the node that computes it to the last that reads it.
Runtimes fuse, which spares values, and keep workspaces, which costs some: the figure is for deciding whether a model
fits on a device at all. What the subgraphs of If, Loop and Scan hold inside is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mptune.graph.casting.value_types import ValueTypes
from mptune.graph.facts import facts_of
from mptune.graph.loading.model import Model, once
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.targets.costs import VIEWS, Shape, ShapeTable, is_folded, item_bytes
from mptune.targets.engine_memory import EngineMemory

if TYPE_CHECKING:
    from mptune.targets.target import Target, TargetKind

USABLE: Mapping[TargetKind, float] = {"jetson": 0.75, "gpu": 0.95, "cpu": 0.75}
"""Share of the memory that a model can count on. On a Jetson the CPU, the system and the desktop live in it too."""


WORKSPACE_SHARE = 0.25
"""Of the memory that CPU and GPU share, what a TensorRT kernel may take as scratch memory.

Without a limit it is all of it, and which kernels are tried depends on what happens to be free during the build.
"""


def default_workspace_mb(shared_gb: float | None) -> int | None:
    """The limit of TensorRT's workspace where the user gives none, MiB; none where the GPU has its own memory."""
    return None if shared_gb is None else max(1, int(shared_gb * 1e9 * WORKSPACE_SHARE / 2**20))


@dataclass(frozen=True)
class MemoryNeed:
    """What all-FP32 and all-FP16 need, in bytes; mixed plans lie between.

    Attributes:
        fp32_weights: constants as the run reads them: what is computed from constants alone is folded, and its result
            counts instead of them.
        fp32_activations: the most that is alive at once of inputs, outputs and values between.
        fp16_activations: the same with every FP32 value in FP16 but for inputs and outputs, which keep their types.
    """

    fp32_weights: int
    fp16_weights: int
    fp32_activations: int
    fp16_activations: int
    fp32_peak: str
    fp16_peak: str

    def total(self, precision: Precision) -> int:
        """Weights and activations of all-FP32, or of all-FP16 or all-BF16, in bytes."""
        if precision.stored is Precision.FP32:
            return self.fp32_weights + self.fp32_activations
        return self.fp16_weights + self.fp16_activations


def plan_memory(types: ValueTypes, plan: PrecisionPlan, shapes: Mapping[str, Shape]) -> EngineMemory:
    """Predict what a plan's engine takes: every value and constant in the type that the plan gives it."""
    model, resolution = types.model, types.resolve(plan)
    table = ShapeTable(model, shapes)

    def float_bytes(tensor: str) -> int:
        return resolution.computed_in(tensor).nbytes

    def stored(name: str) -> int:
        if name not in model.initializers:
            return _weight_bytes(model, table, name, float_bytes(name))
        needed = resolution.constants.get(name) or {Precision.FP32}
        return sum(_weight_bytes(model, table, name, p.nbytes) for p in needed)

    weights = sum(stored(name) for name in _weights(model))
    activations, _ = _peak(model, table, float_bytes)
    return EngineMemory(None, activations, weights, "predicted")


def memory_need(model: Model, shapes: Mapping[str, Shape]) -> MemoryNeed:
    """Sum up which values are alive at each node of a model."""
    table = ShapeTable(model, shapes)
    fp32, fp32_peak = _peak(model, table, lambda tensor: 4)
    fp16, fp16_peak = _peak(model, table, lambda tensor: 2)
    weights = _weights(model)
    return MemoryNeed(
        fp32_weights=sum(_weight_bytes(model, table, name, 4) for name in weights),
        fp16_weights=sum(_weight_bytes(model, table, name, 2) for name in weights),
        fp32_activations=fp32,
        fp16_activations=fp16,
        fp32_peak=fp32_peak,
        fp16_peak=fp16_peak,
    )


@once
def _weights(model: Model) -> frozenset[str]:
    """The constants and folded values that the run reads or gives back; views count as what they show."""
    folded = facts_of(model).folded
    root: dict[str, str] = {}
    read = {output.name for output in model.outputs}
    for node in model.nodes:
        if not is_folded(node, folded):
            read.update((*node.inputs, *node.captures))
        elif node.op_type in VIEWS and node.inputs and node.inputs[0] in folded:
            root[node.outputs[0]] = root.get(node.inputs[0], node.inputs[0])
    return frozenset(root.get(name, name) for name in read if name in folded)


def _weight_bytes(model: Model, table: ShapeTable, name: str, float_bytes: int) -> int:
    """Bytes of a constant or folded value; FP32 counts ``float_bytes`` an element."""
    constant = model.initializers.get(name)
    if constant is not None:
        return constant.nbytes // 2 if constant.dtype == "float" and float_bytes == 2 else constant.nbytes
    return table.elements(name) * item_bytes(model, name, float_bytes)


def _peak(model: Model, table: ShapeTable, float_bytes: Callable[[str], int]) -> tuple[int, str]:
    """The most bytes alive at once, and the name of the node at which they are."""
    ends = _ends(model)
    interface = {info.name for info in (*model.inputs, *model.outputs)}

    def size(tensor: str) -> int:
        return table.elements(tensor) * item_bytes(model, tensor, 4 if tensor in interface else float_bytes(tensor))

    given = sum(size(info.name) for info in model.inputs)  # the caller keeps them
    change = np.zeros(len(model.nodes) + 2, np.int64)
    for name, end in ends.items():
        change[model.producer[name]] += size(name)
        change[end + 1] -= size(name)
    alive = change.cumsum()  # beside the inputs, at each node
    peak = int(alive.argmax())
    return given + int(alive[peak]), model.nodes[peak].name if alive[peak] else ""


@once
def _ends(model: Model) -> Mapping[str, int]:
    """Computed value that has memory of its own -> index of the last node that reads it, directly or through a view.

    What is folded is a weight, and the nodes that do it read nothing at run time.
    """
    folded = facts_of(model).folded
    root: dict[str, str] = {}
    ends: dict[str, int] = {}
    outputs = {info.name for info in model.outputs}
    for node in model.nodes:
        if is_folded(node, folded):
            continue
        read = {root.get(name, name) for name in (*node.inputs, *node.captures)}
        ends.update(dict.fromkeys(read & ends.keys(), node.index))
        ends.update((out, node.index) for out in node.outputs if out)
        is_view = (
            node.op_type in VIEWS
            and node.is_standard
            and all((node.inputs, node.outputs))
            and node.inputs[0] not in folded
        )
        if is_view and node.outputs[0] not in outputs:
            root[node.outputs[0]] = root.get(node.inputs[0], node.inputs[0])
            del ends[node.outputs[0]]
    return {name: len(model.nodes) if name in outputs else end for name, end in ends.items()}


def memory_warnings(need: MemoryNeed, target: Target, *, measured: bool = False) -> tuple[str, ...]:
    """A warning where a model will not fit on a device, or only just; all-FP32 counts, since it is the baseline.

    Where engines are ``measured``, the baseline and a candidate, which may be nearly all FP32, are loaded at a time.
    """
    if target.memory_gb is None:
        return ()
    usable = target.memory_gb * 1e9 * USABLE[target.kind]
    fp32, fp16 = need.total(Precision.FP32), need.total(Precision.FP16)
    if fp32 <= usable < 2 * fp32 and measured:
        return (
            f"the baseline and a candidate are timed in turn and need up to {2 * fp32 / 1e9:.2g} GB of memory together"
            f" (all-FP32: weights {need.fp32_weights / 1e9:.2g}, activations {need.fp32_activations / 1e9:.2g}), of"
            f" which about {usable / 1e9:.2g} GB are free on {target.title}: close other programs (on a Jetson also the"
            " desktop), or give a smaller --batch or smaller inputs",
        )
    if fp32 <= usable:
        return ()
    shared = ", which the system shares" if target.kind == "jetson" else ""
    fits = "all-FP16 does not fit either" if fp16 > usable else f"all-FP16 needs {fp16 / 1e9:.2g} GB"
    return (
        f"all-FP32, the baseline, needs about {fp32 / 1e9:.2g} GB of memory (weights {need.fp32_weights / 1e9:.2g}, "
        f"activations {need.fp32_activations / 1e9:.2g} at {need.fp32_peak!r}), {target.title} has "
        f"{target.memory_gb:g} GB{shared}; {fits}: give a smaller --batch or smaller inputs",
    )
