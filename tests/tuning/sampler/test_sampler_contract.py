"""Optuna's own contract for samplers, held by ``PrecisionSampler``, and its use with Optuna alone.

Its ``SingleOnlySamplerTestCase`` is for samplers that refuse several objectives.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import optuna
import pytest
from optuna.distributions import CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.trial import TrialState

from mptune.tuning.sampler.precision import PrecisionSampler
from mptune.tuning.sampler.trials import Prior

suites = pytest.importorskip("optuna.testing.pytest_samplers", reason="this Optuna comes without its suites")

GROUPS = tuple(f"g{i}" for i in range(6))
PRECISION = CategoricalDistribution(("fp32", "fp16"))
PRIOR = Prior(GROUPS, log_square_errors=(-14.0,) * 6, gains_ms=(0.5,) * 6)


SAMPLERS = pytest.mark.parametrize(
    "sampler", [lambda prior=prior: PrecisionSampler(prior, seed=0) for prior in (None, PRIOR)]
)


@SAMPLERS
class TestBasic(suites.BasicSamplerTestCase):  # type: ignore[misc, name-defined]
    """All of it: parameters that are no precisions are sampled at random, whatever else the study holds."""


@SAMPLERS
class TestMultiObjective(suites.MultiObjectiveSamplerTestCase):  # type: ignore[misc, name-defined]
    """All of it."""


@SAMPLERS
class TestRelative(suites.RelativeSamplerTestCase):  # type: ignore[misc, name-defined]
    """The three tests that hand ``sample_relative`` numbers, or categories that are no precisions, do not apply."""

    test_sample_relative_numerical = None
    test_sample_relative_categorical = None
    test_sample_relative_mixed = None


@SAMPLERS
def test_samples_with_other_parameters_beside_the_precisions(sampler: Callable[[], BaseSampler]) -> None:
    """A study may hold a batch size, too: that is drawn at random, and the precisions are still proposed."""
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=sampler())
    for first, values in (("fp32", (10.0, 1e-6)), ("fp16", (9.5, 1e-3))):
        params = {**dict.fromkeys(GROUPS, "fp32"), "g0": first}
        distributions = dict.fromkeys(GROUPS, PRECISION)
        study.add_trial(optuna.create_trial(params=params, distributions=distributions, values=values))

    def objective(trial: optuna.Trial) -> tuple[float, float]:
        batch = trial.suggest_int("batch", 1, 8)
        fp16 = sum(trial.suggest_categorical(g, ("fp32", "fp16")) == "fp16" for g in GROUPS)
        return 10.0 - fp16 + 0.001 * batch, 1e-4 * (fp16 + 1)

    study.optimize(objective, n_trials=6)
    assert all(t.state is TrialState.COMPLETE for t in study.trials)
    assert len({tuple(t.params[g] for g in GROUPS) for t in study.trials}) == 8, "none is proposed twice"


@pytest.mark.parametrize("directions", [["minimize"], ["minimize", "maximize"], ["minimize"] * 3])
def test_other_objectives_are_refused(directions: list[str]) -> None:
    study = optuna.create_study(directions=directions, sampler=PrecisionSampler(PRIOR, seed=0))
    space = dict.fromkeys(GROUPS, PRECISION)
    study.tell(study.ask(space), [1.0] * len(directions))
    with pytest.raises(ValueError, match=r"directions=\['minimize', 'minimize'\]"):
        study.ask(space)


def test_the_example_of_the_docstring_runs() -> None:
    """With Optuna alone and nothing of a search: the sampler is a public name."""
    text = sys.modules[PrecisionSampler.__module__].__doc__
    _, _, example = text.partition("::\n")
    code = "\n".join(line.removeprefix("    ") for line in example.splitlines() if not line or line.startswith("    "))
    assert "mptune.PrecisionSampler(" in code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fp16" in done.stdout
