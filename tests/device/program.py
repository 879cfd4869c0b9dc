"""What an engine computes: a typed ONNX model, run by ONNX Runtime's CPU provider, rounded after each node.

That provider computes FP16 nodes in FP32 and drops the roundings between them, so the model is run in FP32 with an
explicit pair of Casts behind each node whose type is FP16 or BF16.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, inliner, numpy_helper

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
        operators = {node.op_type for node in _all_nodes(graph)}
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
            if self._dependent_outputs:
                known = self._inferred(shapes)
                found |= {name: known.get(name, (-1,) * len(found[name])) for name in self._dependent_outputs}
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

    def _inferred(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Shapes of outputs as far as they follow from those of the inputs."""
        model = copy.deepcopy(self.model)
        for one in model.graph.input:
            if one.name in shapes:
                new = helper.make_tensor_value_info(one.name, one.type.tensor_type.elem_type, shapes[one.name])
                one.CopyFrom(new)
        for one in model.graph.output:
            one.type.tensor_type.ClearField("shape")
        graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
        return {
            one.name: tuple(
                dim.dim_value if dim.HasField("dim_value") else -1 for dim in one.type.tensor_type.shape.dim
            )
            for one in graph.output
            if one.type.tensor_type.HasField("shape")
        }


def load_model(path: str) -> ModelProto:
    """A model file with its external data inside."""
    return onnx.load(path, load_external_data=True)


def _numpy_type(element: int) -> np.dtype:
    return helper.tensor_dtype_to_np_dtype(element)


def _all_nodes(graph: GraphProto) -> list[NodeProto]:
    found = []
    for node in graph.node:
        found.append(node)
        for inner in _subgraphs(node):
            found += _all_nodes(inner)
    return found


def _subgraphs(node: NodeProto) -> list[GraphProto]:
    graphs = [one.g for one in node.attribute if one.type == AttributeProto.GRAPH]
    return graphs + [g for one in node.attribute if one.type == AttributeProto.GRAPHS for g in one.graphs]


def _types(graph: GraphProto) -> dict[str, int]:
    """Element type of every tensor, those of subgraphs included."""
    found = {one.name: one.data_type for one in graph.initializer}
    for one in (*graph.input, *graph.value_info, *graph.output):
        found[one.name] = one.type.tensor_type.elem_type
    for node in graph.node:
        for inner in _subgraphs(node):
            found = {**_types(inner), **found}
    return found


def _compute_in_fp32(model: ModelProto, types: Mapping[str, int]) -> None:
    """Turn every FP16 and BF16 tensor inside into FP32; inputs and outputs of the model keep their types."""
    graph = model.graph
    begin: list[NodeProto] = []
    end: list[NodeProto] = []
    renamed: dict[str, str] = {}
    for one in graph.input:
        if one.type.tensor_type.elem_type in _HALVES:
            renamed[one.name] = f"{one.name}.wide"
            begin.append(helper.make_node("Cast", [one.name], [renamed[one.name]], to=TensorProto.FLOAT))
    outputs = {one.name: one.type.tensor_type.elem_type for one in graph.output}
    for name, element in outputs.items():
        if element in _HALVES:
            renamed.setdefault(name, f"{name}.wide")
            end.append(helper.make_node("Cast", [renamed[name]], [name], to=element))
    _widen(graph, types, renamed)
    nodes = [*begin, *(copy.deepcopy(node) for node in graph.node), *end]
    del graph.node[:]
    graph.node.extend(nodes)
    del graph.value_info[:]


def _widen(graph: GraphProto, types: Mapping[str, int], renamed: Mapping[str, str]) -> None:
    for tensor in graph.initializer:
        if tensor.data_type in _HALVES:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
    nodes: list[NodeProto] = []
    for node in graph.node:
        for position, name in enumerate(node.input):
            node.input[position] = renamed.get(name, name)
        for position, name in enumerate(node.output):
            node.output[position] = renamed.get(name, name)
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR and attribute.t.data_type in _HALVES:
                attribute.t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(attribute.t).astype(np.float32)))
            if attribute.name in ("to", "dtype", "output_dtype") and attribute.i in _HALVES:
                attribute.i = TensorProto.FLOAT
        for inner in _subgraphs(node):
            for one in (*inner.input, *inner.output):
                if one.type.tensor_type.elem_type in _HALVES:
                    one.type.tensor_type.elem_type = TensorProto.FLOAT
            del inner.value_info[:]
            _widen(inner, types, renamed)
        nodes.append(node)
        nodes += _rounding(node, types, {new: old for old, new in renamed.items()})
    kept = [copy.deepcopy(node) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)


def _rounding(node: NodeProto, types: Mapping[str, int], original: Mapping[str, str]) -> Sequence[NodeProto]:
    """Casts behind a node that round its FP16 and BF16 outputs, which keep their names."""
    found = []
    for position, name in enumerate(node.output):
        element = types.get(original.get(name, name), 0)
        if not name or element not in _HALVES:
            continue
        node.output[position] = f"{name}.exact"
        found += [
            helper.make_node("Cast", [f"{name}.exact"], [f"{name}.narrow"], to=element),
            helper.make_node("Cast", [f"{name}.narrow"], [name], to=TensorProto.FLOAT),
        ]
    return found
