"""How much memory a model needs: its weights, and the most that is alive at once of what it computes.

A walk over the nodes in topological order: a value is alive from the node that computes it to the last that reads it.
Runtimes fuse, which spares values, and keep workspaces, which costs some: the figure is for deciding whether a model
fits on a device at all. What the subgraphs of If, Loop and Scan hold inside is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from mptune.graph.facts import facts_of
from mptune.graph.loading.model import Model, once
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.value_types import ValueTypes
from mptune.targets.costs import VIEWS, Shape, ShapeTable, is_folded, item_bytes
from mptune.targets.target import EngineMemory, Target, TargetKind

# Of the memory that CPU and GPU share, what a TensorRT kernel may take as scratch memory. Without a limit it is all of
# it, and which kernels are tried depends on what happens to be free during the build.
_WORKSPACE_SHARE = 0.25
# Share of the memory that a model can count on. On a Jetson the CPU, the system and the desktop live in it too.
_USABLE: Mapping[TargetKind, float] = {"jetson": 0.75, "gpu": 0.95, "cpu": 0.75}


def default_workspace_mb(shared_gb: float | None) -> int | None:
    """The limit of TensorRT's workspace where the user gives none, MiB; none where the GPU has its own memory."""
    return None if shared_gb is None else max(1, int(shared_gb * 1e9 * _WORKSPACE_SHARE / 2**20))


@dataclass(frozen=True)
class MemoryNeed:
    """What all-FP32 and all-FP16 need, in bytes; mixed plans lie between.

    Attributes:
        fp32_weights: constants as the run reads them: what is computed from constants alone is folded, and its result
            counts instead of them.
        fp32_activations: the most that is alive at once of inputs, outputs and values between.
        fp16_activations: the same with every FP32 value in FP16 but for inputs and outputs, which keep their types.
        fp32_peak: name of the node at which they are alive.
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


def memory_need(model: Model, shapes: Mapping[str, Shape]) -> MemoryNeed:
    """What all-FP32 and all-FP16 need."""
    table, (weights, _) = ShapeTable(model, shapes), _lifetimes(model)
    fp32, fp32_peak = _activations(model, table, lambda value: 4)
    fp16, fp16_peak = _activations(model, table, lambda value: 2)
    fp32_weights, fp16_weights = (sum(_weight_bytes(model, table, name, size) for name in weights) for size in (4, 2))
    return MemoryNeed(fp32_weights, fp16_weights, fp32, fp16, fp32_peak, fp16_peak)


def plan_memory(types: ValueTypes, plan: PrecisionPlan, shapes: Mapping[str, Shape]) -> EngineMemory:
    """Predict what a plan's engine takes: every value and constant in the type that the plan gives it."""
    model, resolution, table = types.model, types.resolve(plan), ShapeTable(types.model, shapes)
    weights = 0
    for name in _lifetimes(model)[0]:
        if name in model.initializers:
            stored_in = resolution.constants.get(name) or {Precision.FP32}
        else:
            stored_in = {resolution.computed_in(name)}
        weights += sum(_weight_bytes(model, table, name, precision.nbytes) for precision in stored_in)
    activations, _ = _activations(model, table, lambda value: resolution.computed_in(value).nbytes)
    return EngineMemory(None, activations, weights, "predicted")


def _weight_bytes(model: Model, table: ShapeTable, name: str, float_bytes: int) -> int:
    """Bytes of a constant or folded value; FP32 counts ``float_bytes`` an element."""
    constant = model.initializers.get(name)
    if constant is not None:
        return constant.nbytes // 2 if constant.dtype == "float" and float_bytes == 2 else constant.nbytes
    return table.elements(name) * item_bytes(model, name, float_bytes)


def _activations(model: Model, table: ShapeTable, float_bytes: Callable[[str], int]) -> tuple[int, str]:
    """The most bytes alive at once, and the name of the node at which they are."""
    interface = {info.name for info in (*model.inputs, *model.outputs)}

    def size(value: str) -> int:
        return table.elements(value) * item_bytes(model, value, 4 if value in interface else float_bytes(value))

    change = np.zeros(len(model.nodes) + 2, np.int64)
    for value, last in _lifetimes(model)[1].items():
        change[model.producer[value]] += size(value)
        change[last + 1] -= size(value)
    alive = change.cumsum()  # beside the inputs, which the caller keeps, at each node
    peak = int(alive.argmax())
    name = model.nodes[peak].name if alive[peak] else ""
    return sum(size(info.name) for info in model.inputs) + int(alive[peak]), name


@once
def _lifetimes(model: Model) -> tuple[frozenset[str], dict[str, int]]:
    """The weights, and for each computed value that has memory of its own the index of the last node that reads it.

    Weights are the constants and folded values that the run reads or gives back. Views count as what they show.
    """
    folded = facts_of(model).folded
    outputs = {info.name for info in model.outputs}
    root: dict[str, str] = {}  # result of a view -> the value behind it
    last: dict[str, int] = {}
    read = {*outputs}
    for node in model.nodes:
        is_view = node.op_type in VIEWS and node.is_standard and bool(node.inputs and node.outputs)
        is_free = is_folded(node, folded)  # such a node reads nothing at run time
        if not is_free:
            read.update((*node.inputs, *node.captures))
            behind = {root.get(name, name) for name in (*node.inputs, *node.captures)}
            last.update(dict.fromkeys(behind & last.keys(), node.index))
            last.update((out, node.index) for out in node.outputs if out)
        # A view that is an output is copied, as is one of a weight.
        if is_view and (node.inputs[0] in folded) is is_free and (is_free or node.outputs[0] not in outputs):
            root[node.outputs[0]] = root.get(node.inputs[0], node.inputs[0])
            last.pop(node.outputs[0], None)
    last.update((name, len(model.nodes)) for name in outputs & last.keys())
    return frozenset(root.get(name, name) for name in read if name in folded), last


def memory_warnings(need: MemoryNeed, target: Target, *, measured: bool = False) -> tuple[str, ...]:
    """A warning where a model will not fit on a device, or only just; all-FP32 counts, since it is the baseline.

    Where engines are ``measured``, the baseline and a candidate, which may be nearly all FP32, are loaded at a time.
    """
    if target.memory_gb is None:
        return ()
    usable = target.memory_gb * 1e9 * _USABLE[target.kind]
    fp32, fp16 = need.total(Precision.FP32), need.total(Precision.FP16)
    if (2 * fp32 if measured else fp32) <= usable:
        return ()
    weights, activations = f"weights {need.fp32_weights / 1e9:.2g}", f"activations {need.fp32_activations / 1e9:.2g}"
    need_gb, what = (fp32 / 1e9, "all-FP32") if fp32 > usable else (2 * fp32 / 1e9, "the baseline beside a candidate")
    return (
        f"{what} needs about {need_gb:.2g} GB of memory ({weights}, {activations} at {need.fp32_peak!r}), all-FP16"
        f" {fp16 / 1e9:.2g} GB, and about {usable / 1e9:.2g} GB are free on {target.title}: close other programs, or"
        " give a smaller --batch or smaller inputs",
    )
