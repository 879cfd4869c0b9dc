"""Which operators TensorRT's parser may lack, before anything is parsed."""

from __future__ import annotations

from collections import Counter

from mptune.engines.base import MissingKernel
from mptune.engines.tensorrt.library import Kind
from mptune.graph.loading.model import Model

_NOT_IN_BF16 = frozenset({"GRU", "HardSwish"})
"""Operators of ONNX that the parser of TensorRT-RTX 1.7 takes in FP32 and FP16 alone: it subtracts a GRU's gate from an
FP32 one ("ElementWiseOperation SUB must have same input types. But they are of types Float and BFloat16"); and "Only
FLOAT, HALF or INT8 input is supported for the HardSwish operator"."""
CURE = "give the model from before ONNX Runtime's optimiser, or --engine onnxruntime"


def foreign_operators(model: Model, domain: str = "") -> str:
    """Operators of other domains than ONNX's own, or of one of them, and how many nodes each has, as a text."""
    counts = Counter(f"{node.domain}.{node.op_type}" for node in model.nodes if not node.is_standard)
    named = {name: count for name, count in counts.items() if name.startswith(domain)}
    return ", ".join(f"{name} ({count} nodes)" if count > 1 else name for name, count in named.items())


def refused_in_bf16(model: Model, kind: Kind) -> tuple[MissingKernel, ...]:
    """The nodes that the parser refuses in BF16."""
    title = "TensorRT-RTX" if kind == "tensorrt-rtx" else "TensorRT"
    others = "" if kind == "tensorrt-rtx" else "; TensorRT's own has not been tried"
    reason = "the ONNX parser of TensorRT-RTX 1.7 refuses {} in BF16" + others
    nodes = (node for node in model.nodes if node.is_standard and node.op_type in _NOT_IN_BF16)
    return tuple(MissingKernel(n.name, n.op_type, title, "", reason.format(n.op_type)) for n in nodes)
