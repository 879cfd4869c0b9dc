"""Emulated errors: the jobs, which of them a plan takes, and what one run of a model takes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mptune.data.archive import save_samples
from mptune.engines.base import EngineError, Failure, FailureKind, Stage
from mptune.engines.context import RunContext
from mptune.engines.ort import session as side_by_side
from mptune.engines.ort.session import OrtSession, Provider
from mptune.engines.samples import Feed, Outputs, Scoring
from mptune.engines.toolchains import emulation, jobs
from mptune.engines.toolchains.emulation import Emulation, rows_per_sample, run_bytes
from mptune.engines.toolchains.jobs import ErrorsJob, ReferenceJob, SwitchedErrorsJob
from mptune.graph.loading.model import load_model
from mptune.graph.loading.tensors import TensorInfo
from mptune.graph.plan import DEFAULT_PRECISIONS, Precision, PrecisionPlan
from mptune.processes.child import WorkerState
from mptune.settings import DataSettings
from tests.engines.engine_support import prepare
from tests.graph import models

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
        self.model, self.groups, self.context = context.model, context.groups, context
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
    part: range | None, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_by_side, "usable_cores", lambda: 2)
    monkeypatch.setattr(side_by_side, "available_bytes", lambda: None)  # nothing is known: one after another
    one_by_one, plans = run.emulation().errors(run.alone()[:2], part=part), run.alone()[:2]
    run.state.close()
    monkeypatch.setattr(side_by_side, "available_bytes", lambda: 1 << 30)
    together, threads, compute = threading.Barrier(2, timeout=30.0), set(), OrtSession.run

    def run_with_another(session: OrtSession, feeds: Feed, **options: bool) -> Outputs:
        together.wait()
        threads.add(session.options.threads)
        return compute(session, feeds, **options)

    monkeypatch.setattr(OrtSession, "run", run_with_another)
    assert run.emulation().errors(plans, part=part) == one_by_one
    assert threads == {1}


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
    many.errors([plan], part=FEW)
    assert "switched" not in run.state._cache


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
