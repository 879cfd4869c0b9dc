"""A search over FP32, FP16 and BF16 of a network that overflows in FP16, predicted for a device that is not here."""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import mptune
from mptune.errors import RunError, SettingsError, TargetError
from mptune.graph.loading.model import load_model
from mptune.graph.plan import REDUCED, Precision, PrecisionPlan
from mptune.reporting.terminal.front import print_explanation, print_front
from mptune.reporting.text import breaking_precision
from mptune.tuning.explanation import Explanation
from tests.graph.models import save, text, weight

pytestmark = pytest.mark.usefixtures("opened_here")

ALL = ("fp32", "fp16", "bf16")
BUDGET = 8


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three products; what the second computes is beyond 65504, and is scaled down before the third."""
    graph = """(float[32,256] x) => (float[32,8] y) <float small = {1e-6}> {
        ["first"] a = MatMul(x, w1) ["relu"] b = Relu(a) ["large"] c = MatMul(b, w2) ["scale"] d = Mul(c, small)
        ["last"] y = MatMul(d, w3) }"""
    scales = {"w1": 12.0, "w2": 20.0}
    weights = [weight(name, 256, 256, scale=scale) for name, scale in scales.items()]
    return save(text(graph, *weights, weight("w3", 256, 8, scale=1.0)), tmp_path_factory.mktemp("overflowing"))


def search(path: Path, out: Path, **more: object) -> mptune.Front:
    data = {"x": np.random.default_rng(0).standard_normal((96, 256)).astype(np.float32)}
    given = {"data": data, "target": "jetson-orin-nano-8gb", "budget": BUDGET, "precisions": ALL, **more}
    return mptune.search(path, out=out, **given)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def searched(overflowing: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[mptune.Front, Path]:
    out = tmp_path_factory.mktemp("run") / "r.mptune"
    return search(overflowing, out, max_error=0.1), out


def test_what_overflows_is_bf16_and_the_rest_fp16(searched: tuple[mptune.Front, Path]) -> None:
    front, out = searched
    fastest = front.points[0].plan
    assert len(fastest.bf16_groups) >= 1
    assert all(np.isfinite(point.error_value) for point in front.points)
    written = PrecisionPlan.from_json((out / "chosen" / "plan.json").read_text())
    assert written.fingerprint == front.chosen.plan.fingerprint
    document = json.loads((out / "front.json").read_text())
    assert document["points"][0]["bf16_groups"] == len(fastest.bf16_groups)
    assert "in BF16, the rest in FP32" in (out / "chosen" / "README.txt").read_text()
    constants = onnx.load(out / "chosen" / "model.onnx").graph.initializer
    assert onnx.TensorProto.BFLOAT16 in {constant.data_type for constant in constants}


def test_it_is_explained_with_what_each_group_is(searched: tuple[mptune.Front, Path]) -> None:
    front, _ = searched
    assert front.chosen is not None
    stream = io.StringIO()
    print_explanation(front, stream)
    verdicts = dict(re.findall(r"^(g\d+) .* (\S+)$", stream.getvalue().partition("by error per")[2], re.MULTILINE))
    held = {p: {g for g, verdict in verdicts.items() if verdict == p.name} for p in REDUCED}
    assert held[Precision.BF16] == set(front.chosen.plan.bf16_groups) != set()
    assert held[Precision.FP16] == set(front.chosen.plan.fp16_groups)


def test_a_search_without_fp16_speaks_of_bf16(overflowing: Path, tmp_path: Path) -> None:
    front = search(overflowing, tmp_path / "r.mptune", budget=3, precisions=("fp32", "bf16"))
    assert front.chosen is not None
    assert front.chosen.plan.bf16_groups
    stream = io.StringIO()
    print_front(front, stream)
    print_explanation(front, stream)
    shown = stream.getvalue()
    assert "info: overflow (g001): " in shown, "BF16 holds it"
    assert "explicit BF16 roundings" in shown
    for words in ("FP16+BF16/32", "breaks     in FP16: overflow (g001)"):
        shown = shown.partition("What breaks")[0].replace(words, "")
    assert "FP16" not in shown
    nothing = replace(front, findings=(), explanation=Explanation())
    assert breaking_precision(nothing) == "BF16"
    assert breaking_precision(front) == "FP16"
    readme = (tmp_path / "r.mptune/chosen/README.txt").read_text()
    assert " in BF16, the rest in FP32" in readme
    assert "BF16 weights" in readme
    assert "roundings to FP16" not in readme


def test_the_run_is_read_resumed_and_packed(
    overflowing: Path, searched: tuple[mptune.Front, Path], tmp_path: Path
) -> None:
    front, out = searched
    assert mptune.report(out).points[0].plan == front.points[0].plan
    again = search(overflowing, out, max_error=0.1)
    assert [p.plan for p in again.points] == [p.plan for p in front.points]
    with pytest.raises(RunError, match="another --precisions"):
        search(overflowing, out, precisions=("fp32", "fp16"))
    with tarfile.open(mptune.export(out, tmp_path / "run.tar.gz")) as file:
        names = {Path(name).name for name in file.getnames()}
    assert {"fp32.bin", "fp16.bin", "bf16.bin"} <= names


@pytest.mark.parametrize("target", ["t4", "cpu"])
def test_a_device_without_bf16_is_refused(target: str, overflowing: Path, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="has no BF16") as caught:
        search(overflowing, tmp_path / "r", target=target)
    assert "--precisions" in caught.value.hint


@pytest.mark.parametrize("precisions", [("fp16",), ("fp32",), ("fp32", "int8"), ("bf16", "fp32")])
def test_other_sets_are_refused(precisions: tuple[str, ...], overflowing: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="precisions= is"):
        search(overflowing, tmp_path / "r", precisions=precisions)


def test_a_search_of_a_raised_model(overflowing: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "model.onnx", tmp_path / "r"
    shutil.copy(overflowing, path)
    assert load_model(path).opset < 22
    search(path, out, budget=3, opset=22)
    assert json.loads((out / "run.json").read_text())["fixed_settings"]["opset"] == 22
    assert json.loads((out / "chosen" / "plan.json").read_text())["opset"] == 22
    front = search(path, out, budget=4, opset=22)
    assert front.evaluations == 4
    with pytest.raises(RunError, match="another --opset"):
        search(path, out, budget=4)
    applied = mptune.apply(path, out / "chosen" / "plan.json", out=tmp_path / "applied.onnx")
    mixed, chosen = (load_model(each, any_precision=True) for each in (applied, out / "chosen" / "model.onnx"))
    assert [node.op_type for node in mixed.nodes] == [node.op_type for node in chosen.nodes]
    assert mixed.opset == chosen.opset == 22
    path.unlink()
    fastest = mptune.pick(out, plan=front.points[0].plan.fingerprint).chosen
    assert fastest.plan == front.points[0].plan, "by the copy in the run"
