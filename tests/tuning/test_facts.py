"""What is asked once before a search: kernels that are missing, ranges of values, the device, its memory."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import mptune
from mptune.engines.base import Failure, FailureKind, MissingKernel, Stage
from mptune.engines.environment import Environment
from mptune.errors import BaselineError, RunError
from mptune.files import write_json
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.hazards.hazard import TensorRange
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
from mptune.settings import SearchSettings
from mptune.targets.detect import JetsonState, PowerMode
from mptune.targets.target import load_target
from mptune.tuning.bench import Silent
from mptune.tuning.facts import MissingKernels, Observations, observe
from mptune.tuning.front import Front
from mptune.tuning.measuring import Measuring
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
    kept = {one.worth.group: one for one in front.explanation.by_plan[front.points[0].plan.fingerprint]}
    assert (kept[group].reason, kept[group].finding) == ("no-kernel", "no-fp16-kernel")
    assert "no FP16 kernel for Softmax" in kept[group].because
    later = make_toolchain(())
    front = search(later, budget=12)
    assert len(later.built) > 0
    assert later.asked_for_kernels == 0, "a resumed run knows it"
    assert precisions(front, group) == {Precision.FP32}
    assert [one for one in front.findings if one.code == "no-fp16-kernel"] == [finding]


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("answers", [(BROKEN, (SOFTMAX,)), (BROKEN,)])
def test_an_engine_that_fails_is_asked_in_a_fresh_process(answers: tuple[tuple[MissingKernel, ...] | Failure]) -> None:
    toolchain, diary, group = make_toolchain(*answers), Diary(), grouped().owners[SOFTMAX.node]
    front, is_answered = search(toolchain, budget=10, listener=diary), len(answers) == 2
    assert toolchain.asked_for_kernels == 2
    assert (precisions(front, group) == {Precision.FP32}) is is_answered
    warnings = [text for text in diary.warnings if "FP16 kernel" in text]
    assert len(warnings) == (not is_answered)
    assert set(warnings) <= set(front.warnings)
    assert all("SIGSEGV" in text for text in warnings)


@pytest.mark.usefixtures("place")
def test_nodes_outside_of_the_groups_pin_nothing() -> None:
    kernels = MissingKernels({Precision.FP16: (MissingKernel("shape/Gather", "Gather", CUDA, CPU),)})
    assert kernels.pins(grouped()) == {}
    assert kernels.findings(grouped()) == ()


@pytest.mark.parametrize("fused", [True, False])
def test_squares_in_a_fused_norm_pin_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
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
    kept = Observations.load(Path("model.mptune/data/observed.json"))
    assert kept.kernels.fused == ((NORM,) if fused else ())


def test_observations_survive_their_file(tmp_path: Path) -> None:
    ranges = {"t": TensorRange(600.0, (2, 3)), "u": TensorRange(math.inf)}
    toolchain, diary = FakeToolchain(Law(()), ranges=ranges), Diary()
    seen = observe(toolchain, diary)
    assert diary.stages == ["computing the reference outputs", "observing the ranges of values"]
    assert seen.observed.absmax == {"t": 600.0, "u": math.inf}
    assert seen.observed.shapes == {"t": (2, 3), "u": ()}
    path = tmp_path / "observed.json"
    write_json(path, seen.to_json())
    assert Observations.load(path) == seen
    path.write_text(path.read_text()[:-10])
    with pytest.raises(RunError, match=r"observed\.json cannot be read"):
        Observations.load(path)
    assert Observations.load(tmp_path / "none.json") is None


def test_a_model_that_cannot_be_observed_is_told() -> None:
    broken = FakeToolchain(Law(()), ranges=Failure(Stage.RUN, FailureKind.OUT_OF_MEMORY, "too large"))
    with pytest.raises(BaselineError, match="cannot be observed"):
        observe(broken, Diary())


class OnJetson(FakeToolchain):
    """Its machine is an Orin Nano at a floating clock."""

    def environment(self) -> Environment:
        state = JetsonState("NVIDIA Jetson Orin Nano", "p3767-0003", mode=PowerMode(gpu_mhz=624.0), gpu_min_mhz=306.0)
        return replace(super().environment(), warnings=("own",), jetson=state)


def warnings_of(toolchain: FakeToolchain, target: str | None) -> tuple[str, ...]:
    context, profile = SimpleNamespace(settings=SearchSettings()), None if target is None else load_target(target)
    return Measuring.open(context, profile, Silent(), lambda _: toolchain).environment.warnings  # type: ignore[arg-type]


def test_a_profile_that_the_device_belies_is_a_warning() -> None:
    toolchain = OnJetson(Law(["g000"]))
    own, floats = warnings_of(toolchain, "jetson-orin-nano-8gb")
    assert own == "own"
    assert "floats between 306 and 624 MHz" in floats
    assert any("another module" in text for text in warnings_of(toolchain, "jetson-orin-nx-8gb"))
    assert warnings_of(toolchain, None) == ("own",)
    toolchain.latency_source = "predicted"
    assert warnings_of(toolchain, "h200") == ("own",), "what is predicted is not this machine"


def test_a_search_warns_before_it_starts(mlp_path: Path, mlp_data: Path, tmp_path: Path) -> None:
    """A board of the user's own with 10 kB of memory; the model has 34 kB of weights."""
    (tmp_path / "tiny.toml").write_text(
        'format = 1\ntitle = "Tiny board"\nkind = "jetson"\ncompute_capability = "8.7"\nfp16_tflops = 1\n'
        "fp32_tflops = 0.5\nbandwidth_gbps = 10\nlaunch_us = 4\nmemory_gb = 1e-5\n"
    )
    diary = Diary()
    settings = {"data": mlp_data, "target": str(tmp_path / "tiny.toml"), "out": tmp_path / "run.mptune"}
    front = mptune.search(mlp_path, listener=diary, budget=2, **settings)  # type: ignore[arg-type]
    (told,) = (text for text in diary.warnings if "all-FP32 needs about" in text)
    assert "GB are free on Tiny board" in told
    assert told in front.warnings
    assert told in mptune.search(mlp_path, budget=2, **settings).warnings, "also when it is resumed"  # type: ignore[arg-type]
