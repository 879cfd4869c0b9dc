"""How much of the front a sampler finds with a budget of builds, on simulated models (SEARCH.md, goals A, C and D).

A simulated model is a chain of groups with branches; each boundary costs a Cast; what a group takes depends a little
on the precisions of its neighbours (tactics, 5 %), so that the additive law is not the truth; timings are noisy
(1.5 %); 4 % of the groups overflow in FP16. The sampler is given what the tool would give it: one-group errors as
emulation finds them (10 % off; one overflow in ten is missed), roofline gains (off by a factor of about 1.6 each, in
unknown units). Quality is the hypervolume of the true latencies and errors of what was built, as a share of a
near-exact front's.

    python -m benchmarks.search_quality --groups 12 40 120 --seeds 20 --out benchmarks/results/search_quality.json
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.samplers import BaseSampler

from mptune.search.cut import CutSolver, Tie
from mptune.search.precision import MEASURED_ATTR, PrecisionSampler
from mptune.search.sampler import CONSTRAINT_ATTR, HAS_TRIAL_CONSTRAINTS, make_sampler
from mptune.search.surrogate import ERROR_FLOOR, Prior, stack

REFERENCE_ERROR = 3e-2
TACTIC, TIMING, OVERFLOW, MISSED = 0.05, 0.015, 0.04, 0.1
SAMPLERS = ("precision", "one decade wrong", "no prior", "prior only", "local", "tpe", "nsga2", "random")


@dataclass
class Truth:
    """One simulated model."""

    groups: int
    seed: int

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.seed, self.groups])
        n = self.groups
        self.ties = [Tie((i, i + 1)) for i in range(n - 1)]
        for start in range(0, n - 4, 4):  # a branch: what one group computes is read again three groups later
            self.ties[start] = Tie((start, start + 1, start + 3))
        self.ties += [Tie((0,), fp32=True), Tie((n - 1,), fp32=True)]
        fp32 = rng.lognormal(0.0, 0.8, n)
        saved = rng.uniform(-0.05, 0.75, n)
        self.times = np.stack([fp32, fp32 * (1 - saved)], axis=1)
        self.costs = rng.uniform(0.03, 0.3, len(self.ties)) * (fp32 * saved).mean()
        self.tactics = np.exp(rng.normal(0.0, TACTIC, (n, 2, 2, 2)))
        self.tactics[:, 0, 0, 0] = 1.0
        self.errors = 10 ** rng.uniform(-4.5, -2.2, n)
        self.overflows = rng.random(n) < OVERFLOW
        self.missed = self.overflows & (rng.random(n) < MISSED)
        self.emulated = self.errors * np.exp(rng.normal(0.0, 0.1, n))
        self.roofline_gains = (self.times[:, 0] - self.times[:, 1]) * rng.lognormal(0.0, 0.5, n) * 0.4
        self.roofline_costs = self.costs * rng.lognormal(0.0, 0.5, len(self.costs)) * 0.4
        self.decade = np.log(10.0**2) * rng.normal(0.0, 1.0, n)
        self.base = float(self.latency(np.zeros((1, n), dtype=bool))[0])

    def latency(self, plans: np.ndarray) -> np.ndarray:
        half = plans.astype(int)
        before = np.pad(half, ((0, 0), (1, 0)))[:, :-1]
        after = np.pad(half, ((0, 0), (0, 1)))[:, 1:]
        index = np.arange(self.groups)
        times = self.times[index, half] * self.tactics[index, half, before, after]
        crossed = np.stack([tie.crossed(plans) for tie in self.ties], axis=1)
        return times.sum(axis=1) + crossed @ self.costs

    def error(self, plans: np.ndarray) -> np.ndarray:
        return np.sqrt(plans @ self.errors**2 + ERROR_FLOOR**2)

    def finite(self, plans: np.ndarray) -> np.ndarray:
        return ~(plans & self.overflows).any(axis=1)

    def hypervolume(self, plans: np.ndarray) -> float:
        plans = plans[self.finite(plans)]
        gain = 1 - self.latency(plans) / self.base
        height = np.log(REFERENCE_ERROR / self.error(plans)) / math.log(REFERENCE_ERROR / ERROR_FLOOR)
        inside = (gain > 0) & (height > 0)
        order = np.argsort(-gain[inside])
        gain, height = gain[inside][order], np.maximum.accumulate(height[inside][order])
        return float(((gain - np.append(gain[1:], 0.0)) * height).sum()) if len(gain) else 0.0

    def front(self, plans: np.ndarray) -> np.ndarray:
        plans = plans[self.finite(plans)]
        latency, error = self.latency(plans), self.error(plans)
        order = np.lexsort((error, latency))
        best = np.minimum.accumulate(error[order])
        return plans[order[np.append(True, best[1:] < best[:-1])]]

    def near_exact(self) -> float:
        """The hypervolume of the front after cuts over 400 weights and Pareto local search by flips of one and two."""
        n = self.groups
        if n <= 12:
            return self.hypervolume((np.arange(2**n)[:, None] >> np.arange(n) & 1).astype(bool))
        weights = np.geomspace(1e-2, 1e10, 400) * self.times[:, 0].mean()
        unary = -(self.times[:, 0] - self.times[:, 1]) + weights[:, None] * self.errors**2
        unary[:, self.overflows] = self.times.sum()
        front = self.front(CutSolver(n, self.ties).solve(unary, np.tile(self.costs, (400, 1))))
        flips = np.eye(n, dtype=bool)
        flips = np.vstack([flips, flips[:-1] ^ flips[1:], flips[:-2] ^ flips[1:-1] ^ flips[2:]])
        value = self.hypervolume(front)
        for _ in range(30):
            # At 120 groups there are thousands of points: a spread of them is widened at a time.
            chosen = front[np.unique(np.linspace(0, len(front) - 1, min(len(front), 300)).astype(int))]
            around = (chosen[:, None, :] ^ flips[None]).reshape(-1, n)
            front = self.front(stack([front, around], n))
            before, value = value, self.hypervolume(front)
            if value < before * (1 + 1e-5):
                break
        return value

    def prior(self, kind: str) -> Prior:
        ids = tuple(f"g{i:03d}" for i in range(self.groups))
        if kind == "no prior":
            return Prior(ids)
        log_squares = np.log(self.emulated**2) + (self.decade if kind == "one decade wrong" else 0.0)
        log_squares[self.overflows & ~self.missed] = math.inf
        return Prior(
            ids,
            tuple(map(float, log_squares)),
            tuple(map(float, self.roofline_gains)),
            tuple(self.ties),
            tuple(map(float, self.roofline_costs)),
        )


def prior_only(truth: Truth, budget: int) -> np.ndarray:
    """The front of the prior alone, evenly thinned to the budget: nothing is learnt."""
    prior = truth.prior("precision")
    squares = np.exp(np.array(prior.log_square_errors))
    gains = np.array(prior.gains_ms)
    weights = np.geomspace(1e-2, 1e10, 400) * gains.max()
    unary = -gains + weights[:, None] * np.minimum(squares, 1e6)
    plans = stack(
        [CutSolver(truth.groups, prior.ties).solve(unary, np.tile(prior.tie_costs_ms, (400, 1)))], truth.groups
    )
    return plans[np.unique(np.linspace(0, len(plans) - 1, budget).astype(int))]


def make(kind: str, truth: Truth) -> BaseSampler:
    if kind in ("precision", "one decade wrong", "no prior"):
        return PrecisionSampler(truth.prior(kind), seed=truth.seed)
    return make_sampler(kind, truth.seed, truth.groups)


def search(truth: Truth, kind: str, budget: int) -> tuple[np.ndarray, list[float]]:
    """The plans that were built, in their order, and the seconds of computing that each proposal took."""
    if kind == "prior only":
        return prior_only(truth, budget), []
    rng = np.random.default_rng([truth.seed, 7])
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=make(kind, truth))
    ids = [f"g{i:03d}" for i in range(truth.groups)]
    space = {g: optuna.distributions.CategoricalDistribution(("fp32", "fp16")) for g in ids}
    for precision in ("fp32", "fp16"):
        study.enqueue_trial(dict.fromkeys(ids, precision))
    built: dict[bytes, np.ndarray] = {}
    seconds: list[float] = []
    for attempt in range(20 * budget):
        started = time.process_time()  # other programs on the machine do not count
        trial = study.ask(space)
        if attempt >= 2:
            seconds.append(time.process_time() - started)
        plan = np.array([[trial.params[g] == "fp16" for g in ids]])
        if plan.tobytes() in built:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        built[plan.tobytes()] = plan[0]
        latency = float(truth.latency(plan)[0] * (1 + TIMING * rng.normal()))
        trial.set_user_attr(MEASURED_ATTR, {"latency_ms": latency, "sd_ms": TIMING * latency})
        finite = bool(truth.finite(plan)[0])
        trial.set_user_attr(CONSTRAINT_ATTR, 0.0 if finite else 1.0)
        if HAS_TRIAL_CONSTRAINTS:
            trial.set_constraint("feasible", 0.0 if finite else 1.0)
        if finite:
            study.tell(trial, [latency, float(truth.error(plan)[0])])
        else:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        if len(built) == budget:
            break
    return np.array(list(built.values())), seconds


def run_one(task: tuple[int, int, str, int]) -> dict[str, Any]:
    groups, seed, kind, budget = task
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    import warnings

    warnings.simplefilter("ignore")
    truth = Truth(groups, seed)
    exact = truth.near_exact()
    plans, seconds = search(truth, kind, budget)
    return {
        "groups": groups,
        "seed": seed,
        "sampler": kind,
        "ratios": {str(b): truth.hypervolume(plans[:b]) / exact for b in (10, 25, 50) if b <= budget},
        "finite": int(truth.finite(plans).sum()),
        "propose_ms": 1e3 * float(np.median(seconds)) if seconds else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, nargs="+", default=[12, 40, 120])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--samplers", nargs="+", default=list(SAMPLERS), choices=SAMPLERS)
    parser.add_argument("--budget", type=int, default=50)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    tasks = [
        (groups, seed, kind, arguments.budget)
        for groups in arguments.groups
        for kind in arguments.samplers
        for seed in range(arguments.seeds)
    ]
    mapper: Callable[..., Any] = map
    pool = ProcessPoolExecutor(arguments.workers) if arguments.workers > 1 else None
    if pool is not None:
        mapper = pool.map
    results = []
    print("| groups | sampler | median of 10 | 25 | 50 builds | 10th percentile | finite | ms a proposal |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for result in mapper(run_one, tasks):
        results.append(result)
        mine = [r for r in results if (r["groups"], r["sampler"]) == (result["groups"], result["sampler"])]
        if len(mine) < arguments.seeds:
            continue
        columns = [f"{np.median([r['ratios'][b] for r in mine]):.3f}" for b in mine[0]["ratios"]]
        lowest = np.quantile([list(r["ratios"].values())[-1] for r in mine], 0.1)
        finite = np.mean([r["finite"] for r in mine])
        timed = [r["propose_ms"] for r in mine if r["propose_ms"] is not None]
        spent = f"{np.median(timed):.0f}" if timed else "-"
        row = [result["groups"], result["sampler"], *columns, f"{lowest:.3f}", f"{finite:.1f}", spent]
        print("| " + " | ".join(map(str, row)) + " |", flush=True)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"budget": arguments.budget, "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
