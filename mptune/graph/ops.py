"""THE table of operators: what mptune knows of each by its name, and what its schema says about types.

ONNX's own operators, and those of com.microsoft that mptune knows (docs/ContribOperators.md of microsoft/onnxruntime).
Operators that are not in the table have kind ``other`` and no trait. Other modules ask for the sets below; a set that
differs from these stands where it is needed, as a difference with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Set as AbstractSet
from dataclasses import dataclass
from functools import cache
from typing import Any

import onnx

from mptune.graph.plan import PRECISIONS, REDUCED, Precision


@dataclass(frozen=True, slots=True)
class Operator:
    """One row of the table; inputs by position."""

    kind: str = "other"  # those of ``ANCHORS`` start a layer group of this kind at fusion granularity
    traits: str = ""  # words that the sets below collect; each says what its trait means
    sizes: AbstractSet[int] = frozenset()  # inputs whose values are sizes, positions, factors or counts of a shape
    indices: AbstractSet[int] = frozenset()  # inputs whose values say which elements are read or written
    shaped_like: tuple[int, ...] | None = None  # inputs whose shapes decide on the shapes of the results; None for all
    fp32: str = ""  # why the node stays FP32 though its schema admits FP16; "" where it need not
    fp32_inputs: AbstractSet[int] = frozenset()  # the inputs that do; empty means the whole node does
    fp32_with: AbstractSet[int] = frozenset()  # optional inputs with which the whole node does; empty means with any


_TABLE: dict[str, Operator] = {}


def _rows(kind: str, names: str, traits: str = "", **columns: Any) -> None:
    """Add operators that differ in nothing but their names; names and traits are separated by spaces."""
    for name in names.split():
        assert name not in _TABLE, f"{name} has two rows"
        _TABLE[name] = Operator(kind, traits, **columns)


_rows("conv", "Conv ConvTranspose DeformConv FusedConv NhwcConv NhwcFusedConv ConvTransposeWithDynamicPads")
_rows("matmul", "MatMul Gemm Einsum FusedMatMul TransposeMatMul FusedGemm", "plain")
_rows("matmul", "FusedMatMulActivation GemmFastGelu MatMulNBits MatMulNBitsQkv MatMulNBitsMlp MatMulBnb4 MoE QMoE")
_rows("norm", "LayerNormalization InstanceNormalization GroupNormalization BatchNormalization", "centres")
_rows("norm", "GatedRMSNorm RMSNormalization LpNormalization LRN GroupNorm SkipGroupNorm EmbedLayerNormalization")
_rows("norm", "SimplifiedLayerNormalization SkipLayerNormalization SkipSimplifiedLayerNormalization")
_rows("norm", "MeanVarianceNormalization", fp32="ONNX defines it with an FP32 constant inside")
_rows("softmax", "Softmax LogSoftmax BiasSoftmax")
_rows("attention", "Attention MultiHeadAttention GroupQueryAttention PackedAttention PackedMultiHeadAttention")
_rows("attention", "DecoderAttention DecoderMaskedSelfAttention DecoderMaskedMultiHeadAttention")
_rows("attention", "LongformerAttention SparseAttention PagedAttention LinearAttention")
_LENGTHS = "reads sequence_lens: the parsers of the TensorRT family refuse that in FP16"
_rows("rnn", "LSTM GRU RNN", fp32=_LENGTHS, fp32_with={4})

# From some operator set on the axes of a reduction are an input.
_rows("reduce", "ReduceMean ReduceSum", "sums means", sizes={1})
_rows("reduce", "ReduceL1 ReduceL2 ReduceSumSquare", "sums", sizes={1})
_rows("reduce", "ReduceLogSum ReduceLogSumExp ReduceProd", sizes={1})
_rows("reduce", "GlobalAveragePool", "sums means")
_rows("reduce", "CumSum", "sums")
_rows("reduce", "GlobalLpPool")

_COORDINATES = "scales are coordinates: FP16 would move them"
_rows("resample", "Resize", sizes={1, 2, 3}, fp32=f"roi and {_COORDINATES}", fp32_inputs={1, 2})
_rows("resample", "Upsample", sizes={1}, fp32=_COORDINATES, fp32_inputs={1})
_rows("resample", "AffineGrid", sizes={1}, fp32="its results are coordinates: FP16 would move them")
_rows("resample", "GridSample RoiAlign")

_rows("movement", "Identity", "alias copies")
_rows("movement", "Dropout", "alias")
_rows("movement", "Cast")
_rows("movement", "Reshape Squeeze Unsqueeze", "view reshapes copies", sizes={1})
_rows("movement", "Flatten", "view reshapes copies")
_rows("movement", "Transpose", "view copies")
_rows("movement", "Expand", "view copies", sizes={1})
_rows("movement", "Slice", "copies", sizes={1, 2, 3, 4})
_rows("movement", "Split Tile", "copies", sizes={1})
_rows("movement", "DepthToSpace SpaceToDepth", "copies")

_rows("elementwise", "Add Sub", "arithmetic adds")
_rows("elementwise", "Mul Div", "arithmetic")
_rows("elementwise", "Sum", "adds")
_rows("elementwise", "Min Max", "bounds")
_rows("elementwise", "Clip", "bounds activation")
_rows("elementwise", "Relu LeakyRelu PRelu ThresholdedRelu Elu Selu Celu Gelu Mish Softplus Softsign", "activation")
_rows("elementwise", "Sigmoid Tanh HardSigmoid HardSwish FastGelu QuickGelu BiasGelu", "activation")
_rows("elementwise", "Abs Ceil Erf Exp Floor Log Mean Mod Neg Pow Reciprocal Round Shrink Sign Sqrt Swish Where")
_rows("elementwise", "Acos Acosh Asin Asinh Atan Atanh Cos Cosh Sin Sinh Tan")

_SCALES = "scales must stay FP32: opset < 19 demands it, and small scales vanish in FP16"
_rows("quantise", "QuantizeLinear DequantizeLinear", fp32=_SCALES)
_rows("quantise", "DynamicQuantizeLinear", fp32="computes a scale, which must stay FP32")

_DRAWN = "states its type in an attribute; computed once in FP32, then cast"
_rows("random", "RandomNormal RandomNormalLike RandomUniform RandomUniformLike", fp32=_DRAWN)
_rows("random", "Bernoulli", fp32="its output takes the input's type, or one that an attribute states")
_rows("random", "Multinomial", fp32="samples from exact probabilities")

_rows("shape", "Shape Size")

# The others are of no kind that anything asks for.
_rows("other", "Greater Less GreaterOrEqual LessOrEqual Equal", "compares")
_rows("other", "Concat", "copies")
_rows("other", "Gather GatherND", "copies", indices={1})
_rows("other", "GatherElements", "copies", indices={1}, shaped_like=(1,))
_rows("other", "Scatter ScatterElements ScatterND", indices={1}, shaped_like=(0,))
_rows("other", "TensorScatter", shaped_like=(0,))
_rows("other", "ArrayFeatureExtractor", shaped_like=(1,))
_rows("other", "ArgMax ArgMin", "extreme")
_rows("other", "Compress NonZero Unique", "selects")
_rows("other", "NonMaxSuppression", "selects", sizes={2}, fp32="the operator exists in FP32 only")
# Their sizes are counts or positions which do not make the shape of what they compute.
_rows("other", "Trilu SequenceAt SequenceErase", "counts", sizes={1})
_rows("other", "SequenceInsert", "counts", sizes={2})
_rows("other", "Loop", "counts", sizes={0})
_rows("other", "ConstantOfShape BlackmanWindow HammingWindow HannWindow", sizes={0})
_rows("other", "CenterCropPad TopK ReduceMax ReduceMin SplitToSequence", sizes={1})
_rows("other", "MaxUnpool", sizes={2})
_rows("other", "Col2Im DFT", sizes={1, 2})
_rows("other", "Pad STFT", sizes={1, 3})
_rows("other", "QLinearConv QLinearMatMul", fp32="scales must stay FP32: small scales vanish in FP16")
_rows("other", "MatMulInteger ConvInteger", "products")
_rows("other", "EyeLike", fp32=_DRAWN)
_rows("other", "Range", sizes={0, 1, 2}, fp32="counts: FP16 has no odd integer above 2048")
_COUNTS = "indices and depth count: FP16 has no odd integer above 2048"
_rows("other", "OneHot", sizes={1}, indices={0}, fp32=_COUNTS, fp32_inputs={0, 1})
_rows("other", "MelWeightMatrix", fp32="its edges are frequencies: FP16 would move them")
_rows("other", "Optional OptionalGetElement OptionalHasElement", fp32="an optional's type is part of its own")
_rows("other", "BitCast", fp32="reads the bits, which FP16 changes")

_OTHER = Operator()


def operator(op_type: str) -> Operator:
    """The row of an operator."""
    return _TABLE.get(op_type, _OTHER)


def _of_kind(*kinds: str) -> frozenset[str]:
    return frozenset(name for name, row in _TABLE.items() if row.kind in kinds)


def _with(trait: str) -> frozenset[str]:
    return frozenset(name for name, row in _TABLE.items() if trait in row.traits.split())


# The kinds of operators that start a group at fusion granularity.
ANCHORS = ("conv", "matmul", "norm", "softmax", "attention", "rnn", "reduce", "resample")
HEAVY = ("conv", "matmul", "attention", "rnn")  # the kinds whose work is products


def anchor_kind(op_type: str) -> str | None:
    """The kind of group that an operator starts at fusion granularity; None where it starts none."""
    kind = operator(op_type).kind
    return kind if kind in ANCHORS else None


CONVOLUTIONS = _of_kind("conv")
RECURRENT = _of_kind("rnn")  # operators that run once for each step of a sequence
SOFTMAX = _of_kind("softmax")
PRODUCTS = _of_kind("conv", "matmul")  # multiply their first input by their second; of a runtime, with more inside
MATRIX_PRODUCTS = _with("plain")  # matrix products of two inputs and nothing but a bias or an activation inside
INTEGER_PRODUCTS = _with("products")  # products of integers that are quantised as they come; their sums are INT32
CENTRING_NORMS = _with("centres")  # ONNX's norms that take a mean out of their input
SUMMING = _with("sums")  # operators that add many elements of one value up, their magnitudes or their squares
MEANS = _with("means")  # those that give a mean or a sum of the elements themselves

MOVEMENT = _of_kind("movement")  # only move or repeat what they read: they go with its producer at any granularity
VIEWS = _with("view")  # movements that keep every element: its shape, its place or how often it is there changes
RESHAPES = _with("reshapes")  # views whose elements keep their order: nothing moves in memory
# Give a value another name: exporters put one before a weight that layers share, in all of them but the first.
ALIASES = _with("alias")
GLUE = VIEWS | ALIASES | {"Cast"}  # what exporters put anywhere between two operators, such as in an attention core
COPIES = _with("copies")  # operators whose every result is one of the elements of their inputs, in the same type

ELEMENTWISE = _of_kind("elementwise")
ARITHMETIC = _with("arithmetic")  # sums, differences, products and quotients of two values
ADDS = _with("adds")
BOUNDS = _with("bounds")  # operators that limit a value by another one
GUARDS = BOUNDS - {"Min"} | {"Add"}  # what keeps a value away from zero before it divides
ACTIVATIONS = _with("activation")
COMPARISONS = _with("compares")
EXTREMES = _with("extreme")  # operators that give the position of the largest or the smallest element

QUANTISING = _of_kind("quantise")  # operators that quantise values, or give them back
RANDOM = _of_kind("random")  # operators that compute something else each time
SHAPE_OF = _of_kind("shape")  # operators that read the shape of a value, and not the value
SELECTING = _with("selects")  # operators that return as many elements as their input's values call for


# Names of the element types of tensors -> the precision that each is.
FLOAT_TYPES: Mapping[str, Precision] = {precision.dtype: precision.stored for precision in PRECISIONS}


@dataclass(frozen=True)
class OperatorSchema:
    """The part of an operator's schema that typing needs.

    Formal types are parameters such as ``T``, or types such as ``tensor(int64)``; the last may be there repeatedly.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    types: Mapping[str, frozenset[str]]  # type parameter -> the types that it admits

    @classmethod
    def read(cls, schema: Any, type_attribute: str = "type_str") -> OperatorSchema:
        """Read a schema object of onnx, or of ONNX Runtime, which has ``typeStr`` for ``type_str``."""
        inputs, outputs = (tuple(getattr(p, type_attribute) for p in side) for side in (schema.inputs, schema.outputs))
        return cls(inputs, outputs, {c.type_param_str: frozenset(c.allowed_type_strs) for c in schema.type_constraints})

    def input_type(self, position: int) -> str:
        """Formal type of an input."""
        return self.inputs[min(position, len(self.inputs) - 1)]

    def output_type(self, position: int) -> str:
        """Formal type of an output."""
        return self.outputs[min(position, len(self.outputs) - 1)]

    def admitted(self, type_parameter: str) -> frozenset[Precision]:
        """The reduced precisions that a type parameter admits besides FP32."""
        types = self.types.get(type_parameter, frozenset())
        if f"tensor({Precision.FP32.dtype})" not in types:
            return frozenset()
        return frozenset(p for p in REDUCED if f"tensor({p.dtype})" in types)


@dataclass(frozen=True)
class NodeRule:
    """What a reduced precision would change about one node (``mptune.graph.facts.node_rules``)."""

    # The reduced precisions that it can run in. FP16 is among them if any is: what has BF16 and no FP16 stays FP32.
    precisions: frozenset[Precision] = frozenset()
    inputs: tuple[int, ...] = ()  # positions of those that change their type with it
    outputs: tuple[int, ...] = ()
    reads_any: tuple[int, ...] = ()  # positions of FP32 inputs that take any type as it comes, without a Cast
    attribute: str | None = None  # states the output's type (``to`` of Cast); None where those of the inputs do
    fixed: str | None = None  # why it has no precision of its own; None where it has one, or nothing of FP32 type


# How the names of quantised operators begin, those of ONNX Runtime's own domain; and those that are named so and
# compute with activations that are not quantised.
QUANTISED_NAMES = ("Q", "DynamicQuantize", "Dequantize", "MatMulInteger", "GemmFloat8")
WEIGHTS_ONLY = frozenset({"QuickGelu", "QMoE"})
OPAQUE_TYPES = frozenset({"sequence", "map", "optional", "sparse_tensor", "undefined"})  # no tensors, or not known


@cache
def onnx_schema(op_type: str, opset: int) -> OperatorSchema | None:
    """The schema of one of ONNX's own operators; None where the operator set has none of this name."""
    try:
        return OperatorSchema.read(onnx.defs.get_schema(op_type, opset, ""))
    except onnx.defs.SchemaError:
        return None


def is_written_out(op_type: str, opset: int) -> bool:
    """Whether ONNX defines one of its operators by others, so that a runtime without a kernel can write it out."""
    if onnx_schema(op_type, opset) is None:
        return False
    schema: Any = onnx.defs.get_schema(op_type, opset, "")
    return bool(schema.has_function or schema.has_context_dependent_function)
