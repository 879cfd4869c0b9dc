"""What is asked once before a search: missing kernels, ranges of values, TF32, the device, its memory."""

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
from mptune.engines.latency import Latency
from mptune.errors import BaselineError, RunError
from mptune.files import write_json
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.hazards.hazard import TensorRange
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
from mptune.settings import SearchSettings
from mptune.targets.detect import JetsonState, PowerMode
from mptune.targets.target import load_target
from mptune.tuning.bench import Logged
from mptune.tuning.facts import MissingKernels, Observations, observe
from mptune.tuning.front import Front
from mptune.tuning.measuring import Measuring
from tests.fakes import Diary, FakeToolchain, Law, make_toolchain, search
from tests.graph.norms_written_out import X, rms_norm
from tests.graph.test_fused import NORM

pytestmark = pytest.mark.usefixtures("opened_here", "place")

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
SOFTMAX = MissingKernel("mixing/Softmax", "Softmax", CUDA, CPU)
BROKEN = Failure(Stage.BUILD, FailureKind.CRASH, "killed by SIGSEGV")


def grouped() -> GroupedModel:
    model = load_model("model.onnx")
    return GroupedModel(model, find_groups(model))


def precisions(front: Front, group: str) -> set[Precision]:
    return {evaluation.plan.precision[group] for evaluation in (*front.points, front.fp16)}


def test_a_group_without_a_kernel_stays_in_fp32_with_a_finding_and_a_reason() -> None:
    toolchain, group = make_toolchain(kernel_answers=[(SOFTMAX,)]), grouped().owners[SOFTMAX.node]
    front = search(toolchain, budget=10)
    assert toolchain.asked_for_kernels == 1
    assert precisions(front, group) == {Precision.FP32}
    (finding,) = (f for f in front.findings if f.code == "no-fp16-kernel")
    assert (finding.severity, finding.origin) == ("info", "search")
    assert (finding.where.nodes, finding.where.groups) == ((SOFTMAX.node,), (group,))
    assert finding.evidence["operator"] == "Softmax"
    assert f"{CUDA} has no FP16 kernel for Softmax" in finding.text
    document = json.loads(Path("model.mptune/front.json").read_text())
    assert "no-fp16-kernel" in {f["code"] for f in document["findings"]}
    (kept,) = (k for k in front.explanation.fp32_groups(front.points[0].plan.fingerprint) if k.worth.group == group)
    assert (kept.reason, kept.finding) == ("no-kernel", "no-fp16-kernel")
    assert "no FP16 kernel for Softmax" in kept.because
    later = make_toolchain()
    front = search(later, budget=12)
    assert later.built
    assert later.asked_for_kernels == 0, "a resumed run knows it"
    assert precisions(front, group) == {Precision.FP32}
    assert [f for f in front.findings if f.code == "no-fp16-kernel"] == [finding]


@pytest.mark.parametrize("answers", [(BROKEN, (SOFTMAX,)), (BROKEN,)])
def test_an_engine_that_fails_is_asked_in_a_fresh_process(answers: tuple[tuple[MissingKernel, ...] | Failure]) -> None:
    toolchain, diary, group = make_toolchain(kernel_answers=answers), Diary(), grouped().owners[SOFTMAX.node]
    front, is_answered = search(toolchain, budget=10, listener=diary), len(answers) == 2
    assert toolchain.asked_for_kernels == 2
    assert (precisions(front, group) == {Precision.FP32}) is is_answered
    warnings = [text for text in diary.warnings if "FP16 kernel" in text]
    assert len(warnings) == (not is_answered)
    assert set(warnings) <= set(front.warnings)
    assert all("SIGSEGV" in text for text in warnings)


def test_nodes_outside_of_the_groups_pin_nothing() -> None:
    kernels = MissingKernels({Precision.FP16: (MissingKernel("shape/Gather", "Gather", CUDA, CPU),)})
    assert kernels.pins(grouped()) == {}
    assert kernels.findings(grouped()) == ()


@pytest.mark.parametrize("fused", [True, False])
def test_squares_in_a_fused_norm_pin_nothing(fused: bool) -> None:
    """Also when the run is resumed: the engine is asked once."""
    rms_norm(Path()).path.rename("model.onnx")
    np.savez("data.npz", x=np.concatenate([X] * 8))
    norm, ranges = grouped().owners["n_q"], {"q": TensorRange(4.9e5, (64, 32), lowest=0.0, highest=4.9e5)}
    for budget, norms in ((8, (NORM,) if fused else ()), (12, ())):
        front = search(make_toolchain(ranges=ranges, fused=norms), budget=budget)
        assert front.fp16.plan.precision[norm] is (Precision.FP16 if fused else Precision.FP32)
    kept = Observations.load(Path("model.mptune/data/observed.json"))
    assert kept.kernels.fused == ((NORM,) if fused else ())


def test_tf32_is_measured_once_and_bounds_what_is_chosen() -> None:
    without = search(make_toolchain(), budget=8, out="without.mptune")
    assert without.tf32 is without.to_json()["baseline"]["tf32"] is None, "the device has none"
    assert without.chosen.plan.reduced_groups
    ms, error = 0.5 * without.chosen.latency.median_ms, 0.01 * without.chosen.judged_error
    toolchain = make_toolchain(tf32=(ms, error))
    front = search(toolchain, budget=8)
    assert front.tf32.error_value == pytest.approx(error)
    assert front.tf32.speedup == pytest.approx(front.fp32.latency.median_ms / front.tf32.latency.median_ms)
    kept = json.loads(Path("model.mptune/front.json").read_text())["baseline"]["tf32"]
    assert kept["latency"]["median_ms"] == pytest.approx(front.tf32.latency.median_ms)
    assert kept["fp32"] == []
    assert front.chosen.judged_error <= error, "no plan is as fast, so what is chosen is more exact"
    assert search(toolchain, budget=9).tf32 == front.tf32
    assert toolchain.tf32_calls == 1
    assert toolchain.ahead.count("tf32") == 1, "opened ahead once, as the search begins"
    assert mptune.report("model.mptune").tf32 == front.tf32


def test_observations_survive_their_file(tmp_path: Path) -> None:
    ranges, diary = {"t": TensorRange(600.0, (2, 3)), "u": TensorRange(math.inf)}, Diary()
    shown = observe(FakeToolchain(Law(()), ranges=ranges), diary)
    assert diary.stages == ["computing the reference outputs", "observing the ranges of values"]
    assert shown.observed.absmax == {"t": 600.0, "u": math.inf}
    assert shown.observed.shapes == {"t": (2, 3), "u": ()}
    path = tmp_path / "observed.json"
    write_json(path, shown.to_json())
    assert Observations.load(path) == shown
    path.write_text(path.read_text()[:-10])
    with pytest.raises(RunError, match=r"observed\.json cannot be read"):
        Observations.load(path)
    assert Observations.load(tmp_path / "none.json") is None


def test_what_all_fp32_takes_is_told_where_it_is_measured_first(monkeypatch: pytest.MonkeyPatch) -> None:
    first, diary = SimpleNamespace(latency=Latency.predicted(2.9)), Diary()
    monkeypatch.setattr(FakeToolchain, "evaluate_first", lambda toolchain: first)
    observe(FakeToolchain(Law(()), ranges={}), diary)
    assert diary.stages[-1] == "all-FP32 takes 2.900 ms"


def test_a_model_that_cannot_be_observed_is_told() -> None:
    broken = FakeToolchain(Law(()), ranges=Failure(Stage.RUN, FailureKind.OUT_OF_MEMORY, "too large"))
    with pytest.raises(BaselineError, match="cannot be observed"):
        observe(broken, Diary())


class OnJetson(FakeToolchain):
    """Its machine is an Orin Nano at a floating clock."""

    def environment(self) -> Environment:
        state = JetsonState("NVIDIA Jetson Orin Nano", "p3767-0003", mode=PowerMode(gpu_mhz=624.0), gpu_min_mhz=306.0)
        return replace(super().environment(), warnings=("own",), jetson=state)


@pytest.mark.parametrize(
    ("target", "source", "texts"),
    [
        ("jetson-orin-nano-8gb", "measured", ["own", "floats between 306 and 624 MHz"]),
        ("jetson-orin-nx-8gb", "measured", ["own", "another module", "set the mode", "floats between"]),
        (None, "measured", ["own"]),
        ("h200", "predicted", ["own"]),  # what is predicted is not this machine
    ],
)
def test_a_profile_that_the_device_belies_is_a_warning(target: str | None, source: str, texts: list[str]) -> None:
    context, profile = SimpleNamespace(settings=SearchSettings()), None if target is None else load_target(target)
    toolchain = OnJetson(Law(["g000"]), latency_source=source)
    warnings = Measuring.open(context, profile, Logged(), lambda _: toolchain).environment.warnings
    assert all(text in warning for text, warning in zip(texts, warnings, strict=True))
    assert toolchain.limit == 1e-2, "by default"


def test_a_search_warns_before_it_starts() -> None:
    """A board of the user's own with 10 kB of memory; the model has 34 kB of weights."""
    Path("tiny.toml").write_text(
        'format = 1\ntitle = "Tiny board"\nkind = "jetson"\ncompute_capability = "8.7"\nfp16_tflops = 1\n'
        "fp32_tflops = 0.5\nbandwidth_gbps = 10\nlaunch_us = 4\nmemory_gb = 1e-5\n"
    )
    diary, settings = Diary(), {"data": "data.npz", "target": "tiny.toml", "budget": 2}
    front = mptune.search("model.onnx", listener=diary, **settings)
    (warning,) = (text for text in diary.warnings if "all-FP32 needs about" in text)
    assert "GB are free on Tiny board" in warning
    assert warning in front.warnings
    assert warning in mptune.search("model.onnx", **settings).warnings, "also when it is resumed"
