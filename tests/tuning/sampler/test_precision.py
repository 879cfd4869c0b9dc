"""Samplers by name and by themselves: with Optuna alone, resumed, in parallel, and where there is nothing to find."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from threadpoolctl import threadpool_info, threadpool_limits

from mptune.errors import SettingsError
from mptune.settings import SearchSettings
from mptune.tuning.bench import Stop
from mptune.tuning.dominance import dominated_area, exactness, gains
from mptune.tuning.sampler.precision import SAMPLERS, PrecisionSampler, make_sampler
from mptune.tuning.sampler.trials import EHVI_ATTR, Prior, read_plans, set_outcome
from mptune.tuning.stopping import PATIENCE
from tests.tuning import additive
from tests.tuning.additive import BASE, COSTS, GAINS, GROUPS, IDS, SQUARES
from tests.tuning.conftest import OpenRecord, make_small_space
from tests.tuning.factory import make_toolchain, propose_with, tune

SPACE = dict.fromkeys(IDS, CategoricalDistribution(("fp32", "fp16")))
PRIOR = additive.prior(log_square_errors=tuple(SQUARES), gains_ms=tuple(GAINS), boundary_costs_ms=tuple(COSTS))


def law(params: Mapping[str, str]) -> tuple[float, float]:
    latency, error = additive.law(np.array([[params[group] == "fp16" for group in IDS]]))
    return float(latency[0]), float(error[0])


def searched(sampler: BaseSampler, trials: int) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)
    for precision in ("fp32", "fp16"):
        study.enqueue_trial(dict.fromkeys(IDS, precision))
    for _ in range(trials):
        trial = study.ask(SPACE)
        values = law(trial.params)
        set_outcome(trial, {"values": values})
        study.tell(trial, values)
    return study


def test_it_finds_more_than_tpe_and_expects_less_and_less() -> None:
    mine, figures = searched(PrecisionSampler(PRIOR, seed=0), trials=40), []
    for study in (mine, searched(make_sampler("tpe", 0), trials=40)):
        latency, error = np.array([t.values for t in study.best_trials]).T
        points_faster_than_fp32 = len({*latency[latency < BASE]})
        figures.append((dominated_area(gains(latency, BASE), exactness(error)), points_faster_than_fp32))
    assert (np.array(figures[0]) > figures[1]).all()
    expected = [t.user_attrs[EHVI_ATTR] for t in mine.trials[2:]]
    assert len(expected) == 38
    assert min(expected) >= 0
    assert np.mean(expected[:5]) > 10 * np.mean(expected[-5:])


@pytest.mark.smoke
def test_before_the_baseline_it_proposes_at_random_and_then_learns() -> None:
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=PrecisionSampler(PRIOR, seed=0))
    trial = study.ask(SPACE)
    assert EHVI_ATTR not in trial.user_attrs
    assert set(trial.params) == set(IDS)
    study.tell(trial, law(trial.params))
    study.enqueue_trial(dict.fromkeys(IDS, "fp32"))
    study.tell(study.ask(SPACE), law(dict.fromkeys(IDS, "fp32")))
    assert read_plans(study.trials, PRIOR.columns).base_ms == BASE
    number = study.ask(SPACE).number
    assert EHVI_ATTR in study.trials[number].user_attrs


class Emulation:
    """The law's errors, and which plans were asked for."""

    def __init__(self, overflows: str = "") -> None:
        self.asked: list[dict[str, str]] = []
        self.overflows = overflows

    def __call__(self, plans: Sequence[Mapping[str, str]]) -> list[float]:
        self.asked += [dict(plan) for plan in plans]
        return [math.inf if plan.get(self.overflows) == "fp16" else law(plan)[1] for plan in plans]


def test_a_proposal_computes_in_one_thread() -> None:
    """Matrices of some hundred rows: more threads take ten times the processor time, and no less on the clock."""
    within: set[int] = set()

    def threads() -> set[int]:
        return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}

    if not threads():
        pytest.skip("no BLAS is loaded whose threads can be set")

    def emulate(plans: Sequence[Mapping[str, str]]) -> list[float]:
        within.update(threads())
        return Emulation()(plans)

    with threadpool_limits(limits=2, user_api="blas"):
        searched(PrecisionSampler(PRIOR, seed=0, emulate=emulate), trials=4)
        assert within == {1}
        assert 2 in threads(), "the caller's own threads are as before"


def test_what_was_emulated_is_taken_up_by_a_resumed_study() -> None:
    off = np.random.default_rng(3).normal(0.0, 5.0, GROUPS)
    wrong = replace(PRIOR, log_square_errors=tuple(np.array(PRIOR.log_square_errors) + off))
    whole, resumed = (searched(PrecisionSampler(wrong, seed=3, emulate=Emulation()), trials=n) for n in (12, 7))
    emulation = Emulation()
    resumed.sampler = PrecisionSampler(wrong, seed=3, emulate=emulation)
    for _ in range(5):
        trial = resumed.ask(SPACE)
        resumed.tell(trial, law(trial.params))
    assert [t.params for t in whole.trials] == [t.params for t in resumed.trials]
    assert 0 < len(emulation.asked) < 5 * 12


def test_a_plan_that_overflows_in_emulation_is_not_proposed() -> None:
    study = searched(PrecisionSampler(PRIOR, seed=0, emulate=Emulation("g5")), trials=25)
    assert np.isinf(read_plans(study.trials, PRIOR.columns).emulations[1]).any()
    assert not any(trial.params["g5"] == "fp16" for trial in study.trials[2:])


def test_nothing_more_to_gain_stops_the_search_and_stays_stopped(open_record: OpenRecord) -> None:
    space = make_small_space(10)
    record, toolchain = open_record(space), make_toolchain(space, non_finite={g.id for g in space.groups})
    propose_with(record, Prior(space.free, log_square_errors=(math.inf,) * 10, gains_ms=(0.5,) * 10))
    assert tune(record, toolchain, budget=100).stop is Stop.CONVERGED
    spent = record.spent
    assert PATIENCE <= spent < 40
    assert tune(record, toolchain, budget=100).stop is Stop.CONVERGED
    assert record.spent == spent
    settings = SearchSettings(budget=spent + 3, sampler="tpe")
    assert tune(open_record(space), toolchain, settings).stop is Stop.BUDGET


def test_samplers_by_name() -> None:
    kinds = {"precision": PrecisionSampler, "tpe": TPESampler, None: RandomSampler}
    assert {*kinds} == {*SAMPLERS, None}
    assert all(isinstance(make_sampler(name, 0), kind) for name, kind in kinds.items())
    with pytest.raises(SettingsError, match="there is no sampler 'nsga2'") as refused:
        make_sampler("nsga2", 0)
    assert refused.value.hint == "choose one of precision, tpe; a run that used another one goes on with any"


@pytest.mark.parametrize("name", [*SAMPLERS, None])
def test_the_same_seed_proposes_the_same(name: str | None) -> None:
    first, second, other = (searched(make_sampler(name, seed), trials=14) for seed in (5, 5, 6))
    assert [t.params for t in first.trials] == [t.params for t in second.trials]
    assert [t.params for t in first.trials] != [t.params for t in other.trials]
