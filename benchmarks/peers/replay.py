"""Samplers replayed on measured models (``benchmarks.peers.world``): hypervolume at equal builds, and their fronts.

mptune's sampler has what the tool gives it: emulated one-group errors, the roofline's terms, emulation of what it
proposes, and the plans of the search space first, which count as builds. Optuna's begin with all-FP32 and all-FP16.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from benchmarks.common import bools_of, rounded, save
from benchmarks.peers.world import Laws, World, open_world
from benchmarks.samplers import make_compared
from benchmarks.simulator import search
from mptune.tuning.dominance import hypervolume_improvement, pareto_staircase
from mptune.tuning.sampler.plans import Bools
from mptune.tuning.sampler.precision import PrecisionSampler

NAMES = {
    "precision": "mptune",
    "tpe": "Optuna TPE",
    "nsga2": "Optuna NSGA-II",
    "random": "Optuna random",
    "gp": "Optuna GP",
}
BUILDS = 50
"""Searches are compared after as many."""

FINAL = (BUILDS, 200)
"""Builds after which a front is built and timed."""

MOST_POINTS = 8
"""Points of a front that are built and timed."""

LIMITS = (1e-2, 3e-3, 1e-3)
"""Error limits; mptune's sampler runs once for each, as it aims at a limit, and once without one."""

SHARES = (0.1, 0.3, 0.5)
"""Error limits of what is built and timed, as shares of all-FP16's error."""

_GP_TRIES = 2
"""Optuna's GPSampler proposes built plans again and again, and takes seconds each time."""


@dataclass(frozen=True)
class Task:
    """One replay of a sampler with a seed and a budget of builds; ``laws`` are of the model, None fits them.

    ``limit`` is the error that mptune's sampler aims at; None: the whole front.
    """

    results: Path
    model: str
    sampler: str
    seed: int
    budget: int
    limit: float | None = None
    laws: Laws | None = None
    deadline: float = math.inf
    """By the system's clock (``time.time``): none is begun after it."""


def run(task: Task) -> dict[str, Any]:
    """Replay one search; how it failed where it does."""
    document: dict[str, Any] = {"sampler": task.sampler, "seed": task.seed, "budget": task.budget, "limit": task.limit}
    if time.time() >= task.deadline:
        return {**document, "failure": "not begun: no time was left"}
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    world = open_world(task.results, task.model, task.seed, task.laws)
    is_own = task.sampler == "precision"
    try:
        if is_own:
            sampler = PrecisionSampler(world.prior(), seed=task.seed, limit=task.limit, emulate=world.emulate)
        else:
            sampler = make_compared(task.sampler, task.seed, world.groups)
        tries = _GP_TRIES * task.budget if task.sampler == "gp" else None
        plans, _ = search(world, sampler, task.budget, tries=tries, first=world.first if is_own else None)
    except Exception as error:  # whatever a peer raises is its result
        return {**document, "failure": f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"}
    by_budget = {str(n): plans[:n] for n in FINAL if n <= len(plans)}
    limits = [share * all_fp16(world)[1] for share in SHARES] if task.limit is None else [task.limit]
    count = MOST_POINTS if task.limit is None else 1
    return {
        **document,
        "built": len(plans),
        "fronts": {
            n: [world.bits(plan) for plan in few_points(world, part, limits, count)] for n, part in by_budget.items()
        },
        "within_ms": {n: within_limits(world, part) for n, part in by_budget.items()},
        "curve": [rounded(world.hypervolume(plans[:n])) for n in range(1, len(plans) + 1)],
    }


def within_limits(world: World, plans: Bools) -> list[float | None]:
    """The least latency within each of ``LIMITS`` by the law, with what the plans deviate by; None: none."""
    plans = plans[world.finite(plans)]
    latency, error = world.latency(plans), world.error(plans)
    within = (latency[error <= limit] for limit in LIMITS)
    return [rounded(float(ms.min())) if len(ms) else None for ms in within]


def all_fp16(world: World) -> tuple[float, float]:
    """Latency and error of all-FP16; where its outputs are not finite, of all groups that alone have finite outputs."""
    plan = ~world.overflows[None]
    return float(world.latency(plan)[0]), float(world.error(plan)[0])


def bisected(world: World) -> list[dict[str, Any]]:
    """The plans that Polygraphy's bisection comes to for each of ``LIMITS``, from both ends."""
    free = [k for k, is_free in enumerate(world.known.is_free) if is_free]
    rows = []
    for limit, forward in product(LIMITS, (True, False)):

        def is_good(bits: str, limit: float = limit) -> bool:
            row = bools_of([bits])[:, world.known.is_free]
            return bool(world.finite(row)[0] and world.error(row)[0] <= limit)

        plan, builds = bisect(free, len(world.known.groups), is_good, forward=forward)
        row = bools_of([plan])[:, world.known.is_free]
        figures = {"latency_ms": rounded(float(world.latency(row)[0])), "error": rounded(float(world.error(row)[0]))}
        name = f"bisection {'forward' if forward else 'backward'}, error {limit:g}"
        rows.append({"name": name, "plan": plan, "builds": builds, **figures})
    return rows


def bisect(groups: Sequence[int], count: int, is_good: Callable[[str], bool], *, forward: bool) -> tuple[str, int]:
    """Polygraphy's idea (``debug precision --mode bisect``): the fewest leading or trailing groups to keep in FP32.

    Args:
        groups: positions of the groups that may be FP16, in the order of the graph.
        count: of all groups.
        is_good: whether a plan is within the tolerance; called once for each plan, which is then built.
        forward: keep groups from the front of the network in FP32, else from its end.

    Returns:
        The plan with the fewest FP32 groups that was seen to be good (all-FP32 where none was), and the builds.
    """

    def plan(fp32: int) -> str:
        half = set(groups[fp32:] if forward else groups[: len(groups) - fp32])
        return "".join("01"[position in half] for position in range(count))

    low, high, builds = 0, len(groups), 0  # all of them in FP32 is taken to be good
    while low < high:
        middle = (low + high) // 2
        builds += 1
        low, high = (low, middle) if is_good(plan(middle)) else (middle + 1, high)
    return plan(high), builds


def few_points(world: World, plans: Bools, limits: Sequence[float], count: int = MOST_POINTS) -> Bools:
    """Plans of a search that are built and timed, at most ``count``: first those for the limits, then of its front.

    A plan's deviations from the law are drawn, and no engine has them: for a limit the plan is taken that is the
    fastest by the law itself, of those within the limit by twice the law's residual. Then what dominates most.
    """
    plans = plans[world.finite(plans) & plans.any(axis=1)]
    latency, error = world.by_law(plans)
    margin = math.exp(-2.0 * world.laws.residual.log_error)
    within = [np.flatnonzero(error <= limit * margin) for limit in limits]
    chosen = [plans[which[np.argmin(latency[which])]] for which in within if len(which)]
    front = world.front(plans) if len(plans) else plans
    every: Bools = np.unique(np.array([*chosen, *front], dtype=bool).reshape(-1, world.groups), axis=0)
    first = list(dict.fromkeys(int(np.flatnonzero((every == plan).all(axis=1))[0]) for plan in chosen))
    gain, exact = world.coordinates(every)
    while len(first) < min(count, len(every)):
        added = hypervolume_improvement(gain, exact, *pareto_staircase(gain[first], exact[first]))
        added[first] = -1.0
        first.append(int(np.argmax(added)))
    few: Bools = every[first]
    return few


def replay(model: str, options: argparse.Namespace, deadline: float) -> bool:
    """Replay a model's searches that are not in its file yet; the file is written after every run.

    Args:
        model: its name; nothing is done where it was not collected.
        options: the folder ``results``, ``samplers`` of ``NAMES``, the number of ``seeds`` of each, the ``budget`` of
            mptune's, the ``stock_budget`` of the others, and how many ``jobs`` at a time.
        deadline: by ``time.monotonic``: no run is begun after it.

    Returns:
        False where the model was collected in part.
    """
    out = options.results / f"peers_replay_{model}.json"
    if not all((options.results / f"{stem}_{model}.json").exists() for stem in ("peers_known", "h200_plans")):
        return True
    try:
        world = open_world(options.results, model)
    except SystemExit as error:
        print(f"{model}: not replayed: {error}")
        return False
    runs = json.loads(out.read_text())["runs"] if out.exists() else []
    done = {(run["sampler"], run["seed"], run["budget"], run["limit"]): run for run in runs if "failure" not in run}
    until = time.time() + deadline - time.monotonic()
    tasks = []
    for seed, sampler, limit in product(range(options.seeds), options.samplers, (None, *LIMITS)):
        budget = options.budget if sampler == "precision" else options.stock_budget
        if (sampler, seed, budget, limit) not in done and (limit is None or sampler == "precision"):
            tasks.append(Task(options.results.resolve(), model, sampler, seed, budget, limit, world.laws, until))
    document = {
        "model": model,
        "replayed": True,
        "baseline_and_fp16": [[rounded(world.base), 0.0], [rounded(value) for value in all_fp16(world)]],
        "bisected": bisected(world),
        "law": world.laws.to_json(),
        "baseline_ms": rounded(world.base),
        **world.own_front(LIMITS),
    }
    samplers = list(NAMES)
    with multiprocessing.get_context("spawn").Pool(min(options.jobs, max(1, len(tasks))), maxtasksperchild=1) as pool:
        for result in pool.imap_unordered(run, tasks):
            done[result["sampler"], result["seed"], result["budget"], result["limit"]] = result
            runs = sorted(done.values(), key=lambda r: (samplers.index(r["sampler"]), r["seed"], r["limit"] or 0))
            save(out, {**document, "runs": runs}, lists=("runs",))
            words = result.get("failure") or f"{result['built']} plans, hypervolume {result['curve'][-1]:.4f}"
            print(f"{result['sampler']:<10} seed {result['seed']} limit {result['limit']}: {words}", flush=True)
    return True
