"""Evaluations made by hand, and searches on the fake toolchain, for tests of what is done with them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hypothesis import strategies as st

from mptune.choice import Choice
from mptune.data.metrics.accuracy import OutputError
from mptune.engines.latency import Latency
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.run_json import FixedSettings, ModelSection, RunFile, SearchSection
from mptune.settings import SearchSettings
from mptune.targets.target import EngineMemory
from mptune.tuning.bench import Bench, Limits, Listener, Logged, Stop
from mptune.tuning.evaluation import ORIGIN_FP16, ORIGIN_SAMPLER, Evaluation, Origin
from mptune.tuning.front import Front
from mptune.tuning.knowledge import Knowledge, Sensitivity
from mptune.tuning.record.record import Proposal, StudyRecord
from mptune.tuning.record.study import open_study
from mptune.tuning.sampler.precision import PrecisionSampler
from mptune.tuning.sampler.trials import Prior
from mptune.tuning.space import SearchSpace
from mptune.tuning.tuner import Tuner
from tests.fakes import SHA, Diary, FakeToolchain, Law

Fake = TypeVar("Fake", bound=FakeToolchain)


def make_error(value: float, samples: int = 2) -> OutputError:
    non_finite = 0.0 if math.isfinite(value) else 1.0
    return OutputError({"y": {"relative_l2": (value,) * samples, "non_finite": (non_finite,) * samples}})


def make_evaluation(
    ms: float,
    error: float,
    *,
    width: float = 0.0,
    held_out: float | None = None,
    number: int = 0,
    origin: Origin = ORIGIN_SAMPLER,
    bits: int | None = None,
) -> Evaluation:
    """An evaluation with a 95 % interval of ``ms +- width``; its plan is made of the bits of ``bits`` or ``number``."""
    code = number if bits is None else bits
    precision = {f"g{i:03d}": Precision.FP16 if code >> i & 1 else Precision.FP32 for i in range(10)}
    source = "measured" if width else "predicted"
    return Evaluation(
        plan=PrecisionPlan(SHA, precision),
        number=number,
        origin=origin,
        latency=Latency(ms, ms, ms, (ms - width, ms + width), 0.01, source),  # type: ignore[arg-type]
        error=make_error(error),
        metric="relative_l2",
        error_source="measured",
        speedup=1.0,
        held_out=None if held_out is None else make_error(held_out),
    )


def positive(least: float, largest: float) -> st.SearchStrategy[float]:
    """Of nine digits, as what differs in the last bit alone is smaller by one rule and equal by another; with ties."""
    values = st.floats(least, largest).map(lambda value: float(f"{value:.8e}"))
    return values | st.sampled_from([least, math.sqrt(least * largest), largest])


@st.composite
def searches(draw: st.DrawFn) -> list[Evaluation]:
    """All-FP32 and other plans: close latencies with noise, held-out errors of some, memory of some."""
    width = st.sampled_from([0.01, 0.1, 1.0] if draw(st.booleans()) else [0.0])
    errors = positive(1e-8, 0.1) | st.sampled_from([math.nan, math.inf])
    evaluations = [make_evaluation(draw(st.floats(9.7, 10.3)), 1e-8, width=draw(width), held_out=1e-8)]
    for number in range(1, draw(st.integers(1, 11))):
        ms, held_out = draw(st.floats(9.7, 10.3) | st.floats(2.0, 12.0)), draw(st.none() | errors)
        evaluations.append(make_evaluation(ms, draw(errors), width=draw(width), held_out=held_out, number=number))
    sizes = draw(st.lists(st.none() | st.integers(1, 9), min_size=len(evaluations), max_size=len(evaluations)))
    memories = (None if size is None else EngineMemory(None, 0, size, "predicted") for size in sizes)
    return [replace(e, memory=memory) for e, memory in zip(evaluations, memories, strict=True)]


def make_bench(
    record: StudyRecord,
    toolchain: Toolchain,
    settings: SearchSettings | None = None,
    listener: Listener | None = None,
    limits: Limits | None = None,
) -> Bench:
    """Where a record's plans are evaluated; without limits those of the settings, from now on."""
    settings = settings or SearchSettings()
    return Bench(record, toolchain, settings, listener or Logged(), limits or Limits(settings))


def make_toolchain(space: SearchSpace, kind: type[Fake] = FakeToolchain, **options: Any) -> Fake:  # type: ignore[assignment]
    """A fake toolchain for the groups of a space."""
    return kind(Law([group.id for group in space.groups]), **options)


class Tuned(NamedTuple):
    """A search, and why it stopped."""

    record: StudyRecord
    toolchain: FakeToolchain
    diary: Diary
    stop: Stop


def tune(
    record: StudyRecord,
    toolchain: FakeToolchain | None = None,
    settings: SearchSettings | None = None,
    limits: Limits | None = None,
    knowledge: Knowledge | None = None,
    budget: int = 12,
    **options: Any,
) -> Tuned:
    """Search on a toolchain, or on one with these options."""
    toolchain, diary = toolchain or make_toolchain(record.space, **options), Diary()
    bench = make_bench(record, toolchain, settings or SearchSettings(budget=budget), diary, limits)
    return Tuned(record, toolchain, diary, Tuner(bench, knowledge).run())


def find_sensitivity(
    space: SearchSpace,
    toolchain: Toolchain,
    folder: Path,
    allowed: float = math.inf,
    metric: str = "relative_l2",
    **options: Any,
) -> Sensitivity:
    """One-group errors; what an earlier call noted in the journal of the folder is not done again."""
    record = open_study(space, name=metric, metric=metric, identity={}, journal=folder / "errors.journal")
    known = Knowledge(make_bench(record, toolchain, **options), metric, folder)
    known.take(allowed)
    record.close()
    return known.sensitivity()


def propose_with(record: StudyRecord, prior: Prior) -> None:
    """Let a prior that never changes propose."""
    record._study.sampler = PrecisionSampler(prior, 0)


def make_front(points: tuple[Evaluation, ...], fp32: Evaluation, **changes: object) -> Front:
    """A front of points whose first is chosen, and whose all-FP16 is not finite."""
    fields: dict[str, object] = {
        "run_dir": Path("model.mptune"),
        "model_path": Path("model.onnx"),
        "model_sha256": "0" * 64,
        "target": "cpu",
        "engine": "onnxruntime",
        "device": "Fake 1000",
        "metric": "relative_l2",
        "fp32": fp32,
        "fp16": make_evaluation(3.0, math.nan, number=1023, origin=ORIGIN_FP16),
        "points": points,
        "chosen": points[0] if points else None,
        "choice": Choice(default_error=0.01, chosen=points[0].plan.fingerprint if points else None),
        "evaluations": 40,
        "failures": 3,
        "hypervolume": 0.5,
        **changes,
    }
    return Front(**fields)  # type: ignore[arg-type]


def evaluation_of(proposal: Proposal, toolchain: FakeToolchain) -> Evaluation:
    """What a toolchain measures of a proposal."""
    measurement = toolchain.evaluate(proposal.plan)
    number, origin = proposal.number, proposal.origin
    return Evaluation.from_measurement(
        proposal.plan, measurement, number=number, origin=origin, metric="relative_l2", baseline_ms=None
    )


def make_run_file(settings: SearchSettings, model: ModelSection, fixed: FixedSettings, study: str = "s") -> RunFile:
    """That of a search that begins."""
    search, choice = SearchSection.from_settings(settings), Choice.from_settings(settings)
    return RunFile(model=model, fixed_settings=fixed, search=search, study=study, choice=choice)


def make_fixed_settings(settings: SearchSettings, **resolved: object) -> FixedSettings:
    """The fixed settings of a search, with empty hashes where none are given."""
    hashes = {"space_sha256": "", "groups_sha256": "", "labels_sha256": None, "plugins_sha256": ()}
    return FixedSettings.from_settings(settings, **{**hashes, "granularity": "fusion", **resolved})
