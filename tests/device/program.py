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
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, inliner, numpy_helper

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
        constants = {one.name for one in graph.initializer}
        self.inputs = {one.name: one.type.tensor_type for one in graph.input if one.name not in constants}
        self.outputs = {one.name: one.type.tensor_type for one in graph.output}
        operators = {node.op_type for node in graph.node}
        self.can_be_captured = not operators & set(_NOT_CAPTURED)
        self._shapes: dict[Any, dict[str, Shape]] = {}

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """All outputs; inputs that the model declares FP64 are given in FP32, and such outputs come back so."""
        cast = {
            name: value.astype(np.float64)
            if self.inputs[name].elem_type == TensorProto.DOUBLE
            else value.astype(_numpy_type(self.inputs[name].elem_type), copy=False)
            for name, value in feeds.items()
        }
        found = dict(zip(self.outputs, self._session.run(list(self.outputs), cast), strict=True))
        return {name: v.astype(np.float32) if v.dtype == np.float64 else v for name, v in found.items()}

    def output_shapes(self, shapes: Mapping[str, Shape], values: Mapping[str, np.ndarray]) -> Mapping[str, Shape]:
        """Shapes of the outputs; -1 where a dimension depends on values.

        Args:
            shapes: of all inputs.
            values: of the inputs from which shapes are computed.
        """
        key = tuple(shapes.items()), tuple(value.tobytes() for value in values.values())
        if key not in self._shapes:
            feeds = {name: values.get(name, np.zeros(shape, np.float32)) for name, shape in shapes.items()}
            found = {name: value.shape for name, value in self.run(feeds).items()}
            for name in self._dependent_outputs:
                found[name] = tuple(dim.dim_value or -1 for dim in self.outputs[name].shape.dim)
            self._shapes[key] = found
        return self._shapes[key]

    @cached_property
    def layers(self) -> tuple[tuple[NodeProto, tuple[int, ...], tuple[int, ...]], ...]:
        """Each node with the element types of its inputs and outputs."""
        types = self._types
        return tuple(
            (
                node,
                tuple(types.get(name, 0) for name in node.input if name),
                tuple(types.get(name, 0) for name in node.output if name),
            )
            for node in self.model.graph.node
        )

    @cached_property
    def _dependent_outputs(self) -> frozenset[str]:
        tainted: set[str] = set()
        for node in self.model.graph.node:
            if node.op_type in _BY_VALUES or any(name in tainted for name in node.input):
                tainted |= set(node.output)
        return frozenset(tainted & self.outputs.keys())

    @cached_property
    def _types(self) -> dict[str, int]:
        return _types(onnx.shape_inference.infer_shapes(self.model).graph)

    @cached_property
    def _session(self) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        computed = ModelProto()
        computed.CopyFrom(self.model)
        _compute_in_fp32(computed, self._types)
        data = computed.SerializeToString()
        return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def load_model(path: str) -> ModelProto:
    """A model file with its external data inside."""
    return onnx.load(path, load_external_data=True)


def _numpy_type(element: int) -> np.dtype:
    return helper.tensor_dtype_to_np_dtype(element)


def _types(graph: GraphProto) -> dict[str, int]:
    """Element type of every tensor."""
    values = (*graph.input, *graph.value_info, *graph.output)
    types = {one.name: one.type.tensor_type.elem_type for one in values}
    return {**types, **{one.name: one.data_type for one in graph.initializer}}


def _compute_in_fp32(model: ModelProto, types: Mapping[str, int]) -> None:
    """Turn every FP16 and BF16 tensor inside into FP32; inputs and outputs of the model keep their types.

    Behind each node a pair of Casts rounds its FP16 and BF16 outputs, which keep their names.
    """
    graph, nodes = model.graph, list[NodeProto]()
    outputs = {one.name for one in graph.output}
    assert not any(types[one.name] in _HALVES for one in graph.input)
    for tensor in graph.initializer:
        if tensor.data_type in _HALVES:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
    for node in graph.node:
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
    copies = [copy.deepcopy(node) for node in nodes]
    del graph.node[:], graph.value_info[:]
    graph.node.extend(copies)
