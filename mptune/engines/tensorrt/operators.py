"""Which operators TensorRT's parser lacks, known before anything is parsed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from mptune.engines.base import MissingKernel
from mptune.engines.tensorrt.library import Kind
from mptune.graph.loading.model import Model

PARSED = frozenset(
    {
        *("Attention", "CausalConvWithState", "DequantizeLinear", "GatherND", "Gelu", "GridSample"),
        *("GroupQueryAttention", "LinearAttention", "MatMulNBits", "MultiHeadAttention", "Pad", "QMoE"),
        *("QuantizeLinear", "Range", "RotaryEmbedding", "SkipSimplifiedLayerNormalization", "Trilu"),
    }
)
"""Operators of com.microsoft that the parser of TensorRT-RTX 1.7 takes by their name, some of them in some forms only
(``OnnxParser.supports_operator``); older parsers have fewer."""
_NOT_IN_BF16 = frozenset({"GRU", "HardSwish"})
"""Operators of ONNX that the parser of TensorRT-RTX 1.7 takes in FP32 and FP16 alone: it subtracts a GRU's gate from an
FP32 one ("ElementWiseOperation SUB must have same input types. But they are of types Float and BFloat16"); and "Only
FLOAT, HALF or INT8 input is supported for the HardSwish operator"."""
CURE = "give the model from before ONNX Runtime's optimiser, or --engine onnxruntime"


def foreign_operators(model: Model) -> Counter[str]:
    """Operators of other domains than ONNX's own, with their domain, and how many nodes each has."""
    return Counter(f"{node.domain}.{node.op_type}" for node in model.nodes if not node.is_standard)


def unparsed_operators(model: Model) -> str:
    """The operators of ONNX Runtime's domains that no parser of TensorRT takes, as a text; "" where there are none."""
    counts = foreign_operators(model)
    return named_operators(
        {
            name: count
            for name, count in counts.items()
            if name.startswith("com.microsoft") and name.removeprefix("com.microsoft.") not in PARSED
        }
    )


def named_operators(counts: Mapping[str, int]) -> str:
    """Operators and how many nodes each has, as a text."""
    return ", ".join(f"{name} ({count} nodes)" if count > 1 else name for name, count in counts.items())


def refused_in_bf16(model: Model, kind: Kind) -> tuple[MissingKernel, ...]:
    """The nodes that the parser refuses in BF16."""
    title = "TensorRT-RTX" if kind == "tensorrt-rtx" else "TensorRT"
    others = "" if kind == "tensorrt-rtx" else "; TensorRT's own has not been tried"
    return tuple(
        MissingKernel(
            node.name,
            node.op_type,
            title,
            "",
            f"the ONNX parser of TensorRT-RTX 1.7 refuses {node.op_type} in BF16{others}",
        )
        for node in model.nodes
        if node.is_standard and node.op_type in _NOT_IN_BF16
    )
