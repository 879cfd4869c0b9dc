"""Attention whose sums leave FP16's range, by onnx.helper alone: what BF16 is for.

    python -m benchmarks.models.overflowing --out overflowing      # overflowing.onnx and overflowing.npz

Exponential features without a shift (Katharopoulos et al., arXiv 2006.16236): the sums grow with the exponentials.
Weights are drawn, so errors are this network's, not a trained one's.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 22
TOKENS, WIDTH, HEADS, BLOCKS = 512, 256, 4, 4


class Network:
    """Collects nodes and weights; every method returns the name of what it adds."""

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._count = 0

    def op(self, op_type: str, *inputs: str, scope: str = "", **attributes: object) -> str:
        self._count += 1
        name = f"{scope}/{op_type}_{self._count}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], name=name, **attributes))
        return name

    def constant(self, values: object, dtype: type = np.float32) -> str:
        name = f"c{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.array(values, dtype), name))
        return name

    def draw(self, *shape: int, scale: float = 1.0) -> str:
        fan_in = np.prod(shape[1:]) if len(shape) > 2 else shape[0]
        return self.constant(self.rng.standard_normal(shape) * scale * fan_in**-0.5)

    def linear(self, x: str, before: int, after: int, scope: str, scale: float = 1.0) -> str:
        product = self.op("MatMul", x, self.draw(before, after, scale=scale), scope=scope)
        return self.op("Add", product, self.constant(self.rng.standard_normal(after) * 0.02), scope=scope)

    def silu(self, x: str, scope: str) -> str:
        return self.op("Mul", x, self.op("Sigmoid", x, scope=scope), scope=scope)

    def heads(self, x: str, scope: str, order: tuple[int, ...] = (0, 2, 1, 3)) -> str:
        shape = self.constant([0, TOKENS, HEADS, WIDTH // HEADS], np.int64)
        return self.op("Transpose", self.op("Reshape", x, shape, scope=scope), scope=scope, perm=list(order))

    def joined(self, x: str, scope: str) -> str:
        merged = self.op("Transpose", x, scope=scope, perm=[0, 2, 1, 3])
        return self.op("Reshape", merged, self.constant([0, TOKENS, WIDTH], np.int64), scope=scope)

    def finish(self, inputs: Mapping[str, tuple[int, ...]], output: str) -> onnx.ModelProto:
        self.nodes.append(helper.make_node("Identity", [output], ["y"], name="y"))
        given = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", *s]) for n, s in inputs.items()]
        result = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
        graph = helper.make_graph(self.nodes, self.name, given, result, self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
        return onnx.shape_inference.infer_shapes(model)


def linear_attention(net: Network) -> tuple[onnx.ModelProto, dict[str, tuple[int, ...]]]:
    x = net.linear("tokens", 64, WIDTH, "/embed")
    ones = net.constant([-2], np.int64)
    for k in range(BLOCKS):
        scope = f"/block{k}"
        h = net.op("LayerNormalization", x, net.constant(np.ones(WIDTH)), scope=f"{scope}/norm1", axis=-1)
        scale = 3.0
        q, key = (
            net.op("Exp", net.heads(net.linear(h, WIDTH, WIDTH, f"{scope}/{n}", scale), scope), scope=f"{scope}/{n}")
            for n in ("q", "k")
        )
        v = net.heads(net.linear(h, WIDTH, WIDTH, f"{scope}/v"), scope)
        turned = net.op("Transpose", key, scope=scope, perm=[0, 1, 3, 2])
        gathered = net.op("MatMul", q, net.op("MatMul", turned, v, scope=scope), scope=scope)
        total = net.op("Mul", q, net.op("ReduceSum", key, ones, scope=scope), scope=scope)
        weight = net.op("ReduceSum", total, net.constant([-1], np.int64), scope=scope)
        mixed = net.joined(net.op("Div", gathered, weight, scope=scope), scope)
        x = net.op("Add", x, net.linear(mixed, WIDTH, WIDTH, f"{scope}/proj"), scope=scope)
        h = net.op("LayerNormalization", x, net.constant(np.ones(WIDTH)), scope=f"{scope}/norm2", axis=-1)
        h = net.silu(net.linear(h, WIDTH, 4 * WIDTH, f"{scope}/fc1"), f"{scope}/fc1")
        x = net.op("Add", x, net.linear(h, 4 * WIDTH, WIDTH, f"{scope}/fc2"), scope=scope)
    inputs = {"tokens": (TOKENS, 64)}
    return net.finish(inputs, net.linear(x, WIDTH, 64, "/head")), inputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help=".onnx and .npz are appended")
    parser.add_argument("--rows", type=int, default=64)
    options = parser.parse_args()
    model, inputs = linear_attention(Network("linear_attention", 0))
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, options.out.with_suffix(".onnx"))
    rng = np.random.default_rng(1)
    arrays = {name: rng.standard_normal((options.rows, *shape)).astype(np.float32) for name, shape in inputs.items()}
    np.savez(options.out.with_suffix(".npz"), **arrays)


if __name__ == "__main__":
    main()
