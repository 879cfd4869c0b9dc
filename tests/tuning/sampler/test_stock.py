"""Samplers by name, and the law that they are tried on."""

from __future__ import annotations

from itertools import pairwise

import optuna
import pytest
from optuna.samplers import BaseSampler, RandomSampler, TPESampler

from mptune.errors import SettingsError
from mptune.tuning.sampler.precision import SAMPLERS, PrecisionSampler, check_sampler, make_sampler
from mptune.tuning.sampler.trials import set_outcome

GROUPS = [f"g{i:03d}" for i in range(24)]
GAIN, CAST = 1.0, 0.8
ERRORS = {g: 10.0 ** (-1 - (7 * i % 24) / 6) for i, g in enumerate(GROUPS)}


def law(params: dict[str, str], cast: float = CAST) -> tuple[float, float]:
    """Gains of FP16 groups less the boundaries between neighbours, each ``cast``, and errors that add in squares."""
    fp16 = [params[g] == "fp16" for g in GROUPS]
    boundaries = sum(a != b for a, b in pairwise(fp16))
    error = sum(ERRORS[g] ** 2 for g, half in zip(GROUPS, fp16, strict=True) if half) ** 0.5
    return len(GROUPS) - GAIN * sum(fp16) + cast * boundaries, error


def searched(sampler: BaseSampler, trials: int = 80, cast: float = CAST) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)
    for precision in ("fp32", "fp16"):
        study.enqueue_trial(dict.fromkeys(GROUPS, precision))
    for _ in range(trials):
        trial = study.ask({g: optuna.distributions.CategoricalDistribution(("fp32", "fp16")) for g in GROUPS})
        values = law(trial.params, cast)
        set_outcome(trial, {"values": values})
        study.tell(trial, values)
    return study


def beaten(study: optuna.Study) -> int:
    """How many points of the front are faster than all-FP32."""
    return len({tuple(t.values) for t in study.best_trials if t.values[0] < len(GROUPS)})


@pytest.mark.parametrize("name", ["local", "nsga2", "random"])
def test_an_unknown_sampler_is_refused_with_a_hint(name: str) -> None:
    with pytest.raises(SettingsError, match=f"there is no sampler '{name}'") as refused:
        check_sampler(name)
    assert refused.value.hint == "choose one of precision, tpe; a run that used another one goes on with any"
    with pytest.raises(SettingsError):
        make_sampler(name, 0)


def test_the_samplers_by_name() -> None:
    made = {name: make_sampler(name, 0) for name in SAMPLERS}
    assert isinstance(made["precision"], PrecisionSampler)
    assert isinstance(made["tpe"], TPESampler)
    assert isinstance(make_sampler(None, 0), RandomSampler)


@pytest.mark.parametrize("name", [*SAMPLERS, None])
def test_the_same_seed_proposes_the_same(name: str | None) -> None:
    first, second, other = (searched(make_sampler(name, seed), trials=14) for seed in (5, 5, 6))
    assert [t.params for t in first.trials] == [t.params for t in second.trials]
    assert [t.params for t in first.trials] != [t.params for t in other.trials]
