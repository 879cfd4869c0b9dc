"""What the sampler knows before: one-group errors, taken once or in part while a search runs; emulated plans."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import EmulatedSamples, Failure, FailureKind, Stage, in_parts
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import PRECISIONS, Precision, PrecisionPlan
from mptune.settings import SearchSettings
from mptune.targets.roofline import BoundaryCost, LatencyTerms
from mptune.tuning import knowledge
from mptune.tuning.bench import Limits, Stop
from mptune.tuning.evaluation import ORIGIN_SAMPLER, Evaluation
from mptune.tuning.knowledge import SENSITIVITY_JSON, Knowledge, Sensitivity, make_prior
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.sampler.latency_model import LatencyModel
from mptune.tuning.sampler.precision import EMULATIONS_TO_LEARN
from mptune.tuning.sampler.trials import BuiltPlans
from mptune.tuning.space import Pin, SearchSpace
from tests import fakes
from tests.fakes import Diary, FakeToolchain, make_plan
from tests.graph.helpers import feeds
from tests.graph.test_corpus import CORPUS
from tests.tuning import factory
from tests.tuning.conftest import OpenRecord, make_small_space
from tests.tuning.factory import find_sensitivity, make_bench, make_toolchain, tune

METRIC = "relative_l2"
Know = Callable[..., Knowledge]


def emulated(knowledge: Knowledge, *rows: str) -> list[float]:
    """The errors of plans as the sampler asks for them."""
    return knowledge.emulate([dict(knowledge._space.choices(make_plan(bits))) for bits in rows])


@pytest.fixture
def know(open_record: OpenRecord, tmp_path: Path) -> Know:
    """What a search knows of a space's plans, which are emulated on a toolchain."""
    return lambda space, toolchain, diary=None, metric=METRIC: Knowledge(
        make_bench(open_record(space), toolchain, listener=diary), metric, tmp_path
    )


def test_each_free_group_is_emulated_alone_once(tmp_path: Path) -> None:
    space, diary = make_small_space(10), Diary()
    toolchain, again = make_toolchain(space), make_toolchain(space)
    taken = find_sensitivity(space, toolchain, tmp_path, listener=diary)
    assert taken.errors == {g: pytest.approx(e, rel=1e-3) for g, e in toolchain.law.errors.items()}
    assert toolchain.built == []
    assert toolchain.emulated[1] == make_plan("0100000000").fingerprint
    assert diary.stages == [f"one-group errors: {count} of 10 groups" for count in (0, 8, 10)]
    assert find_sensitivity(space, again, tmp_path) == taken
    assert again.emulated == []
    find_sensitivity(space, again, tmp_path, metric="max_abs")
    assert len(again.emulated) == 10


def test_a_group_whose_emulation_fails_is_unknown_and_one_that_overflows_is_infinite(tmp_path: Path) -> None:
    space = make_small_space(4)
    toolchain, again = make_toolchain(space, emulation_fails={"g001"}, non_finite={"g002"}), make_toolchain(space)
    taken = find_sensitivity(space, toolchain, tmp_path)
    assert {g: math.isinf(error) for g, error in taken.errors.items()} == {"g000": False, "g002": True, "g003": False}
    squares = make_prior(space, taken, None, exact=False).log_square_errors
    assert [math.isinf(square) for square in squares] == [False, False, True, False]
    assert find_sensitivity(space, again, tmp_path).to_json() == taken.to_json()
    assert again.emulated == [], "what fails for good is not asked again"


def times(error: OutputError, factor: float) -> dict[str, Sequence[float]]:
    """The statistics of ``y``, whose error is larger by a factor."""
    return {**error.per_output["y"], METRIC: tuple(factor * value for value in error.per_output["y"][METRIC])}


class TwoOutputs(FakeToolchain):
    """An output ``z`` beside ``y``, a hundred times as wrong as that; NaN in g002."""

    def _emulated_error(self, plan: PrecisionPlan) -> OutputError:
        error, non_finite = super()._emulated_error(plan), 5.0 if "g002" in plan.fp16_groups else 0.0
        return OutputError({**error.per_output, "z": {**times(error, 100.0), "non_finite": (non_finite,) * 2}})


def test_outputs_that_are_ignored_do_not_count(tmp_path: Path) -> None:
    space = make_small_space(4)
    toolchain = make_toolchain(space, TwoOutputs)
    ignoring, whole = (
        find_sensitivity(space, toolchain, tmp_path, settings=SearchSettings(ignore=ignored))
        for ignored in (("z",), ())
    )
    law = toolchain.law.errors
    assert ignoring.errors == {g: pytest.approx(law[g], rel=1e-3) for g in space.free}
    assert math.isinf(whole.errors["g002"])
    assert whole.errors["g001"] == pytest.approx(100 * law["g001"], rel=1e-3)
    assert len(toolchain.emulated) == 4, "another set of ignored outputs needs no new emulation"
    assert Sensitivity.load(tmp_path / SENSITIVITY_JSON, METRIC).ignoring(("z",)).errors == ignoring.errors


def test_what_one_worker_found_the_other_does_not_emulate(know: Know) -> None:
    """One works before the other, then both at once."""
    space = make_small_space(16)
    first, second, third, other = (make_toolchain(space) for _ in range(4))
    one, two, three = (know(space, toolchain) for toolchain in (first, second, third))
    one.take(16)
    two.take(math.inf)
    three.take(math.inf)
    assert (len(first.emulated), len(second.emulated), len(third.emulated)) == (8, 8, 0)
    assert set(first.emulated).isdisjoint(second.emulated)
    assert two.sensitivity() == three.sensitivity()
    know(space, other, metric="max_abs").take(math.inf)
    assert len(other.emulated) == 16, "another metric has other errors"


IDS = [f"g{i:03d}" for i in range(6)]


@st.composite
def laws(draw: st.DrawFn) -> tuple[LatencyTerms, SearchSpace]:
    """With BF16 for some groups that are not FP32 and for some that are pinned."""
    gains = {g: draw(st.floats(-0.5, 1.0)) for g in IDS}
    ids, boundaries = st.sampled_from(IDS), []
    for index in range(draw(st.integers(0, 6))):
        producer = draw(st.none() | ids)
        readers = draw(st.lists(ids.filter(lambda g, p=producer: g != p), max_size=3, unique=True))
        fixed = draw(st.booleans())
        if readers or fixed:
            boundaries.append(BoundaryCost(f"t{index}", producer, tuple(readers), draw(st.floats(0, 0.5)), fixed))
    pins = draw(st.dictionaries(ids, st.sampled_from(tuple(PRECISIONS)), max_size=3))
    reduced = {g: draw(st.sampled_from((Precision.FP16, Precision.BF16))) for g in IDS if g not in pins}
    terms = LatencyTerms(10.0, gains, tuple(boundaries), draw(st.sampled_from((0.0, 0.5))))
    return terms, space_of(pins, reduced)


def space_of(pins: Mapping[str, Precision], reduced: Mapping[str, Precision]) -> SearchSpace:
    pinned = {g: Pin(p, "a test") for g, p in pins.items()}
    return replace(make_small_space(6), free=tuple(reduced), pinned=pinned, reduced=reduced)


def law_ms(terms: LatencyTerms, plan: PrecisionPlan) -> float:
    """What the sampler predicts: every plan as a mixed one, whose FP32 groups may use TF32; all-FP32 is built first."""
    return terms.predict(plan) if plan.reduced_groups else terms.base_ms - terms.tf32_gain_ms


READ_BY_BOTH = (
    LatencyTerms(10.0, dict.fromkeys(IDS, 0.0), (BoundaryCost("t0", "g003", ("g000", "g001"), 0.5),)),
    space_of({"g000": Precision.FP32, "g001": Precision.FP16}, dict.fromkeys(IDS[2:], Precision.BF16)),
)
"""A tensor of a BF16 group that is read by two that are pinned, to FP32 and to FP16: it may need two Casts."""


@settings(max_examples=80, deadline=None)
@given(laws())
@example(READ_BY_BOTH)
def test_the_prior_counts_casts_between_two_reduced_precisions(law: tuple[LatencyTerms, SearchSpace]) -> None:
    terms, space = law
    prior = make_prior(space, Sensitivity(METRIC, dict.fromkeys(IDS, 1e-3)), terms, exact=True)
    reduced = list(space.reduced.values())
    assert prior.precisions == (() if {*reduced} <= {Precision.FP16} else tuple(reduced))
    plans = np.random.default_rng(0).random((8, len(space.free))) < 0.5
    none, empty = np.zeros((0, len(space.free)), dtype=bool), np.zeros(0)
    model = LatencyModel(prior, BuiltPlans(none, empty, empty, empty, empty, terms.base_ms))
    predicted = model.predict(plans, model.mean()[None])[0]
    for plan, latency in zip(plans, predicted, strict=True):
        choices = {g: space.options[g][int(low)] for g, low in zip(space.free, plan, strict=True)}
        assert latency == pytest.approx(law_ms(terms, space.plan(choices)))


@pytest.mark.usefixtures("opened_here", "place")
@pytest.mark.parametrize(
    ("source", "holds", "budget"),
    [("measured", True, 14), ("measured", False, 14), ("emulated", True, 14), ("measured", True, 2)],
)
@pytest.mark.usefixtures("spends_budget")
def test_a_search_emulates_groups_first_and_plans_where_errors_are_measured_and_those_of_an_emulation(
    source: str, holds: bool, budget: int
) -> None:
    toolchain, diary = fakes.make_toolchain(error_source=source, emulation_holds=holds), Diary()
    front = fakes.search(toolchain, budget=budget, listener=diary)
    groups = toolchain.law.groups
    fp32, proposes = front.fp32.plan, budget > 10
    alone = [fp32.replace({group: Precision.FP16}).fingerprint for group in groups]
    assert front.evaluations == budget
    assert toolchain.emulated[: len(groups)] == (alone if proposes else [])
    assert any(stage.startswith("one-group errors") for stage in diary.stages) == proposes
    assert Path("model.mptune/data/sensitivity.json").exists() == proposes
    emulates = proposes and source == "measured" and holds
    assert (len(toolchain.emulated) > len(groups)) == emulates, "more than one plan for each group"
    assert any(point.emulated is not None for point in front.points) == emulates
    assert len(toolchain.emulated) == len(set(toolchain.emulated))


SAMPLES = 8


@dataclass
class BySample(FakeToolchain):
    """Emulates on a CPU: each sample has an error of its own, and parts of the samples are taken apart.

    Attributes:
        spread: standard deviation of the log of one sample's error.
        samples: plan and part of each emulation.
    """

    spread: float = 0.3
    samples: list[tuple[str, range]] = field(default_factory=list)
    part: range = range(SAMPLES)

    def emulate(self, plans: Sequence[PrecisionPlan], part: range | None = None) -> tuple[OutputError, ...] | Failure:
        self.part = range(SAMPLES) if part is None else part
        errors = super().emulate(plans)
        self.samples += [] if isinstance(errors, Failure) else [(plan.fp16_groups[0], self.part) for plan in plans]
        return errors

    def _emulated_error(self, plan: PrecisionPlan) -> OutputError:
        (group,) = plan.fp16_groups
        draws = np.random.default_rng([7, self.law.groups.index(group)]).normal(size=SAMPLES)
        values = super()._emulated_error(plan).per_output["y"]
        of_part = {name: (by[0],) * len(self.part) for name, by in values.items()}
        of_part[METRIC] = tuple(values[METRIC][0] * math.exp(self.spread * draws[k]) for k in self.part)
        return OutputError({"y": of_part})

    @property
    def emulations(self) -> int:
        return sum(len(part) for _, part in self.samples)


def by_sample(space: SearchSpace, **options: Any) -> BySample:
    samples = EmulatedSamples(in_parts(SAMPLES), 4)
    sources = {"latency_source": "predicted", "error_source": "emulated"}
    return make_toolchain(space, BySample, emulated_samples=samples, **sources, **options)


def complete(space: SearchSpace, toolchain: BySample) -> dict[str, float]:
    """The error of each group alone on all samples."""
    errors = replace(toolchain, samples=[], emulated=[]).emulate([space.alone(group) for group in space.free])
    return {group: error.value(METRIC) for group, error in zip(space.free, errors, strict=True)}


def test_errors_are_within_their_doubt_until_all_samples_are_taken(tmp_path: Path) -> None:
    space = make_small_space(48)
    toolchain = by_sample(space, spread=0.4)
    partial, exact = find_sensitivity(space, toolchain, tmp_path, 2 * 48), complete(space, toolchain)
    deviations = [math.log(partial.errors[g] / exact[g]) / doubt for g, doubt in partial.doubts.items()]
    assert len(deviations) == 48
    assert 0.5 < math.sqrt(np.mean(np.square(deviations))) < 2.0
    whole = find_sensitivity(space, toolchain, tmp_path)
    assert not whole.doubts
    assert whole.errors == pytest.approx(exact)
    assert toolchain.emulations == SAMPLES * 48


def test_what_fails_or_overflows_has_one_sample(tmp_path: Path) -> None:
    space = make_small_space(16)
    toolchain = by_sample(space, spread=1.0, emulation_fails={"g002"}, non_finite={"g009"})
    errors = find_sensitivity(space, toolchain, tmp_path).errors
    assert [g for g, error in errors.items() if math.isinf(error)] == ["g009"]
    assert set(space.free) - set(errors) == {"g002"}
    assert [part for group, part in toolchain.samples if group == "g009"] == [range(1)]


def test_errors_that_are_missing_are_those_of_the_groups_kind(tmp_path: Path) -> None:
    small = make_small_space(24)
    groups = tuple(replace(group, kind=f"k{index % 8}") for index, group in enumerate(small.groups))
    space = replace(small, groups=groups)
    taken = find_sensitivity(space, by_sample(space, spread=0.1), tmp_path, 8)
    prior = make_prior(space, taken, None, exact=False)
    assert prior.log_square_errors[9] == pytest.approx(2 * math.log(taken.errors["g001"]))
    assert prior.log_square_sds[9] > 1.0
    assert prior.log_square_sds[1] == pytest.approx(2 * taken.doubts["g001"])


def searched(
    record: StudyRecord, toolchain: BySample, folder: Path, budget: int, limits: Limits | None = None
) -> tuple[Knowledge, Diary, factory.Tuned]:
    """A search, what it knew, and what its knowledge said."""
    diary, wanted = Diary(), SearchSettings(budget=budget)
    known = Knowledge(make_bench(record, toolchain, wanted, diary, limits), METRIC, folder)
    return known, diary, tune(record, toolchain, wanted, limits, known)


def test_the_first_plan_is_proposed_before_all_errors_are_known(
    open_record: OpenRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knowledge, "AT_FIRST", 16)
    space, before = make_small_space(24), []
    toolchain, record = by_sample(space), open_record(space)
    toolchain.before = lambda plan: before.append(toolchain.emulations)
    known, diary, _ = searched(record, toolchain, tmp_path, 24)
    _, _, *proposals = before
    assert proposals[0] == 16, "two jobs of eight groups"
    assert proposals == sorted(proposals)
    assert all(count <= 16 + 2 * proposal for proposal, count in enumerate(proposals)), "in proportion"
    assert "searching; 8 one-group errors are estimated from groups like them" in diary.stages
    assert diary.stages[-1] == "searching"
    assert known.prior.log_square_errors is not None
    assert [e.origin for e in record.evaluations()].count(ORIGIN_SAMPLER) == 21
    exact, taken = complete(space, toolchain), Sensitivity.load(tmp_path / SENSITIVITY_JSON, METRIC)
    assert set(taken.errors) == set(space.free), "filled in"
    assert all(abs(math.log(taken.errors[g] / exact[g])) < 5 * taken.doubts.get(g, 1e-9) for g in space.free)


def test_a_resumed_search_does_the_same(
    open_record: OpenRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knowledge, "AT_FIRST", 16)
    space, results = make_small_space(24), []
    for name, budgets in (("whole", (16,)), ("parts", (6, 11, 16))):
        (tmp_path / name).mkdir()
        record, toolchain = open_record(space, journal=tmp_path / name / "study.journal"), by_sample(space)
        for budget in budgets:
            searched(record, toolchain, tmp_path / name, budget)
        results.append(([e.plan.fingerprint for e in record.evaluations()], toolchain.samples))
    assert results[0] == results[1]


def test_when_the_time_is_over_during_emulations_no_plan_is_built(open_record: OpenRecord, tmp_path: Path) -> None:
    space = make_small_space(24)
    toolchain, record = by_sample(space), open_record(space)
    limits = Limits(SearchSettings(timeout_s=10.0), clock=lambda: 11.0 if toolchain.samples else 0.0)
    assert searched(record, toolchain, tmp_path, 20, limits)[2].stop is Stop.TIMEOUT
    assert len(record.evaluations()) == len(space.seeds)
    assert not record.running()


def test_each_plan_is_emulated_once(know: Know) -> None:
    space = make_small_space(4)
    toolchain = make_toolchain(space)
    emulator = know(space, toolchain)
    errors = emulated(emulator, "1000", "0110", "1000")
    assert errors == [pytest.approx(toolchain.law.error(make_plan(bits))) for bits in ("1000", "0110", "1000")]
    assert toolchain.emulated == [make_plan("1000").fingerprint, make_plan("0110").fingerprint]
    assert emulated(emulator, "1000") == errors[:1]


class WrongAlone(FakeToolchain):
    """The emulated errors of groups alone are off by factors of up to 10."""

    def _emulated_error(self, plan: PrecisionPlan) -> OutputError:
        error = super()._emulated_error(plan)
        if len(plan.fp16_groups) != 1:
            return error
        off = 10.0 ** np.random.default_rng(int(plan.fp16_groups[0][1:])).uniform(-1.0, 1.0)
        return OutputError({"y": times(error, off)})


@pytest.mark.parametrize("seconds", [1e-6, 1e3])
def test_a_search_emulates_to_learn_where_that_is_cheap(
    open_record: OpenRecord, tmp_path: Path, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build takes 0.1 s (``tests.fakes``), a job of emulations so many seconds."""
    space, ticks, wanted = make_small_space(10), itertools.count(), SearchSettings(budget=6)
    toolchain, record = make_toolchain(space, WrongAlone), open_record(space)
    asked: list[int] = []
    allowed: list[int] = []

    class Counting(Knowledge):
        def emulate(self, choices: Sequence[Mapping[str, str]]) -> list[float]:
            asked.append(len(choices))
            return super().emulate(choices)

        def affordable(self, seconds: float) -> int:
            allowed.append(super().affordable(seconds))
            return allowed[-1]

    bench = make_bench(record, toolchain, wanted)
    known = Counting(bench, METRIC, tmp_path, clock=lambda: seconds * next(ticks))
    decoded, decode = [], Evaluation.from_json
    monkeypatch.setattr(Evaluation, "from_json", lambda text: decoded.append(text["number"]) or decode(text))
    tune(record, toolchain, wanted, knowledge=known)
    assert record.spent == 6
    assert len(decoded) == len(set(decoded)), "each evaluation is decoded once"
    assert len(asked) >= 3, "candidates are emulated, too"
    assert allowed[:2] == [2, 2], "no time is known, nor is it when the largest errors are in FP32"
    assert asked[0] == 8, "four times as many at first"
    assert set(allowed[2:]) == ({EMULATIONS_TO_LEARN} if seconds < 1.0 else {0})
    assert len(allowed) == 4, "before each plan that is no seed of the space"


def test_what_is_known_of_single_groups_is_not_emulated_again(know: Know) -> None:
    space = make_small_space(3)
    toolchain = make_toolchain(space, non_finite={"g002"})
    emulator, law = know(space, toolchain), pytest.approx(toolchain.law.error(make_plan("010")), rel=1e-3)
    emulator.sampler()
    assert len(toolchain.emulated) == 3
    assert emulated(emulator, "010", "001") == [law, math.inf]
    assert len(toolchain.emulated) == 3
    assert emulator.recall(make_plan("010")) == (law, 2)


def test_what_overflows_is_infinite_and_what_fails_is_not_known(know: Know) -> None:
    space = make_small_space(4)
    toolchain = make_toolchain(space, emulation_fails={"g001"}, non_finite={"g002"})
    emulator = know(space, toolchain)
    errors = emulated(emulator, "1000", "0100", "0010")
    assert errors[0] < errors[2] == math.inf
    assert math.isnan(errors[1])
    assert emulator.recall(make_plan("0100")) is None, "it failed: nothing is known of the outputs"
    assert emulator.recall(make_plan("0010")) == (math.inf, 2)
    before = len(toolchain.emulated)
    assert math.isnan(*emulated(emulator, "0100"))
    assert len(toolchain.emulated) == before, "it is not tried again and again"


def test_a_machine_that_stays_broken_is_tried_again_and_then_nothing_is_asked(know: Know) -> None:
    space, diary, asked = make_small_space(2), Diary(), []
    toolchain = make_toolchain(space)
    emulator = know(space, toolchain, diary)
    (known,) = emulated(emulator, "10")
    gone = Failure(Stage.RUN, FailureKind.DEVICE_LOST, "gone")
    toolchain.emulate = lambda plans: asked.append(plans) or gone
    assert emulated(emulator, "01", "10") == pytest.approx([math.nan, known], nan_ok=True)
    assert math.isnan(*emulated(emulator, "11"))
    assert emulated(emulator, "10") == [known]
    assert len(asked) == 2
    assert [("gone" in text, "trying again" in text, "without emulating" in text) for text in diary.warnings] == [
        (True, True, False),
        (True, False, True),
    ]


@pytest.mark.parametrize(
    ("measured", "emulated", "fp32", "agree"),
    [
        (1.4e-3, 1e-3, 0.0, True),
        (0.7e-3, 1e-3, 0.0, True),
        (1.6e-3, 1e-3, 0.0, False),
        (0.6e-3, 1e-3, 0.0, False),
        (1.0e-3, 1e-5, 1e-3, True),
        (1.0e-3, math.inf, 0.0, False),
        (0.0, 3.67e-7, 0.0, True),  # FP16 groups that round nothing, on an H200
        (2.0e-7, 2.0e-6, 0.0, False),
    ],
)
def test_a_factor_between_both_errors_is_kept(measured: float, emulated: float, fp32: float, agree: bool) -> None:
    errors = OutputError({"y": {METRIC: (measured, 9.0), "max_abs": (1.0, 1.0), "non_finite": (0.0, 0.0)}})
    for metric, disagrees in ((METRIC, not agree), ("max_abs", False)):
        evaluation = replace(factory.make_evaluation(1.0, 0.0), error=errors, metric=metric).with_emulated(
            emulated, 1, fp32
        )
        assert (evaluation.emulated, evaluation.disagrees) == (emulated, disagrees)
        assert Evaluation.from_json(json.loads(json.dumps(evaluation.to_json()))) == evaluation


def test_errors_of_groups_that_are_not_emulated_are_added(know: Know, open_record: OpenRecord) -> None:
    space = replace(make_small_space(4), not_emulated=("g001",))
    toolchain, record = make_toolchain(space), open_record(space)
    assert math.isnan(*emulated(know(space, toolchain), "1100"))
    record.enqueue(space.alone("g001"), ORIGIN_SAMPLER)
    proposal = record.ask()
    record.tell_evaluation(
        proposal, replace(factory.evaluation_of(proposal, toolchain), error=factory.make_error(7e-3))
    )
    again = know(space, toolchain)
    again.sampler()
    (alone,) = emulated(again, "1000")
    assert emulated(again, "1100", "0100") == pytest.approx([math.hypot(alone, 7e-3), 7e-3])
    assert again.recall(make_plan("0100")) is None, "no emulated error to compare a measured one with"


@pytest.mark.usefixtures("opened_here")
def test_a_search_measures_a_recurrent_layer_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(CORPUS[0].parent / "lstm.onnx", "model.onnx")
    model = load_model("model.onnx")
    np.savez("data.npz", **{name: np.stack([value[0]] * 8) for name, value in feeds(model).items()})
    toolchain = fakes.make_toolchain()
    fakes.search(toolchain, budget=8)
    fp32 = GroupedModel(model, find_groups(model)).uniform(Precision.FP32)
    assert fp32.replace({"g001": Precision.FP16}).fingerprint in toolchain.built[:3]
