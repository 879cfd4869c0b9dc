"""One-group errors that are taken while a search runs: first a sample of each group, then where more is wanted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import EmulatedSamples, Failure, in_parts
from mptune.graph.plan import PrecisionPlan
from mptune.settings import SearchSettings
from mptune.tuning import knowledge
from mptune.tuning.bench import Limits, Stop
from mptune.tuning.evaluation import ORIGIN_SAMPLER
from mptune.tuning.knowledge import SENSITIVITY_JSON, Knowledge, Sensitivity, make_prior
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.sampler.precision import PrecisionSampler
from mptune.tuning.space import SearchSpace
from mptune.tuning.tuner import Tuner
from tests.fakes import Diary, FakeToolchain, Law
from tests.tuning.conftest import OpenRecord, make_small_space
from tests.tuning.factory import find_sensitivity, make_bench

METRIC = "relative_l2"
SAMPLES = 8


@dataclass
class BySample(FakeToolchain):
    """Emulates on a CPU: each sample has an error of its own, and parts of the samples are taken apart.

    Attributes:
        spread: standard deviation of the log of one sample's error.
        samples: plan and part of each emulation.
    """

    spread: float = 0.3
    spreads: Mapping[str, float] = field(default_factory=dict)
    zero: Mapping[str, int] = field(default_factory=dict)
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
        factors = np.exp(self.spreads.get(group, self.spread) * draws)
        factors[: self.zero.get(group, 0)] = 0.0
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
    assert not isinstance(errors, Failure)
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
    found = find_sensitivity(space, toolchain, METRIC, tmp_path / "s.json", Diary())
    assert [g for g, error in found.errors.items() if math.isinf(error)] == ["g009"]
    assert set(space.free) - set(found.errors) == {"g002"}
    assert [part for group, part in toolchain.samples if group == "g009"] == [range(1)]
    again = by_sample(space, spread=1.0)
    assert find_sensitivity(space, again, METRIC, tmp_path / "s.json", Diary()).errors == found.errors
    assert again.samples == []


def test_an_interrupted_one_goes_on_where_it_was(tmp_path: Path) -> None:
    space = make_small_space(24)
    whole, first, second = (by_sample(space, spread=0.4) for _ in range(3))
    expected = find_sensitivity(space, whole, METRIC, tmp_path / "whole.json", Diary())
    take(space, first, tmp_path, 40.0)
    assert take(space, second, tmp_path, math.inf) == expected
    assert Sensitivity.load(tmp_path / SENSITIVITY_JSON, METRIC) == expected
    assert first.emulations <= 40
    assert first.samples + second.samples == whole.samples


def test_errors_that_are_missing_are_those_of_the_groups_kind(tmp_path: Path) -> None:
    small = make_small_space(24)
    groups = tuple(replace(group, kind=f"k{index % 8}") for index, group in enumerate(small.groups))
    space = replace(small, groups=groups)
    known = take(space, by_sample(space, spread=0.1), tmp_path, 8)
    prior = make_prior(space, known, None, exact=False)
    means, sds = prior.log_square_errors, prior.log_square_sds
    assert means is not None
    assert sds is not None
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


def test_a_resumed_search_takes_and_proposes_the_same(
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
