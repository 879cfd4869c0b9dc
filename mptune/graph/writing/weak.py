"""The FP32 model for TensorRT 8, and the precision of each of its layers: 8.x has no strongly typed networks.

Nodes get short unique names, by which ``trtexec --layerPrecisions`` finds their layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from mptune.errors import ModelError, PlanError
from mptune.graph.groups import GroupedModel
from mptune.graph.hazards.masks import is_held
from mptune.graph.interface import with_reduced_interface
from mptune.graph.loading.model import Model
from mptune.graph.loading.tensors import STANDARD_DOMAINS, all_graphs, subgraphs
from mptune.graph.ops import onnx_schema
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.value_types import new_suffix, value_types
from mptune.graph.writing.rewrite import add_node, frame_of
from mptune.graph.writing.weights import NeededConstant, fp16_rounding, write_self_contained

_OPSET, _IR_VERSION = 17, 8  # the newest that TensorRT 8.5 and 8.6 document, and the IR version that came with it
_LACKING = """
    Bernoulli BitShift BlackmanWindow CastLike Compress ConcatFromSequence ConvInteger DFT Det DynamicQuantizeLinear
    HammingWindow HannWindow HardSwish Hardmax IsInf LayerNormalization MatMulInteger MaxRoiPool MaxUnpool
    MelWeightMatrix Mod Multinomial NegativeLogLikelihoodLoss OneHot Optional OptionalGetElement OptionalHasElement
    QLinearConv QLinearMatMul STFT SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert
    SequenceLength SequenceMap SoftmaxCrossEntropyLoss SplitToSequence StringNormalizer TfIdfVectorizer Unique
"""
"""ONNX's operators that docs/operators.md of onnx-tensorrt 8.5-GA does not list as supported; 8.6 has the others."""
_UNNAMED = """
    Cast Constant ConstantOfShape DequantizeLinear Dropout GRU Identity If LSTM Loop QuantizeLinear RNN Scan Shape Size
    Trilu
"""
"""Operators whose layers take no precision, or are not named after the node (``registerLayer`` in the importers)."""


@dataclass(frozen=True)
class WeakModel:
    """A model in FP32, and the precisions of its layers, by the names of their nodes."""

    proto: onnx.ModelProto  # without ``constants``
    constants: Sequence[NeededConstant]
    precisions: dict[str, Precision] = field(default_factory=dict)  # what the layer computes in
    # What it gives, where all of that is floating. What the model gives keeps its type.
    types: dict[str, Precision] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the model, and put the constants into ``proto``; past 2 GiB they lie in ``path`` + ``.data``."""
        write_self_contained(self.proto, self.constants, path)


def weak_model(grouped: GroupedModel, plan: PrecisionPlan) -> WeakModel:
    """The model of a plan. Each node has the name that it has in the user's model as its documentation string.

    Raises:
        ModelError: TensorRT 8.5 lacks the operator set or an operator of the model.
        PlanError: the plan has groups in BF16.
    """
    grouped = with_reduced_interface(grouped) if plan.reduced_groups else grouped
    model, types = grouped.model, value_types(grouped)
    _refuse_what_is_lacking(model, plan)
    suffix, planned = new_suffix(model, ""), types.node_precisions(plan.stored)
    outputs = {info.name for info in model.outputs}
    weak = WeakModel(frame_of(model), [(constant, name, None) for name, constant in model.initializers.items()])
    weak.proto.ir_version = min(weak.proto.ir_version, _IR_VERSION)
    for node in model.nodes:
        if node.op_type == "Constant" and node.outputs[0] in model.initializers:
            continue
        written = add_node(weak.proto.graph, node, node.inputs, node.outputs)
        written.name, written.doc_string = f"n{len(weak.proto.graph.node):04d}{suffix}", node.name
        # What the typed model limits, or keeps out of FP16, this one does not.
        floats = [value for value in node.inputs if model.info(value).is_float32]
        constants = [model.initializers[value] for value in floats if value in model.initializers]
        is_beyond = any(fp16_rounding(constant).overflowed for constant in constants)
        is_beyond |= any(is_held(model, value, Precision.FP16) for value in floats)
        precision = Precision.FP32 if is_beyond else planned.get(node.name)
        if precision is None or node.op_type in _UNNAMED.split() or types.facts.is_static(node.outputs[0]):
            continue
        weak.precisions[written.name] = precision
        if all(model.info(value).is_float32 for value in node.outputs if value):
            weak.types[written.name] = precision if outputs.isdisjoint(node.outputs) else Precision.FP32
    return weak


def _refuse_what_is_lacking(model: Model, plan: PrecisionPlan) -> None:
    if plan.stored.bf16_groups:
        hint = "take a plan in FP16 and FP32: `mptune report` lists the plans, --plan ID names one"
        raise PlanError(f"plan {plan.fingerprint} has groups in BF16, which TensorRT 8 lacks", hint)
    if model.opset > _OPSET:
        message = f"{model.path} has opset {model.opset}, TensorRT 8 reads {_OPSET} at most"
        raise ModelError(message, f"export the model at opset {_OPSET} or below")
    for node in model.nodes:
        inside = (inner for outer in subgraphs(node.proto) for graph in all_graphs(outer) for inner in graph.node)
        for proto in (node.proto, *inside):
            op = proto.op_type if proto.domain in STANDARD_DOMAINS else f"{proto.domain}::{proto.op_type}"
            attributes = {attribute.name: attribute.i for attribute in proto.attribute}
            if op in _LACKING.split() or onnx_schema(op, model.opset) is None:
                hint = "export the model at an older opset, where other operators take its place, or without it"
                raise ModelError(f"{op} (node {node.name!r}) is no operator of TensorRT 8.5", hint)
            if op == "Shape" and ("end" in attributes or attributes.get("start")):
                message = f"node {node.name!r} is a Shape with start or end, which the parser of TensorRT 8 ignores"
                raise ModelError(message, "export the model at opset 14 or below")
            is_computed = op in ("Conv", "ConvTranspose") and proto.input[1] not in model.initializers
            if is_computed and "kernel_shape" not in attributes:
                message = f"node {node.name!r} is a {op} with a computed kernel and without kernel_shape"
                raise ModelError(message, "give the node the attribute kernel_shape, which TensorRT 8 needs")
