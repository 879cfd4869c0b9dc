"""A search over FP32, FP16 and BF16 of a network that overflows in FP16, predicted for a device that is not here."""

from __future__ import annotations

import io
import json
import re
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
from tests.graph.models import constant, model, node, save, value

pytestmark = pytest.mark.usefixtures("opened_here")

ALL = ("fp32", "fp16", "bf16")
BUDGET, TARGET = 8, "jetson-orin-nano-8gb"


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Three products; what the second computes is beyond 65504, and is scaled down before the third."""
    folder = tmp_path_factory.mktemp("overflowing")
    rng = np.random.default_rng(0)
    nodes = [
        node("MatMul", ["x", "w1"], "a", "first"),
        node("Relu", ["a"], "b", "relu"),
        node("MatMul", ["b", "w2"], "c", "large"),
        node("Mul", ["c", "small"], "d", "scale"),
        node("MatMul", ["d", "w3"], "y", "last"),
    ]
    weights = [
        constant("w1", rng.standard_normal((256, 256)) * 12),
        constant("w2", rng.standard_normal((256, 256)) * 20),
        constant("small", np.array(1e-6)),
        constant("w3", rng.standard_normal((256, 8))),
    ]
    proto = model(nodes, [value("x", [32, 256])], [value("y", [32, 8])], weights)
    np.savez(folder / "x.npz", x=rng.standard_normal((96, 256)).astype(np.float32))
    return save(proto, folder), folder / "x.npz"


@pytest.fixture(scope="module")
def searched(overflowing: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[mptune.Front, Path]:
    path, data = overflowing
    out = tmp_path_factory.mktemp("run") / "r.mptune"
    front = mptune.search(
        path,
        data=data,
        out=out,
        target=TARGET,
        budget=BUDGET,
        precisions=ALL,
        progress=False,
        max_error=0.1,
    )
    return front, out


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


def test_a_search_without_fp16_speaks_of_bf16(overflowing: tuple[Path, Path], tmp_path: Path) -> None:
    out, bf16 = tmp_path / "r.mptune", ("fp32", "bf16")
    front = mptune.search(
        overflowing[0], data=overflowing[1], out=out, target=TARGET, budget=3, precisions=bf16, progress=False
    )
    assert front.chosen is not None
    assert front.chosen.plan.bf16_groups
    stream = io.StringIO()
    print_front(front, stream)
    print_explanation(front, stream)
    text = stream.getvalue()
    assert "info: overflow (g001): " in text, "BF16 holds it"
    assert "explicit BF16 roundings" in text
    shown = (
        text.partition("What breaks")[0].replace("FP16+BF16/32", "").replace("breaks     in FP16: overflow (g001)", "")
    )
    assert "FP16" not in shown
    nothing = replace(front, findings=(), explanation=Explanation())
    assert breaking_precision(nothing) == "BF16"
    assert breaking_precision(front) == "FP16"
    readme = (out / "chosen" / "README.txt").read_text()
    assert " in BF16, the rest in FP32" in readme
    assert "BF16 weights" in readme
    assert "roundings to FP16" not in readme


def test_the_run_is_read_and_resumed(overflowing: tuple[Path, Path], searched: tuple[mptune.Front, Path]) -> None:
    front, out = searched
    assert mptune.report(out).points[0].plan == front.points[0].plan
    again = mptune.search(
        overflowing[0], data=overflowing[1], out=out, target=TARGET, budget=BUDGET, precisions=ALL, progress=False,
        max_error=0.1,
    )  # fmt: skip
    assert [p.plan for p in again.points] == [p.plan for p in front.points]
    with pytest.raises(RunError, match="another --precisions"):
        mptune.search(overflowing[0], data=overflowing[1], out=out, target=TARGET, budget=BUDGET, progress=False)


def test_it_is_packed_with_its_weights(searched: tuple[mptune.Front, Path], tmp_path: Path) -> None:
    packed = mptune.export(searched[1], tmp_path / "run.tar.gz")
    with tarfile.open(packed) as file:
        names = {Path(name).name for name in file.getnames()}
    assert {"fp32.bin", "fp16.bin", "bf16.bin"} <= names


@pytest.mark.parametrize("target", ["t4", "cpu"])
def test_a_device_without_bf16_is_refused(target: str, overflowing: tuple[Path, Path], tmp_path: Path) -> None:
    path, data = overflowing
    with pytest.raises(TargetError, match="has no BF16") as caught:
        mptune.search(path, data=data, out=tmp_path / "r", target=target, budget=4, precisions=ALL, progress=False)
    assert "--precisions" in caught.value.hint


@pytest.mark.parametrize("precisions", [("fp16",), ("fp32",), ("fp32", "int8"), ("bf16", "fp32")])
def test_other_sets_are_refused(precisions: tuple[str, ...], overflowing: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="precisions= is"):
        mptune.search(overflowing[0], out=tmp_path / "r", precisions=precisions)


def test_a_search_of_a_raised_model(overflowing: tuple[Path, Path], tmp_path: Path) -> None:
    path, data = overflowing
    out = tmp_path / "r"
    common = {"data": data, "out": out, "target": TARGET, "precisions": ALL, "progress": False}
    before = load_model(path).opset
    mptune.search(path, budget=3, opset=22, **common)
    assert before < 22
    assert json.loads((out / "run.json").read_text())["fixed_settings"]["opset"] == 22
    assert json.loads((out / "chosen" / "plan.json").read_text())["opset"] == 22
    assert load_model(out / "chosen" / "model.onnx", any_precision=True).opset == 22
    front = mptune.search(path, budget=4, opset=22, **common)
    assert front.evaluations == 4
    with pytest.raises(RunError, match="another --opset"):
        mptune.search(path, budget=4, **common)
    applied = mptune.apply(path, out / "chosen" / "plan.json", out=tmp_path / "applied.onnx")
    mixed, chosen = (onnx.load(one).graph for one in (applied, out / "chosen" / "model.onnx"))
    assert [node.op_type for node in mixed.node] == [node.op_type for node in chosen.node]
    assert load_model(applied, any_precision=True).opset == 22
    path_before = path.rename(path.with_suffix(".moved"))
    try:
        fastest = mptune.pick(out, plan=front.points[0].plan.fingerprint).chosen
        assert fastest.plan == front.points[0].plan, "by the copy in the run"
    finally:
        path_before.rename(path)
