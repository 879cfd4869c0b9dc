"""Operators by what they mean for layer groups: which start a group, which only move data, and which stay FP32."""

from __future__ import annotations

from collections.abc import Mapping

FOLDED = "computed from constants alone: folded before the model runs, so FP16 saves nothing"
CASTS_INTEGERS = "casts integers: every reader gets them in the type that it needs"

RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
"""Operators that run once for each step of a sequence."""

ANCHOR_KINDS: Mapping[str, str] = {
    **dict.fromkeys(("Conv", "ConvTranspose", "DeformConv"), "conv"),
    **dict.fromkeys(("FusedConv", "NhwcConv", "NhwcFusedConv", "ConvTransposeWithDynamicPads"), "conv"),
    **dict.fromkeys(("MatMul", "Gemm", "Einsum"), "matmul"),
    **dict.fromkeys(
        (
            "FusedMatMul",
            "TransposeMatMul",
            "FusedMatMulActivation",
            "FusedGemm",
            "GemmFastGelu",
            "MatMulNBits",
            "MatMulNBitsQkv",
            "MatMulNBitsMlp",
            "MatMulBnb4",
            "MoE",
            "QMoE",
        ),
        "matmul",
    ),
    **dict.fromkeys(
        (
            "LayerNormalization",
            "InstanceNormalization",
            "GroupNormalization",
            "RMSNormalization",
            "BatchNormalization",
            "LpNormalization",
            "LRN",
            "MeanVarianceNormalization",
            "SimplifiedLayerNormalization",
            "SkipLayerNormalization",
            "SkipSimplifiedLayerNormalization",
            "EmbedLayerNormalization",
            "GroupNorm",
            "SkipGroupNorm",
            "GatedRMSNorm",
        ),
        "norm",
    ),
    **dict.fromkeys(("Softmax", "LogSoftmax", "BiasSoftmax"), "softmax"),
    **dict.fromkeys(
        (
            "Attention",
            "MultiHeadAttention",
            "GroupQueryAttention",
            "PackedAttention",
            "PackedMultiHeadAttention",
            "DecoderAttention",
            "DecoderMaskedSelfAttention",
            "DecoderMaskedMultiHeadAttention",
            "LongformerAttention",
            "SparseAttention",
            "PagedAttention",
            "LinearAttention",
        ),
        "attention",
    ),
    **dict.fromkeys(RECURRENT, "rnn"),
    **dict.fromkeys(
        (
            "ReduceMean",
            "ReduceSum",
            "ReduceSumSquare",
            "ReduceL1",
            "ReduceL2",
            "ReduceLogSum",
            "ReduceLogSumExp",
            "ReduceProd",
            "CumSum",
            "GlobalAveragePool",
            "GlobalLpPool",
        ),
        "reduce",
    ),
    **dict.fromkeys(("Resize", "Upsample", "GridSample", "RoiAlign", "AffineGrid"), "resample"),
}
"""Operators that start a group at fusion granularity, and the kind of group that they start: ONNX's own, and those of
ONNX Runtime's domain com.microsoft (docs/ContribOperators.md of microsoft/onnxruntime)."""

DATA_MOVEMENT = frozenset(
    {
        "Reshape",
        "Transpose",
        "Squeeze",
        "Unsqueeze",
        "Flatten",
        "Identity",
        "Dropout",
        "Cast",
        "Slice",
        "Split",
        "Expand",
        "Tile",
        "DepthToSpace",
        "SpaceToDepth",
    }
)
"""Operators that only move or repeat what they read: they go with its producer at any granularity."""
