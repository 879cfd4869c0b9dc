"""Operators by what they mean for layer groups: which start a group, and which only move data."""

from __future__ import annotations

from collections.abc import Mapping

ANCHOR_KINDS: Mapping[str, str] = {
    **dict.fromkeys(("Conv", "ConvTranspose", "DeformConv"), "conv"),
    **dict.fromkeys(("MatMul", "Gemm", "Einsum"), "matmul"),
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
        ),
        "norm",
    ),
    **dict.fromkeys(("Softmax", "LogSoftmax"), "softmax"),
    "Attention": "attention",
    **dict.fromkeys(("LSTM", "GRU", "RNN"), "rnn"),
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
"""Operators that start a group at fusion granularity, and the kind of group that they start."""

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
