"""What a deployment could have recorded: right outputs, and outputs with one planted fault each, by seed.

TF32 and FP16 are computed node by node with the bits masked in NumPy, apart from mptune's own emulation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnxruntime

Arrays = dict[str, np.ndarray]
PRODUCTS = {"MatMul", "Conv", "Gemm", "ConvTranspose"}


def session(model: bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def data_of(model: Path, rng: np.random.Generator, rows: int = 4) -> Arrays:
    """Random values for every input, six along axes without a length."""
    data = {}
    for value in session(model.read_bytes()).get_inputs():
        shape = [rows, *(d if isinstance(d, int) else 6 for d in value.shape[1:])]
        integers = "int" in value.type
        data[value.name] = rng.integers(0, 40, shape) if integers else rng.standard_normal(shape).astype(np.float32)
    return data


def run(model: Path, data: Arrays, batch: int) -> Arrays:
    """Outputs of all rows, ``batch`` rows at a time."""
    opened = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    return _in_batches(lambda feed: _named(opened, feed), data, batch)


def _named(opened: onnxruntime.InferenceSession, feed: Mapping[str, np.ndarray]) -> Arrays:
    return dict(zip([o.name for o in opened.get_outputs()], opened.run(None, dict(feed)), strict=True))


def _in_batches(function: Callable[[Arrays], Arrays], data: Arrays, batch: int) -> Arrays:
    count = len(next(iter(data.values())))
    parts = [function({n: a[k : k + batch] for n, a in data.items()}) for k in range(0, count, batch)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class NodeByNode:
    """Runs a model one node at a time, so that operands and results can be rounded in between."""

    def __init__(self, model: Path) -> None:
        self.proto = onnx.load(str(model))
        self.constants = {t.name: onnx.numpy_helper.to_array(t) for t in self.proto.graph.initializer}
        self._sessions: dict[tuple[object, ...], onnxruntime.InferenceSession] = {}

    def run(
        self,
        data: Arrays,
        batch: int,
        operand: Callable[[np.ndarray], np.ndarray] | None = None,
        result: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> Arrays:
        return _in_batches(lambda feed: self._one(feed, operand, result), data, batch)

    def _one(self, feed: Arrays, operand: object, result: object) -> Arrays:
        values: Arrays = {**self.constants, **feed}
        if callable(result):
            values = {name: result(array) for name, array in values.items()}
        for index, node in enumerate(self.proto.graph.node):
            names = [name for name in dict.fromkeys(node.input) if name]
            given = {name: values[name] for name in names}
            if node.op_type in PRODUCTS and callable(operand):
                given = {name: operand(array) if name in node.input[:2] else array for name, array in given.items()}
            for name, array in self._node(index, node, given).items():
                values[name] = result(array) if callable(result) else array
        return {output.name: values[output.name] for output in self.proto.graph.output}

    def _node(self, index: int, node: onnx.NodeProto, given: Arrays) -> Arrays:
        key = (index, *((name, array.dtype, array.shape) for name, array in given.items()))
        if key not in self._sessions:
            inputs = [
                onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
                for n, a in given.items()
            ]
            outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
            graph = onnx.helper.make_graph([node], "node", inputs, outputs)
            model = onnx.helper.make_model(graph, opset_imports=self.proto.opset_import, ir_version=9)
            self._sessions[key] = session(model.SerializeToString())
        return _named(self._sessions[key], given)


def _masked(values: np.ndarray, half: int, mask: int) -> np.ndarray:
    if values.dtype != np.float32:
        return values
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + np.uint32(half)) & np.uint32(mask)).view(np.float32)


def to_tf32(values: np.ndarray) -> np.ndarray:
    """To 10 bits of mantissa, ties away from zero, as ``cvt.rna.tf32`` does."""
    return _masked(values, 0x1000, 0xFFFFE000)


def cut_to_tf32(values: np.ndarray) -> np.ndarray:
    """The low 13 bits cut off."""
    return _masked(values, 0, 0xFFFFE000)


def to_bf16(values: np.ndarray) -> np.ndarray:
    return _masked(values, 0x8000, 0xFFFF0000)


def to_half(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).astype(np.float32) if values.dtype == np.float32 else values


def stale(right: Arrays, rng: np.random.Generator, batch: int) -> Arrays:
    """Some rows, or all, are those of the run before."""
    count = len(next(iter(right.values())))
    share = rng.choice([0.3, 0.6, 1.0])
    runs = [k for k in range(1, count // batch) if rng.random() < share] or [1]
    rows = np.arange(count)
    source = np.where(np.isin(rows // batch, runs), rows - batch, rows)
    return {name: array[source] for name, array in right.items()}


def torn(right: Arrays, rng: np.random.Generator, batch: int) -> Arrays:
    """Some rows begin with this result and end with that of the run before."""
    outputs = {}
    count = len(next(iter(right.values())))
    rows = np.array([k for k in range(batch, count) if rng.random() < 0.5] or [batch])
    share = rng.uniform(0.2, 0.8)
    for name, array in right.items():
        flat, before = array.reshape(count, -1).copy(), array.reshape(count, -1)
        start = min(max(1, round(share * flat.shape[1])), flat.shape[1] - 1)
        flat[rows, start:] = before[rows - batch, start:]
        outputs[name] = flat.reshape(array.shape)
    return outputs


def not_computed(right: Arrays, kind: str) -> Arrays:
    """Nothing was copied back; or one buffer, with what no row or the last one gives, for all rows."""
    share = 0.0 if kind == "zero" else 1.0
    first = -1 if kind == "last row" else 0
    return {
        name: np.repeat(share * array[first:].mean(axis=0, keepdims=True), len(array), 0).astype(array.dtype)
        for name, array in right.items()
    }


def permuted(right: Arrays, rng: np.random.Generator, kind: str) -> Arrays:
    name = str(rng.choice(sorted(right)))
    array = right[name]
    if kind == "rows":
        return {**right, name: array[::-1].copy()}
    if kind == "columns":
        axis = 1 if array.ndim >= 4 else array.ndim - 1
        return {**right, name: np.roll(array, -int(rng.integers(1, array.shape[axis])), axis)}
    one, other = [n for n in right if right[n].shape == array.shape][:2]
    return {**right, one: right[other], other: right[one]}
