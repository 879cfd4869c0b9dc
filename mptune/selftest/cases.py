"""The self-test's tiny models, and what the engines are held against: onnx's reference evaluator (NumPy)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from mptune.data.archive import save_samples
from mptune.engines.base import Workspace
from mptune.engines.workload import Workload
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.rounding_steps import with_rounding_steps

SEED = 7
SAMPLES = 2
_OPSET = 19
_IR_VERSION = 9
Shape = tuple[int, ...]


class _Graph:
    """Nodes and weights of a model with one input ``x`` and one output ``y``; weights keep the size of what flows."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(SEED)

    def constant(self, name: str, value: np.ndarray) -> str:
        """Add a constant and return its name."""
        self.constants.append(numpy_helper.from_array(value, name))
        return name

    def weights(self, name: str, shape: Shape, inputs: int) -> str:
        """Add normal FP32 weights of a layer that sums up so many products."""
        values = self._random.standard_normal(shape) / np.sqrt(inputs)
        return self.constant(name, values.astype(np.float32))

    def add(self, op: str, *inputs: str, out: str, **attributes: Any) -> str:
        """Add a node, named as its output, and return that."""
        self.nodes.append(helper.make_node(op, list(inputs), [out], name=f"{op.lower()}_{out}", **attributes))
        return out

    def conv(self, source: str, out: str, channels: int, inputs: int) -> str:
        """Add a 3 x 3 convolution."""
        weights = self.weights(f"{out}.weight", (channels, inputs, 3, 3), inputs * 9)
        return self.add("Conv", source, weights, out=out, kernel_shape=[3, 3], pads=[1, 1, 1, 1])

    def model(self, name: str, shape: Shape, result: Shape) -> onnx.ModelProto:
        """The model, checked."""
        x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", shape), ("y", result)))
        graph = helper.make_graph(self.nodes, name, [x], [y], self.constants)
        opsets = [helper.make_opsetid("", _OPSET)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name="mptune")
        onnx.checker.check_model(model, full_check=True)
        return model


def convolutions() -> onnx.ModelProto:
    """Four convolutions with ReLU between."""
    graph = _Graph()
    value = "x"
    for index, (channels, inputs) in enumerate(((32, 16), (32, 32), (32, 32))):
        value = graph.add("Relu", graph.conv(value, f"conv{index}", channels, inputs), out=f"relu{index}")
    graph.conv(value, "y", 16, 32)
    return graph.model("convolutions", (1, 16, 24, 24), (1, 16, 24, 24))


def attention() -> onnx.ModelProto:
    """A transformer block: layer norms, single-head attention, and two dense layers with GELU."""
    graph, rows, width = _Graph(), 64, 128

    def norm(source: str, out: str) -> str:
        scale = graph.constant(f"{out}.scale", np.ones(width, np.float32))
        bias = graph.constant(f"{out}.bias", np.zeros(width, np.float32))
        return graph.add("LayerNormalization", source, scale, bias, out=out, axis=-1)

    def dense(source: str, out: str, inputs: int, outputs: int) -> str:
        return graph.add("MatMul", source, graph.weights(f"{out}.weight", (inputs, outputs), inputs), out=out)

    normed = norm("x", "norm0")
    query, key, value = (dense(normed, name, width, width) for name in ("query", "key", "value"))
    turned = graph.add("Transpose", key, out="key_t", perm=[0, 2, 1])
    scale = graph.constant("scale", np.array(width**-0.5, np.float32))
    scores = graph.add("Mul", graph.add("MatMul", query, turned, out="scores"), scale, out="scaled")
    mixed = graph.add("MatMul", graph.add("Softmax", scores, out="shares", axis=-1), value, out="mixed")
    middle = graph.add("Add", "x", dense(mixed, "projected", width, width), out="middle")
    wide = dense(norm(middle, "norm1"), "wide", width, 2 * width)
    root = graph.constant("root2", np.array(np.sqrt(2), np.float32))
    erf = graph.add("Erf", graph.add("Div", wide, root, out="over_root"), out="erf")
    unit, half = (graph.constant(f"c{v}", np.array(v, np.float32)) for v in (1.0, 0.5))
    gate = graph.add("Mul", wide, graph.add("Add", erf, unit, out="erf1"), out="gate")
    dense(graph.add("Mul", gate, half, out="gelu"), "narrow", 2 * width, width)
    graph.add("Add", middle, "narrow", out="y")
    return graph.model("attention", (1, rows, width), (1, rows, width))


MODELS: Mapping[str, Callable[[], onnx.ModelProto]] = {
    "convolutions": convolutions,
    "attention": attention,
}


def samples_of(model: onnx.ModelProto) -> Sequence[Mapping[str, np.ndarray]]:
    """``SAMPLES`` normal FP32 samples of the model's input."""
    random = np.random.default_rng(SEED)
    (value,) = model.graph.input
    shape = tuple(dimension.dim_value for dimension in value.type.tensor_type.shape.dim)
    return [{value.name: random.standard_normal(shape).astype(np.float32)} for _ in range(SAMPLES)]


FP32, FP16, FIRST, SECOND = "all-fp32", "all-fp16", "one half", "other half"
"""The plans: in the last two, every other group that may be FP16 is, and none of them is in both."""


@dataclass(frozen=True, eq=False)
class Case:
    """One tiny model."""

    name: str
    workload: Workload
    plans: Mapping[str, PrecisionPlan]
    reference: tuple[np.ndarray, ...]

    @cached_property
    def fused(self) -> Mapping[str, np.ndarray]:
        """Outputs of the first sample by plan, as an engine rounds that fuses nodes."""
        return self._emulated(self.workload.grouped)

    @cached_property
    def unfused(self) -> Mapping[str, np.ndarray]:
        """The same for an engine with a kernel for each node (ONNX Runtime's CUDA provider)."""
        return self._emulated(with_rounding_steps(self.workload.grouped))

    def _emulated(self, grouped: GroupedModel) -> dict[str, np.ndarray]:
        emulator, outputs = Emulator(grouped), {}
        (sample,) = samples_of(self.workload.model.proto)[:1]
        for name, plan in self.plans.items():
            path = emulator.write(plan, self.workload.workspace.scratch("emulated"))
            outputs[name] = _evaluate(path, sample)
            path.unlink()
        return outputs


def make_cases(folder: Path) -> tuple[Case, ...]:
    """Write the tiny models and their samples, a folder for each, and compute their reference outputs."""
    return tuple(_case(name, folder / name) for name in MODELS)


def _case(name: str, folder: Path) -> Case:
    folders = {f"{what}_dir": folder / what for what in ("weights", "data", "engines", "logs")}
    for path in folders.values():
        path.mkdir(parents=True)
    workspace = Workspace(model_path=folder / "model.onnx", **folders)
    onnx.save(MODELS[name](), workspace.model_path)
    model = load_model(workspace.model_path)
    grouped = GroupedModel(model, find_groups(model))
    samples = samples_of(model.proto)
    save_samples(workspace.samples("search"), samples)
    fp32 = grouped.uniform(Precision.FP32)
    free = [group.id for group in grouped.groups if group.pinned is None]
    chosen = {FP32: [], FP16: free, FIRST: free[::2], SECOND: free[1::2]}
    plans = {plan: fp32.replace(dict.fromkeys(ids, Precision.FP16)) for plan, ids in chosen.items()}
    reference = tuple(_evaluate(workspace.model_path, sample) for sample in samples)
    return Case(name, Workload(grouped, workspace), plans, reference)


def _evaluate(path: Path, sample: Mapping[str, np.ndarray]) -> np.ndarray:
    from onnx.reference import ReferenceEvaluator

    (output,) = cast("list[np.ndarray]", ReferenceEvaluator(str(path)).run(None, dict(sample)))
    return output
