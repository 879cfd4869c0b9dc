"""A model that FP16 makes coarse, and what sound deployments of it could have recorded, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
from onnxruntime.transformers.float16 import convert_float_to_float16

from tests.diagnosis import recordings
from tests.diagnosis.recordings import Arrays, NodeByNode
from tests.graph.models import constant, save, text

ROWS = 24


def _weight(name: str, rows: int, columns: int) -> onnx.TensorProto:
    values = np.random.default_rng(len(name) + columns).standard_normal((rows, columns)) / rows**0.5
    return constant(name, values.astype(np.float32))


def fragile() -> onnx.ModelProto:
    """Values pass through an offset of 200, where FP16's spacing is an eighth."""
    graph = """(float[batch,32] x) => (float[batch,8] y) <float[1] offset = {200}> {
        ["/first/MatMul"] a = MatMul(x, w1) ["/first/Tanh"] t = Tanh(a) ["/second/MatMul"] b = MatMul(t, w20)
        ["/there/Add"] c = Add(b, offset) ["/back/Sub"] d = Sub(c, offset) ["/head/MatMul"] y = MatMul(d, w300)
    }"""
    return text(graph, _weight("w1", 32, 64), _weight("w20", 64, 64), _weight("w300", 64, 8))


def data() -> Arrays:
    return {"x": np.random.default_rng(0).standard_normal((ROWS, 32)).astype(np.float32)}


def _fed(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path, Path], Arrays]:
    return lambda path, _: recordings.run(path, {"x": change(data()["x"]).astype(np.float32)}, 1)


def _rounded(
    operand: Callable[[np.ndarray], np.ndarray] | None = None, result: Callable[[np.ndarray], np.ndarray] | None = None
) -> Callable[[Path, Path], Arrays]:
    return lambda path, _: NodeByNode(path).run(data(), 1, operand=operand, result=result)


def _fused(path: Path, _: Path) -> Arrays:
    """FP16 between layers, and FP32 inside of them: the offset is added before the result is rounded."""
    engine = NodeByNode(path)
    rounded = {"a", "t", "c", "d", "y", "w1", "w20", "w300", "x"}
    exact = engine.run(data(), ROWS)
    values: dict[str, np.ndarray] = {**engine.constants, **data()}
    values = {name: recordings.to_half(array) if name in rounded else array for name, array in values.items()}
    for index, each in enumerate(engine.proto.graph.node):
        for name, array in engine._node(index, each, {name: values[name] for name in each.input}).items():
            values[name] = recordings.to_half(array) if name in rounded else array
    return {name: values[name] for name in exact}


def _kept(path: Path, folder: Path) -> Arrays:
    """A converter's FP16 model in which the last product stays FP32, run by ONNX Runtime."""
    half = convert_float_to_float16(onnx.load(str(path)), keep_io_types=True, node_block_list=["/head/MatMul"])
    return recordings.run(save(half, folder, "half.onnx"), data(), ROWS)


def _to_bf16(values: np.ndarray) -> np.ndarray:
    if values.dtype != np.float32:
        return values
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32)


SOUND: Mapping[str, Callable[[Path, Path], Arrays]] = {
    "FP16 throughout": _rounded(result=recordings.to_half),
    "FP16, some nodes fused": _fused,
    "FP16 of a converter, in ONNX Runtime": _kept,
    "BF16 in the products": _rounded(operand=_to_bf16),
    "FP32": _fed(lambda x: x),
}
"""None of these is warned of."""
