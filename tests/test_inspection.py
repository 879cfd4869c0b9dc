"""``mptune.inspect`` and what a person sees of it."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest

import mptune
from mptune.errors import BaselineError
from mptune.inspection import Inspection
from mptune.reporting.terminal.front import print_front
from mptune.reporting.terminal.listings import print_inspection, quantity
from tests.conftest import DIGITS
from tests.graph import models
from tests.graph.models import constant, node, weight
from tests.zoo.voice import voice


def shown(inspection: Inspection, monkeypatch: pytest.MonkeyPatch, columns: int = 100) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = io.StringIO()
    print_inspection(inspection, stream)
    return stream.getvalue()


def test_without_data_sizes_are_assumed_and_said_so(mlp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inspection = mptune.inspect(mlp_path, batch=4)
    assert dict(inspection.assumed) == {"batch": 4}
    assert inspection.observed is None
    assert inspection.unknown_shapes == 0
    gemm = next(o for o in inspection.operators if o.name == "Gemm")
    assert gemm.flops == 2 * 4 * (4 * 32 * 64 + 32 * 8)
    assert inspection.parameters == sum(c.nbytes for c in inspection.model.initializers.values()) / 4
    assert [g.repeats for g in inspection.groups if g.group.name == "block0/fc1"] == [2]
    # At fc1 its input of 4 x 32 values, the norm's of 4 x 32 and its output of 4 x 64 are alive, with Relu's.
    assert inspection.memory.fp32_weights == inspection.weight_bytes
    assert inspection.memory.fp32_activations == 4 * 4 * (32 + 64 + 64)
    assert inspection.to_json()["memory_bytes"]["fp16_weights"] == inspection.weight_bytes // 2
    text = shown(inspection, monkeypatch)
    for words in ("ASSUMED: batch = 4", "hazards: none found", "give --data", "in FP16: weights and the values"):
        assert words in text


@pytest.mark.slow
def test_a_look_at_a_large_model_takes_the_first_samples(mlp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"x": np.eye(8, 32, dtype=np.float32)}
    whole = mptune.inspect(mlp_path, data=data)
    assert (whole.samples, whole.available) == (8, 8)
    monkeypatch.setattr("mptune.inspection._OBSERVED_FLOPS", 5.5 * whole.flops)
    few = mptune.inspect(mlp_path, data=data)
    assert (few.samples, few.available, few.to_json()["samples_available"]) == (5, 8, 8)
    assert "observed on 5 samples of arrays: the first of 8; --strict runs all" in shown(few, monkeypatch)
    monkeypatch.setattr("mptune.inspection._OBSERVED_FLOPS", 0.0)
    assert mptune.inspect(mlp_path, data=data).samples == 4
    assert mptune.inspect(mlp_path, data=data, all_samples=True).samples == 8


@pytest.mark.smoke
def test_with_data_ranges_are_observed_and_pin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = """(float[n,4] x) => (float[n,4] y) <float big = {3e4}> {
        ["/one/MatMul"] a = MatMul(x, w) ["/scale/Mul"] b = Mul(a, big) ["/scale/Relu"] c = Relu(b)
        ["/two/MatMul"] d = MatMul(c, w) ["/back/Div"] y = Div(d, big) }"""
    path = models.save(models.text(graph, constant("w", np.eye(4))), tmp_path)
    np.savez(tmp_path / "data.npz", x=np.full((3, 4), 5.0, np.float32))
    assert not any(g.pin for g in mptune.inspect(path).groups)
    inspection = mptune.inspect(path, data=tmp_path / "data.npz", batch=3)
    assert inspection.observed == "data.npz"
    assert inspection.samples == 1
    pins = {g.group.name: g.pin.reason for g in inspection.groups if g.pin is not None}
    assert set(pins) == {"one", "two"}
    assert "reached 1.5e+05" in pins["one"]
    text = shown(inspection, monkeypatch)
    assert "observed on 1 samples of data.npz" in text
    assert "FP32 pinned" in text
    assert "FP32 g000: b: reached 1.5e+05 on the calibration data, FP16 ends at 65504" in text
    document = json.loads(json.dumps(inspection.to_json(), allow_nan=False))
    assert [g["pinned"] and g["pinned"]["precision"] for g in document["groups"]] == ["fp32", "fp32"]
    assert document["shapes"] == {"assumed": {}, "observed": "data.npz", "unknown": 0}
    assert re.search(r"^hazards: \d+ warnings$", text, re.MULTILINE), "a plan repairs each: none is an error"
    assert {hazard["severity"] for hazard in document["hazards"]} == {"warning"}


def test_a_network_in_an_if_has_nothing_to_tune_and_that_is_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inspection = mptune.inspect(models.save(voice(), tmp_path))
    words = "the network lies in If nodes; nothing to tune"
    assert shown(inspection, monkeypatch, 80).splitlines()[0] == f"warning: {words}"
    assert (inspection.findings[0].code, inspection.findings[0].where.nodes) == ("nothing-to-tune", ("by_rate",))
    flat = mptune.inspect(models.save(voice(""), tmp_path))
    assert inspection.weight_bytes == 2 * flat.weight_bytes
    assert "nothing-to-tune" not in [finding.code for finding in flat.findings]
    proto = voice()
    proto.graph.node[1].output[0] = "raw"
    proto.graph.node.append(node("Mul", ["raw", "gain"], "output", "gain"))
    proto.graph.initializer.append(constant("gain", 2.0))
    beside = mptune.inspect(models.save(proto, tmp_path))
    assert beside.findings[0].text == "the network lies in If nodes; nothing to tune but 1 group outside them"


def test_a_quantised_network_has_nothing_to_tune_and_that_is_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = """(float[1,4] x) => (float[1,4] y) {
        q, s, z = DynamicQuantizeLinear(x) i = MatMulInteger(q, w, z) f = Cast<to = 1>(i) y = Mul(f, s) }"""
    path = models.save(models.text(graph, constant("w", np.eye(4), np.int8)), tmp_path)
    text = shown(mptune.inspect(path), monkeypatch)
    assert text.splitlines()[0] == "warning: the network is quantised already; nothing to tune"
    data = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    front = mptune.search(path, data=data, out=tmp_path / "run", budget=3, target="jetson-orin-nano-8gb")
    stream = io.StringIO()
    print_front(front, stream)
    assert stream.getvalue().splitlines()[0] == "warning: the network is quantised already; nothing to tune"
    assert stream.getvalue().count("nothing to") == 1


def test_the_space_decides_granularity_and_pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = tmp_path / "mine.toml"
    space.write_text('format = 1\ngranularity = "block"\n[pin]\nfp32 = ["stem"]\n')
    inspection = mptune.inspect(DIGITS, space=str(space))
    assert inspection.granularity == "block"
    assert [g.group.name for g in inspection.groups if g.pin] == ["stem"]
    text = shown(inspection, monkeypatch)
    assert "at block granularity" in text
    assert f"FP32 g000: pinned to fp32 by 'stem' of {space}" in text
    space.write_text('format = 1\ngranularity = "auto"\n')
    assert mptune.inspect(DIGITS, space=str(space), budget=17).granularity == "fusion"
    assert mptune.inspect(DIGITS, space=str(space), budget=4).granularity == "fusion", "a small budget is no reason"
    assert mptune.inspect(DIGITS, space=str(space), budget=500).granularity == "op"


@pytest.mark.parametrize("columns", [80, 100, 140])
def test_tables_fit_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(mptune.inspect(DIGITS), monkeypatch, columns).splitlines()
    start, end = lines.index("groups"), lines.index("operators")
    rows = lines[start + 1 : end - 1]
    assert len(rows) == 1 + 34
    assert max(len(line.rstrip()) for line in rows) <= columns
    assert all(row.startswith("g0") for row in rows[1:])
    assert all(row.rstrip().endswith("free") for row in rows[1:])
    assert ("LayerNorm" in "".join(rows)) == (columns >= 96)


def test_hazards_of_one_kind_are_shown_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = "".join(f'["scale{k}"] a{k} = Mul(x{k}, huge) ["m{k}"] x{k + 1} = MatMul(a{k}, w)' for k in range(9))
    proto = models.text(f"(float[2,4] x0) => (float[] x9) <float huge = {{1e6}}> {{ {nodes} }}", weight("w", 4, 4))
    path = models.save(proto, tmp_path)
    text = shown(mptune.inspect(path), monkeypatch)
    assert text.count("1e+06 exceeds FP16's 65504 and is held as 65504") == 1, "a search measures what that does"
    assert "and 3 more" in text, "nine groups: the scale of the input, and each product with the scale after it"
    assert "-> " in text


def test_names_are_whole_where_nobody_looks_and_operators_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "/".join(f"encoder_{k}.attention" for k in range(8)) + "/query/MatMul"
    graph = f"""(float[4,4] x) => (float[4,4] y) {{ ["{name}"] a = MatMul(x, w) y = com.example.Mystery(a) }}"""
    proto = models.text(graph, weight("w", 4, 4))
    text = shown(mptune.inspect(models.save(proto, tmp_path)), monkeypatch, 80)
    (row,) = [line for line in text.splitlines() if line.startswith("g000")]
    assert row.split()[1] == name.removesuffix("/MatMul")
    assert row.rstrip().endswith("free")
    assert "com.example.Mystery" in text
    assert "operator of the domain 'com.example'" in " ".join(text.split())


def test_a_model_that_cannot_be_observed_is_reported(mlp_data: Path, tmp_path: Path) -> None:
    graph = "(float[n,32] x) => (float[] z) <int64[2] shape = {7, 7}> { y = Reshape(x, shape) z = Relu(y) }"
    with pytest.raises(BaselineError, match="cannot be observed in FP32") as caught:
        mptune.inspect(models.save(models.text(graph), tmp_path), data=mlp_data)
    assert "mptune-inspect-" not in caught.value.hint, "a log that is gone is not named"


def test_quantities() -> None:
    shown = [quantity(number, "B") for number in (0, 999, 1000, 12345, 999_960, 1.5e9, 123.4e12)]
    assert shown == ["0 B", "999 B", "1.00 kB", "12.3 kB", "1.00 MB", "1.50 GB", "123 TB"]


def test_which_groups_could_be_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value beyond FP16's range, and a convolution, which has no BF16 before opset 22."""
    graph = """(float[1,2,4,4] x) => (float[1,2,4,4] y) <float small = {1e-6}> {
        ["/conv/Conv"] a = Conv(x, kernel) ["/large/MatMul"] b = MatMul(a, w) ["/scale/Mul"] c = Mul(b, small)
        ["/last/MatMul"] y = MatMul(c, v) }"""
    weights = weight("kernel", 2, 2, 1, 1), weight("w", 4, 4, scale=1e6), weight("v", 4, 4)
    path = models.save(models.text(graph, *weights), tmp_path)
    data = np.random.default_rng(0).standard_normal((8, 2, 4, 4)).astype(np.float32)
    inspection = mptune.inspect(path, data=data)
    conv = next(g for g in inspection.groups if "Conv" in g.group.ops)
    assert conv.no_bf16 == ("ONNX has no BF16 for Conv at opset 17; --opset 22 raises the model")
    beyond = [g for g in inspection.groups if g.only_bf16]
    assert beyond
    assert all(g.pin is not None and g.no_bf16 is None for g in beyond)
    assert any("/large/MatMul" in g.group.nodes for g in beyond)
    last = next(g for g in inspection.groups if "/last/MatMul" in g.group.nodes)
    assert (last.no_bf16, last.only_bf16) == (None, False)
    document = next(g for g in inspection.to_json()["groups"] if g["id"] == conv.group.id)
    assert document["no_bf16"] == conv.no_bf16
    text = " ".join(shown(inspection, monkeypatch, 200).split())
    count = len(inspection.groups)
    assert f"{count - 1} of {count} groups could be BF16, {len(beyond)} of them pinned" in text
    assert "1 not: ONNX has no BF16 for Conv" in text
