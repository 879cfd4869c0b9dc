from __future__ import annotations

from itertools import pairwise

import optuna
import pytest
from optuna.samplers import BaseSampler

from mptune.tuning.sampler.stock import CONSTRAINT_ATTR, LocalSampler, make_sampler

GROUPS = [f"g{i:03d}" for i in range(24)]
GAIN, CAST = 1.0, 0.8
ERRORS = {g: 10.0 ** (-1 - (7 * i % 24) / 6) for i, g in enumerate(GROUPS)}


def law(params: dict[str, str]) -> tuple[float, float]:
    """Gains of FP16 groups less the boundaries between neighbours, and errors that add in squares."""
    fp16 = [params[g] == "fp16" for g in GROUPS]
    boundaries = sum(a != b for a, b in pairwise(fp16))
    error = sum(ERRORS[g] ** 2 for g, half in zip(GROUPS, fp16, strict=True) if half) ** 0.5
    return len(GROUPS) - GAIN * sum(fp16) + CAST * boundaries, error


def searched(sampler: BaseSampler, trials: int = 80) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)
    for precision in ("fp32", "fp16"):
        study.enqueue_trial(dict.fromkeys(GROUPS, precision))
    for _ in range(trials):
        trial = study.ask({g: optuna.distributions.CategoricalDistribution(("fp32", "fp16")) for g in GROUPS})
        trial.set_user_attr(CONSTRAINT_ATTR, 0.0)
        study.tell(trial, law(trial.params))
    return study


def beaten(study: optuna.Study) -> int:
    """How many points of the front are faster than all-FP32."""
    return len({tuple(t.values) for t in study.best_trials if t.values[0] < len(GROUPS)})


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_neighbours_find_what_tpe_alone_does_not(seed: int) -> None:
    local = beaten(searched(make_sampler("local", seed, len(GROUPS))))
    assert local > beaten(searched(make_sampler("tpe", seed, len(GROUPS))))
    assert local >= 4


def test_a_neighbour_differs_in_one_run_of_groups() -> None:
    sampler = make_sampler("local", 3, len(GROUPS))
    assert isinstance(sampler, LocalSampler)
    study = searched(sampler, trials=12)
    fronts = [t.params for t in study.best_trials]
    runs = 0
    for _ in range(40):
        params = study.ask(dict.fromkeys(GROUPS, optuna.distributions.CategoricalDistribution(("fp32", "fp16")))).params
        for front in fronts:
            changed = [i for i, g in enumerate(GROUPS) if params[g] != front[g]]
            if changed and changed == list(range(changed[0], changed[-1] + 1)):
                runs += 1
                break
    assert runs >= 10


def test_the_same_seed_proposes_the_same() -> None:
    first, second = (searched(make_sampler("local", 5, len(GROUPS)), trials=10) for _ in range(2))
    assert [t.params for t in first.trials] == [t.params for t in second.trials]
    sampler = make_sampler("local", 5, len(GROUPS))
    sampler.reseed_rng()
    assert [t.params for t in searched(sampler, trials=10).trials] != [t.params for t in first.trials]
