"""What every toolchain and every backend must do, run against each that can run here; which of them a target gets."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mptune.engines.backend import Backend, Place
from mptune.engines.base import EngineError, Failure, FailureKind, Measurement, Stage
from mptune.engines.context import RunContext
from mptune.engines.environment import GpuState
from mptune.engines.latency import Repetitions
from mptune.engines.ort.backend import ONNXRUNTIME, OrtBuilder
from mptune.engines.ort.cuda_session import OrtEngine
from mptune.engines.ort.session import SessionOptions
from mptune.engines.samples import Scoring
from mptune.engines.spread import LEAST_VALUES
from mptune.engines.tensorrt.backend import TENSORRT
from mptune.engines.tensorrt.builder import BuildJob
from mptune.engines.tensorrt.library import LibraryReport, is_installed
from mptune.engines.toolchains import ahead, choose, measuring as measure, reference, toolchain
from mptune.engines.toolchains.choose import choose_target, find_backends, list_toolchains, open_toolchain
from mptune.engines.toolchains.measuring import STATE_AGE_S, MeasureJob
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.errors import TargetError
from mptune.graph.hazards.hazard import TensorRange
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.processes.child import WorkerState
from mptune.settings import SearchSettings, TensorRtSettings
from mptune.targets.detect import Gpu, PowerMode, detect_gpus
from mptune.targets.roofline import roofline
from mptune.targets.target import load_target
from mptune.tuning.evaluation import ORIGIN_FP16, Evaluation
from tests.device.machines import become
from tests.engines import faults
from tests.engines.engine_support import QUICK, failed, install, make_context, measured, prepare
from tests.engines.evaluator.mptune_evaluator import EVALUATOR

DIGITS = Path(__file__).parents[3] / "benchmarks/models/digits_vit.onnx"
WITHOUT_GPU = pytest.mark.skipif(bool(detect_gpus()), reason="needs a machine without a GPU")
KINDS = [
    "cpu",
    "evaluator",
    "jetson-orin-nano-8gb",
    pytest.param("rtx-4500-ada", marks=[pytest.mark.tensorrt_rtx, WITHOUT_GPU]),
    pytest.param("ada", marks=[pytest.mark.tensorrt_rtx, WITHOUT_GPU]),
]


@pytest.fixture(params=KINDS)
def tools(request: pytest.FixtureRequest, mlp_context: RunContext, tmp_path: Path) -> Iterator[Toolchain]:
    """Measured on the CPU, by a backend of another package, too; predicted; predicted with engines built; measured by
    TensorRT on a device in host memory."""
    with ExitStack() as stack:
        target, context = request.param, mlp_context
        if target == "ada":
            here = stack.enter_context(become("ada", tmp_path / "machine", is_alone=True))
            stack.callback(lambda: here.broken() == [] or pytest.fail(str(here.broken())))
            target, context = here.machine.target, mlp_context.with_settings(engine="tensorrt")
        opened = (
            Toolchain(EVALUATOR, load_target("cpu"), context)
            if target == "evaluator"
            else open_toolchain(load_target(target), context)
        )
        tools = stack.enter_context(opened)
        for which in ("search", "held_out"):
            assert not isinstance(tools.reference(which), Failure)
        yield tools


def test_plans_are_built_run_and_timed_or_predicted(tools: Toolchain, fp32: PrecisionPlan, fp16: PrecisionPlan) -> None:
    is_measured = tools.latency_source == "measured"
    assert tools.error_source == ("measured" if is_measured else "emulated")
    base, half = measured(tools.evaluate(fp32)), measured(tools.evaluate(fp16))
    held_out = measured(tools.evaluate(fp16, "held_out"))
    assert {each.latency.source for each in (base, half, held_out)} == {tools.latency_source}
    assert {each.error_source for each in (base, half, held_out)} == {tools.error_source}
    assert base.error.value("relative_l2") < 1e-6 < half.error.value("relative_l2") < 1e-1
    assert held_out.error != half.error
    once_more = measured(tools.evaluate(fp16))
    tools.restart()
    again = measured(tools.evaluate(fp16))
    assert again.error == half.error
    if is_measured:
        assert LEAST_VALUES <= len(half.latency.raw_ms) == len(half.baseline.raw_ms) <= 10
        assert (base.drift, half.power_mode) == (1.0, None)
        name = base.latency.session.baseline
        assert once_more.latency.session.baseline == name
        is_here = tools.worker.pid is None  # the device in memory runs its jobs in this process
        assert (again.latency.session.baseline == name) is is_here, "of another process"
        assert is_here or half.latency.session.log_ratio != once_more.latency.session.log_ratio
    else:
        assert (base.latency.session, base.baseline, base.error.value("relative_l2")) == (None, None, 0.0)
    if base.engine_path is not None:
        assert {path.parent for path in (base.engine_path, half.engine_path)} == {tools.context.engines_dir}
        assert (again.engine_path, again.build_s) == (half.engine_path, 0.0), "what was measured is what ships"
    tools.close()
    assert not list(tools.context.weights_dir.glob("*.onnx"))
    assert not list(tools.context.logs_dir.glob("*"))


def test_few_samples_show_what_cannot_be_chosen(mlp_context: RunContext, fp16: PrecisionPlan, monkeypatch: Any) -> None:
    monkeypatch.setattr("mptune.engines.toolchains.emulation.QUICK_S", 0.0)
    slower = fp16.replace(dict.fromkeys(fp16.fp16_groups[1:], Precision.FP32))
    with open_toolchain(load_target("jetson-orin-nano-8gb"), mlp_context) as tools:
        assert not isinstance(tools.reference("search"), Failure)
        wanted = ((fp16, None), (fp16, 1e-6), (slower, 1.0), (fp16, 1.0), (slower, 1.0))
        errors = [measured(tools.evaluate(plan)).error for plan, tools.limit in wanted]
    assert [error.sample_count for error in errors] == [4, 2, 4, 4, 2], "beyond it, the fastest within it, behind that"
    assert (errors[1].per_output, errors[3]) == (errors[0].of_first(2).per_output, errors[0])


def test_failures_come_back_as_values_and_the_next_call_works(mlp_context: RunContext, fp16: PrecisionPlan) -> None:
    with open_toolchain(load_target("cpu"), mlp_context) as tools:
        assert not isinstance(tools.reference("search"), Failure)
        measured(tools.evaluate(fp16))
        weights = {path: path.read_bytes() for path in mlp_context.weights_dir.glob("fp*.bin")}
        assert weights
        for path in weights:
            path.unlink()
        failure = failed(tools.evaluate(fp16))
        assert failure.stage is Stage.BUILD
        assert failure.message
        assert failure.log_path is not None
        assert failure.log_path.parent == mlp_context.logs_dir
        for path, content in weights.items():
            path.write_bytes(content)
        measured(tools.evaluate(fp16))
    assert not list(mlp_context.weights_dir.glob("*.onnx"))


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
    record.write_text(json.dumps({**document, "baseline_ms": 1000.0}))
    later = evaluate()
    assert later.drift == pytest.approx(1000.0 / later.baseline.median_ms)
    assert any("as long as when it was first measured" in warning for warning in later.warnings)
    assert len(later.latency.raw_ms) == len(first.latency.raw_ms)
    record.write_text("damaged")
    assert evaluate().drift == 1.0


def test_tf32_is_predicted_and_emulated_and_the_prior_of_latencies_is_the_roofline(
    mlp_context: RunContext, fp32: PrecisionPlan, fp16: PrecisionPlan
) -> None:
    target, grouped = load_target("h200"), mlp_context.grouped
    with Toolchain(None, target, mlp_context) as tools:
        assert not isinstance(tools.reference("search"), Failure)
        tf32, base, half = map(measured, (tools.evaluate_tf32(), tools.evaluate(fp32), tools.evaluate(fp16)))
        assert (tf32.latency.source, tf32.error_source) == ("predicted", "emulated")
        assert half.latency.median_ms < tf32.latency.median_ms < base.latency.median_ms
        assert 1e-5 < tf32.error.value("relative_l2") < 1e-3
        ranges = tools.observe()
        assert not isinstance(ranges, Failure)
        shapes = {name: values.shape for name, values in ranges.items()}
        assert tools.latency_terms() == roofline(grouped, target, shapes)
    with Toolchain(None, load_target("t4"), mlp_context) as tools:
        assert tools.evaluate_tf32() is None
    assert not list(mlp_context.weights_dir.glob("*.onnx"))
    with_tf32 = roofline(grouped, target, shapes, tf32=True)
    assert with_tf32.tf32_gain_ms > 0
    with Toolchain(None, target, mlp_context.with_settings(tf32=True)) as tools:
        assert tools.latency_terms() == with_tf32
    with Toolchain(ONNXRUNTIME, target, mlp_context, "cuda") as tools:  # whatever the engine
        tools.reference_model._ranges = ranges  # the CUDA provider need not run here
        assert tools.latency_terms() == roofline(grouped, target, shapes)


@pytest.mark.parametrize(("name", "expected"), [("mlp", False), ("cnn", True), ("digits", False)])
def test_convolutions_leave_tf32_to_the_environment(
    name: str, expected: bool, mlp_path: Path, cnn_path: Path, settings: SearchSettings, tmp_path: Path
) -> None:
    model = load_model({"mlp": mlp_path, "cnn": cnn_path, "digits": DIGITS}[name])
    feed = {v.name: np.ones([d if isinstance(d, int) else 2 for d in v.shape or ()], np.float32) for v in model.inputs}
    context, target = make_context(model, tmp_path, feed, settings=settings), load_target("h200")
    with Toolchain(None, target, context) as predicted:
        ranges = predicted.observe()
    assert not isinstance(ranges, Failure)

    def rule(provider: Any, observed: Mapping[str, TensorRange] | None) -> bool:
        """Of a provider, which need not run here; where no shapes are given they follow from the samples."""
        with Toolchain(ONNXRUNTIME, target, context, provider) as tools:
            if observed is not None:
                tools.reference_model._ranges = observed
                tools.reference_model.static = replace(tools.reference_model.static, unknown=1)
            assert isinstance(tools.builder, OrtBuilder)
            return tools.builder.tf32_by_environment

    assert rule("cuda", ranges) is rule("cuda", None) is expected
    assert rule("cuda", {}) is (name != "mlp")  # any convolution will do where nothing can be counted
    assert not rule("cpu", ranges)


@pytest.mark.parametrize("convolves", [False, True])
def test_only_what_is_timed_leaves_tf32_to_the_environment(
    convolves: bool, mlp_context: RunContext, fp16: PrecisionPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``convolves`` as the CUDA provider does where convolutions are a good part of the work."""
    jobs: dict[str, list[str]] = {}
    with Toolchain(ONNXRUNTIME, load_target("cpu"), mlp_context) as tools:
        monkeypatch.setattr(tools.builder, "tf32_by_environment", convolves)
        call = tools.worker.call

        def heard(job: Any, timeout_s: float | None = None) -> Any:
            engines = (job.engine, job.baseline) if isinstance(job, MeasureJob) else ()
            jobs[type(job).__name__] = [engine.options.tf32 for engine in engines]
            return call(job, timeout_s)

        monkeypatch.setattr(tools.worker, "call", heard)
        assert not isinstance(tools.reference("search"), Failure)
        measured(tools.evaluate(fp16))
    timed = ["off by environment" if convolves else "off"] * 2
    assert jobs == {"ReferenceJob": [], "MeasureJob": timed, "ObserveJob": []}


@pytest.mark.parametrize(("is_jetson", "given", "wanted"), [(False, None, None), (True, None, 1859), (True, 64, 64)])
def test_builds_on_a_jetson_are_alone_and_limited(
    is_jetson: bool, given: int | None, wanted: int | None, mlp_context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu("NVIDIA Jetson Orin Nano", (8, 7), 7.8, "L4T 36.4.3", is_jetson=is_jetson)
    target = load_target("jetson-orin-nano-8gb")
    limited = mlp_context.with_settings(tensorrt=TensorRtSettings(workspace_mb=given))
    install(monkeypatch, tensorrt=LibraryReport("10.3.0"))
    jobs, failure = list[object](), Failure(Stage.BUILD, FailureKind.DEVICE_LOST, "gone")
    with Toolchain(TENSORRT, target, limited, gpu=gpu) as tools:
        monkeypatch.setattr(tools.worker, "call", lambda job, timeout_s: jobs.append(job) or failure)
        assert tools.evaluate(mlp_context.grouped.uniform(Precision.FP16)) is failure
    (job,) = jobs
    assert isinstance(job, BuildJob)
    assert (job.alone, job.options.settings.workspace_mb) == (is_jetson, wanted)


def job_of(folder: Path) -> MeasureJob:
    """The same model as candidate and baseline."""
    model, samples, reference = prepare(folder)
    engine = OrtEngine(model, SessionOptions(preset="timed"))
    return MeasureJob(engine, engine, Scoring(samples, reference), samples, latency=QUICK)


def test_the_baselines_session_stays_open_beside_all_that_are_timed(tmp_path: Path) -> None:
    state, job = WorkerState(), job_of(tmp_path)
    result = job.run(state)
    first, repetitions = result.measurement, result.repetitions
    ((_, baseline),) = [entry for slot, entry in state._cache.items() if slot == "baseline"]
    assert repetitions.iterations * repetitions.executions_per_value >= 10
    assert len(first.latency.raw_ms) == len(first.baseline.raw_ms) == repetitions.iterations
    assert first.error.value("max_abs") == 0.0
    expected = np.log(first.latency.median_ms / first.baseline.median_ms)
    assert first.latency.session.log_ratio == pytest.approx(expected, abs=1e-3)
    again = replace(job, repetitions=Repetitions(12, 2)).run(state)
    assert again.repetitions == Repetitions(12, 2)
    assert len(again.measurement.latency.raw_ms) == 12
    assert state._cache["baseline"][1] is baseline
    state.close()
    with pytest.raises(EngineError, match="closed"):
        baseline.session.run({"x": np.zeros((1, 2), np.float32)})
    assert job.run(WorkerState()).measurement.latency.session.baseline != first.latency.session.baseline


def test_the_state_of_the_gpus_is_read_again_once_it_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = [(GpuState(0, "H200", sm_clock_mhz=mhz),) for mhz in (900.0, 1900.0)]
    monkeypatch.setattr(measure, "read_gpus", readings.pop)
    monkeypatch.setattr(measure, "process_warnings", tuple)
    watch, warnings = measure.GpuWatch(), []
    for now in (0.0, STATE_AGE_S / 2, 2 * STATE_AGE_S, 2.5 * STATE_AGE_S):
        monkeypatch.setattr(measure.time, "monotonic", lambda now=now: now)
        warnings.append(watch.warnings())
    assert warnings[:2] == [(), ()]
    text, _, cure = warnings[2][0].rpartition(": ")
    assert "fell from 1900 to 900 MHz" in text
    assert cure.startswith("lock")
    assert warnings[3] == warnings[2], "also for the plans that are timed until the next reading"


@pytest.mark.parametrize(("by_cuda", "sms"), [(4, 4), (None, 8)])
def test_a_measurement_and_its_evaluation_keep_the_power_mode(
    by_cuda: int | None, sms: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What CUDA reports counts; the mask of the TPCs stands in for it."""
    mode = PowerMode("15W", 8, 612.0, 2133.0)
    monkeypatch.setattr(measure.detect, "read_power_mode", lambda: mode)
    monkeypatch.setattr(measure.cuda, "multiprocessors", lambda: by_cuda)
    measurement = replace(job_of(tmp_path), on_gpu=True).run(WorkerState()).measurement
    assert measurement.power_mode == replace(mode, sm_count=sms)
    plan = PrecisionPlan("0" * 64, {"g000": Precision.FP16})
    evaluation = Evaluation.from_measurement(
        plan, measurement, number=0, origin=ORIGIN_FP16, metric="relative_l2", baseline_ms=None
    )
    assert evaluation.to_json()["power_mode"] == {
        "name": "15W",
        "sm_count": sms,
        "gpu_mhz": 612.0,
        "memory_mhz": 2133.0,
    }
    assert job_of(tmp_path).run(WorkerState()).measurement.power_mode is None


ORIN = Gpu("NVIDIA Jetson Orin Nano", (8, 7), 7.8, "L4T 36.4.3", is_jetson=True)
OLD_DRIVER = "the driver is older than the CUDA of cuda-python: pip install 'cuda-bindings<13', or update the driver"
BOTH = {"tensorrt": LibraryReport("10.16.2"), "tensorrt_rtx": LibraryReport("1.7.1")}
RTX = {"tensorrt_rtx": LibraryReport("1.7.1")}
BROKEN = {"tensorrt": "tensorrt is installed, but a library is missing"}
NO_BINDINGS = {"tensorrt": LibraryReport("10.3.0", ("typed in part: update",), "cuda-python is not usable")}


@pytest.mark.parametrize("backend", [*find_backends(), EVALUATOR], ids=lambda backend: backend.name)
def test_every_backend_says_how_it_stands(backend: Backend) -> None:
    for target in map(load_target, ("cpu", "jetson-orin-nano-8gb", "rtx-4500-ada")):
        answer = backend.available(Place(target))
        assert answer.ability or not answer.obstacle or answer.hint
        assert answer.title.startswith(backend.name) or answer.ability != "measures"
    statuses = {status.name: status for status in backend.statuses(choose.detect_gpus())}
    for name, status in statuses.items():
        assert name.startswith(backend.name)
        assert status.reason
        assert status.available or status.install or "no GPU" in status.reason
    if backend is TENSORRT and not is_installed("tensorrt"):
        assert statuses["tensorrt"].reason == "tensorrt is not installed"
        assert "pip install tensorrt" in statuses["tensorrt"].install


def test_doctor_lists_every_backend() -> None:
    statuses = {status.name: status for status in list_toolchains()}
    assert statuses.keys() == {"onnxruntime-cuda", "onnxruntime-cpu", "tensorrt", "tensorrt-rtx"}
    assert statuses["onnxruntime-cpu"].available
    if not choose.detect_gpus() and is_installed("tensorrt-rtx"):
        assert "builds ahead of time for compute capability 7.5, 8.0, 8.6, 8.9" in statuses["tensorrt-rtx"].reason


HERE, JETSON = "rtx-4500-ada", "jetson-orin-nano-8gb"
NOT_FOR_CPUS = "cannot be used for .*: it is for NVIDIA GPUs"


@WITHOUT_GPU
@pytest.mark.parametrize(
    ("packages", "target", "engine", "expected", "passed_over"),
    [
        # A GPU here is measured by the first that can.
        (BOTH, HERE, "auto", "tensorrt", None),
        (BOTH, HERE, "tensorrt-rtx", "tensorrt-rtx", None),
        (BOTH, HERE, "onnxruntime", "onnxruntime", None),
        (RTX, HERE, "auto", "tensorrt-rtx", None),
        (RTX, HERE, "tensorrt", "cannot be used for NVIDIA RTX 4500 Ada.*: tensorrt is not installed", None),
        (BROKEN, HERE, "auto", "onnxruntime", "tensorrt"),
        (NO_BINDINGS, HERE, "auto", "onnxruntime", "tensorrt"),
        (NO_BINDINGS, HERE, "tensorrt", "cuda-python is not usable", None),
        ({}, HERE, "auto", "emulation", "onnxruntime"),
        ({}, HERE, "onnxruntime", "cannot be used for NVIDIA RTX 4500 Ada", None),
        # A device elsewhere is predicted; auto builds for RTX GPUs alone.
        (None, "cpu", "tensorrt", f"--engine tensorrt {NOT_FOR_CPUS}", None),
        (None, "cpu", "tensorrt-rtx", f"--engine tensorrt-rtx {NOT_FOR_CPUS}", None),
        (None, JETSON, "tensorrt", "TensorRT builds engines on the device", None),
        (None, JETSON, "tensorrt-rtx", "it builds for compute capability", None),
        (None, HERE, "onnxruntime", "emulation", None),
        (None, "t4", "auto", "emulation", None),
    ],
)
def test_which_backend_a_target_gets(
    packages: Any,
    target: str,
    engine: Any,
    expected: str,
    passed_over: str | None,
    request: pytest.FixtureRequest,
    mlp_context: RunContext,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if packages is not None:
        request.getfixturevalue("gpu_here")
        install(monkeypatch, None if packages else "no CUDA", **packages)
    context = mlp_context.with_settings(engine=engine)
    if " " in expected:
        with pytest.raises(TargetError, match=expected) as caught:
            open_toolchain(load_target(target), context)
        assert caught.value.hint
        assert ("leave --engine at auto" in caught.value.hint) is expected.startswith("TensorRT builds")
        return
    with open_toolchain(load_target(target), context) as tools:
        assert (tools.name, tools.builder is None) == (expected, expected == "emulation")
        assert tools.error_source == ("measured" if tools.latency_source == "measured" else "emulated")
        warnings = [text for text in tools.environment().warnings if " is passed over for " in text]
    assert [text.split()[0] for text in warnings] == ([] if passed_over is None else [passed_over])


@pytest.mark.parametrize("target", ["cpu", JETSON])
def test_without_tensorrt_engines_plugins_are_refused(mlp_context: RunContext, target: str) -> None:
    """Nothing would load them: neither ONNX Runtime nor a prediction."""
    with pytest.raises(TargetError, match="is for engines of TensorRT"):
        open_toolchain(load_target(target), mlp_context.with_settings(plugins=(Path("a.so"),)))


def test_a_named_target_is_taken_at_its_word_and_without_a_gpu_auto_is_a_jetson(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device file without a name is no reason to predict."""
    choice = choose_target("cpu")
    assert (choice.target.name, choice.why) == ("cpu", "")
    with pytest.raises(TargetError):
        choose_target("no-such-device")
    monkeypatch.setattr(choose, "detect_gpus", tuple)
    choice = choose_target("auto")
    assert choice.target.name == "jetson-orin-nano-8gb"
    assert "no GPU" in choice.why
    monkeypatch.setattr(choose, "hidden_gpu", lambda: Path("/dev/nvhost-gpu"))
    with pytest.raises(TargetError, match="/dev/nvhost-gpu shows an NVIDIA GPU") as caught:
        choose_target("auto")
    assert "NAME predicts" in caught.value.hint
    assert choose_target("jetson-orin-nano-8gb").target.kind == "jetson"


def test_what_keeps_tensorrt_from_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime is not installed with CUDA on a Jetson: its reason alone would mislead."""
    monkeypatch.setattr(choose, "detect_gpus", lambda: (ORIN,))
    install(monkeypatch, "no CUDA provider", tensorrt=LibraryReport("10.3.0", (), OLD_DRIVER))
    why = choose_target("auto").why
    assert why.startswith(f"{ORIN.name} was found, but cannot be measured (")
    assert OLD_DRIVER in why
    assert OLD_DRIVER in {status.name: status for status in list_toolchains()}["tensorrt"].reason


@pytest.fixture
def opens_beside(mlp_context: RunContext, monkeypatch: pytest.MonkeyPatch) -> Iterator[Toolchain]:
    """Measured on the CPU, with two processes beside the first, as on a GPU."""
    monkeypatch.setattr(reference, "usable_cores", lambda: 4)
    monkeypatch.setattr(toolchain, "has_room_beside", lambda provider: True)
    monkeypatch.setattr(toolchain, "available_bytes", lambda: 100e9)
    target = load_target("cpu").model_copy(update={"memory_gb": 100.0})
    with Toolchain(ONNXRUNTIME, target, mlp_context) as tools:
        assert tools.builder is not None
        tools.builder.opens_beside = True
        assert not isinstance(tools.reference("search"), Failure)
        yield tools


def test_plans_that_are_opened_ahead_are_measured_as_others_are(
    opens_beside: Toolchain, fp32: PrecisionPlan, fp16: PrecisionPlan
) -> None:
    tools = opens_beside
    assert tools.most_ahead == 3
    alone = measured(tools.evaluate(fp16))
    tools.open_ahead([fp32, fp16, fp16])
    opened = [measured(tools.evaluate(plan)) for plan in (fp32, fp16, fp16)]
    assert [each.error for each in opened[1:]] == [alone.error] * 2
    sessions = [each.latency.session.baseline for each in (alone, *opened)]
    assert len(set(sessions)) == 3, "each in a process of its own; one of them is the first"
    assert sessions[0] in sessions[1:]
    first = measured(tools.evaluate(fp16)).latency.session.baseline
    tools.turn_elsewhere(fp16)
    assert measured(tools.evaluate(fp16)).latency.session.baseline != first

    tools.open_ahead([fp32, fp16])
    tools.restart()
    assert measured(tools.evaluate(fp16)).latency.session.baseline not in sessions, "a restart ends them all"


def test_all_fp32_is_measured_before_the_search_asks(opens_beside: Toolchain, fp32: PrecisionPlan) -> None:
    tools = opens_beside
    tools.context = tools.context.with_settings(gpus=(0, 1))
    tools.open_first()
    assert tools.evaluate_first() is None, "a worker on each GPU measures it"
    assert [worker.pid for worker in tools._workers.beside] == [None, None]
    tools.context = tools.context.with_settings(gpus=())
    tools.open_first()
    assert not isinstance(tools.missing_kernels(Precision.FP16), Failure)
    first = tools.evaluate_first()
    assert first is not None
    tools._ahead.finish()
    assert None not in [worker.pid for worker in tools._workers.beside], "the baseline is open in each"
    assert tools.evaluate(fp32) is first is not tools.evaluate(fp32)


def test_tf32_is_opened_before_it_is_asked_for(
    opens_beside: Toolchain, fp32: PrecisionPlan, fp16: PrecisionPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools, worker = opens_beside, opens_beside._workers.tf32
    monkeypatch.setattr(tools.builder, "build_tf32", lambda: tools.builder.build(fp32))
    for most, tf32_tflops in ((3, None), (2, 1.0), (3, 1.0)):
        assert worker.pid is None, "a CPU has none, and then there is no room for it"
        tools._ahead.most = most
        tools.target = tools.target.model_copy(update={"tf32_tflops": tf32_tflops})
        tools.open_tf32()
    measured(tools.evaluate(fp16))
    assert (worker._process.jobs, tools.is_opening) == (1, False), "it waits for all"
    pid, alone = worker.pid, measured(tools.evaluate_tf32())
    assert (worker.pid, worker._process.jobs) == (pid, 2)
    tools.restart()
    again = measured(tools.evaluate_tf32())
    assert (again.error, worker.pid == pid) == (alone.error, False), "a restart ends it, too"


def test_other_groups_are_measured_in_the_same_processes(opens_beside: Toolchain, fp32: PrecisionPlan) -> None:
    tools = opens_beside
    tools.open_baselines()
    tools.open_first()
    first = tools.evaluate_first()
    while tools.is_opening:
        time.sleep(0.01)
    pids = [worker.pid for worker in tools._workers.beside]
    assert None not in pids
    grouped = tools.context.grouped
    joined = replace(grouped.groups[0], nodes=tuple(node for group in grouped.groups for node in group.nodes))
    other = tools.regrouped(replace(tools.context, grouped=replace(grouped, groups=(joined,))))
    plan = other.context.grouped.uniform(Precision.FP32)
    assert plan.fingerprint != fp32.fingerprint
    assert other.evaluate(plan) is first
    assert not other._ahead.unused, "it knows where baselines are open"
    other.open_ahead([other.context.grouped.uniform(Precision.FP16)])
    assert measured(other.evaluate(other.context.grouped.uniform(Precision.FP16))).error.sample_count
    assert [worker.pid for worker in other._workers.beside] == pids


@pytest.mark.parametrize(
    ("host_gb", "device_gb", "most"), [(100.0, 100.0, 3), (9.0, 100.0, 2), (100.0, 5.0, 2), (3.0, 3.0, 1)]
)
def test_as_many_plans_are_opened_as_there_is_memory_for(
    host_gb: float, device_gb: float, most: int, opens_beside: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "available_bytes", lambda: host_gb * 1e9)
    opens_beside.target = opens_beside.target.model_copy(update={"memory_gb": device_gb})
    assert opens_beside.most_ahead == most


def test_where_opening_side_by_side_fails_plans_are_opened_one_by_one(
    opens_beside: Toolchain, fp32: PrecisionPlan, fp16: PrecisionPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = opens_beside
    monkeypatch.setattr(ahead, "OpenAheadJob", lambda *job: faults.abort())
    tools.open_ahead([fp32, fp16])
    measured(tools.evaluate(fp32))
    assert tools.most_ahead == 1
    tools.open_ahead([fp32, fp16])
    names = {measured(tools.evaluate(plan)).latency.session.baseline for plan in (fp32, fp16)}
    assert len(names) == 1
    tools.turn_elsewhere(fp16)
    assert measured(tools.evaluate(fp16)).latency.session.baseline not in names, "there is no other: it was ended"


def test_where_the_first_plan_does_not_open_others_are_opened_side_by_side(
    opens_beside: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is short while ranges are observed."""
    with monkeypatch.context() as patch:
        patch.setattr(ahead, "OpenAheadJob", lambda *job: faults.abort())
        opens_beside.open_first()
        assert opens_beside.evaluate_first() is not None
    assert opens_beside.most_ahead == 3
