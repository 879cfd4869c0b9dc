"""PrecisionSampler: proposes the plan of the largest expected hypervolume improvement.

Usable with Optuna alone: one categorical ``"fp32"``/``"fp16"`` per group, two objectives to minimise, latency in
milliseconds and error, the latency of all-FP32 among the trials. It keeps no state: each proposal rebuilds the
posterior from the study's trials, what was emulated for them too, so that studies can be shared and resumed. An
example, without a prior::

    import mptune
    import optuna

    gains_ms = {"conv": 0.4, "norm": 0.01, "attention": 0.3, "head": 0.1}
    errors = {"conv": 1e-4, "norm": 8e-3, "attention": 2e-3, "head": 3e-4}

    def objective(trial):  # in a real search: build the plan, time it, compare its outputs
        fp16 = [group for group in gains_ms if trial.suggest_categorical(group, ("fp32", "fp16")) == "fp16"]
        return 2.0 - sum(gains_ms[group] for group in fp16), sum(errors[group] ** 2 for group in fp16) ** 0.5 + 1e-7

    study = optuna.create_study(directions=["minimize", "minimize"], sampler=mptune.PrecisionSampler(seed=0))
    study.enqueue_trial(dict.fromkeys(gains_ms, "fp32"))  # the baseline, before anything is proposed
    study.optimize(objective, n_trials=10)
    for trial in study.best_trials:
        print(trial.values, trial.params)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial
from threadpoolctl import threadpool_limits

from mptune.errors import SettingsError
from mptune.json_form import encode_float
from mptune.tuning.dominance import ERROR_FLOOR, REFERENCE_ERROR
from mptune.tuning.sampler.acquisition import EhviEstimator, ErrorAxis, find_candidates, taught_by
from mptune.tuning.sampler.error_model import ErrorModel, design_plans
from mptune.tuning.sampler.overflow_model import OverflowModel
from mptune.tuning.sampler.plans import PRECISIONS, Bools, Floats, to_bits
from mptune.tuning.sampler.trials import EHVI_ATTR, GAIN_ATTR, BuiltPlans, Prior, emulated_attr, make_tpe, read_plans

SAMPLERS = ("precision", "tpe")
"""The samplers that a search may be asked for by name: this one, and Optuna's TPE."""

_FINALISTS = 300
"""Candidates of the largest screened EHVI that all draws judge."""

_EMULATED_AT_A_TIME, _EMULATION_ROUNDS = 4, 2
"""Finalists that one round emulates, and rounds at most: a proposal waits for eight emulations of them at worst."""

EMULATIONS_TO_LEARN = 8
"""Plans that are emulated before a proposal so that the groups' errors become known, at most."""

_AT_FIRST = 4
"""Times as many before the first one, or about as many as there are groups where that is more."""

_DESIGN_ROUNDS = 5
"""Rounds in which they are emulated: what is in doubt shows in the first ones."""


Emulate = Callable[[Sequence[Mapping[str, str]]], Sequence[float]]
"""Plans, each as free group -> ``"fp16"`` or ``"fp32"`` -> their errors, ``inf`` where not finite."""


class PrecisionSampler(BaseSampler):
    """An Optuna sampler that models a plan's error and latency group by group. Thread-safe as far as studies are."""

    def __init__(
        self,
        prior: Prior | None = None,
        seed: int | None = None,
        error_scale: float | None = None,
        limit: float | None = None,
        emulate: Emulate | None = None,
        emulations_to_learn: int = EMULATIONS_TO_LEARN,
        errors: Mapping[int, float] | None = None,
        error_name: str = "",
    ) -> None:
        """Make the sampler.

        Args:
            prior: what is known before any build; None learns from builds alone.
            seed: the same study, prior and seed give the same proposal.
            error_scale: error past which a plan is worth nothing; None takes 3e-2; ``inf`` the largest one measured.
            limit: error that the plan to be used keeps to, in place of ``error_scale``: plans are sought there, and in
                the two decades below it.
            emulate: gives the errors of plans before they are built; NaN where it cannot.
            emulations_to_learn: how many plans may be emulated before a proposal beside those that are candidates, to
                learn the groups' errors from them; fewer are where these are known.
            errors: of trials by their number; they take the place of the second objective.
            error_name: what these errors are, so that a sampler of other ones does not take emulated errors for its.
        """
        self._prior = prior
        self._emulate = emulate
        self._emulations_to_learn = emulations_to_learn
        self._seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
        self._random = RandomSampler(seed=self._seed)
        self._reference_error, self._limit = error_scale or REFERENCE_ERROR, limit
        self._errors, self._error_name = errors or {}, error_name

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Every group that the prior names; without one, every precision parameter of an earlier trial."""
        if self._prior is not None:
            return {group: CategoricalDistribution(options) for group, options in self._prior.columns.options.items()}
        for other in study.get_trials(deepcopy=False):
            every = other.distributions.items()
            precisions = {name: d for name, d in every if {*getattr(d, "choices", ())} == {*PRECISIONS}}
            if precisions and other.number != trial.number:
                return dict(precisions)
        return {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The plan of the largest EHVI; nothing before all-FP32 has been timed.

        Raises:
            ValueError: the study does not minimise two objectives.
        """
        choices, attrs = self.draw(study, trial.number, tuple(search_space))
        for name, value in attrs.items():
            # Optuna has no public way for a sampler to write on the trial that it samples; its own do the same.
            study._storage.set_trial_user_attr(trial._trial_id, name, value)
        return choices

    def draw(self, study: Study, number: int, groups: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Parameters and user attributes of a trial of this number; see ``sample_relative``."""
        prior = self._prior or Prior(groups)
        trials = study.get_trials(deepcopy=False) if groups else []
        if study.directions != [StudyDirection.MINIMIZE] * 2 and any(prior.groups[0] in t.params for t in trials):
            raise ValueError("PrecisionSampler needs a study with directions=['minimize', 'minimize']: latency, error")
        built = read_plans(trials, prior.columns, number, self._errors, self._error_name)
        if not math.isfinite(built.base_ms):
            return {}, {}
        generator = np.random.default_rng([self._seed, number])
        import scipy.linalg  # noqa: F401  Slow to import; only a library that is loaded is limited.

        # Matrices of some hundred rows are multiplied no sooner by many threads, which wait by spinning: with two, a
        # proposal for 64 groups took 0.34 s of processor time after 100 plans and 0.68 s after 400; with one 0.06 s
        # and 0.09 s.
        with threadpool_limits(limits=1, user_api="blas"):
            plan, attrs = self.propose(prior, built, generator)
        return ({}, {}) if plan is None else (prior.columns.choices(plan), attrs)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Uniformly at random: parameters that are no precisions, and plans before all-FP32 has been timed."""
        return self._random.sample_independent(study, trial, param_name, param_distribution)

    def reseed_rng(self) -> None:
        """Draw a new seed."""
        self._seed = int(np.random.SeedSequence().generate_state(1)[0])
        self._random.reseed_rng()

    def propose(
        self, prior: Prior, built: BuiltPlans, generator: np.random.Generator
    ) -> tuple[Bools | None, dict[str, Any]]:
        """The plan with the largest expected hypervolume improvement, weighed by its probability to be finite.

        ``built.base_ms`` must be known. Returns the plan, shape (n_groups,), True is FP16 (None where every plan is
        built), and the attributes of its trial: ``EHVI_ATTR``, ``GAIN_ATTR``, ``EMULATED_ATTR``.
        """
        n_groups, emulated_errors = len(prior.groups), dict[str, float | str]()

        def emulated(plans: Bools) -> Floats:  # (n_plans,), NaN where emulation fails
            assert self._emulate is not None
            errors = np.array(self._emulate([prior.columns.choices(plan) for plan in plans]), dtype=float)
            valid = [(to_bits(plan), e) for plan, e in zip(plans, errors, strict=True) if not math.isnan(e)]
            emulated_errors.update({bits: encode_float(error) for bits, error in valid})
            return errors

        error_model, overflow = ErrorModel(prior, taught_by(prior, built)), OverflowModel(prior, built)
        # Where the groups' errors are in doubt, plans that tell of them are emulated first, in rounds, as what is in
        # doubt shows in the first ones. It matters most to know the errors of groups that gain much.
        left = 0 if self._emulate is None else self._emulations_to_learn
        if not len(built.emulations[0]):
            left *= max(_AT_FIRST, n_groups // EMULATIONS_TO_LEARN)
        at_a_time = max(EMULATIONS_TO_LEARN, left // _DESIGN_ROUNDS)
        gains = np.abs(np.ones(n_groups) if prior.gains_ms is None else np.array(prior.gains_ms))
        while left > 0:
            before = built.emulations[0]
            tried, may_be_fp16 = np.vstack([built.plans, before]), overflow.probabilities <= 0.5
            drawn = np.random.default_rng([n_groups, len(before)])
            count = min(left, at_a_time)
            designed = design_plans(error_model, gains + gains.mean(), may_be_fp16, tried, count, drawn)
            if not len(designed):
                break
            built = built.with_emulated(designed, emulated(designed))
            error_model, overflow = ErrorModel(prior, taught_by(prior, built)), OverflowModel(prior, built)
            left -= len(designed)
        reference = self._reference_error
        if math.isinf(reference):
            reference = max(float(np.nanmax(built.error, initial=0.0)), 10 * ERROR_FLOOR)
        axis = ErrorAxis.to_floor(reference) if self._limit is None else ErrorAxis.to_limit(self._limit)
        estimator = EhviEstimator(prior, built, generator, axis, error_model, overflow)
        finalists = find_candidates(prior, estimator, built.plans, generator).best(_FINALISTS)
        if not len(finalists):
            return None, {}
        # The finalists are emulated, a few at a time, until the best of them is one whose error is known.
        errors = estimator.emulated_errors(finalists)
        is_emulated = ~np.isnan(errors)
        for round_ in range(_EMULATION_ROUNDS + 1):
            ehvi = np.where(np.isposinf(errors), -1.0, estimator.ehvi(finalists, errors))
            order = np.argsort(-ehvi, kind="stable")
            if self._emulate is None or is_emulated[order[0]] or round_ == _EMULATION_ROUNDS:
                break
            few = order[~is_emulated[order]][:_EMULATED_AT_A_TIME]
            errors[few] = emulated(finalists[few])
            is_emulated[few] = True
        attrs: dict[str, Any] = {EHVI_ATTR: max(float(ehvi[order[0]]), 0.0)}
        attrs[GAIN_ATTR] = float(estimator.expected_gain(finalists, errors).max())
        if emulated_errors:
            attrs[emulated_attr(self._error_name)] = emulated_errors
        return finalists[order[0]], attrs


def derive_seed(seed: int, trials: int) -> int:
    """A seed that differs for every number of trials, so that a resumed sampler does not repeat itself."""
    return int(np.random.SeedSequence([seed, trials]).generate_state(1)[0])


def check_sampler(name: str) -> None:
    """Refuse a name that is no sampler's."""
    if name not in SAMPLERS:
        hint = f"choose one of {', '.join(SAMPLERS)}; a run that used another one goes on with any"
        raise SettingsError(f"there is no sampler {name!r}", hint)


def make_sampler(name: str | None, seed: int) -> BaseSampler:
    """Make a sampler by name; None, where all plans are enqueued, is uniformly random."""
    if name is None:
        return RandomSampler(seed=seed)
    check_sampler(name)
    return PrecisionSampler(seed=seed) if name == "precision" else make_tpe(seed)
