"""Simulated models for judging samplers: latency and error of plans, priors, the near-exact front, and searches.

A chain of groups with branches; each boundary costs a Cast; what a group takes depends a little on the precisions of
its neighbours (tactics, 5 %), so that the additive law is not the truth; timings are noisy (1.5 %); 4 % of the groups
overflow in FP16. A sampler is given what the tool would give it:

- one-group errors as emulation finds them, log-sd 0.1 (an H200's engines against emulation: ratios 0.93 to 1.12, a
  log-sd of about 0.03 to 0.05); one overflow in ten is missed,
- emulated errors of whole plans, log-sd 0.03, which miss the same overflows,
- roofline gains, off by a factor of about 1.6 each, in unknown units,
- "profiled": beside them the times of the groups in each engine that is built, as a profiler tells them, 5 % noise.

``Hard`` models are less like the law, and less is known of them: one-group errors are off by 0.35 decades (and stay so
when a group is emulated alone once more), one overflow in four is missed by every emulation, so that only a build
shows it, the errors of neighbours are correlated, and a quarter of the boundaries breaks a fusion where it is crossed,
which costs more than the prior says. Why timings are as noisy and rooflines as wrong as they are:
``results/search_quality_calibration.json``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.samplers import BaseSampler

from mptune.tuning import dominance
from mptune.tuning.sampler.plans import PRECISIONS, Bools, Boundary, Columns, Crossings, CutSolver, Floats, plan_keys
from mptune.tuning.sampler.trials import Prior, set_outcome

TACTIC, TIMING, OVERFLOW, MISSED = 0.05, 0.015, 0.04, 0.1
ONE_GROUP, WHOLE_PLAN, ROOFLINE, PROFILE = 0.1, 0.03, 0.5, 0.05


@dataclass(frozen=True)
class Hard:
    """How models differ from the default; what is drawn follows from the model's seed."""

    one_group_decades: float = 0.35
    """Standard deviation of log10 of an emulated one-group error about the true one."""
    missed: float = 0.25
    """Share of the overflows that no emulation foresees, of one group or of a whole plan."""
    correlation: tuple[float, float] = (-0.3, 0.5)
    """Range of the correlations between the errors that neighbours cause; others are uncorrelated."""
    fusions: float = 0.25
    """Share of the boundaries that break a fusion where they are crossed."""
    fusion_cost: tuple[float, float] = (0.1, 0.6)
    """Range of what that costs beside the Cast, as multiples of what FP16 saves in a group on average."""
    timing: float = 0.0033
    """Standard deviation of a timing, relative: sessions of one plan differ by 0.12 to 0.33 % on an H200."""
    roofline: float = 0.3
    """Standard deviation of the log of the prior's gains and costs about the true ones, fusions left out."""


@dataclass
class Truth:
    """One simulated model, drawn from the seed."""

    groups: int
    seed: int
    overflow: float = OVERFLOW
    """Share of the groups that overflow in FP16."""
    missed: float = MISSED
    """Share of these that emulation does not foresee."""
    timing: float = TIMING
    """Standard deviation of a timing, relative; ``hard`` has its own."""
    hard: Hard | None = None

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.seed, self.groups])
        n = self.groups
        self.ids = tuple(f"g{i:03d}" for i in range(n))
        self.boundaries = [Boundary(i, (i + 1,)) for i in range(n - 1)]
        for start in range(0, n - 4, 4):  # a branch: what one group computes is read again three groups later
            self.boundaries[start] = Boundary(start, (start + 1, start + 3))
        self.boundaries += [Boundary(0, ("fp32",)), Boundary(n - 1, ("fp32",))]
        self._crossings = Crossings(Columns.fp16(self.ids), self.boundaries)
        fp32 = rng.lognormal(0.0, 0.8, n)
        saved = rng.uniform(-0.05, 0.75, n)
        self.times = np.stack([fp32, fp32 * (1 - saved)], axis=1)
        self.costs = rng.uniform(0.03, 0.3, len(self.boundaries)) * (fp32 * saved).mean()
        self.tactics = np.exp(rng.normal(0.0, TACTIC, (n, 2, 2, 2)))
        self.tactics[:, 0, 0, 0] = 1.0
        self.errors = 10 ** rng.uniform(-4.5, -2.2, n)
        self.overflows = rng.random(n) < self.overflow
        self.missed = self.overflows & (rng.random(n) < self.missed)
        self.emulated = self.errors * np.exp(rng.normal(0.0, ONE_GROUP, n))
        roofline = ROOFLINE if self.hard is None else self.hard.roofline
        self.roofline_gains = (self.times[:, 0] - self.times[:, 1]) * rng.lognormal(0.0, roofline, n) * 0.4
        self.roofline_costs = self.costs * rng.lognormal(0.0, roofline, len(self.costs)) * 0.4
        self.correlations = np.zeros(n - 1)
        if self.hard is not None:
            self._harden(self.hard, np.random.default_rng([self.seed, n, 2]), (fp32 * saved).mean())
        self.base = float(self.latency(np.zeros((1, n), dtype=bool))[0])

    def _harden(self, hard: Hard, rng: np.random.Generator, saved_ms: float) -> None:
        """Draw what is different, of a generator of its own."""
        self.timing = hard.timing
        self.emulated = self.errors * 10 ** rng.normal(0.0, hard.one_group_decades, self.groups)
        self.missed = self.overflows & (rng.random(self.groups) < hard.missed)
        self.correlations = rng.uniform(*hard.correlation, self.groups - 1)
        breaks = rng.random(len(self.costs)) < hard.fusions
        self.costs = self.costs + breaks * rng.uniform(*hard.fusion_cost, len(self.costs)) * saved_ms

    def latency(self, plans: Bools) -> Floats:
        """True latency of each row, True is FP16."""
        crossed = self._crossings.count(np.ascontiguousarray(plans.T))
        latency: Floats = self._times(plans).sum(axis=1) + self.costs @ crossed
        return latency

    def _times(self, plans: Bools) -> Floats:
        """What each group takes, plans x groups."""
        codes = np.zeros((len(plans), self.groups), dtype=np.int32)
        codes[:] = 8 * np.arange(self.groups, dtype=np.int32) + 4 * plans
        codes[:, 1:] += 2 * plans[:, :-1].astype(np.int32)
        codes[:, :-1] += plans[:, 1:]
        times: Floats = (self.times[:, :, None, None] * self.tactics).ravel()[codes]
        return times

    def profile(self, plan: Bools, rng: np.random.Generator) -> list[float]:
        """What each group takes in one engine, as a profiler tells it."""
        return [float(ms) for ms in self._times(plan[None])[0] * rng.lognormal(0.0, PROFILE, self.groups)]

    def error(self, plans: Bools) -> Floats:
        """True error of each row."""
        squares = plans @ self.errors**2
        if self.hard is not None:
            products = self.errors[1:] * self.errors[:-1]
            squares += (plans[:, 1:] & plans[:, :-1]) @ (2.0 * self.correlations * products)
        error: Floats = np.sqrt(squares + dominance.ERROR_FLOOR**2)
        return error

    def finite(self, plans: Bools) -> Bools:
        """Whether each row's outputs are finite."""
        finite: Bools = ~(plans & self.overflows).any(axis=1)
        return finite

    def emulate(self, choices: Sequence[Mapping[str, str]]) -> list[float]:
        """Errors of plans as emulation finds them; the same plan gives the same answer."""
        answers = []
        for choice in choices:
            plan = np.array([[choice[group] == "fp16" for group in self.ids]])
            miss = np.random.default_rng([self.seed, *np.packbits(plan)]).normal(0.0, WHOLE_PLAN)
            seen = bool((plan & self.overflows & ~self.missed).any())
            if plan.sum() == 1:  # What the prior says of the group.
                error, miss = self.emulated[plan[0]][0], 0.0
            else:
                error = self.error(plan)[0]
            answers.append(math.inf if seen else float(error * np.exp(miss)))
        return answers

    def prior(self) -> Prior:
        """The prior that mptune's sampler starts from."""
        log_squares = np.log(self.emulated**2)
        log_squares[self.overflows & ~self.missed] = math.inf
        return Prior(
            self.ids,
            tuple(map(float, log_squares)),
            tuple(map(float, self.roofline_gains)),
            tuple(self.boundaries),
            tuple(map(float, self.roofline_costs)),
        )

    # -- what is best --------------------------------------------------------------------------------------------

    def coordinates(self, plans: Bools) -> tuple[Floats, Floats]:
        """Gain and exactness (``mptune.tuning.dominance``) of the rows that are finite."""
        plans = plans[self.finite(plans)]
        return dominance.gains(self.latency(plans), self.base), dominance.exactness(self.error(plans))

    def hypervolume(self, plans: Bools) -> float:
        """Of the true latencies and errors, against the base latency and the reference error."""
        return dominance.dominated_area(*self.coordinates(plans))

    def gain_within(self, plans: Bools, limit: float) -> float:
        """Largest share of the base latency that one of the plans saves whose error is within the limit, at least 0."""
        sound = plans[self.finite(plans)]
        within = sound[self.error(sound) <= limit]
        return float(dominance.gains(self.latency(within), self.base).max(initial=0.0))

    def front(self, plans: Bools) -> Bools:
        """The plans that no other beats."""
        plans = plans[self.finite(plans)]
        latency, error = self.latency(plans), self.error(plans)
        order = np.lexsort((error, latency))
        best = np.minimum.accumulate(error[order])
        return plans[order[np.append(True, best[1:] < best[:-1])]]

    def near_exact(self) -> Bools:
        """The front after cuts over 400 weights and Pareto local search by flips of one to three adjacent groups."""
        n = self.groups
        if n <= 12:
            return self.front((np.arange(2**n)[:, None] >> np.arange(n) & 1).astype(bool))
        weights = np.geomspace(1e-2, 1e10, 400) * self.times[:, 0].mean()
        unary = -(self.times[:, 0] - self.times[:, 1]) + weights[:, None] * self.errors**2
        unary[:, self.overflows] = self.times.sum()
        solver = CutSolver(Columns.fp16(self.ids), self.boundaries)
        front = self.front(solver.solve(unary, np.tile(self.costs, (400, 1))))
        flips = np.eye(n, dtype=bool)
        flips = np.vstack([flips, flips[:-1] ^ flips[1:], flips[:-2] ^ flips[1:-1] ^ flips[2:]])
        value = self.hypervolume(front)
        for _ in range(30):
            # At 120 groups there are thousands of points: a spread of them is widened at a time.
            chosen = front[np.unique(np.linspace(0, len(front) - 1, min(len(front), 300)).astype(int))]
            around = (chosen[:, None, :] ^ flips[None]).reshape(-1, n)
            front = self.front(unique_plans([front, around], n))
            before, value = value, self.hypervolume(front)
            if value < before * (1 + 1e-5):
                break
        return front

    def reachable(self, front: Bools, builds: int) -> float:
        """The hypervolume of ``builds`` points of a front, taken greedily: what is there to reach."""
        gain, exact = self.coordinates(front)
        chosen: list[int] = []
        for _ in range(min(builds, len(front))):
            staircase = dominance.pareto_staircase(gain[chosen], exact[chosen])
            chosen.append(int(np.argmax(dominance.hypervolume_improvement(gain, exact, *staircase))))
        return self.hypervolume(front[chosen])


def search(
    truth: Truth,
    sampler: BaseSampler,
    budget: int,
    *,
    profiled: bool = False,
    tries: int | None = None,
    first: Sequence[Mapping[str, str]] | None = None,
) -> tuple[Bools, list[float]]:
    """Search a simulated model, all-FP32 and all-FP16 first.

    Args:
        truth: the model.
        sampler: proposes plans.
        budget: plans to build.
        profiled: tell the sampler the times of the groups, too.
        tries: proposals at most, those counted in that are built already; None is 20 times the budget.
        first: plans that are built first, in place of all-FP32 and all-FP16.

    Returns:
        The plans that were built, in their order, and the seconds of computing that each proposal took.
    """
    rng = np.random.default_rng([truth.seed, 7])
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)
    space = dict.fromkeys(truth.ids, optuna.distributions.CategoricalDistribution(PRECISIONS))
    seeds = [dict.fromkeys(truth.ids, precision) for precision in PRECISIONS] if first is None else first
    for seed in seeds:
        study.enqueue_trial(dict(seed))
    built: dict[bytes, Bools] = {}
    seconds: list[float] = []
    for attempt in range(20 * budget if tries is None else tries):
        started = time.process_time()  # other programs on the machine do not count
        trial = study.ask(space)
        if attempt >= len(seeds):
            seconds.append(time.process_time() - started)
        params = trial.params  # a copy
        plan = np.array([[params[group] == PRECISIONS[1] for group in truth.ids]])
        if plan.tobytes() in built:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        built[plan.tobytes()] = plan[0]
        latency = float(truth.latency(plan)[0] * (1 + truth.timing * rng.normal()))
        half_width = 1.96 * truth.timing * latency
        timed = {"median_ms": latency, "ci95_ms": [latency - half_width, latency + half_width]}
        values = [latency, float(truth.error(plan)[0])] if truth.finite(plan)[0] else None
        outcome: dict[str, Any] = {"values": values, "evaluation": {"latency": timed}}
        if profiled:
            outcome["group_ms"] = dict(zip(truth.ids, truth.profile(plan[0], rng), strict=True))
        set_outcome(trial, outcome)
        study.tell(trial, values, optuna.trial.TrialState.PRUNED if values is None else None)
        if len(built) == budget:
            break
    return np.array(list(built.values())), seconds


def unique_plans(plans: Sequence[Bools], n_groups: int) -> Bools:
    """Plans of several sources, each once, in the order of their first occurrence."""
    rows = np.concatenate([np.asarray(p, dtype=bool).reshape(-1, n_groups) for p in plans])
    kept: Bools = rows[np.sort(np.unique(plan_keys(rows), return_index=True)[1])]
    return kept
