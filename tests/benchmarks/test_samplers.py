"""The samplers that mptune's is compared with."""

from __future__ import annotations

import optuna
import pytest

from benchmarks.samplers import LocalSampler, make_compared
from tests.tuning.sampler.test_stock import GROUPS, beaten, searched


@pytest.mark.slow
def test_neighbours_find_what_tpe_alone_does_not() -> None:
    local = beaten(searched(make_compared("local", 0, len(GROUPS))))
    assert local > beaten(searched(make_compared("tpe", 0, len(GROUPS))))
    assert local >= 4


def test_a_neighbour_differs_in_one_run_of_groups() -> None:
    sampler = make_compared("local", 3, len(GROUPS))
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
