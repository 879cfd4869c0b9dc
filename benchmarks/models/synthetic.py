"""Transformers of any size, by onnx.helper alone: the shapes that rewriting is timed on.

python -m benchmarks.models.synthetic --nodes 10000 --out t10k.onnx
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

TOKENS = 8
NODES_PER_BLOCK = 28


class _Graph:
    """Collects nodes and weights; every method returns the name of what it adds."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._rng = np.random.default_rng(seed)

    def node(self, op: str, inputs: list[str], name: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(op, inputs, [f"{name}_out"], name=name, **attributes))
        return f"{name}_out"

    def constant(self, name: str, values: object, dtype: type = np.float32) -> str:
        self.weights.append(numpy_helper.from_array(np.array(values, dtype), name))
        return name

    def draw(self, name: str, *shape: int) -> str:
        return self.constant(name, self._rng.standard_normal(shape, np.float32) * shape[0] ** -0.5)

    def linear(self, x: str, scope: str, width_in: int, width_out: int) -> str:
        y = self.node("MatMul", [x, self.draw(f"{scope}.weight", width_in, width_out)], f"{scope}/MatMul")
        return self.node("Add", [y, self.constant(f"{scope}.bias", np.zeros(width_out))], f"{scope}/Add")

    def norm(self, x: str, scope: str, width: int, decomposed: bool) -> str:
        gain, shift = self.constant(f"{scope}.weight", np.ones(width)), self.constant(f"{scope}.bias", np.zeros(width))
        if not decomposed:
            return self.node("LayerNormalization", [x, gain, shift], f"{scope}/LayerNormalization", axis=-1)
        mean = self.node("ReduceMean", [x], f"{scope}/ReduceMean", axes=[-1])
        centred = self.node("Sub", [x, mean], f"{scope}/Sub")
        square = self.node("Pow", [centred, self.constant(f"{scope}.two", 2.0)], f"{scope}/Pow")
        variance = self.node("ReduceMean", [square], f"{scope}/ReduceMean_1", axes=[-1])
        guarded = self.node("Add", [variance, self.constant(f"{scope}.eps", 1e-5)], f"{scope}/Add")
        root = self.node("Sqrt", [guarded], f"{scope}/Sqrt")
        divided = self.node("Div", [centred, root], f"{scope}/Div")
        scaled = self.node("Mul", [divided, gain], f"{scope}/Mul")
        return self.node("Add", [scaled, shift], f"{scope}/Add_1")

    def block(self, x: str, scope: str, width: int, heads: int, decomposed: bool) -> str:
        """``NODES_PER_BLOCK`` nodes, 16 more with norms that are written out."""
        split = self.constant(f"{scope}.split", [0, TOKENS, heads, width // heads], np.int64)
        merge = self.constant(f"{scope}.merge", [0, TOKENS, width], np.int64)
        normed = self.norm(x, f"{scope}/norm1", width, decomposed)
        views = []
        for part, order in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
            projected = self.linear(normed, f"{scope}/attn/{part}", width, width)
            view = self.node("Reshape", [projected, split], f"{scope}/attn/{part}/Reshape")
            views.append(self.node("Transpose", [view], f"{scope}/attn/{part}/Transpose", perm=order))
        scores = self.node("MatMul", views[:2], f"{scope}/attn/MatMul")
        weights = self.node("Softmax", [scores], f"{scope}/attn/Softmax", axis=-1)
        mixed = self.node("MatMul", [weights, views[2]], f"{scope}/attn/MatMul_1")
        mixed = self.node("Transpose", [mixed], f"{scope}/attn/Transpose", perm=[0, 2, 1, 3])
        mixed = self.node("Reshape", [mixed, merge], f"{scope}/attn/Reshape")
        x = self.node("Add", [x, self.linear(mixed, f"{scope}/attn/proj", width, width)], f"{scope}/Add")
        hidden = self.linear(self.norm(x, f"{scope}/norm2", width, decomposed), f"{scope}/mlp/fc1", width, 4 * width)
        hidden = self.node("Relu", [hidden], f"{scope}/mlp/act/Relu")
        return self.node("Add", [x, self.linear(hidden, f"{scope}/mlp/fc2", 4 * width, width)], f"{scope}/Add_1")


def transformer(blocks: int, width: int = 32, heads: int = 4, decomposed: bool = False) -> onnx.ModelProto:
    """``blocks`` pre-norm blocks and a head; decomposed: opset 13 norms, with an embedding and a norm at either end."""
    graph = _Graph(seed=0)
    x = "tokens"
    if decomposed:
        x = graph.norm(graph.linear(x, "embed", width, width), "norm0", width, decomposed)
    for index in range(blocks):
        x = graph.block(x, f"blocks.{index}", width, heads, decomposed)
    if decomposed:
        x = graph.norm(x, "norm", width, decomposed)
    graph.linear(x, "head", width, 16)
    graph.nodes[-1].output[0] = "logits"
    inputs = [helper.make_tensor_value_info("tokens", TensorProto.FLOAT, ["batch", TOKENS, width])]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", TOKENS, 16])]
    proto = helper.make_graph(graph.nodes, "transformer", inputs, outputs, graph.weights)
    imports = [helper.make_opsetid("", 13 if decomposed else 17)]
    return helper.make_model(proto, opset_imports=imports, ir_version=9, producer_name="mptune.benchmarks")


def with_nodes(count: int) -> onnx.ModelProto:
    """A transformer of about ``count`` nodes."""
    return transformer(max(1, round((count - 2) / NODES_PER_BLOCK)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    onnx.save(with_nodes(options.nodes), options.out)


if __name__ == "__main__":
    main()
