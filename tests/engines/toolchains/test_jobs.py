"""Jobs of every toolchain: the reference, observed ranges, and emulated errors with what one run takes."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from mptune.data.archive import read_sample_shapes, read_samples, save_samples
from mptune.data.metrics.parts import PARTS_JSON, load_parts
from mptune.data.samples import Rollout
from mptune.engines.base import EngineError, Failure, FailureKind, ReferenceReport, Stage
from mptune.engines.context import RunContext
from mptune.engines.failures import did_not_run
from mptune.engines.ort import cuda_session, session as side_by_side
from mptune.engines.ort.backend import ONNXRUNTIME
from mptune.engines.ort.cuda_session import probe
from mptune.engines.ort.session import OrtSession, Provider
from mptune.engines.outputs import value_error
from mptune.engines.samples import Feed, Outputs, Scoring
from mptune.engines.toolchains import emulation, jobs, reference
from mptune.engines.toolchains.emulation import Emulation, rows_per_sample, run_bytes
from mptune.engines.toolchains.jobs import ErrorsJob, ObserveJob, ReferenceJob, SwitchedErrorsJob
from mptune.engines.toolchains.rows import row_feeds
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.graph.loading.model import load_model
from mptune.graph.loading.tensors import TensorInfo
from mptune.graph.plan import DEFAULT_PRECISIONS, Precision, PrecisionPlan
from mptune.graph.writing.variants import observed_parts, write_with_outputs
from mptune.processes.child import WorkerState
from mptune.processes.parent import Worker
from mptune.settings import DataSettings
from mptune.targets.target import load_target
from mptune.tuning.baseline import check_reference
from tests.engines import faults
from tests.engines.engine_support import prepare, run_here
from tests.graph import models


def take_reference(model: Path, folder: Path, *feeds: np.ndarray | dict[str, np.ndarray]) -> ReferenceReport:
    samples = folder / "samples.npz"
    save_samples(samples, tuple(feed if isinstance(feed, dict) else {"x": feed} for feed in feeds))
    return run_here(ReferenceJob(model, samples, folder / "reference.npz", "cpu"))


def computing(folder: Path, nodes: str, shape: str = "n, 4") -> Path:
    return models.save(models.text(f"(float[{shape}] x) => (float[] y) {{ {nodes} }}"), folder)


def ramp(*shape: int) -> np.ndarray:
    return np.linspace(-1, 1, math.prod(shape), dtype=np.float32).reshape(shape)


def test_the_reference_is_kept_and_described(tmp_path: Path) -> None:
    report = take_reference(computing(tmp_path, "y = Relu (x)"), tmp_path, ramp(2, 4), 2 * ramp(2, 4))
    assert report.provider == "CPUExecutionProvider"
    assert report.outputs == {"y": {"size": 16.0, "non_finite": 0.0, "zero_fraction": 0.5, "absmax": 2.0}}
    assert report.repeat_error == 0.0
    assert set(report.rows.mixed.values()) == {0.0}
    assert not report.rows.failure
    first, second = read_samples(tmp_path / "reference.npz")
    np.testing.assert_array_equal(first["y"], np.maximum(ramp(2, 4), 0))
    np.testing.assert_array_equal(second["y"], 2 * first["y"])
    report = take_reference(computing(tmp_path, "y = Log (x)", "4"), tmp_path, np.array([-1, 0, 1, np.e], np.float32))
    assert (report.outputs["y"]["non_finite"], report.repeat_error) == (2.0, 0.0)
    assert report.outputs["y"]["absmax"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("shapes", "axes"),
    [
        ({"x": [4, 3], "y": [4, 2, 2], "threshold": [1], "scale": []}, {"x": 0, "y": 0}),
        ({"signal": [1, 5, 3], "hidden": [4, 1, 8], "cell": [4, 1, 8]}, None),  # layers and directions of an LSTM
        ({"nodes": [10, 3], "edges": [2, 20]}, None),
        ({"nodes": [10, 3], "adjacency": [10, 10]}, None),
        ({"x": ["batch", 3], "past": [2, "batch", 3]}, {"x": 0, "past": 1}),  # a cache of stacked keys and values
        ({"x": ["tokens", 3]}, None),
        ({"x": ["batch", 3], "mask": ["rows", 3]}, {"x": 0}),  # rows may be the batch under another name
    ],
)
def test_fixed_sizes_that_differ_are_no_batch(shapes: dict[str, list[Any]], axes: dict[str, int] | None) -> None:
    sizes = {name: [size if isinstance(size, int) else 1 for size in shape] for name, shape in shapes.items()}
    samples = [{name: factor * ramp(*shape) for name, shape in sizes.items()} for factor in (1, 2)]
    feeds = row_feeds(shapes, samples)
    assert (None if feeds is None else feeds.axes) == axes
    assert feeds is None or feeds.is_whole is ("mask" not in shapes)


def test_a_large_model_has_batches_of_two_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, samples = computing(tmp_path, "y = Relu (x)"), tmp_path / "s"
    save_samples(samples, [{"x": ramp(1, 4) * k} for k in range(1, 7)])
    sizes, run = list[int](), OrtSession.run

    def noted(session: OrtSession, feeds: Mapping[str, np.ndarray], **options: bool) -> dict[str, np.ndarray]:
        sizes.append(len(feeds["x"]))
        return run(session, feeds, **options)

    monkeypatch.setattr(OrtSession, "run", noted)
    for nbytes, rows in ((None, 4), (1 << 20, 4), (1 << 29, 2), (1 << 40, 2)):
        sizes.clear()
        ReferenceJob(model, samples, tmp_path / "reference.npz", "cpu", run_bytes=nbytes).run(WorkerState())
        assert max(sizes) == rows


def test_a_batch_that_is_another_number_is_named_with_that_number(tmp_path: Path) -> None:
    nodes = 'shape = Constant <value_ints = [4, 3]> () ["flatten"] h = Reshape (x, shape) y = Neg (h)'
    model = computing(tmp_path, nodes, "n, 3")
    (finding,) = check_reference(take_reference(model, tmp_path, ramp(4, 3)))
    assert "fails with a batch of 1 (" in finding.text
    assert finding.cure == "fix it at 4", "the samples run with it"


def test_a_model_that_fails_since_indices_of_another_input_fit_no_other_rows_has_no_batch(tmp_path: Path) -> None:
    proto = models.text("(float[n,3] x, int64[e] edges) => (float[e,3] y) { y = Gather<axis = 0>(x, edges) }")
    feed = {"x": ramp(4, 3), "edges": np.array([0, 3, 1])}
    assert check_reference(take_reference(models.save(proto, tmp_path), tmp_path, feed)) == ()


@pytest.mark.skipif(onnx.IR_VERSION < 14, reason="this onnx writes no version that ONNX Runtime 1.31 does not read")
def test_an_ir_version_beyond_onnx_runtimes_is_told_with_the_one_that_it_reads(tmp_path: Path) -> None:
    model = computing(tmp_path, "y = Neg (x)", "n, 3")
    proto = onnx.load(model)
    proto.ir_version = onnx.IR_VERSION
    onnx.save(proto, model)
    with pytest.raises(EngineError) as caught:
        take_reference(model, tmp_path, ramp(1, 3))
    hint = did_not_run("it does not run", Failure(Stage.BUILD, caught.value.kind, str(caught.value))).hint
    assert hint.startswith("save it with ir_version = 13")


@pytest.mark.parametrize(
    ("values", "reference", "error"),
    [
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([1.0, 0.0], [0.0, 0.0], math.inf),
        ([3.0, 5.0], [3.0, 4.0], 0.2),
        ([math.nan, 1.0], [math.nan, 1.0], 0.0),
        ([math.nan, 1.0], [1.0, 1.0], math.inf),
        ([1.0], [1.0, 1.0], math.inf),
    ],
)
def test_value_error(values: list[float], reference: list[float], error: float) -> None:
    assert value_error(np.array(values), np.array(reference)) == pytest.approx(error)


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Runs beside each other wait for one another on two cores; each is noted, with the threads of its session."""
    together, threads, compute = threading.Barrier(2, timeout=30.0), list[int](), OrtSession.run

    def run_with_another(session: OrtSession, feeds: Feed, **options: bool) -> Outputs:
        if threading.current_thread() is not threading.main_thread():
            together.wait()
            threads.append(session.options.threads)
        return compute(session, feeds, **options)

    monkeypatch.setattr(side_by_side, "usable_cores", lambda: 2)
    monkeypatch.setattr(OrtSession, "run", run_with_another)
    return threads


def test_reference_and_ranges_are_the_same_side_by_side(tmp_path: Path, beside: list[int]) -> None:
    model, samples = computing(tmp_path, "e = Exp (x) y = Relu (e)", "1, 2"), tmp_path / "samples.npz"
    save_samples(samples, [{"x": ramp(1, 2) * k} for k in (3, 100, -1, 2)])
    loaded = load_model(model)
    (part,) = observed_parts(loaded, {})
    write_with_outputs(loaded, None, tmp_path / "observing.onnx", part.outputs)
    reference = ReferenceJob(model, samples, tmp_path / "reference.npz", "cpu")
    observe = ObserveJob(tmp_path / "observing.onnx", part, samples, "cpu")
    results = []
    for nbytes in (None, 1024):  # nothing is known of the memory: one after another
        report, ranges = (replace(job, run_bytes=nbytes).run(WorkerState()) for job in (reference, observe))
        results.append((repr((report, ranges)), [each["y"].tolist() for each in read_samples(reference.outputs)]))
        assert beside == [1] * (0 if nbytes is None else 4 + 4), "four samples of the reference, four observed"
    assert results[0] == results[1], "as text: NaN differs from itself"


@pytest.mark.parametrize("provider", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_provider_that_starts_has_no_obstacle(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_session, "_reasons", {})
    with Worker() as worker:
        assert probe(provider, worker) is None


@pytest.mark.parametrize("count", [8, 7])
def test_the_parts_of_a_rollout_are_those_of_its_sequences(count: int, tmp_path: Path) -> None:
    """Two sequences of three steps or four: there are fewer outputs than samples."""
    model = computing(tmp_path, "y = Add (x, x)", "1, 4")
    samples = tmp_path / "samples.npz"
    save_samples(samples, tuple({"x": ramp(1, 4) * k} for k in range(1, count + 1)))
    rollout = Rollout((("y", "x"),), count // 2)
    run_here(ReferenceJob(model, samples, tmp_path / "reference.npz", "cpu", rollout=rollout))
    found = load_parts(tmp_path / PARTS_JSON)
    assert (found["y"].axis, len(found["y"].scales)) == (1, 4), "axis 0 is the batch"


@pytest.fixture(autouse=True)
def _observes_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU observes beside the reference, as a GPU does."""
    monkeypatch.setattr("mptune.engines.toolchains.reference.has_room_beside", lambda provider: True)


class Calls:
    """The workers of each job; ``instead`` may take the place of a job, or of its answer."""

    def __init__(self) -> None:
        self.workers: dict[type, list[Worker]] = {ReferenceJob: [], ObserveJob: []}
        self.instead: Callable[[Any], Any] = lambda job: job


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    call, calls = Worker.call, Calls()

    def noted(worker: Worker, job: Any, timeout_s: float | None = None) -> Any:
        calls.workers[type(job)].append(worker)
        job = calls.instead(job)
        return job if isinstance(job, Failure) else call(worker, job, timeout_s)

    monkeypatch.setattr(Worker, "call", noted)
    return calls


@pytest.fixture
def opened(mlp_context: RunContext) -> Iterator[Callable[[], Toolchain]]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(Toolchain(ONNXRUNTIME, load_target("cpu"), mlp_context))


def test_ranges_are_the_same_beside_the_reference_and_in_parts(
    opened: Callable[[], Toolchain], calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = opened().observe()
    calls.workers[ObserveJob].clear()
    toolchain = opened()
    assert not isinstance(toolchain.reference("search"), Failure)
    assert toolchain.observe() == toolchain.observe() == expected
    for which in ("held_out", "search"):
        assert not isinstance(toolchain.reference(which), Failure)
    (beside,), (first, second, third) = calls.workers[ObserveJob], calls.workers[ReferenceJob]
    assert beside is not first is second is third
    monkeypatch.setattr("mptune.graph.writing.variants._MOST_OUTPUTS", 5)
    calls.workers[ObserveJob].clear()
    stages: list[str] = []
    assert opened().observe(stages.append) == expected
    assert len(calls.workers[ObserveJob]) == len(stages) > 1
    assert all(stage.startswith("observing the ranges of values: ") for stage in stages)


@pytest.mark.parametrize(("weights_bytes", "processes"), [(1 << 30, 2), (1, 1)])
def test_ranges_are_observed_by_as_many_processes_as_hold_the_weights(
    weights_bytes: int, processes: int, opened: Callable[[], Toolchain], calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = opened().observe()
    calls.workers[ObserveJob].clear()
    monkeypatch.setattr(reference, "usable_cores", lambda: 8)
    monkeypatch.setattr(reference, "_OBSERVERS_BYTES", weights_bytes)
    toolchain = opened()
    assert not isinstance(toolchain.reference("search"), Failure)
    assert toolchain.observe() == expected
    assert len(set(calls.workers[ObserveJob])) == processes


def test_few_samples_are_observed_where_their_values_take_much_memory(
    opened: Callable[[], Toolchain], mlp_context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_OBSERVED_BYTES", 1)
    monkeypatch.setattr(reference, "LEAST_OBSERVED", 3)
    ranges = opened().observe()
    assert not isinstance(ranges, Failure)
    assert {value.samples for value in ranges.values()} == {3}
    assert len(read_sample_shapes(mlp_context.samples("search"))) == 4


@pytest.mark.parametrize("hangs", [True, False])
def test_what_fails_beside_is_tried_again_in_another_process(
    hangs: bool, opened: Callable[[], Toolchain], mlp_context: RunContext, calls: Calls
) -> None:
    """Once ranges are asked for; what starves beside the reference is ended by a restart."""

    def crowded(job: Any) -> Any:
        if isinstance(job, ReferenceJob):
            return Failure(Stage.RUN, FailureKind.OUT_OF_MEMORY, "no room") if hangs else job
        if len(calls.workers[ObserveJob]) > 1:
            return job
        return faults.hang(mlp_context.logs_dir / "pids") if hangs else Failure(Stage.RUN, FailureKind.CRASH, "killed")

    calls.instead, toolchain = crowded, opened()
    assert isinstance(toolchain.reference("search"), Failure) is hangs
    while not calls.workers[ObserveJob]:
        time.sleep(0.01)
    if hangs:
        toolchain.restart()
    assert not isinstance(toolchain.observe(), Failure)
    first, again = calls.workers[ObserveJob]
    assert first is not again is toolchain.worker


FEW = range(4)
"""The samples that errors are emulated on before a plan is built: here all that there are."""


def test_errors_are_taken_per_sample_and_files_that_changed_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, samples, reference = prepare(tmp_path, shift=1.0)
    (tmp_path / "mine.py").write_text("def metric(outputs, reference):\n    return float(outputs['y'].sum())\n")
    metric = f"{tmp_path / 'mine.py'}:metric"
    state, job = WorkerState(), ErrorsJob((model, model), Scoring(samples, reference, metric))
    error, same = job.run(state)
    assert error == same
    assert error.per_output["y"]["max_abs"] == (1.0, 1.0)
    assert error.value(metric) == pytest.approx((7 + 14) / 2), "a user's metric is taken, too"
    (few,) = ErrorsJob((model,), Scoring(samples, reference, part=range(1))).run(WorkerState())
    assert few.per_output["y"]["max_abs"] == (1.0,)
    reference.unlink()
    prepare(tmp_path, shift=2.0)
    assert job.run(state)[0].value("max_abs") == 2.0
    save_samples(reference, [{"y": np.zeros((2, 3), np.float32)}] * 2)
    with pytest.raises(EngineError, match=r"shape \(1, 2\) on sample 0, the reference has \(2, 3\)"):
        ErrorsJob((model,), Scoring(samples, reference)).run(WorkerState())
    prepare(tmp_path)
    for part in (None, range(1, 2)):  # the reference itself has no error, and is not run
        scoring = Scoring(samples, reference, part=part)
        expected = ErrorsJob((model,), scoring).run(WorkerState())
        with monkeypatch.context() as patch:
            patch.delattr(jobs, "open_session")
            assert ErrorsJob((None,), scoring).run(WorkerState()) == expected


class Run:
    """An emulation of the MLP whose jobs run in this process, and what they were."""

    def __init__(self, context: RunContext, provider: Provider = "cpu") -> None:
        self.model, self.groups, self.context = context.model, context.grouped.groups, context
        self.state = WorkerState()
        self.jobs: list[Any] = []
        self.answer: Callable[[Any], Any] = lambda job: job.run(self.state)
        self.provider: Provider = provider
        paths = context.model_path, context.samples("search"), context.reference("search")
        ReferenceJob(*paths, provider).run(self.state)

    def emulation(self, batch: int = 1, precisions: tuple[str, ...] = DEFAULT_PRECISIONS) -> Emulation:
        context = self.context.with_settings(precisions=precisions, data_settings=DataSettings(batch=batch))
        shapes = dict.fromkeys(("x", "block0.narrow", "block1.narrow"), (3, 32))
        return Emulation(context, context.grouped, self.provider, self, shapes)

    def call(self, job: Any) -> Any:
        self.jobs.append(job)
        return self.answer(job)

    @property
    def kinds(self) -> list[type]:
        return [type(job) for job in self.jobs]

    def plan(self, *half: int) -> PrecisionPlan:
        fp32 = PrecisionPlan.uniform(self.model.sha256, [g.id for g in self.groups], Precision.FP32)
        return fp32.replace({self.groups[index].id: Precision.FP16 for index in half})

    def alone(self) -> list[PrecisionPlan]:
        return [self.plan(index) for index in range(len(self.groups))]


@pytest.fixture
def run(mlp_context: RunContext) -> Run:
    return Run(mlp_context)


def values(errors: Sequence[Any] | Failure) -> list[float]:
    assert not isinstance(errors, Failure), errors
    return [error.value("relative_l2") for error in errors]


def test_plans_of_one_group_share_sessions_and_agree_with_their_own(run: Run) -> None:
    many = run.emulation()
    shared = values(many.errors(run.alone(), part=FEW))
    assert set(run.kinds) == {SwitchedErrorsJob}
    assert len(run.jobs) < len(run.groups)
    assert all(job.given for job in run.jobs), "a stretch runs what is before it"
    apart = values(many.errors(run.alone()))
    assert run.kinds[-1] is ErrorsJob
    assert shared == pytest.approx(apart, rel=1e-2)
    assert min(apart) > 1e-6
    many.close()
    assert not list(run.context.weights_dir.glob("*.onnx"))


def test_the_parts_of_the_samples_together_are_all_of_them(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mptune.engines.toolchains.emulation.QUICK_S", 0.0)
    many, apart = run.emulation(), run.emulation()
    assert many.samples.parts == (range(1), range(1, 2), range(2, 4))
    assert Run(run.context, "cpu").emulation(8).samples.parts == (range(1),)
    whole = many.errors(run.alone(), part=FEW)
    assert not isinstance(whole, Failure)
    found = [apart.errors(run.alone(), part=part) for part in many.samples.parts]
    for index, error in enumerate(whole):
        first, *others = (errors[index] for errors in found if not isinstance(errors, Failure))
        assert len(others) == 2
        for other in others:
            first = first.with_samples_of(other)
        assert first == error
    assert max(len(job.scoring.part) for job in run.jobs[len(run.jobs) // 2 :]) == 2


@pytest.mark.parametrize("part", [None, FEW], ids=["evaluated", "alone"])
def test_samples_are_emulated_side_by_side_with_the_same_errors(
    part: range | None, run: Run, beside: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = []
    for nbytes in (0, 1 << 30):
        monkeypatch.setattr(side_by_side, "available_bytes", lambda nbytes=nbytes: nbytes)
        errors.append(run.emulation().errors(run.alone()[:2], part=part))
        run.state.close()
        assert set(beside) == ({1} if nbytes else set())
    assert errors[0] == errors[1]


@pytest.mark.gpu
def test_a_gpu_takes_any_plan_in_one_session_and_agrees_with_the_cpu(run: Run) -> None:
    gpu = Run(run.context, "cuda")
    many = [*run.alone(), run.plan(0, 3)]
    assert values(gpu.emulation().errors(many)) == pytest.approx(values(run.emulation().errors(many)), rel=5e-2)
    assert gpu.kinds == [SwitchedErrorsJob]


def test_plans_with_bf16_and_without_take_turns_in_one_session(run: Run) -> None:
    many, fp16 = run.emulation(precisions=("fp32", "fp16", "bf16")), run.plan(0)
    bf16 = fp16.replace({run.groups[0].id: Precision.BF16})
    both = fp16.replace({run.groups[1].id: Precision.BF16})
    found = [values(many.errors(plans, part=FEW)) for plans in ([fp16], [bf16], [fp16], [bf16], [both, fp16])]
    assert len({job.model for job in run.jobs}) == 1, "a session is opened again at every change"
    assert found[2] == pytest.approx(found[0], rel=1e-6)
    assert found[3] == found[1] != found[0]
    assert found[1] + found[4] == pytest.approx(values(run.emulation().errors([bf16, both, fp16])), rel=1e-2)


def test_a_session_stays_open_for_the_next_job_unless_its_weights_are_large(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    many, plan = run.emulation(), run.plan(0)
    many.errors([plan], part=FEW)
    slot = next(slot for slot in run.state._cache if slot.startswith("switched"))
    session = run.state._cache[slot][1]
    many.errors([plan], part=FEW)
    assert run.state._cache[slot][1] is session
    monkeypatch.setattr(emulation, "_KEPT_BYTES", 0)
    slots = list[str | None]()
    run.answer = lambda job: slots.append(job.slot) or job.run(run.state)  # type: ignore[attr-defined]
    run.emulation().errors([plan], part=FEW)
    assert slots == [None]


def test_where_switches_do_not_work_each_plan_has_a_session_of_its_own(run: Run) -> None:
    """A plan that fails by itself leaves the switches alone."""
    run.answer = lambda job: Failure(Stage.RUN, FailureKind.ERROR, "another shape")
    many = run.emulation()
    assert isinstance(many.errors([run.plan(0)], part=FEW), Failure)
    assert many.unshared is None
    crash = Failure(Stage.RUN, FailureKind.CRASH, "no such kernel")
    run.answer = lambda job: crash if isinstance(job, SwitchedErrorsJob) else job.run(run.state)
    assert values(many.errors([run.plan(0)], part=FEW))[0] > 0
    assert many.unshared is crash
    many.errors([run.plan(1)], part=FEW)
    assert run.kinds == [SwitchedErrorsJob, ErrorsJob, SwitchedErrorsJob, ErrorsJob, ErrorsJob]


@pytest.mark.parametrize(
    ("rows_in", "rows_out", "seen", "expected"),
    [(8, "Gemm_0", 8, 8), ("n", "Gemm_0", 5, 5), (8, "Gemm_0", 3, 1), (8, "Gemm_0", None, 1), (8, 3, 8, 1)],
)
def test_an_output_whose_rows_the_exporter_did_not_know_has_those_that_were_seen(
    rows_in: int | str, rows_out: int | str, seen: int | None, expected: int, tmp_path: Path
) -> None:
    nodes = [models.node("ReduceMean", ["x"], "y", "mean", axes=[1])]
    proto = models.model(nodes, [models.value("x", [rows_in, 4])], [models.value("y", [rows_in, 1])])
    outputs = (TensorInfo("y", "float", (rows_out, 1)),)
    model = replace(load_model(models.save(proto, tmp_path)), outputs=outputs)
    assert rows_per_sample(model, 5, {} if seen is None else {"y": (seen, 1)}) == expected


def bytes_of(graph: str, folder: Path, *shapes: tuple[int, ...]) -> int | None:
    save_samples(folder / "samples.npz", tuple({"x": np.zeros(shape, np.float32)} for shape in shapes))
    model = load_model(models.save(models.text(graph), folder))
    return run_bytes(model, folder / "samples.npz", "cpu")


def test_a_run_takes_what_lives_at_once_on_the_largest_sample(tmp_path: Path) -> None:
    chain = "(float[{}, 1000] x) => (float[] y) {{ a = Exp (x) b = Relu (a) y = Neg (b) }}"
    single = bytes_of(chain.format(1), tmp_path, (1, 1000))
    assert single == 3 * 4 * 3 * 1000, "the input, which the caller keeps, and two values, each in three forms"
    assert bytes_of(chain.format("batch"), tmp_path, (1, 1000), (5, 1000), (2, 1000)) == 5 * single


@pytest.mark.parametrize(
    "nodes",
    [
        "n = NonZero (x) y = Cast <to = 1> (n)",
        "y = If (which) <then_branch = a () => (float[4, 4] e) { e = Exp (x) },"
        " else_branch = b () => (float[4, 4] f) { f = Exp (x) }>",
    ],
)
def test_it_is_unknown_where_a_size_depends_on_values_or_a_branch_has_values_of_its_own(
    nodes: str, tmp_path: Path
) -> None:
    assert bytes_of(f"(float[4, 4] x) => (float[] y) <bool which = {{1}}> {{ {nodes} }}", tmp_path, (4, 4)) is None
