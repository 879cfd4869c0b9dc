from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from mptune.engines.base import Failure, Measurement, Stage
from mptune.engines.context import RunContext
from mptune.engines.ort.backend import ONNXRUNTIME, OrtBuilder
from mptune.engines.ort.session import Provider
from mptune.engines.tensorrt.library import LibraryReport, is_installed
from mptune.engines.toolchains import choose as toolchain
from mptune.engines.toolchains.choose import choose_target, list_toolchains, open_toolchain
from mptune.engines.toolchains.measuring import MeasureJob
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.errors import TargetError
from mptune.graph.hazards.hazard import TensorRange
from mptune.graph.loading.model import load_model
from mptune.graph.plan import PrecisionPlan
from mptune.processes.child import Job
from mptune.settings import SearchSettings
from mptune.targets.detect import Gpu
from mptune.targets.roofline import roofline
from mptune.targets.target import load_target
from tests.engines.engine_support import install, make_context

T = TypeVar("T")

DIGITS = Path(__file__).parents[3] / "benchmarks/models/digits_vit.onnx"
NO_GPU = not toolchain.detect_gpus()


def measured(found: Measurement | Failure | None) -> Measurement:
    assert isinstance(found, Measurement), found
    return found


def test_tf32_is_predicted_and_emulated_on_a_device_that_is_not_here(
    mlp_context: RunContext, fp32: PrecisionPlan, fp16: PrecisionPlan
) -> None:
    with Toolchain(None, load_target("h200"), mlp_context) as tools:
        assert not isinstance(tools.reference("search"), Failure)
        tf32, base, half = map(measured, (tools.evaluate_tf32(), tools.evaluate(fp32), tools.evaluate(fp16)))
        assert (tf32.latency.source, tf32.error_source) == ("predicted", "emulated")
        assert half.latency.median_ms < tf32.latency.median_ms < base.latency.median_ms
        assert 1e-5 < tf32.error.value("relative_l2") < 1e-3
    assert not list(mlp_context.weights_dir.glob("*.onnx"))


def test_the_prior_of_latencies_is_the_roofline_whatever_the_engine(mlp_context: RunContext) -> None:
    target, grouped = load_target("h200"), mlp_context.grouped
    with Toolchain(None, target, mlp_context) as predicted:
        ranges = predicted.observe()
        assert not isinstance(ranges, Failure)
        shapes = {name: seen.shape for name, seen in ranges.items()}
        assert predicted.latency_terms() == roofline(grouped, target, shapes)
    with Toolchain(None, target, mlp_context.with_settings(tf32=True)) as predicted:
        with_tf32 = roofline(grouped, target, shapes, tf32=True)
        assert predicted.latency_terms() == with_tf32
        assert with_tf32.tf32_gain_ms > 0
    with Toolchain(ONNXRUNTIME, target, mlp_context, "cuda") as tools:
        tools.reference_model._ranges = ranges  # the CUDA provider need not run here
        assert tools.latency_terms() == roofline(grouped, target, shapes)


@pytest.mark.parametrize(("name", "expected"), [("mlp", False), ("cnn", True), ("digits", False)])
def test_convolutions_leave_tf32_to_the_environment(
    name: str, expected: bool, mlp_path: Path, cnn_path: Path, settings: SearchSettings, tmp_path: Path
) -> None:
    path = {"mlp": mlp_path, "cnn": cnn_path, "digits": DIGITS}[name]
    model = load_model(path)
    target = load_target("h200")
    feed = {v.name: np.ones([d if isinstance(d, int) else 2 for d in v.shape or ()], np.float32) for v in model.inputs}
    context = make_context(model, tmp_path, feed, settings=settings)
    with Toolchain(None, target, context) as predicted:
        ranges = predicted.observe()
    assert not isinstance(ranges, Failure)

    def rule(provider: Provider, seen: Mapping[str, TensorRange]) -> bool:
        """Whether the CUDA provider, which need not run here, knows the shapes, or knows none."""
        with Toolchain(ONNXRUNTIME, target, context, provider) as tools:
            tools.reference_model._ranges = seen
            assert isinstance(tools.builder, OrtBuilder)
            return tools.builder.tf32_by_environment

    assert rule("cuda", ranges) is expected
    assert rule("cuda", {}) is (name != "mlp")  # any convolution will do where nothing can be counted
    assert not rule("cpu", ranges)


@pytest.mark.parametrize("convolves", [False, True])
def test_only_what_is_timed_leaves_tf32_to_the_environment(
    convolves: bool, mlp_context: RunContext, fp16: PrecisionPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``convolves`` as the CUDA provider does where convolutions are a good part of the work."""
    seen: dict[str, list[str]] = {}
    with Toolchain(ONNXRUNTIME, load_target("cpu"), mlp_context) as tools:
        monkeypatch.setattr(tools.builder, "tf32_by_environment", convolves)
        call = tools.worker.call

        def heard(job: Job[T], timeout_s: float | None = None) -> T | Failure:
            engines = (job.engine, job.baseline) if isinstance(job, MeasureJob) else ()
            seen[type(job).__name__] = [engine.options.tf32 for engine in engines]
            return call(job, timeout_s)

        monkeypatch.setattr(tools.worker, "call", heard)
        assert not isinstance(tools.reference("search"), Failure)
        measured(tools.evaluate(fp16))
    assert seen == {
        "ReferenceJob": [],
        "MeasureJob": ["off by environment" if convolves else "off"] * 2,
        "ObserveJob": [],
    }


@pytest.mark.slow
def test_latency_is_corrected_for_drift_across_resumed_runs(mlp_context: RunContext, fp32: PrecisionPlan) -> None:
    def evaluate() -> Measurement:
        with open_toolchain(load_target("cpu"), mlp_context) as tools:
            if not mlp_context.reference("search").exists():
                tools.reference("search")
            return measured(tools.evaluate(fp32))

    first = evaluate()
    (record,) = mlp_context.data_dir.glob("timing-*.json")
    document = json.loads(record.read_text())
    assert document["baseline_ms"] == first.baseline.median_ms
    document["baseline_ms"] = 1000.0
    record.write_text(json.dumps(document))
    later = evaluate()
    assert later.drift == pytest.approx(1000.0 / later.baseline.median_ms)
    assert any("as long as when it was first measured" in warning for warning in later.warnings)
    assert len(later.latency.raw_ms) == len(first.latency.raw_ms)
    record.write_text("damaged")
    assert evaluate().drift == 1.0


def test_failures_come_back_as_values_and_the_next_call_works(mlp_context: RunContext, fp16: PrecisionPlan) -> None:
    with open_toolchain(load_target("cpu"), mlp_context) as tools:
        assert not isinstance(tools.reference("search"), Failure)
        mlp_context.weights_dir.mkdir(exist_ok=True)
        measured(tools.evaluate(fp16))
        weights = {path: path.read_bytes() for path in mlp_context.weights_dir.glob("fp*.bin")}
        assert weights
        for path in weights:
            path.unlink()
        failure = tools.evaluate(fp16)
        assert isinstance(failure, Failure)
        assert failure.stage is Stage.BUILD
        assert failure.message
        assert failure.log_path is not None
        assert failure.log_path.parent == mlp_context.logs_dir
        for path, content in weights.items():
            path.write_bytes(content)
        measured(tools.evaluate(fp16))
    assert not list(mlp_context.weights_dir.glob("*.onnx"))


def test_a_named_target_is_taken_at_its_word_and_without_a_gpu_auto_is_a_jetson() -> None:
    choice = choose_target("cpu")
    assert (choice.target.name, choice.why) == ("cpu", "")
    with pytest.raises(TargetError):
        choose_target("no-such-device")
    if NO_GPU:
        choice = choose_target("auto")
        assert choice.target.name == "jetson-orin-nano-8gb"
        assert "no GPU" in choice.why


def test_a_device_file_without_a_name_is_no_reason_to_predict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "detect_gpus", lambda: ())
    monkeypatch.setattr(toolchain, "hidden_gpu", lambda: Path("/dev/nvhost-gpu"))
    with pytest.raises(TargetError, match="/dev/nvhost-gpu shows an NVIDIA GPU") as caught:
        choose_target("auto")
    assert "NAME predicts" in caught.value.hint
    assert choose_target("jetson-orin-nano-8gb").target.kind == "jetson"


def test_what_keeps_tensorrt_from_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime is not installed with CUDA on a Jetson: its reason alone would mislead."""
    orin = Gpu("NVIDIA Jetson Orin Nano", (8, 7), 7.8, "L4T 36.4.3", is_jetson=True)
    obstacle = "the driver is older than the CUDA of cuda-python: pip install 'cuda-bindings<13', or update the driver"
    monkeypatch.setattr(toolchain, "detect_gpus", lambda: (orin,))
    report = LibraryReport("10.3.0", (), obstacle)
    install(monkeypatch, "no CUDA provider", tensorrt=report)
    assert obstacle in choose_target("auto").why
    statuses = {status.name: status for status in list_toolchains()}
    assert obstacle in statuses["tensorrt"].reason


@pytest.mark.skipif(not NO_GPU, reason="needs a machine without a GPU")
@pytest.mark.usefixtures("gpu_here")
def test_a_gpu_whose_provider_does_not_start_is_predicted(
    monkeypatch: pytest.MonkeyPatch, mlp_context: RunContext
) -> None:
    install(monkeypatch, "no CUDA")
    choice = choose_target("auto")
    assert "RTX 4500 Ada" in choice.why
    assert "cannot be measured" in choice.why
    with pytest.raises(TargetError, match="cannot be used for NVIDIA RTX 4500 Ada"):
        open_toolchain(choice.target, mlp_context.with_settings(engine="onnxruntime"))
    with open_toolchain(choice.target, mlp_context) as tools:
        assert tools.provider == "cpu"
        assert any("passed over for NVIDIA RTX 4500 Ada" in warning for warning in tools.environment().warnings)


def test_every_toolchain_says_how_it_stands() -> None:
    statuses = {status.name: status for status in list_toolchains()}
    assert statuses["onnxruntime-cpu"].available
    assert all(status.reason for status in statuses.values())
    assert statuses.keys() == {"onnxruntime-cuda", "onnxruntime-cpu", "tensorrt", "tensorrt-rtx"}
    assert all(status.available or status.install or "no GPU" in status.reason for status in statuses.values())
    if NO_GPU and is_installed("tensorrt-rtx"):
        assert "builds ahead of time for compute capability 7.5, 8.0, 8.6, 8.9" in statuses["tensorrt-rtx"].reason
    if not is_installed("tensorrt"):
        assert statuses["tensorrt"].reason == "tensorrt is not installed"
        assert "pip install tensorrt" in statuses["tensorrt"].install
