"""PrecisionSampler: proposes the plan that the additive law expects to add most to the front.

Usable with Optuna alone: one categorical ``"fp32"``/``"fp16"`` per group, two objectives to minimise, latency in
milliseconds and error, the latency of all-FP32 among the trials. It keeps no state: each proposal rebuilds the
posterior from the study's trials, so that studies can be shared and resumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from mptune.search.cut import Bools, CutSolver, Floats
from mptune.search.surrogate import (
    ERROR_FLOOR,
    ErrorModel,
    LatencyModel,
    Observations,
    Prior,
    overflow_probabilities,
    stack,
)

MEASURED_ATTR = "measured"
"""Trial attribute: ``{"latency_ms", "sd_ms"}``: the latency, also of a plan whose outputs are not finite, and its
standard error."""

PROMISE_ATTR = "promise"
"""Trial attribute: by how much the hypervolume (0 to 1) was expected to grow when the plan was proposed."""

REFERENCE_ERROR = 3e-2
_CHOICES = ("fp32", "fp16")
_SAMPLES, _SWEEP, _ROUNDS = 8, 24, 3
_ENUMERABLE = 12
_KEPT = 24
_FINALISTS = 300
_CELLS = 4_000_000


class PrecisionSampler(BaseSampler):
    """See the module. Thread-safe as far as Optuna's studies are."""

    def __init__(self, prior: Prior | None = None, seed: int | None = None, error_scale: float | None = None) -> None:
        """Make the sampler.

        Args:
            prior: what is known before any build; None learns from evaluations alone.
            seed: the same study, prior and seed give the same proposal.
            error_scale: error past which a plan is worth nothing; None takes 3e-2, SEARCH.md's; ``inf`` the largest one
                seen.
        """
        self._prior = prior
        self._seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
        self._random = RandomSampler(seed=self._seed)
        self._reference = error_scale or REFERENCE_ERROR
        self._cut: tuple[Prior, CutSolver] | None = None

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Every group that the prior names; without one, every precision that earlier trials had."""
        if self._prior is not None:
            return {group: CategoricalDistribution(_CHOICES) for group in self._prior.groups}
        for other in study.get_trials(deepcopy=False):
            found = {k: d for k, d in other.distributions.items() if _is_precision(d)}
            if found and other.number != trial.number:
                return dict(found)
        return {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The most promising plan; nothing before a plan without FP16 has been timed."""
        if not search_space:
            return {}
        prior = self._prior or Prior(tuple(search_space))
        seen = observe_trials(study.get_trials(deepcopy=False), prior.groups, trial.number)
        if not math.isfinite(seen.base_ms):
            return {}
        generator = np.random.default_rng([self._seed, trial.number])
        plan, promise = self.propose(prior, seen, generator)
        if plan is None:
            return {}
        study._storage.set_trial_user_attr(trial._trial_id, PROMISE_ATTR, promise)
        return {group: _CHOICES[int(half)] for group, half in zip(prior.groups, plan, strict=True)}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """At random, where nothing is known."""
        return self._random.sample_independent(study, trial, param_name, param_distribution)

    def reseed_rng(self) -> None:
        """Draws a new seed."""
        self._seed = int(np.random.SeedSequence().generate_state(1)[0])
        self._random.reseed_rng()

    def propose(self, prior: Prior, seen: Observations, generator: np.random.Generator) -> tuple[Bools | None, float]:
        """The plan with the largest expected gain of hypervolume times its chance to be finite.

        Args:
            prior: what is known beforehand.
            seen: what has been or is being evaluated; its ``base_ms`` must be known.
            generator: of the draws.

        Returns:
            One row, True is FP16 (None where every plan is known), and what it promises.
        """
        groups = len(prior.groups)
        latency, error = LatencyModel(prior, seen), ErrorModel(prior, seen)
        chances = overflow_probabilities(prior, seen)
        reference = self._reference
        if math.isinf(reference):
            reference = max(float(np.nanmax(seen.error, initial=0.0)), 10 * ERROR_FLOOR)
        box = _Box(latency, error, chances, seen, reference, generator)
        if groups <= _ENUMERABLE:
            pool: Bools = (np.arange(2**groups)[:, None] >> np.arange(groups) & 1).astype(bool)
            candidates = box.unseen(pool)
        else:
            pool = stack([seen.plans, self._cuts(prior, box, generator), _ends(groups)], groups)
            candidates = box.unseen(_widened(pool, box, prior, generator))
        if not len(candidates):
            return None, 0.0
        rough = box.expected(candidates, draws=1)
        finalists = candidates[np.argsort(-rough, kind="stable")[:_FINALISTS]]
        fine = box.expected(finalists)
        best = int(np.argmax(fine))
        return finalists[best], float(fine[best])

    def _cuts(self, prior: Prior, box: _Box, generator: np.random.Generator) -> Bools:
        """The exact optima of a sweep of weights, for the mean and for each draw."""
        if self._cut is None or self._cut[0] is not prior:
            self._cut = prior, CutSolver(len(prior.groups), prior.ties)
        solver, groups, ties = self._cut[1], len(prior.groups), len(prior.ties)
        squares = np.exp(box.u)
        value = np.maximum(box.terms[:, :groups], 1e-9 * box.base_ms)
        # From where the cheapest group is refused to where the dearest is let in.
        ratio = value / squares
        low, high = np.log(np.quantile(ratio, 0.02, axis=1)), np.log(np.quantile(ratio, 0.98, axis=1))
        # Other weights each time, so that no plan stays hidden between two of them.
        steps = (np.arange(_SWEEP) + generator.random((len(ratio), _SWEEP))) / _SWEEP
        sweeps = np.exp(low[:, None] + (high - low)[:, None] * (1.2 * steps - 0.1))
        # A group that may fail costs as much as what it could spoil.
        risk = np.log1p(-np.minimum(box.chances, 1 - 1e-6)) * -0.5 * box.base_ms
        unary = -box.terms[:, None, :groups] + sweeps[:, :, None] * squares[:, None, :] + risk
        costs = np.repeat(box.terms[:, groups : groups + ties], _SWEEP, axis=0)
        return solver.solve(unary.reshape(-1, groups), costs)


class _Box:
    """The hypervolume's box with what is in it, under the mean (draw 0) and draws of both posteriors."""

    def __init__(
        self,
        latency: LatencyModel,
        error: ErrorModel,
        chances: Floats,
        seen: Observations,
        reference: float,
        generator: np.random.Generator,
    ) -> None:
        self.base_ms = seen.base_ms
        self.chances = chances
        self.terms = np.vstack([latency.mean(), latency.samples(generator, _SAMPLES)])
        self.u = np.vstack([error.typical, error.samples(generator, _SAMPLES)])
        self._latency, self._error = latency, error
        self._span = math.log(reference / ERROR_FLOOR)
        self._top = math.log(reference)
        self._known = {row.tobytes() for row in np.packbits(seen.plans, axis=1)}
        inside = seen.finite != 0.0  # plans in work are taken to come out as predicted
        gains, heights = self.place(seen.plans[inside])
        measured = np.isfinite(seen.error[inside])
        heights[:, measured] = self._height(np.maximum(seen.error[inside][measured], ERROR_FLOOR))
        self._stairs = [_stairs(g, h) for g, h in zip(gains, heights, strict=True)]

    def unseen(self, plans: Bools) -> Bools:
        """Those of the plans that nobody has evaluated or evaluates."""
        new = [row.tobytes() not in self._known for row in np.packbits(plans, axis=1)]
        kept: Bools = plans[np.array(new, dtype=bool)]
        return kept

    def _height(self, error: Floats) -> Floats:
        return (self._top - np.log(error)) / self._span

    def place(self, plans: Bools, draws: int = _SAMPLES + 1) -> tuple[Floats, Floats]:
        """Share of the base saved, and exactness on the log axis: draws x plans each."""
        gains = 1.0 - self._latency.predict(plans, self.terms[:draws]) / self.base_ms
        return gains, self._height(self._error.predict(plans, self.u[:draws]))

    def expected(self, plans: Bools, draws: int = _SAMPLES + 1) -> Floats:
        """By how much each plan is expected to raise the hypervolume, times its chance to be finite."""
        gains, heights = self.place(plans, draws)
        added = [_added(g, h, *s) for g, h, s in zip(gains, heights, self._stairs[:draws], strict=True)]
        finite = np.exp(plans @ np.log1p(-self.chances))
        expected: Floats = np.mean(added, axis=0) * finite
        return expected


def _stairs(gains: Floats, heights: Floats) -> tuple[Floats, Floats]:
    """The front as stairs: ascending gains, and how high everything up to each is dominated."""
    inside = (gains > 0) & (heights > 0)
    order = np.argsort(gains[inside])
    steps, tops = gains[inside][order], heights[inside][order]
    tops = np.maximum.accumulate(tops[::-1])[::-1]
    kept = np.append(tops[:-1] > tops[1:], True)[: len(tops)]
    return steps[kept], tops[kept]


def _added(gains: Floats, heights: Floats, steps: Floats, tops: Floats) -> Floats:
    """The area that each point adds to the stairs."""
    left = np.concatenate([[0.0], steps])
    right = np.concatenate([steps, [np.inf]])
    level = np.concatenate([tops, [0.0]])
    widths = np.clip(np.minimum(gains[:, None], right) - left, 0.0, None)
    area: Floats = (widths * np.clip(heights[:, None] - level, 0.0, None)).sum(axis=1)
    return area


def _ends(groups: int) -> Bools:
    """All-FP16, and each group alone in FP16."""
    return np.vstack([np.ones((1, groups), dtype=bool), np.eye(groups, dtype=bool)])


def _widened(pool: Bools, box: _Box, prior: Prior, generator: np.random.Generator) -> Bools:
    """The pool with neighbours of its most promising plans: one to three flips, and whole runs; two rounds."""
    groups = len(prior.groups)
    flips = [np.eye(groups, dtype=bool)]
    pairs = [tie.members[:2] for tie in prior.ties if len(tie.members) >= 2]
    if pairs:
        flips.append(_masks(pairs, groups))
    for round_ in range(_ROUNDS):
        gains, heights = box.place(pool, 1)
        near = _near_front(pool, gains[0], heights[0], box)
        random = [generator.choice(groups, size=int(k), replace=False) for k in generator.integers(2, 4, 2 * groups)]
        masks = np.vstack([*flips, _masks(random, groups)])
        few = _CELLS // (len(near) + 1) // (groups + len(prior.ties))
        if len(masks) > few:  # Hundreds of groups: some of the neighbours, so that thinking stays short.
            masks = masks[generator.choice(len(masks), size=max(few, 1), replace=False)]
        around = (near[:, None, :] ^ masks[None, :, :]).reshape(-1, groups)
        if round_ < _ROUNDS - 1 and len(around) > 2 * _FINALISTS:
            around = stack([around], groups)
            worth = box.expected(around, 1)
            around = around[np.argsort(-worth, kind="stable")[: 2 * _FINALISTS]]
        pool = stack([pool, around], groups)
    return pool


def _near_front(pool: Bools, gains: Floats, heights: Floats, box: _Box) -> Bools:
    """The plans that promise most, and those of the predicted front, about ``_KEPT`` together."""
    worth = box.expected(box.unseen(pool), 1) if len(pool) else np.zeros(0)
    promising = box.unseen(pool)[np.argsort(-worth, kind="stable")[: _KEPT // 2]]
    order = np.argsort(-gains, kind="stable")
    best = np.maximum.accumulate(heights[order])
    front = order[np.append(True, best[1:] > best[:-1])]
    front = front[(gains[front] > 0) & (heights[front] > 0)]
    spread = front[np.unique(np.linspace(0, len(front) - 1, min(len(front), _KEPT // 2)).astype(int))]
    return stack([promising, pool[spread]], pool.shape[1])


def _masks(positions: Sequence[Any], groups: int) -> Bools:
    masks = np.zeros((len(positions), groups), dtype=bool)
    for row, members in enumerate(positions):
        masks[row, list(members)] = True
    return masks


def _is_precision(distribution: BaseDistribution) -> bool:
    return isinstance(distribution, CategoricalDistribution) and set(distribution.choices) == set(_CHOICES)


def observe_trials(trials: Sequence[FrozenTrial], groups: Sequence[str], asking: int) -> Observations:
    """What the trials of a study say about the groups.

    Args:
        trials: of any state; those that failed through the machine say nothing.
        groups: ids of the free groups.
        asking: number of the trial that a plan is wanted for.
    """
    rows: list[tuple[list[bool], float, float, float, float]] = []
    base, base_sd = math.nan, 0.0
    for trial in trials:
        choices: Mapping[str, Any] = trial.params
        if trial.state in (TrialState.RUNNING, TrialState.WAITING):
            choices = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
        if trial.number == asking or trial.state is TrialState.FAIL or any(g not in choices for g in groups):
            continue
        measured: Mapping[str, Any] = trial.user_attrs.get(MEASURED_ATTR, {})
        latency, error, finite = measured.get("latency_ms", math.nan), math.nan, 0.0
        if trial.state is TrialState.COMPLETE:
            latency, error = trial.values
            finite = 1.0
        elif trial.state is not TrialState.PRUNED:
            latency, finite = math.nan, math.nan
        row = [choices[g] == "fp16" for g in groups]
        outside = "plan" in trial.user_attrs  # all-FP32 where the space pins groups to FP16
        if finite == 1.0 and math.isnan(base) and (outside or not any(row)):
            base, base_sd = float(latency), float(measured.get("sd_ms", 0.0))
        if not outside:
            rows.append((row, float(latency), float(measured.get("sd_ms", 0.0)), float(error), finite))
    plans = np.array([r[0] for r in rows], dtype=bool).reshape(len(rows), len(groups))
    figures = np.array([r[1:] for r in rows], dtype=float).reshape(len(rows), 4)
    return Observations(plans, figures[:, 0], figures[:, 1], figures[:, 2], figures[:, 3], base, base_sd)
