"""One-group errors: taken once, kept, and turned into what the sampler knows beforehand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import mptune
from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import Failure
from mptune.graph.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import DEFAULT_PRECISIONS, PRECISIONS, Precision, PrecisionPlan
from mptune.settings import SearchSettings
from mptune.targets.roofline import BoundaryCost, LatencyTerms
from mptune.tuning.bench import Limits
from mptune.tuning.knowledge import SENSITIVITY_JSON, Knowledge, Sensitivity, make_prior
from mptune.tuning.sampler.latency_model import LatencyModel
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
    found = find_sensitivity(space, toolchain, "relative_l2", path, diary)
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
        assert not isinstance(found, Failure)
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


def test_past_a_limit_nothing_more_is_taken(tmp_path: Path) -> None:
    space = make_small_space(20)
    toolchain, ticks = make_toolchain(space), itertools.count()
    limits = Limits(SearchSettings(timeout_s=2.0), clock=lambda: float(next(ticks)))
    find_sensitivity(space, toolchain, METRIC, tmp_path / "s.json", Diary(), limits=limits)
    assert len(toolchain.emulated) == 8, "one job, then the time is over"
    assert len(Sensitivity.load(tmp_path / SENSITIVITY_JSON, METRIC).errors) == 8, "and what was taken is kept"


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
def laws(draw: st.DrawFn, pins_to: Sequence[Precision] = DEFAULT_PRECISIONS) -> tuple[LatencyTerms, SearchSpace]:
    gains = {g: draw(st.floats(-0.5, 1.0)) for g in IDS}
    ids = st.sampled_from(IDS)
    boundaries = []
    for index in range(draw(st.integers(0, 6))):
        producer = draw(st.none() | ids)
        readers = draw(st.lists(ids.filter(lambda g, p=producer: g != p), max_size=3, unique=True))
        fixed = draw(st.booleans())
        if readers or fixed:
            cost = draw(st.floats(0, 0.5))
            boundaries.append(BoundaryCost(f"t{index}", producer, tuple(readers), cost, fixed))
    space = make_small_space(6)
    pins = draw(st.dictionaries(ids, st.sampled_from(pins_to), max_size=3))
    free = tuple(g for g in IDS if g not in pins)
    pinned = {g: Pin(p, "a test") for g, p in pins.items()}
    tf32 = draw(st.sampled_from((0.0, 0.5)))
    return LatencyTerms(10.0, gains, tuple(boundaries), tf32), replace(space, free=free, pinned=pinned)


def law_ms(terms: LatencyTerms, plan: PrecisionPlan) -> float:
    """What the sampler predicts: every plan as a mixed one, whose FP32 groups may use TF32; all-FP32 is built first."""
    return terms.predict(plan) if plan.reduced_groups else terms.base_ms - terms.tf32_gain_ms


@st.composite
def laws_of_three(draw: st.DrawFn) -> tuple[LatencyTerms, SearchSpace]:
    """As ``laws``, with BF16 for some groups that are not FP32 and for some that are pinned."""
    terms, space = draw(laws(tuple(PRECISIONS)))
    reduced = {g: draw(st.sampled_from((Precision.FP16, Precision.BF16))) for g in space.free}
    return terms, replace(space, reduced=reduced)


def read_by_both() -> tuple[LatencyTerms, SearchSpace]:
    """A tensor of a BF16 group that is read by two that are pinned, to FP32 and to FP16: it may need two Casts."""
    space = make_small_space(6)
    pinned = {"g000": Pin(Precision.FP32, "a test"), "g001": Pin(Precision.FP16, "a test")}
    boundary = BoundaryCost("t0", "g003", ("g000", "g001"), 0.5)
    free = tuple(g for g in IDS if g not in pinned)
    space = replace(space, free=free, pinned=pinned, reduced=dict.fromkeys(free, Precision.BF16))
    return LatencyTerms(10.0, dict.fromkeys(IDS, 0.0), (boundary,)), space


@settings(max_examples=80, deadline=None)
@given(laws_of_three())
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


def test_knowing_the_law_every_proposal_is_on_the_front(open_record: OpenRecord, tmp_path: Path) -> None:
    space, wanted = make_small_space(16), SearchSettings(budget=26)
    record, toolchain = open_record(space), make_toolchain(space, latency_source="predicted", error_source="emulated")
    known = Knowledge(make_bench(record, toolchain, wanted), METRIC, tmp_path)
    Tuner(make_bench(record, toolchain, wanted), knowledge=known).run()
    proposals = record.evaluations()[2:]
    assert len(proposals) == 24
    beaten = [
        p
        for p in proposals
        if any(o.latency.median_ms < p.latency.median_ms and o.error_value < p.error_value for o in proposals)
    ]
    assert len(beaten) <= 1


@pytest.mark.parametrize("budget", [2, 14])
def test_a_search_takes_them_before_it_builds_and_spends_no_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
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
