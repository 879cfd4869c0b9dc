"""One-group errors: taken once, or in part while a search runs, and turned into what the sampler knows before."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import mptune
from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import EmulatedSamples, Failure, in_parts
from mptune.graph.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import PRECISIONS, Precision, PrecisionPlan
from mptune.settings import SearchSettings
from mptune.targets.roofline import BoundaryCost, LatencyTerms
from mptune.tuning import knowledge
from mptune.tuning.bench import Limits, Stop
from mptune.tuning.evaluation import ORIGIN_SAMPLER
from mptune.tuning.knowledge import SENSITIVITY_JSON, Knowledge, Sensitivity, make_prior
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.sampler.latency_model import LatencyModel
from mptune.tuning.sampler.precision import PrecisionSampler
from mptune.tuning.sampler.trials import BuiltPlans
from mptune.tuning.space import Pin, SearchSpace
from mptune.tuning.tuner import Tuner
from tests.conftest import save_mlp
from tests.fakes import FAST, Diary, FakeToolchain, Law, make_plan
from tests.tuning.conftest import OpenRecord, make_small_space
from tests.tuning.factory import find_sensitivity, make_bench
from tests.tuning.test_tuner import make_toolchain

METRIC = "relative_l2"


def test_each_free_group_is_emulated_alone_once(tmp_path: Path) -> None:
    space, path, diary = make_small_space(10), tmp_path / "s.json", Diary()
    toolchain = make_toolchain(space)
    found = find_sensitivity(space, toolchain, METRIC, path, diary)
    assert found.errors == {g: pytest.approx(e, rel=1e-3) for g, e in toolchain.law.errors.items()}
    assert toolchain.built == []
    assert toolchain.emulated[1] == make_plan("0100000000").fingerprint
    assert diary.stages == ["one-group errors: 0 of 10 groups", "one-group errors: 8 of 10 groups"]
    again = make_toolchain(space)
    assert find_sensitivity(space, again, "relative_l2", path, diary) == found
    assert again.emulated == []
    find_sensitivity(space, again, "max_abs", path, diary)
    assert len(again.emulated) == 10


def test_a_group_whose_emulation_fails_is_unknown_and_one_that_overflows_is_infinite(tmp_path: Path) -> None:
    space = make_small_space(4)
    toolchain = make_toolchain(space, emulation_fails={"g001"}, non_finite={"g002"})
    found = find_sensitivity(space, toolchain, "relative_l2", tmp_path / "s.json", Diary())
    assert {g: math.isinf(error) for g, error in found.errors.items()} == {"g000": False, "g002": True, "g003": False}
    assert "g001" not in found.errors
    squares = make_prior(space, found, None, exact=False).log_square_errors
    assert squares is not None
    assert [math.isinf(square) for square in squares] == [False, False, True, False]
    again = make_toolchain(space)
    assert find_sensitivity(space, again, "relative_l2", tmp_path / "s.json", Diary()).to_json() == found.to_json()
    assert again.emulated == [], "what fails for good is not asked again"


class TwoOutputs(FakeToolchain):
    """An output ``z`` beside ``y``, a hundred times as wrong as that; NaN in g002."""

    def emulate(self, plans: Sequence[PrecisionPlan], part: range | None = None) -> tuple[OutputError, ...] | Failure:
        found = super().emulate(plans, part)
        return tuple(self._both(plan, error) for plan, error in zip(plans, found, strict=True))

    def _both(self, plan: PrecisionPlan, error: OutputError) -> OutputError:
        y = error.per_output["y"]
        non_finite = 5.0 if "g002" in plan.fp16_groups else 0.0
        return OutputError(
            {"y": y, "z": {**y, METRIC: tuple(100 * v for v in y[METRIC]), "non_finite": (non_finite,) * 2}}
        )


def test_outputs_that_are_ignored_do_not_count(tmp_path: Path) -> None:
    space, path = make_small_space(4), tmp_path / "s.json"
    toolchain = TwoOutputs(Law(list(space.free)))

    def taken(ignored: Collection[str]) -> Sensitivity:
        return find_sensitivity(space, toolchain, METRIC, path, Diary(), settings=SearchSettings(ignore=tuple(ignored)))

    law = toolchain.law.errors
    ignoring = taken(("z",))
    assert ignoring.errors == {g: pytest.approx(law[g], rel=1e-3) for g in space.free}
    whole = taken(())
    assert math.isinf(whole.errors["g002"])
    assert whole.errors["g001"] == pytest.approx(100 * law["g001"], rel=1e-3)
    assert len(toolchain.emulated) == 4, "another set of ignored outputs needs no new emulation"
    assert Sensitivity.load(tmp_path / SENSITIVITY_JSON, METRIC).ignoring(("z",)).errors == ignoring.errors


def test_what_one_worker_found_the_other_does_not_emulate(open_record: OpenRecord, tmp_path: Path) -> None:
    """One works before the other, then both at once."""
    space = make_small_space(16)
    first, second, third = (make_toolchain(space) for _ in range(3))
    one, two, three = (
        Knowledge(make_bench(open_record(space), toolchain, SearchSettings()), METRIC, tmp_path)
        for toolchain in (first, second, third)
    )
    one.take(16)
    two.take(math.inf)
    three.take(math.inf)
    assert (len(first.emulated), len(second.emulated), len(third.emulated)) == (8, 8, 0)
    assert set(first.emulated).isdisjoint(second.emulated)
    assert two.sensitivity() == three.sensitivity()
    other = make_toolchain(space)
    Knowledge(make_bench(open_record(space), other, SearchSettings()), "max_abs", tmp_path).take(math.inf)
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
    free = tuple(g for g in IDS if g not in pins)
    pinned = {g: Pin(p, "a test") for g, p in pins.items()}
    reduced = {g: draw(st.sampled_from((Precision.FP16, Precision.BF16))) for g in free}
    terms = LatencyTerms(10.0, gains, tuple(boundaries), draw(st.sampled_from((0.0, 0.5))))
    return terms, replace(make_small_space(6), free=free, pinned=pinned, reduced=reduced)


def law_ms(terms: LatencyTerms, plan: PrecisionPlan) -> float:
    """What the sampler predicts: every plan as a mixed one, whose FP32 groups may use TF32; all-FP32 is built first."""
    return terms.predict(plan) if plan.reduced_groups else terms.base_ms - terms.tf32_gain_ms


def read_by_both() -> tuple[LatencyTerms, SearchSpace]:
    """A tensor of a BF16 group that is read by two that are pinned, to FP32 and to FP16: it may need two Casts."""
    space = make_small_space(6)
    pinned = {"g000": Pin(Precision.FP32, "a test"), "g001": Pin(Precision.FP16, "a test")}
    boundary = BoundaryCost("t0", "g003", ("g000", "g001"), 0.5)
    free = tuple(g for g in IDS if g not in pinned)
    space = replace(space, free=free, pinned=pinned, reduced=dict.fromkeys(free, Precision.BF16))
    return LatencyTerms(10.0, dict.fromkeys(IDS, 0.0), (boundary,)), space


@settings(max_examples=80, deadline=None)
@given(laws())
@example(read_by_both())
def test_the_prior_counts_casts_between_two_reduced_precisions(law: tuple[LatencyTerms, SearchSpace]) -> None:
    terms, space = law
    prior = make_prior(space, Sensitivity("relative_l2", dict.fromkeys(IDS, 1e-3)), terms, exact=True)
    reduced = list(space.reduced.values())
    assert prior.precisions == (() if {*reduced} <= {Precision.FP16} else tuple(reduced))
    plans = np.random.default_rng(0).random((8, len(space.free))) < 0.5
    none, empty = np.zeros((0, len(space.free)), dtype=bool), np.zeros(0)
    model = LatencyModel(prior, BuiltPlans(none, empty, empty, empty, empty, terms.base_ms))
    predicted = model.predict(plans, model.mean()[None])[0]
    for plan, latency in zip(plans, predicted, strict=True):
        choices = {g: space.options[g][int(low)] for g, low in zip(space.free, plan, strict=True)}
        assert latency == pytest.approx(law_ms(terms, space.plan(choices)))


@pytest.mark.parametrize("budget", [2, 14])
def test_a_search_takes_them_first_and_at_no_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    monkeypatch.chdir(tmp_path)
    save_mlp(tmp_path / "model.onnx")
    model = load_model("model.onnx")
    groups = [g.id for g in find_groups(model)]
    fp32 = PrecisionPlan.uniform(model.sha256, groups, Precision.FP32)
    alone = [fp32.replace({group: Precision.FP16}).fingerprint for group in groups]
    toolchain, diary = FakeToolchain(Law(groups)), Diary()
    options = {"target": "cpu", "latency": FAST, "open_toolchain": toolchain.open}
    front = mptune.search("model.onnx", budget=budget, listener=diary, **options)
    told = [stage for stage in diary.stages if stage.startswith("one-group errors")]
    assert front.evaluations == budget
    assert toolchain.emulated[: len(groups)] == (alone if budget > 10 else [])
    assert len(toolchain.emulated) == len(set(toolchain.emulated))
    assert bool(told) == (budget > 10)
    assert (tmp_path / "model.mptune" / "data" / "sensitivity.json").exists() == (budget > 10)


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
    proposed: list[int] = field(default_factory=list)

    def emulate(self, plans: Sequence[PrecisionPlan], part: range | None = None) -> tuple[OutputError, ...] | Failure:
        whole = super().emulate(plans)
        if isinstance(whole, Failure):
            return whole
        part = range(self.emulated_samples.count) if part is None else part
        self.samples += [(plan.fp16_groups[0], part) for plan in plans]
        return tuple(self._of_part(plan, error, part) for plan, error in zip(plans, whole, strict=True))

    def _of_part(self, plan: PrecisionPlan, error: OutputError, part: range) -> OutputError:
        (group,) = plan.fp16_groups
        draws = np.random.default_rng([7, self.law.groups.index(group)]).normal(size=SAMPLES)
        factors = np.exp(self.spread * draws)
        values = error.per_output["y"]
        kept = {name: (by[0],) * len(part) for name, by in values.items()}
        kept[METRIC] = tuple(values[METRIC][0] * float(factors[k]) for k in part)
        return OutputError({"y": kept})

    @property
    def emulations(self) -> int:
        return sum(len(part) for _, part in self.samples)


def by_sample(space: SearchSpace, kind: type[BySample] = BySample, **options: object) -> BySample:
    samples = EmulatedSamples(in_parts(SAMPLES), 4)
    sources = {"latency_source": "predicted", "error_source": "emulated"}
    return kind(Law(list(space.free)), emulated_samples=samples, **sources, **options)  # type: ignore[arg-type]


def complete(space: SearchSpace, toolchain: BySample) -> dict[str, float]:
    """The error of each group alone on all samples."""
    fp32 = space.seeds[0].plan
    plans = [fp32.replace({group: "fp16"}) for group in space.free]  # type: ignore[dict-item]
    errors = replace(toolchain, samples=[], emulated=[]).emulate(plans)
    return {group: error.value(METRIC) for group, error in zip(space.free, errors, strict=True)}


def take(space: SearchSpace, toolchain: BySample, folder: Path, allowed: float) -> Sensitivity:
    return find_sensitivity(space, toolchain, METRIC, folder / SENSITIVITY_JSON, Diary(), allowed=allowed)


def test_errors_are_within_their_doubt_until_all_samples_are_taken(tmp_path: Path) -> None:
    space = make_small_space(48)
    toolchain = by_sample(space, spread=0.4)
    some, exact = take(space, toolchain, tmp_path, 2 * 48), complete(space, toolchain)
    deviations = [math.log(some.errors[g] / exact[g]) / doubt for g, doubt in some.doubts.items()]
    assert len(deviations) == 48
    assert 0.5 < math.sqrt(np.mean(np.square(deviations))) < 2.0
    whole = take(space, toolchain, tmp_path, math.inf)
    assert not whole.doubts
    assert whole.errors == pytest.approx(exact)
    assert toolchain.emulations == SAMPLES * 48


def test_what_fails_or_overflows_has_one_sample(tmp_path: Path) -> None:
    space = make_small_space(16)
    toolchain = by_sample(space, spread=1.0, emulation_fails={"g002"}, non_finite={"g009"})
    found = take(space, toolchain, tmp_path, math.inf)
    assert [g for g, error in found.errors.items() if math.isinf(error)] == ["g009"]
    assert set(space.free) - set(found.errors) == {"g002"}
    assert [part for group, part in toolchain.samples if group == "g009"] == [range(1)]


def test_errors_that_are_missing_are_those_of_the_groups_kind(tmp_path: Path) -> None:
    small = make_small_space(24)
    groups = tuple(replace(group, kind=f"k{index % 8}") for index, group in enumerate(small.groups))
    space = replace(small, groups=groups)
    known = take(space, by_sample(space, spread=0.1), tmp_path, 8)
    prior = make_prior(space, known, None, exact=False)
    means, sds = prior.log_square_errors, prior.log_square_sds
    assert means[9] == pytest.approx(2 * math.log(known.errors["g001"]))
    assert sds[9] > 1.0
    assert sds[1] == pytest.approx(2 * known.doubts["g001"])


def searched(
    record: StudyRecord,
    space: SearchSpace,
    toolchain: BySample,
    folder: Path,
    budget: int,
    limits: Limits | None = None,
) -> tuple[Knowledge, Diary, Stop]:
    """A search, and what it knew; ``toolchain.proposed`` has the emulations before each proposal."""
    diary, settings = Diary(), SearchSettings(budget=budget)
    known = Knowledge(make_bench(record, toolchain, settings, diary, limits), METRIC, folder)
    sampler = known.sampler

    def counting() -> PrecisionSampler:
        made = sampler()
        toolchain.proposed.append(toolchain.emulations)
        return made

    known.sampler = counting  # type: ignore[method-assign]
    return known, diary, Tuner(make_bench(record, toolchain, settings, diary, limits), known).run()


def test_the_first_plan_is_proposed_before_all_errors_are_known(
    open_record: OpenRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knowledge, "AT_FIRST", 16)
    space = make_small_space(24)
    toolchain, record = by_sample(space), open_record(space)
    known, diary, _ = searched(record, space, toolchain, tmp_path, 60)
    assert toolchain.proposed[0] == 16, "two jobs of eight groups"
    assert toolchain.proposed == sorted(toolchain.proposed)
    assert all(count <= 16 + 2 * proposal for proposal, count in enumerate(toolchain.proposed)), "in proportion"
    assert "searching; 8 one-group errors are estimated from groups like them" in diary.stages
    assert diary.stages[-1] == "searching"
    assert set(Sensitivity.load(tmp_path / SENSITIVITY_JSON, METRIC).errors) == set(space.free), "filled in"
    assert known.prior.log_square_errors is not None
    assert [e.origin for e in record.evaluations()].count(ORIGIN_SAMPLER) == 58
    exact = complete(space, toolchain)
    taken = Sensitivity.load(tmp_path / SENSITIVITY_JSON, METRIC)
    assert all(abs(math.log(taken.errors[g] / exact[g])) < 5 * taken.doubts.get(g, 1e-9) for g in space.free)


def test_a_resumed_search_does_the_same(
    open_record: OpenRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knowledge, "AT_FIRST", 16)
    space = make_small_space(24)
    plans, samples = [], []
    for name, budgets in (("whole", (20,)), ("parts", (7, 13, 20))):
        (tmp_path / name).mkdir()
        record = open_record(space, journal=tmp_path / name / "study.journal")
        toolchain = by_sample(space)
        for budget in budgets:
            searched(record, space, toolchain, tmp_path / name, budget)
        plans.append([e.plan.fingerprint for e in record.evaluations()])
        samples.append(toolchain.samples)
    assert plans[0] == plans[1]
    assert samples[0] == samples[1]


def test_when_the_time_is_over_during_emulations_no_plan_is_built(open_record: OpenRecord, tmp_path: Path) -> None:
    space, now = make_small_space(24), [0.0]

    class Slow(BySample):
        def emulate(self, *args: Any, **options: Any) -> tuple[OutputError, ...] | Failure:
            now[0] = 11.0
            return super().emulate(*args, **options)

    toolchain, record = by_sample(space, Slow), open_record(space)
    limits = Limits(SearchSettings(timeout_s=10.0), clock=lambda: now[0])
    assert searched(record, space, toolchain, tmp_path, 20, limits)[2] is Stop.TIMEOUT
    assert len(record.evaluations()) == len(space.seeds)
    assert not record.running()
