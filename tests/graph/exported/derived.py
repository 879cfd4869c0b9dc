"""Makes the networks that other tools write, from those that torch's exporters wrote: quantised and optimised ones.

``python -m tests.graph.exported.derived [NAME ...]`` with onnxruntime installed, after ``whole.py``. That of
scikit-learn is written by hand.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from tests.graph.exported.stripped import load_filled, strip

FOLDER = Path(__file__).parent / "networks"
HALF_QUANTISED = ("/stem/", "/lateral", "/smooth", "/extra", "/scores", "/boxes")
"""The convolutions that the half-quantised network keeps in FP32: all but the backbone's."""


class Samples(CalibrationDataReader):
    def __init__(self, feeds: list[dict[str, np.ndarray]]) -> None:
        self.feeds = iter(feeds)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.feeds, None)


def quantised(source: str, op_types: list[str], kept: tuple[str, ...] = ()) -> onnx.ModelProto:
    """Symmetric INT8 with a scale per channel and biases in FP32, as TensorRT reads it, by ONNX Runtime's quantiser."""
    model = load_filled(FOLDER / f"{source}.onnx")
    rng = np.random.default_rng(0)
    feeds = [
        {
            value.name: rng.standard_normal([d.dim_value or 1 for d in value.type.tensor_type.shape.dim], np.float32)
            if value.type.tensor_type.elem_type == TensorProto.FLOAT
            else rng.integers(1, 60, [d.dim_value or 2 for d in value.type.tensor_type.shape.dim])
            for value in model.graph.input
        }
        for _ in range(4)
    ]
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder) / "before.onnx", Path(folder) / "after.onnx"
        onnx.save(model, before)
        quantize_static(
            before, after, Samples(feeds), quant_format=QuantFormat.QDQ, op_types_to_quantize=op_types,
            per_channel=True, activation_type=QuantType.QInt8, weight_type=QuantType.QInt8,
            nodes_to_exclude=[n.name for n in model.graph.node if any(word in n.name for word in kept)],
            extra_options={"ActivationSymmetric": True, "WeightSymmetric": True, "QuantizeBias": False},
        )  # fmt: skip
        return onnx.load(after)


def optimised(source: str, level: ort.GraphOptimizationLevel) -> onnx.ModelProto:
    """What ONNX Runtime's CPU provider runs in place of a model."""
    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.graph_optimization_level = level
        options.optimized_model_filepath = str(Path(folder) / "after.onnx")
        model = load_filled(FOLDER / f"{source}.onnx")
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return onnx.load(options.optimized_model_filepath)


def classifier() -> onnx.ModelProto:
    """A scaler, a linear classifier and its map of probabilities, as skl2onnx writes scikit-learn's pipelines."""
    ml, rng = "ai.onnx.ml", np.random.default_rng(0)
    nodes = [
        helper.make_node("Scaler", ["input"], ["scaled"], "Scaler", domain=ml, offset=[0.5] * 4, scale=[2.0] * 4),
        helper.make_node(
            "LinearClassifier", ["scaled"], ["label", "raw"], "LinearClassifier", domain=ml,
            coefficients=rng.standard_normal(12).tolist(), intercepts=[0.1, 0.0, -0.1], classlabels_ints=[0, 1, 2],
            multi_class=1, post_transform="SOFTMAX",
        ),
        helper.make_node("Normalizer", ["raw"], ["probabilities"], "Normalizer", domain=ml, norm="L1"),
        helper.make_node("ZipMap", ["probabilities"], ["output"], "ZipMap", domain=ml, classlabels_int64s=[0, 1, 2]),
    ]  # fmt: skip
    row = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    graph = helper.make_graph(
        nodes, "pipeline", [helper.make_tensor_value_info("input", TensorProto.FLOAT, [None, 4])],
        [
            helper.make_tensor_value_info("label", TensorProto.INT64, [None]),
            helper.make_value_info("output", helper.make_sequence_type_proto(row)),
        ],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(ml, 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def main(names: Sequence[str]) -> None:
    """Make these, or all."""
    logging.disable(logging.WARNING)
    level = ort.GraphOptimizationLevel
    convolutional = ["Conv", "Add", "MaxPool", "Relu", "Concat", "Resize"]
    cases: dict[str, Callable[[], onnx.ModelProto]] = {
        "retinanet_quantised": lambda: quantised("retinanet_torchscript_13", convolutional),
        "retinanet_half_quantised": lambda: quantised("retinanet_torchscript_13", ["Conv", "Add"], HALF_QUANTISED),
        "whisper_quantised": lambda: quantised("whisper_torchscript_17", ["MatMul", "Gemm"]),
        "text_encoder_extended": lambda: optimised("text_encoder_torchscript_13", level.ORT_ENABLE_EXTENDED),
        "whisper_basic": lambda: optimised("whisper_torchscript_17", level.ORT_ENABLE_BASIC),
        "classifier": classifier,
    }
    for name in names or cases:
        onnx.save(strip(cases[name]()), FOLDER / f"{name}.onnx")


if __name__ == "__main__":
    main(sys.argv[1:])
