"""What is expected of each whole network: groups, what is pinned and why, findings, and what a search chooses."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

CONSTANT = "computed from constants alone"
INT8 = "quantised: engines run it in INT8"


@dataclass(frozen=True)
class Expected:
    """One network. Figures hold for each of its exports, unless ``exports`` says otherwise."""

    kinds: Mapping[str, int]  # kind of group -> how many
    pinned: Mapping[str, tuple[int, str]] = field(default_factory=dict)  # kind -> how many, words of the reason
    findings: Set[str] = frozenset()  # codes of ``inspect``; a search has ``target-not-here`` beside them
    on_data: Set[str] = frozenset()  # codes that a search adds, as it sees values and the target
    harmless_on_data: Set[str] = frozenset()  # codes of ``inspect`` that a search leaves out, as it sees values
    # What a search of six plans chooses on the device of ``device.toml``, where FP16 pays: ``all-fp32``, ``all-fp16``,
    # ``mixed``, ``fp16`` where the last two are about as good, or ``any``.
    choice: str = "all-fp16"
    evaluations: int = 6  # how many plans a search of six evaluates: fewer where there are no more
    closeness: float | None = 1e-2  # largest relative L2 error of all-FP16; None where a rounding decides
    not_in_tensorrt_rtx: str | None = None  # what TensorRT-RTX says of the model in FP32, where it refuses it
    exports: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # file -> fields that differ there


_NOT_EMULATED = {"emulation-differs"}  # recurrent layers, where the target is a profile

NETWORKS: Mapping[str, Expected] = {
    # Detectors: every convolution with its batch norm and SiLU is one group; decoding goes with the boxes.
    "yolo": Expected({"conv": 25, "resample": 1, "softmax": 1, "reduce": 1}),
    # Which boxes survive turns on a rounding in a network that is not trained; every plan gives boxes, though.
    "yolo_nms": Expected(
        {"conv": 25, "resample": 1, "softmax": 1, "reduce": 1},
        findings={"value-dependent-shape"}, choice="any", closeness=None, not_in_tensorrt_rtx="NonMaxSuppression",
    ),
    "retinanet": Expected({"conv": 33, "resample": 2}, choice="mixed"),  # the two heads count once for each level
    # TopK chooses the regions.
    "two_stage": Expected(
        {"conv": 9, "resample": 1, "matmul": 4, "softmax": 1}, findings={"rows-selected"}, closeness=None,
        not_in_tensorrt_rtx="RoiAlign", choice="mixed",
    ),
    # The decoder's self-attention sees learned queries only, before any image: constants.
    "detr": Expected(
        {"conv": 8, "matmul": 17, "attention": 1, "norm": 5, "elementwise": 2, "softmax": 1},
        pinned={"matmul": (1, CONSTANT), "elementwise": (2, CONSTANT)},
        exports={
            "detr_torchscript_17": {  # which leaves more of it in the graph
                "kinds": {"conv": 8, "matmul": 20, "attention": 1, "norm": 5, "elementwise": 5, "softmax": 1},
                "pinned": {"matmul": (4, CONSTANT), "elementwise": (5, CONSTANT)},
                "choice": "fp16",
            }
        },
    ),
    "siamese": Expected({"conv": 19}, choice="mixed"),  # the correlation of the two images is one of them
    "swin": Expected(
        {"conv": 1, "norm": 11, "matmul": 18, "attention": 4, "reduce": 1},
        exports={"swin_torchscript_14": {"findings": {"norm-written-out"}}},  # LayerNormalization came with opset 17
    ),
    # The norms over channels are written out in the network itself.
    "convnext": Expected(
        {"conv": 5, "norm": 6, "matmul": 7, "reduce": 1},
        findings={"norm-written-out"},
        exports={"convnext_dynamo_23": {"findings": set()}},  # whose opset has the operator
    ),
    # Rounded to FP16, time steps up to 938 change the cosines of their embedding by up to 0.11.
    "diffusion_unet": Expected(
        {"elementwise": 1, "matmul": 15, "conv": 14, "norm": 11, "attention": 2, "resample": 1},
        on_data={"angle-spacing"},
        exports={"diffusion_unet_torchscript_15": {"findings": {"norm-written-out"}}},
    ),
    # Farthest points and nearest neighbours are chosen by comparisons.
    "pointnet": Expected(
        {"reduce": 12, "elementwise": 2, "conv": 4, "matmul": 2, "softmax": 1}, closeness=None, choice="fp16",
        exports={"pointnet_dynamo_18": {"findings": {"broadcast"}}},  # the other export does not tell the shapes
    ),
    # The arithmetic on sizes belongs to no group.
    "shape_arithmetic": Expected(
        {"conv": 7, "resample": 3, "softmax": 1}, choice="fp16", on_data={"one-size-tried"},
    ),
    "channels_last": Expected({"conv": 3, "matmul": 3, "reduce": 1, "softmax": 1}, choice="fp16"),
    # RMSNorm as an operator came with opset 23. The causal mask of -3.4e38 is chosen by Where.
    "llama": Expected(
        {"elementwise": 3, "norm": 5, "matmul": 15, "attention": 2},
        findings={"norm-written-out", "state-fed-back"}, on_data={"one-size-tried"},
    ),
    "whisper": Expected({"conv": 2, "norm": 5, "matmul": 12, "attention": 2}),
    "lstm": Expected({"rnn": 2, "matmul": 1}, choice="fp16", on_data=_NOT_EMULATED),
    "gru": Expected({"conv": 1, "rnn": 1, "matmul": 1, "softmax": 1}, choice="fp16", on_data=_NOT_EMULATED),
    # The mask is multiplied by -3.4e38, which FP16 holds as -65504.
    "text_encoder": Expected(
        {"elementwise": 1, "norm": 5, "matmul": 13, "attention": 2},
        findings={"mask"},
        harmless_on_data={"vanishing-epsilon"},  # its rows are far from constant
        exports={"text_encoder_torchscript_13": {"findings": {"mask", "norm-written-out", "vanishing-epsilon"}}},
    ),
    # Every operator between DequantizeLinear and QuantizeLinear stays as it is; what is left is searched.
    "retinanet_quantised": Expected(
        {"quantised": 67, "elementwise": 1},
        pinned={"quantised": (67, INT8)}, findings={"quantised-parts"},
        evaluations=2, choice="all-fp32",  # FP16 for the last sigmoid alone gains nothing
    ),
    "retinanet_half_quantised": Expected(
        {"conv": 22, "quantised": 22, "resample": 1},
        pinned={"quantised": (22, INT8)}, findings={"quantised-parts"},
        choice="fp16", closeness=3e-2,  # a value between two steps of INT8 may go either way
    ),
    "whisper_quantised": Expected(
        {"conv": 2, "norm": 5, "quantised": 26, "softmax": 2, "elementwise": 4},
        pinned={"quantised": (26, INT8)}, findings={"quantised-parts"},
        choice="mixed", closeness=3e-2,
    ),
    # Out of ONNX Runtime's optimiser: the groups are those of the network that it was given.
    "text_encoder_extended": Expected(
        {"elementwise": 1, "norm": 5, "matmul": 13, "attention": 2},
        findings={"mask"}, not_in_tensorrt_rtx="FusedMatMul",
    ),
    "whisper_basic": Expected({"conv": 2, "norm": 5, "matmul": 12, "attention": 2}),
}  # fmt: skip


def expected(stem: str) -> Expected:
    """Of a file of ``tests/graph/exported/networks``."""
    network = NETWORKS[stem.split("_torchscript_")[0].split("_dynamo_")[0]]
    return replace(network, **network.exports.get(stem, {}))
