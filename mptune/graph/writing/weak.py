"""The FP32 model for a weakly typed network, and what TensorRT must be told of each of its nodes.

TensorRT 8.x has no strong typing: it takes the model in FP32, and the plan as a precision of each layer. The nodes get
short names, which are layer names in an argument of trtexec. Constants get the rank of what they are combined with, so
that the parser adds no layer that broadcasts them. What FP16 does not hold is as in the typed model: constants are
rescaled or limited where an FP16 node reads them, and a mask is limited before one does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from mptune.errors import ModelError, PlanError
from mptune.files import whole_file, write_bytes, writing
from mptune.graph.casting.value_types import ValueTypes, new_suffix, value_types
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.lookup import Lookup
from mptune.graph.hazards.constants import is_held
from mptune.graph.loading.model import MIN_OPSET, Model, Node
from mptune.graph.loading.tensors import STANDARD_DOMAINS, Initializer, all_graphs
from mptune.graph.loading.value_dependent import shape_arithmetic
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.model_file import add_node, clip_node, frame_of, saturate, serialized, serialized_size
from mptune.graph.writing.rewrite import SELF_CONTAINED_LIMIT
from mptune.graph.writing.weights import ConstantStore, LargeConstant, in_file, inline, rounding_of


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_OPERATORS_8_4 = _words("""
    Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BatchNormalization Cast Ceil Celu Clip
    Concat Constant ConstantOfShape Conv ConvTranspose Cos Cosh CumSum DepthToSpace DequantizeLinear Div Dropout
    Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor GRU Gather GatherElements GatherND Gemm GlobalAveragePool
    GlobalLpPool GlobalMaxPool Greater GreaterOrEqual HardSigmoid Identity If ImageScaler InstanceNormalization
    IsNaN LRN LSTM LeakyRelu Less LessOrEqual Log LogSoftmax Loop LpNormalization LpPool MatMul Max MaxPool Mean Min
    Mul Neg NonMaxSuppression Not Or PRelu Pad ParametricSoftplus Pow QuantizeLinear RNN RandomUniform
    RandomUniformLike Range ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd
    ReduceSum ReduceSumSquare Relu Reshape Resize ReverseSequence Round ScaledTanh Scan Scatter ScatterElements
    ScatterND Selu Shape Shrink Sigmoid Sign Sin Sinh Size Slice Softmax Softplus Softsign SpaceToDepth Split Sqrt
    Squeeze Sub Sum Tan Tanh ThresholdedRelu Tile TopK Transpose Unsqueeze Upsample Where Xor
""")
_OPERATORS_8_5 = _OPERATORS_8_4 | _words(
    "GridSample MeanVarianceNormalization NonZero RandomNormal RandomNormalLike Reciprocal RoiAlign Trilu"
)
_OPERATORS_8_6 = _OPERATORS_8_5 | _words("GroupNormalization HardSwish IsInf LayerNormalization Mod OneHot")
_OPERATORS_10 = _OPERATORS_8_6 | _words("CastLike DeformConv Gelu Hardmax Mish")


@dataclass(frozen=True)
class WeakBranch:
    """What a branch of TensorRT takes without strong typing.

    Attributes:
        label: of its versions.
        least, below: the versions that it is: major and minor, the second one excluded.
        opset: the newest that its parser's documentation names.
        operators: those that docs/operators.md of onnx-tensorrt's branch lists as supported.
        unnamed: operators whose layers the parser never names.
    """

    label: str
    least: tuple[int, int]
    below: tuple[int, int]
    opset: int
    operators: frozenset[str]
    unnamed: frozenset[str] = frozenset({"Trilu"})
    has_tensor_api: bool = True
    has_optimization_level: bool = False


_UNNAMED = frozenset({"Trilu", "LayerNormalization", "GroupNormalization"})

WEAK_BRANCHES: Mapping[str, WeakBranch] = {
    "tensorrt-8": WeakBranch("TensorRT 8.5 and 8.6", (8, 5), (9, 0), 17, _OPERATORS_8_5),
    "tensorrt-8.6": WeakBranch(
        "TensorRT 8.6", (8, 6), (9, 0), 17, _OPERATORS_8_6, _UNNAMED, has_optimization_level=True
    ),
    "tensorrt-8.4": WeakBranch("TensorRT 8.4", (8, 4), (8, 5), 17, _OPERATORS_8_4, has_tensor_api=False),
    "tensorrt-10-weak": WeakBranch(
        "TensorRT 10, weakly typed", (10, 0), (11, 0), 20, _OPERATORS_10, has_optimization_level=True
    ),
}
"""``--for`` -> the branch. Sources: onnx-tensorrt, 8.4-GA, 8.5-GA, 8.6-GA and 10.1-GA: docs/operators.md, and
``registerLayer`` in the importers."""

_BROADCASTING = _words(
    "Add And Div Equal Greater GreaterOrEqual Less LessOrEqual MatMul Max Mean Min Mod Mul Or PRelu Pow Sub Sum Where"
    " Xor"
)
_UNTOLD = _words(
    "Cast CastLike Constant ConstantOfShape DequantizeLinear Dropout GRU Identity If LSTM Loop QuantizeLinear RNN Scan"
    " Shape Size"
)
"""Operators whose layers take no precision, or have none with the name of the node for certain."""
_IR_VERSIONS = {17: 8, 20: 9}
"""Operator set -> the IR version that came with it (onnx/docs/Versioning.md)."""


@dataclass(frozen=True)
class WeakNode:
    """A node of the written model: its new name, that of the user's model, its precision, and what it reads and makes.

    Attributes:
        is_whole: everything that it computes is a floating value, so that its layer may be given one output type.
        is_named: trtexec reaches its layer by its name, and the layer takes a precision.
        is_static: it is computed from constants, so that TensorRT may fold it.
    """

    name: str
    original: str
    op: str
    precision: Precision
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    is_whole: bool = True
    is_named: bool = True
    is_static: bool = False


def write_weak(grouped: GroupedModel, plan: PrecisionPlan, branch: WeakBranch, path: Path) -> WeakModel:
    """Write the model to ``path``; past 2 GiB its weights lie in ``path`` + ``.data``.

    Raises:
        ModelError: an operator or a type that the branch does not have.
        PlanError: the plan has another precision than FP16 and FP32.
    """
    weak = WeakModel(grouped, plan, branch)
    weak.write(path)
    return weak


def _add_constants(
    graph: onnx.GraphProto, constants: Mapping[str, Initializer], store: ConstantStore
) -> list[LargeConstant]:
    """Add constants to a graph; returns those whose data are still to be written."""
    stored = [store(constant, name, None) for name, constant in constants.items()]
    graph.initializer.extend(each for each in stored if not isinstance(each, LargeConstant))
    return [each for each in stored if isinstance(each, LargeConstant)]


class WeakModel:
    """One model under one plan: ``proto``, and ``nodes``, whose names begin with ``prefix``; see ``write_weak``."""

    def __init__(self, grouped: GroupedModel, plan: PrecisionPlan, branch: WeakBranch) -> None:
        others = [p for p in plan.stored.reduced_counts if p is not Precision.FP16]
        if others:
            hint = "take a plan in FP16 and FP32: `mptune report` lists the plans, --plan ID names one"
            raise PlanError(f"plan {plan.fingerprint} has groups in {others[0].name}, which {branch.label} lacks", hint)
        self._model = model = grouped.model
        self.branch = branch
        _refuse_types(model, branch)
        self._types: ValueTypes = value_types(grouped)
        resolution = self._types.resolve(plan.stored)
        self._resolution = resolution
        self._static = Lookup(model)
        self._variants: dict[tuple[str, int | None, bool], str] = {}
        self._held: dict[str, str] = {}
        self._suffix = new_suffix(model, "weak")
        self.prefix = "n"
        names = [*model.tensors, *(inner.name for node in model.nodes for inner in _inner(node.proto))]
        while any(re.match(rf"{self.prefix}\d", name) for name in names):
            self.prefix += "n"
        self.nodes: list[WeakNode] = []
        self.proto = proto = frame_of(model)
        opset = min(model.opset, branch.opset)
        del proto.opset_import[:]
        proto.opset_import.append(onnx.helper.make_opsetid("", opset))
        proto.ir_version = min(proto.ir_version, _IR_VERSIONS[branch.opset])
        for node, precision in zip(model.nodes, resolution.node_precisions, strict=True):
            if node.op_type != "Constant" or node.outputs[0] not in model.initializers:
                self._add(node, self._precision(node, precision))

    def document(self) -> dict[str, Any]:
        """What a builder needs of the plan: constraints.py gives it to the layers, build.py holds the engine to it."""
        return {
            "fp16": any(node.precision is Precision.FP16 for node in self.nodes),
            "inputs": [info.name for info in self._model.inputs],
            "prefix": self.prefix,
            "nodes": [
                {
                    "name": node.name,
                    "original": node.original,
                    "static": node.is_static,
                    "precision": str(node.precision),
                    "inputs": node.inputs,
                    "outputs": node.outputs,
                }
                for node in self.nodes
            ],
        }

    def write(self, path: Path) -> None:
        """See ``write_weak``."""
        proto, constants = self.proto, dict(self.constants())
        large = _add_constants(proto.graph, constants, inline)
        if serialized_size(proto, large) <= SELF_CONTAINED_LIMIT:
            write_bytes(path, serialized(proto, large))
            return
        del proto.graph.initializer[:]
        data_path = path.with_name(path.name + ".data")
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        with writing(path), whole_file(data_path) as part, part.open("wb") as data:
            large = _add_constants(proto.graph, constants, in_file(data, data_path.name))
            write_bytes(path, serialized(proto, large))

    def constants(self) -> Iterator[tuple[str, Initializer]]:
        """Name in the written model -> constant, with its values and its shape there."""
        model = self._model
        outputs = {output.name for output in model.outputs}
        for name, constant in model.initializers.items():
            if constant.overridable or name in outputs:
                self._variants.setdefault((name, None, False), name)
        for (name, rank, is_reduced), written in self._variants.items():
            constant = model.initializers[name]
            if is_reduced:
                constant = _limited(self._types.in_precision(name, Precision.FP16))
            if rank is not None:
                constant = _with_rank(constant, rank)
            yield written, constant

    def _precision(self, node: Node, precision: Precision) -> Precision:
        """Of its group; a node that has none is in the type of what it computes."""
        if self._types.group_of[node.index] >= 0:
            return precision
        is_half = any(self._model.info(name).dtype == "float16" for name in node.outputs)
        return Precision.FP16 if is_half else Precision.FP32

    def _add(self, node: Node, precision: Precision) -> None:
        graph, model = self.proto.graph, self._model
        inputs = [self._read(node, slot, name, precision) for slot, name in enumerate(node.inputs)]
        for name in node.captures:
            if name in model.initializers:
                self._variants[name, None, False] = name
        name = self._next_name()
        proto = add_node(graph, replace(node, name=name), inputs, node.outputs)
        if precision is Precision.FP16:
            saturate(proto, precision)
        for inner in (proto, *_inner(proto)):
            _lower(inner, model, self.branch, node.name)
        captured = [c for c in node.captures if c not in model.initializers]
        read = [n for n in inputs if n and n not in self._variants.values()]
        outputs = tuple(out for out in node.outputs if out)
        floats = [model.info(value).dtype in ("float", "float16", "double") for value in (*outputs, *node.inputs)]
        is_told = node.op_type not in _UNTOLD and node.op_type not in self.branch.unnamed
        is_static = any(self._static.is_static(name) for name in outputs)
        is_named = any(floats) and is_told and not is_static and node.index not in shape_arithmetic(model)
        self.nodes.append(
            WeakNode(
                name,
                node.name,
                node.op_type,
                precision,
                (*read, *captured),
                outputs,
                all(floats[: len(outputs)]),
                is_named,
                is_static,
            )
        )

    def _next_name(self) -> str:
        return f"{self.prefix}{len(self.proto.graph.node) + 1:04d}"

    def _read(self, node: Node, slot: int, name: str, precision: Precision) -> str:
        """The name under which a node reads a value."""
        model = self._model
        wanted = self._types.precision_of_input(node, slot, precision)
        is_reduced = wanted is Precision.FP16 and bool(name) and model.info(name).is_float32
        constant = model.initializers.get(name)
        if constant is not None and not constant.overridable:
            is_changed = is_reduced and self._is_changed(name)
            rank = self._rank(node, slot, constant)
            key = name, (None if rank == len(constant.shape) else rank), is_changed
            kind = f"{'' if key[1] is None else rank}{'h' if is_changed else ''}"
            return self._variants.setdefault(key, name if not kind else f"{name}{self._suffix}{kind}")
        if is_reduced and self._resolution.computed_in(name) is Precision.FP32 and is_held(model, name, Precision.FP16):
            return self._limit(name)
        return name

    def _is_changed(self, name: str) -> bool:
        """Whether a constant has other values where an FP16 node reads it."""
        constant = self._types.in_precision(name, Precision.FP16)
        is_rescaled = constant is not self._model.initializers[name]
        return is_rescaled or bool(rounding_of(constant, Precision.FP16).overflowed)

    def _rank(self, node: Node, slot: int, constant: Initializer) -> int:
        """The rank at which a constant is written for one of its readers."""
        rank, model = len(constant.shape), self._model
        if node.op_type not in _BROADCASTING or len(node.outputs) != 1:
            return rank
        shape = model.info(node.outputs[0]).shape
        if node.op_type == "MatMul":
            others = [model.info(name).shape for k, name in enumerate(node.inputs) if k != slot]
            if rank < 2 or any(other is None or len(other) < 2 for other in others):
                return rank
        return rank if shape is None else max(rank, len(shape))

    def _limit(self, value: str) -> str:
        """A mask that is computed in FP32, limited to the range of FP16 for those that read it in FP16."""
        if value not in self._held:
            result = self._held[value] = f"{value}{self._suffix}"
            opset = self.proto.opset_import[0].version
            for proto in clip_node(value, result, Precision.FP16, opset):
                proto.name = self._next_name()
                self.proto.graph.node.append(proto)
            made = self.proto.graph.node[-1]
            self.nodes.append(WeakNode(made.name, f"limits {value}", "Clip", Precision.FP32, (value,), (result,)))
        return self._held[value]


def _refuse_types(model: Model, branch: WeakBranch) -> None:
    """Refuse what the parser of a branch does not take, by name."""
    dtypes = [(v.name, v.dtype) for v in model.tensors.values()] + [
        (c.name, c.dtype) for c in model.initializers.values()
    ]
    for name, dtype in dtypes:
        if dtype == "bfloat16":
            raise ModelError(f"{model.path}: {name!r} is BF16, which {branch.label} lacks", "give the FP32 model")
    for node in model.nodes:
        for proto in (node.proto, *_inner(node.proto)):
            domain = "" if proto.domain in STANDARD_DOMAINS else f"{proto.domain}::"
            if domain or proto.op_type not in branch.operators:
                message = f"{domain}{proto.op_type} (node {node.name!r}) is no operator of {branch.label}"
                raise ModelError(message, _cure(domain + proto.op_type))


def _cure(op: str) -> str:
    branches = [f"--for {name}" for name, branch in WEAK_BRANCHES.items() if op in branch.operators]
    if branches:
        versions = [s.since_version for s in onnx.defs.get_all_schemas_with_history() if s.name == op and not s.domain]
        older = f", or export the model at opset {min(versions) - 1} or below" if min(versions) > MIN_OPSET else ""
        return f"it is in {' and '.join(branches)}{older}"
    return "export the model without it, such as at an older opset, where other operators take its place"


def _inner(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """The nodes in the subgraphs of a node."""
    return [inner for attribute in node.attribute for graph in _graphs(attribute) for inner in graph.node]


def _graphs(attribute: onnx.AttributeProto) -> list[onnx.GraphProto]:
    """The graphs of an attribute and those inside them."""
    return [
        inner
        for graph in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs)
        for inner in all_graphs(graph)
    ]


_RENAMED_MODES = {b"linear": b"bilinear", b"cubic": b"bicubic"}
"""GridSample: mode from opset 20 on -> before."""


def _lower(proto: onnx.NodeProto, model: Model, branch: WeakBranch, name: str) -> None:
    """Turn, in place, a node of a newer operator set into the same node of the branch's.

    onnx's converter (1.23.2) has no way down for Split, Gelu and GroupNormalization, and leaves attributes behind.
    """
    limit, op = branch.opset, proto.op_type
    if op == "Shape" and branch.below < (10, 0) and any(a.name == "end" or a.i for a in proto.attribute):
        message = f"node {name!r} is a Shape with start or end, which the parser of {branch.label} ignores"
        raise ModelError(message, "export the model at opset 14 or below")
    new = onnx.defs.get_schema(op, model.opset, "")
    if new.since_version <= limit:
        return
    refused = ModelError(
        f"node {name!r}: {op} of opset {new.since_version} has no equal in opset {limit}, the newest of {branch.label}",
        f"export the model at opset {limit} or below",
    )
    try:
        old = onnx.defs.get_schema(op, limit, "")
    except onnx.defs.SchemaError:
        raise refused from None
    values = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in proto.attribute}
    if op == "GridSample" and values.get("mode") in _RENAMED_MODES and limit < 20:
        next(a for a in proto.attribute if a.name == "mode").s = _RENAMED_MODES[values["mode"]]
    if op == "GroupNormalization" or (op.startswith("Scatter") and values.get("reduction") in (b"min", b"max")):
        raise refused
    dropped = []
    for attribute, value in values.items():
        if attribute in old.attributes:
            continue
        default = new.attributes[attribute].default_value
        is_default = default.type != onnx.AttributeProto.UNDEFINED and onnx.helper.get_attribute_value(default) == value
        if not is_default and not (op == "Split" and attribute == "num_outputs" and _is_even(proto, model, value)):
            raise refused
        dropped.append(attribute)
    kept = [attribute for attribute in proto.attribute if attribute.name not in dropped]
    if len(proto.input) > old.max_input:
        axes = model.initializers.get(proto.input[1])
        if not op.startswith("Reduce") or axes is None:
            raise refused
        kept.append(onnx.helper.make_attribute("axes", [int(axis) for axis in axes.numpy()]))
        del proto.input[1:]
    copies = [onnx.AttributeProto.FromString(attribute.SerializeToString()) for attribute in kept]
    del proto.attribute[:]
    proto.attribute.extend(copies)


def _is_even(proto: onnx.NodeProto, model: Model, parts: int) -> bool:
    """Whether a Split into so many parts makes them equal, as it does without sizes before opset 18."""
    shape = model.info(proto.input[0]).shape
    axis = next((a.i for a in proto.attribute if a.name == "axis"), 0)
    size = None if shape is None else shape[axis]
    return isinstance(size, int) and size % parts == 0


def _limited(constant: Initializer) -> Initializer:
    """With finite values beyond FP16's largest at the largest (``weights.round_values``)."""
    values, largest = constant.numpy(), np.float32(Precision.FP16.largest)
    limited = np.where(np.isfinite(values), np.clip(values, -largest, largest), values).astype(np.float32)
    return replace(constant, proto=onnx.numpy_helper.from_array(limited, constant.name))


def _with_rank(constant: Initializer, rank: int) -> Initializer:
    shape = (1,) * (rank - len(constant.shape)) + constant.shape
    proto = onnx.TensorProto()
    proto.CopyFrom(constant.proto)
    proto.dims[:] = shape
    return replace(constant, shape=shape, proto=proto)
