"""The documents have the form that the inspector writes: 10 by NVIDIA's guide and public engine dumps, 11 by NVIDIA's
guide "Migrating IEngineInspector Usage from TensorRT 10.x to 11.x"."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mptune.engines.tensorrt.layers import read_layers, type_warnings
from mptune.graph.plan import Precision

HALF, SINGLE = Precision.FP16, Precision.FP32

IN_10 = {HALF: "Row major linear FP16 format", SINGLE: "Row major linear FP32"}
IN_11 = {HALF: "Half", SINGLE: "Float"}


def tensor(version: int, name: str, precision: Precision) -> dict[str, Any]:
    facts: dict[str, Any] = {"Name": name, "Location": "Device", "Dimensions": [1, 8]}
    if version == 10:
        return {**facts, "Format/Datatype": IN_10[precision]}
    return {**facts, "Format": "Row major linear (kLINEAR)", "Datatype": IN_11[precision]}


def document(version: int, *layers: tuple[str, Precision, Precision]) -> str:
    """Layers as (ONNX nodes with a plus between them, type of the input, type of the output)."""
    described = [
        {
            "Name": f"{nodes}_myl0_{position}",
            "LayerType": "gemm",
            "Inputs": [tensor(version, "a", taken)],
            "Outputs": [tensor(version, "b", given)],
            "TacticName": "sm80_xmma_gemm_f16f16_f16f32_f32",
            "StreamId": 0,
            "Metadata": "\x1e".join(f"[ONNX Layer: {node}]" for node in nodes.split("+")) if nodes else "",
        }
        for position, (nodes, taken, given) in enumerate(layers)
    ]
    if version == 10:
        return json.dumps({"Layers": described, "Bindings": ["a", "b"]})
    return json.dumps({"Layers": described, "I/O Tensors": [{"Name": "a", "IOMode": "Input", "DataType": "Float"}]})


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("Row major linear FP16 format", HALF),
        ("Channel major FP16 format where channel % 8 == 0", HALF),
        ("Two wide channel vectorized row major FP16 format", HALF),
        ("Row major linear FP32", SINGLE),
        ("Float", SINGLE),
        ("Half", HALF),
        ("BFloat16", Precision.BF16),
        ("Row major linear BF16", Precision.BF16),
        ("Row major Int32 format", None),
        ("Thirty-two wide channel vectorized row major Int8 format.", None),
        ("N/A due to dynamic shapes", None),
        ("Bool", None),
    ],
)
def test_the_types_in_tensorrts_words(text: str, precision: Precision | None) -> None:
    for key in ("Format/Datatype", "Datatype", "DataType"):
        entry = {"Name": "l", "Inputs": [], "Outputs": [{"Name": "y", key: text}]}
        (layer,) = read_layers(json.dumps({"Layers": [entry]}))
        assert layer.types == (() if precision is None else (precision,))


@pytest.mark.parametrize("text", ["", "no JSON", "[]", '{"Layers": ["a name only", "another"]}', '{"Bindings": []}'])
def test_what_tells_no_types_gives_no_layers_and_no_warnings(text: str) -> None:
    assert read_layers(text) == ()
    assert type_warnings({"n": HALF}, read_layers(text)) == ()


@pytest.mark.parametrize("version", [10, 11])
def test_an_engine_that_does_what_the_plan_says(version: int) -> None:
    nodes = {"a": HALF, "b": SINGLE}
    layers = read_layers(document(version, ("a", HALF, HALF), ("b", SINGLE, SINGLE)))
    assert type_warnings(nodes, layers) == ()


@pytest.mark.parametrize("version", [10, 11])
def test_a_layer_in_another_type_is_told(version: int) -> None:
    nodes = {"a": HALF, "b": HALF, "c": SINGLE}
    layers = read_layers(document(version, ("a", HALF, HALF), ("b", SINGLE, SINGLE), ("c", SINGLE, SINGLE)))
    (warning,) = type_warnings(nodes, layers)
    assert warning.startswith("1 of 3 layers")
    assert "'b_myl0_1' (fp32 in place of fp16)" in warning


def test_what_is_fused_over_a_boundary_is_not_judged() -> None:
    layers = read_layers(document(10, ("a+b", HALF, SINGLE), ("c+/c/cast", HALF, SINGLE), ("d", HALF, HALF)))
    assert type_warnings({"a": HALF, "b": SINGLE, "c": HALF, "d": HALF}, layers) == ()
