"""The FP32 model for TensorRT 8, and the precision of each of its layers: 8.x has no strongly typed networks.

Nodes get short names, by which ``trtexec --layerPrecisions`` reaches their weak. Constants get the rank of what they
are combined with, so that the parser adds no layer that broadcasts them. What FP16 does not hold is as in the typed
model: constants are rescaled or limited where an FP16 node reads them, and a mask is limited before one does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from mptune.errors import ModelError, PlanError
from mptune.graph.casting.value_types import ValueTypes, new_suffix, value_types
from mptune.graph.facts import facts_of
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.hazards.constants import is_held
from mptune.graph.loading.model import MIN_OPSET, Model, Node
from mptune.graph.loading.tensors import STANDARD_DOMAINS, Initializer, all_graphs, subgraphs
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.model_file import add_node, clip_node, frame_of, saturate
from mptune.graph.writing.rewrite import write_self_contained
from mptune.graph.writing.weights import ConstantStore, LargeConstant, rounding_of


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_OPERATORS = _words("""
    Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BatchNormalization Cast Ceil Celu Clip
    Concat Constant ConstantOfShape Conv ConvTranspose Cos Cosh CumSum DepthToSpace DequantizeLinear Div Dropout
    Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor GRU Gather GatherElements GatherND Gemm GlobalAveragePool
    GlobalLpPool GlobalMaxPool Greater GreaterOrEqual GridSample HardSigmoid Identity If ImageScaler
    InstanceNormalization IsNaN LRN LSTM LeakyRelu Less LessOrEqual Log LogSoftmax Loop LpNormalization LpPool MatMul
    Max MaxPool Mean MeanVarianceNormalization Min Mul Neg NonMaxSuppression NonZero Not Or PRelu Pad
    ParametricSoftplus Pow QuantizeLinear RNN RandomNormal RandomNormalLike RandomUniform RandomUniformLike Range
    Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum
    ReduceSumSquare Relu Reshape Resize ReverseSequence RoiAlign Round ScaledTanh Scan Scatter ScatterElements
    ScatterND Selu Shape Shrink Sigmoid Sign Sin Sinh Size Slice Softmax Softplus Softsign SpaceToDepth Split Sqrt
    Squeeze Sub Sum Tan Tanh ThresholdedRelu Tile TopK Transpose Trilu Unsqueeze Upsample Where Xor
""")
"""What docs/operators.md of onnx-tensorrt's 8.5-GA lists as supported; 8.6 has all of it."""
_UNNAMED = _words("""
    Cast Constant ConstantOfShape DequantizeLinear Dropout GRU Identity If LSTM Loop QuantizeLinear RNN Scan Shape Size
    Trilu
""")
"""Operators whose layers take no precision, or are not named after the node (``registerLayer`` in the importers)."""
_BROADCASTING = _words("""
    Add And Div Equal Greater GreaterOrEqual Less LessOrEqual MatMul Max Mean Min Mul Or PRelu Pow Sub Sum Where Xor
""")
_FLOATS = ("float", "float16", "double")
_OPSET, _IR_VERSION = 17, 8
"""The newest that TensorRT 8.5 and 8.6 document, and the IR version that came with it."""


@dataclass(frozen=True)
class WeakModel:
    """A model in FP32, and what TensorRT is told of its layers, by the names of their nodes.

    Attributes:
        proto: the model without ``constants``.
        constants: by the names that they have in it.
        precisions: what the layer computes in.
        types: what it gives, where all of that is floating. What the model gives keeps its type.
    """

    proto: onnx.ModelProto
    constants: Mapping[str, Initializer]
    precisions: dict[str, Precision] = field(default_factory=dict)
    types: dict[str, Precision] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the model; past 2 GiB its constants lie in ``path`` + ``.data``."""
        write_self_contained(self._in_store, path)

    def _in_store(self, store: ConstantStore) -> tuple[onnx.ModelProto, list[LargeConstant]]:
        model = onnx.ModelProto()
        model.CopyFrom(self.proto)
        stored = [store(constant, name, None) for name, constant in self.constants.items()]
        model.graph.initializer.extend(each for each in stored if isinstance(each, onnx.TensorProto))
        return model, [each for each in stored if isinstance(each, LargeConstant)]


def weak_model(grouped: GroupedModel, plan: PrecisionPlan) -> WeakModel:
    """The model of a plan. Each node has the name that it has in the user's model as its documentation string.

    Raises:
        ModelError: TensorRT 8.5 lacks an operator or a type of the model.
        PlanError: the plan has another precision than FP16 and FP32.
    """
    model, types = grouped.model, value_types(grouped)
    _refuse_bf16(model, plan)
    resolution, facts, shapes = types.resolve(plan.stored), facts_of(model), facts_of(model).shape_nodes
    opset, prefix, suffix = min(model.opset, _OPSET), "n", new_suffix(model, "weak")
    proto, constants = frame_of(model), _Constants(types, suffix)
    weak = WeakModel(proto, constants.written)
    del proto.opset_import[:]
    proto.opset_import.append(onnx.helper.make_opsetid("", opset))
    proto.ir_version = min(proto.ir_version, _IR_VERSION)
    # The parser numbers layers that have one name, and names those of constants after the constants.
    names = [*model.tensors, *(inner.name for node in model.nodes for inner in _inner(node.proto))]
    while any(re.match(rf"{prefix}\d", name) for name in names):
        prefix += "n"
    limited: dict[str, str] = {}  # mask -> what FP16 nodes read in its place
    for node, precision in zip(model.nodes, resolution.node_precisions, strict=True):
        if node.op_type == "Constant" and node.outputs[0] in model.initializers:
            continue
        if types.group_of[node.index] < 0:  # in the type of what it computes
            is_half = any(model.info(value).dtype == "float16" for value in node.outputs)
            precision = Precision.FP16 if is_half else Precision.FP32
        inputs = list(node.inputs)
        for slot, value in enumerate(node.inputs):
            wanted = types.precision_of_input(node, slot, precision)
            is_fp16 = wanted is Precision.FP16 and model.info(value).is_float32
            if value in model.initializers:
                inputs[slot] = constants.name(node, slot, is_fp16=is_fp16)
            elif is_fp16 and resolution.computed_in(value) is Precision.FP32 and is_held(model, value, Precision.FP16):
                if value not in limited:
                    limited[value] = value + suffix
                    for clip in clip_node(value, limited[value], Precision.FP16, opset):
                        clip.name = f"{prefix}{len(proto.graph.node) + 1:04d}"
                        proto.graph.node.append(clip)
                    weak.precisions[clip.name] = weak.types[clip.name] = Precision.FP32
                inputs[slot] = limited[value]
        name = f"{prefix}{len(proto.graph.node) + 1:04d}"
        written = add_node(proto.graph, replace(node, name=name), inputs, node.outputs)
        written.doc_string = node.name
        if precision is Precision.FP16:
            saturate(written, precision)
        for each in reversed((written, *_inner(written))):
            _lower(each, model, node.name)
        read, computed = ([v for v in values if v] for values in ((*node.inputs, *node.captures), node.outputs))
        is_folded = node.index in shapes or any(map(facts.is_static, computed))
        are_floats = [model.info(value).dtype in _FLOATS for value in computed]
        reads_floats = any(model.info(value).dtype in _FLOATS for value in read)
        if (reads_floats or any(are_floats)) and node.op_type not in _UNNAMED and not is_folded:
            weak.precisions[name] = precision
            if all(are_floats):
                is_output = any(info.name in computed and info.is_float32 for info in model.outputs)
                weak.types[name] = Precision.FP32 if is_output else precision
    return weak


class _Constants:
    """The constants that are ``written``: each at the rank and with the values that its readers need."""

    def __init__(self, types: ValueTypes, suffix: str) -> None:
        self._types, self._model, self._suffix = types, types.model, suffix
        constants = self._model.initializers
        # What subgraphs read, callers replace, or the model gives keeps its name and its form.
        captured = (name for node in self._model.nodes for name in node.captures if name in constants)
        overridable = (name for name, constant in constants.items() if constant.overridable)
        outputs = (info.name for info in self._model.outputs if info.name in constants)
        self.written = {name: constants[name] for name in (*captured, *overridable, *outputs)}

    def name(self, node: Node, slot: int, *, is_fp16: bool) -> str:
        """The name under which a node reads a constant."""
        name = node.inputs[slot]
        constant = self._model.initializers[name]
        if constant.overridable:
            return name
        rank, kind = self._rank(node, slot), ""
        if is_fp16:
            rescaled = self._types.in_precision(name, Precision.FP16)
            if rescaled is not constant or rounding_of(constant, Precision.FP16).overflowed:
                constant, kind = rescaled, "h"
        if kind or rank != len(constant.shape):
            name = f"{name}{self._suffix}{rank}{kind}"
        if name not in self.written:
            self.written[name] = _limited(constant, rank) if kind else _with_rank(constant, rank)
        return name

    def _rank(self, node: Node, slot: int) -> int:
        """The rank of what a node combines a constant with, at least its own."""
        info = self._model.info
        rank = len(self._model.initializers[node.inputs[slot]].shape)
        if node.op_type not in _BROADCASTING:
            return rank
        if node.op_type == "MatMul":  # there a vector is no matrix of one row
            other = info(node.inputs[1 - slot]).shape
            if rank < 2 or other is None or len(other) < 2:
                return rank
        return max(rank, len(info(node.outputs[0]).shape or ()))


def _refuse_bf16(model: Model, plan: PrecisionPlan) -> None:
    others = [precision.name for precision in plan.stored.reduced_counts if precision is not Precision.FP16]
    if others:
        hint = "take a plan in FP16 and FP32: `mptune report` lists the plans, --plan ID names one"
        raise PlanError(f"plan {plan.fingerprint} has groups in {others[0]}, which TensorRT 8 lacks", hint)
    for value in model.tensors.values():
        if value.dtype == "bfloat16":
            raise ModelError(f"{model.path}: {value.name!r} is BF16, which TensorRT 8 lacks", "give the FP32 model")


def _inner(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """The nodes in the subgraphs of a node."""
    return (inner for outer in subgraphs(node) for graph in all_graphs(outer) for inner in graph.node)


def _lower(node: onnx.NodeProto, model: Model, name: str) -> None:
    """Turn a node, in place, into the same node of operator set 17, or refuse it.

    onnx's converter (1.23.2) has no way down for Split, and leaves attributes behind.
    """
    op = node.op_type if node.domain in STANDARD_DOMAINS else f"{node.domain}::{node.op_type}"
    if op not in _OPERATORS:
        versions = [schema.since_version for schema in onnx.defs.get_all_schemas_with_history() if schema.name == op]
        first = min(versions, default=0)
        older = f"at opset {first - 1} or below, where others take its place" if first > MIN_OPSET else "without it"
        raise ModelError(f"{op} (node {name!r}) is no operator of TensorRT 8.5", f"export the model {older}")
    attributes = {attribute.name: attribute for attribute in node.attribute}
    if op == "Shape" and ("end" in attributes or ("start" in attributes and attributes["start"].i)):
        message = f"node {name!r} is a Shape with start or end, which the parser of TensorRT 8 ignores"
        raise ModelError(message, "export the model at opset 14 or below")
    if op in ("Conv", "ConvTranspose") and "kernel_shape" not in attributes and node.input[1] not in model.initializers:
        message = f"node {name!r} is a {op} with a computed kernel and no kernel_shape, which TensorRT 8 needs"
        raise ModelError(message, "give the node the attribute kernel_shape")
    new, old = (onnx.defs.get_schema(op, opset, "") for opset in (model.opset, min(model.opset, _OPSET)))
    if new.since_version == old.since_version:
        return
    if op.startswith("Reduce") and len(node.input) > old.max_input and node.input[1] in model.initializers:
        axes = [int(axis) for axis in model.initializers[node.input.pop()].numpy()]
        node.attribute.append(onnx.helper.make_attribute("axes", axes, attr_type=onnx.AttributeProto.INTS))
    if op == "GridSample" and "mode" in attributes:
        renamed = {b"linear": b"bilinear", b"cubic": b"bicubic"}
        attributes["mode"].s = renamed.get(attributes["mode"].s, attributes["mode"].s)
    is_newer = len(node.input) > old.max_input
    for key, attribute in attributes.items():
        if op.startswith(("Pad", "Scatter")) and attribute.s in (b"wrap", b"min", b"max"):
            is_newer = True
        if key not in old.attributes:
            is_default = attribute == new.attributes[key].default_value
            is_newer |= not is_default and not (key == "num_outputs" and _is_even(node, model))
            node.attribute.remove(attribute)
    if is_newer:
        raise ModelError(
            f"node {name!r}: {op} of opset {new.since_version} has no equal in opset {_OPSET}, TensorRT 8's newest",
            f"export the model at opset {_OPSET} or below",
        )


def _is_even(split: onnx.NodeProto, model: Model) -> bool:
    """Whether a Split makes equal parts, as it does without sizes before opset 18."""
    shape = model.info(split.input[0]).shape
    axis = next((attribute.i for attribute in split.attribute if attribute.name == "axis"), 0)
    size = None if shape is None else shape[axis]
    return isinstance(size, int) and size % len(split.output) == 0


def _limited(constant: Initializer, rank: int) -> Initializer:
    """With finite values beyond FP16's largest at the largest (``weights.round_values``)."""
    values, largest = constant.numpy(), np.float32(Precision.FP16.largest)
    limited = np.where(np.isfinite(values), np.clip(values, -largest, largest), values).astype(np.float32)
    return _with_rank(replace(constant, proto=onnx.numpy_helper.from_array(limited, constant.name)), rank)


def _with_rank(constant: Initializer, rank: int) -> Initializer:
    shape = (1,) * (rank - len(constant.shape)) + constant.shape
    proto = onnx.TensorProto()
    proto.CopyFrom(constant.proto)
    proto.dims[:] = shape
    return replace(constant, shape=shape, proto=proto)
