"""What an engine computes: a typed ONNX model, run by ONNX Runtime's CPU provider, rounded after each node.

That provider computes FP16 nodes in FP32 and drops the roundings between them, so the model is run in FP32 with an
explicit pair of Casts behind each node whose type is FP16 or BF16.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto, NodeProto, TensorProto, helper, inliner, numpy_helper

_HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_BY_VALUES = ("NonZero", "NonMaxSuppression", "Unique", "Compress")
"""Operators whose outputs have a shape that depends on values (IOutputAllocator is for these)."""
_NOT_CAPTURED = ("If", "Loop", "Scan", *_BY_VALUES)
"""Loops and conditions are no CUDA graph (TensorRT's developer guide, "Limitations of CUDA Graphs")."""

Shape = tuple[int, ...]


class Program:
    """A model with its weights inside."""

    def __init__(self, model: ModelProto) -> None:
        """Nothing is compiled yet."""
        self.model = inliner.inline_local_functions(model) if model.functions else model
        graph = self.model.graph
        constants = {tensor.name for tensor in graph.initializer}
        self.inputs = {info.name: info.type.tensor_type for info in graph.input if info.name not in constants}
        self.outputs = {info.name: info.type.tensor_type for info in graph.output}
        self.can_be_captured = not any(node.op_type in _NOT_CAPTURED for node in graph.node)
        self._shapes: dict[Any, dict[str, Shape]] = {}

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """All outputs; inputs that the model declares FP64 are given in FP32, and such outputs come back so."""
        kinds = {name: helper.tensor_dtype_to_np_dtype(kind.elem_type) for name, kind in self.inputs.items()}
        cast = {name: value.astype(kinds[name], copy=False) for name, value in feeds.items()}
        values = dict(zip(self.outputs, self._session.run(list(self.outputs), cast), strict=True))
        return {name: v.astype(np.float32) if v.dtype == np.float64 else v for name, v in values.items()}

    def output_shapes(self, shapes: Mapping[str, Shape], values: Mapping[str, np.ndarray]) -> Mapping[str, Shape]:
        """Shapes of the outputs; -1 where a dimension depends on values.

        Args:
            shapes: of all inputs.
            values: of the inputs from which shapes are computed.
        """
        key = tuple(shapes.items()), tuple(value.tobytes() for value in values.values())
        if key not in self._shapes:
            feeds = {name: values.get(name, np.zeros(shape, np.float32)) for name, shape in shapes.items()}
            self._shapes[key] = {name: value.shape for name, value in self.run(feeds).items()}
            tainted: set[str] = set()
            for node in self.model.graph.node:
                if node.op_type in _BY_VALUES or any(name in tainted for name in node.input):
                    tainted |= set(node.output)
            for name in tainted & self.outputs.keys():
                self._shapes[key][name] = tuple(dim.dim_value or -1 for dim in self.outputs[name].shape.dim)
        return self._shapes[key]

    @cached_property
    def layers(self) -> tuple[tuple[NodeProto, tuple[int, ...], tuple[int, ...]], ...]:
        """Each node with the element types of its inputs and outputs."""
        return tuple(
            (node, *(tuple(self._types.get(name, 0) for name in names if name) for names in (node.input, node.output)))
            for node in self.model.graph.node
        )

    @cached_property
    def _types(self) -> dict[str, int]:
        """Element type of every tensor."""
        graph = onnx.shape_inference.infer_shapes(self.model).graph
        values = (*graph.input, *graph.value_info, *graph.output)
        types = {info.name: info.type.tensor_type.elem_type for info in values}
        return {**types, **{tensor.name: tensor.data_type for tensor in graph.initializer}}

    @cached_property
    def _session(self) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        data = _computed_in_fp32(self.model, self._types).SerializeToString()
        return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def load_model(path: str) -> ModelProto:
    """A model file with its external data inside."""
    return onnx.load(path, load_external_data=True)


def _computed_in_fp32(original: ModelProto, types: Mapping[str, int]) -> ModelProto:
    """The model with every FP16 and BF16 tensor inside in FP32; its inputs and outputs keep their types.

    Behind each node a pair of Casts rounds its FP16 and BF16 outputs, which keep their names.
    """
    model = copy.deepcopy(original)
    graph, nodes = model.graph, list[NodeProto]()
    outputs = {info.name for info in graph.output}
    assert not any(types[info.name] in _HALVES for info in graph.input)
    for tensor in graph.initializer:
        if tensor.data_type in _HALVES:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
    for node in map(copy.deepcopy, graph.node):
        for attribute in node.attribute:
            if attribute.name in ("to", "dtype", "output_dtype") and attribute.i in _HALVES:
                attribute.i = TensorProto.FLOAT
        nodes.append(node)
        for position, name in enumerate(node.output):
            if types.get(name) in _HALVES:
                node.output[position] = f"{name}.exact"
                narrow = [name if name in outputs else f"{name}.narrow"]
                nodes.append(helper.make_node("Cast", [f"{name}.exact"], narrow, to=types[name]))
                if name not in outputs:
                    nodes.append(helper.make_node("Cast", narrow, [name], to=TensorProto.FLOAT))
    del graph.node[:], graph.value_info[:]
    graph.node.extend(nodes)
    return model
