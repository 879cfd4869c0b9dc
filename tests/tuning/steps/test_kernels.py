"""Operators without an FP16 kernel: asked once, kept, their groups stay in FP32 and say why."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import mptune
from mptune.engines.base import Failure, FailureKind, MissingKernel, Stage
from mptune.errors import RunError
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.hazards.seen import TensorRange
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
from mptune.tuning.front import Front
from mptune.tuning.steps.kernels import MissingKernels
from tests.fakes import Diary, FakeToolchain, Law, search
from tests.graph.norms_written_out import X, rms_norm
from tests.graph.test_fused import NORM

pytestmark = pytest.mark.usefixtures("opened_here")

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
SOFTMAX = MissingKernel("mixing/Softmax", "Softmax", CUDA, CPU)
BROKEN = Failure(Stage.BUILD, FailureKind.CRASH, "killed by SIGSEGV")


def grouped() -> GroupedModel:
    model = load_model("model.onnx")
    return GroupedModel(model, find_groups(model))


def make_toolchain(*answers: tuple[MissingKernel, ...] | Failure) -> FakeToolchain:
    return FakeToolchain(Law([group.id for group in grouped().groups]), kernel_answers=answers)


def precisions(front: Front, group: str) -> set[Precision]:
    assert front.fp16 is not None
    return {evaluation.plan.precision[group] for evaluation in (*front.points, front.fp16)}


@pytest.mark.usefixtures("place")
def test_a_group_without_a_kernel_stays_in_fp32_with_a_finding_and_a_reason() -> None:
    toolchain, group = make_toolchain((SOFTMAX,)), grouped().owners[SOFTMAX.node]
    front = search(toolchain, budget=10)
    assert toolchain.asked_for_kernels == 1
    assert precisions(front, group) == {Precision.FP32}
    (finding,) = [one for one in front.findings if one.code == "no-fp16-kernel"]
    assert (finding.severity, finding.origin) == ("info", "search")
    assert (finding.where.nodes, finding.where.groups) == ((SOFTMAX.node,), (group,))
    assert finding.evidence["operator"] == "Softmax"
    assert f"{CUDA} has no FP16 kernel for Softmax" in finding.text
    document = json.loads(Path("model.mptune/front.json").read_text())
    assert "no-fp16-kernel" in {one["code"] for one in document["findings"]}
    kept = {one.worth.group: one for one in front.explanation.kept[front.points[0].plan.fingerprint]}
    assert (kept[group].reason, kept[group].finding) == ("no-kernel", "no-fp16-kernel")
    assert "no FP16 kernel for Softmax" in kept[group].because
    later = make_toolchain(())
    front = search(later, budget=12)
    assert len(later.built) > 0
    assert later.asked_for_kernels == 0, "a resumed run knows it"
    assert precisions(front, group) == {Precision.FP32}
    assert [one for one in front.findings if one.code == "no-fp16-kernel"] == [finding]


@pytest.mark.usefixtures("place")
def test_an_engine_that_fails_once_is_asked_in_a_fresh_process() -> None:
    toolchain, group = make_toolchain(BROKEN, (SOFTMAX,)), grouped().owners[SOFTMAX.node]
    front = search(toolchain, budget=10)
    assert toolchain.asked_for_kernels == 2
    assert precisions(front, group) == {Precision.FP32}


@pytest.mark.usefixtures("place")
def test_an_engine_that_fails_again_pins_nothing_and_warns() -> None:
    toolchain, diary = make_toolchain(BROKEN), Diary()
    front = search(toolchain, budget=10, listener=diary)
    assert toolchain.asked_for_kernels == 2
    assert front.fp16 is not None
    assert not front.fp16.plan.fp32_groups
    assert not [one for one in front.findings if one.code == "no-fp16-kernel"]
    (warning,) = [text for text in diary.warnings if "FP16 kernel" in text]
    assert "SIGSEGV" in warning
    assert warning in front.warnings


@pytest.mark.usefixtures("place")
def test_nodes_outside_of_the_groups_pin_nothing() -> None:
    kernels = MissingKernels({Precision.FP16: (MissingKernel("shape/Gather", "Gather", CUDA, CPU),)})
    assert kernels.pins(grouped()) == {}
    assert kernels.findings(grouped()) == ()


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("content", [None, b'{"nodes": [{"odd": 1}]}'])
def test_a_lost_answer_is_asked_for_again(content: bytes | None) -> None:
    data, group = Path("model.mptune/data"), grouped().owners[SOFTMAX.node]
    search(make_toolchain((SOFTMAX,)), budget=8)
    if content is None:
        (data / "kernels.json").unlink()
    else:
        (data / "kernels.json").write_bytes(content)
    later, diary = make_toolchain((SOFTMAX,)), Diary()
    front = search(later, budget=12, listener=diary)
    assert later.asked_for_kernels == 1
    assert any("kernels.json" in text for text in diary.warnings)
    assert precisions(front, group) == {Precision.FP32}
    again = make_toolchain(())
    search(again, budget=13)
    assert again.asked_for_kernels == 0


@pytest.mark.usefixtures("place")
def test_a_run_with_a_lost_answer_is_not_packed() -> None:
    search(make_toolchain((SOFTMAX,)), budget=8)
    Path("model.mptune/data/kernels.json").unlink()
    with pytest.raises(RunError, match=r"kernels\.json is missing or damaged"):
        mptune.export("model.mptune", "out.tar.gz")


@pytest.mark.parametrize("fused", [True, False])
def test_squares_inside_of_a_fused_norm_pin_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    """Also when the run is resumed: the engine is asked once."""
    monkeypatch.chdir(tmp_path)
    rms_norm(tmp_path).path.rename("model.onnx")
    np.savez("data.npz", x=np.concatenate([X] * 8))
    law, norm = Law([group.id for group in grouped().groups]), grouped().owners["n_q"]
    ranges = {"q": TensorRange(4.9e5, (64, 32), lowest=0.0, highest=4.9e5)}
    for budget, norms in ((8, (NORM,) if fused else ()), (12, ())):
        toolchain = FakeToolchain(law, ranges=ranges, fused=norms)
        front = search(toolchain, budget=budget)
        assert front.fp16 is not None
        assert front.fp16.plan.precision[norm] is (Precision.FP16 if fused else Precision.FP32)
    kept = MissingKernels.load(Path("model.mptune/data/kernels.json"))
    assert kept.fused == ((NORM,) if fused else ())
