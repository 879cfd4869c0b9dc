"""A graph under construction, for tests that draw networks of their own."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT = TensorProto.FLOAT
Shape = Sequence[int | str | None]


class Net:
    """A graph under construction. Values are their names."""

    def __init__(self, name: str, opset: int = 17, ir_version: int = 9) -> None:
        self.name, self.opset, self.ir_version = name, opset, ir_version
        self.rng = np.random.default_rng(zlib.crc32(name.encode()))
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.constants: list[onnx.TensorProto] = []
        self._count = 0

    def input(self, name: str, shape: Shape, code: int = FLOAT) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, code, shape))
        return name

    def output(self, value: str, name: str, shape: Shape | None, code: int = FLOAT) -> None:
        self.nodes.append(helper.make_node("Identity", [value], [name], f"/{name}/Identity"))
        self.outputs.append(helper.make_tensor_value_info(name, code, shape))

    def fresh(self, stem: str) -> str:
        self._count += 1
        return f"{stem}_{self._count}"

    def weight(self, *shape: int, scale: float | None = None) -> str:
        name = self.fresh("weight")
        values = self.rng.standard_normal(shape) * (scale or shape[0] ** -0.5)
        self.constants.append(numpy_helper.from_array(values.astype(np.float32), name))
        return name

    def op(self, op_type: str, *inputs: str, **attributes: object) -> str:
        value = self.fresh(op_type)
        self.nodes.append(helper.make_node(op_type, inputs, [value], f"/{value}", **attributes))
        return value

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, self.name, self.inputs, self.outputs, self.constants)
        opsets = [helper.make_opsetid("", self.opset)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=self.ir_version)

    def linear(self, x: str, cin: int, cout: int) -> str:
        return self.op("Add", self.op("MatMul", x, self.weight(cin, cout)), self.weight(cout, scale=0.1))
