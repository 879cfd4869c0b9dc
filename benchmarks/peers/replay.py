"""Samplers replayed on measured models (``benchmarks.peers.world``): hypervolume at equal builds, and their fronts.

mptune's sampler has what the tool gives it: emulated one-group errors, the roofline's terms, emulation of what it
proposes, and the plans of the search space first, which count as builds. Optuna's begin with all-FP32 and all-FP16.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.samplers import BaseSampler

from benchmarks.common import bools_of, rounded, save
from benchmarks.peers.own import bisect
from benchmarks.peers.world import Laws, World, open_world
from benchmarks.samplers import make_compared
from benchmarks.simulator import search
from mptune.tuning.dominance import hypervolume_improvement, pareto_staircase
from mptune.tuning.sampler.plans import Bools, Floats
from mptune.tuning.sampler.precision import PrecisionSampler

NAMES = {
    "precision": "mptune",
    "tpe": "Optuna TPE",
    "nsga2": "Optuna NSGA-II",
    "random": "Optuna random",
    "gp": "Optuna GP",
}
SAMPLERS = tuple(NAMES)
AT = (10, 25, 50, 100, 200)
"""Builds after which the hypervolume is shown."""

FINAL = (50, 200)
"""Builds after which a front is built and timed."""

MOST_POINTS = 8
"""Points of a front that are built and timed."""

LIMITS = (0.1, 0.3, 0.5)
"""Error limits, as shares of all-FP16's error."""

LATENCY_LIMITS = (0.1, 0.25, 0.5)
"""Latency limits: all-FP16's latency, and so much of the way from there to all-FP32's."""

_GP_TRIES = 2
"""Optuna's GPSampler proposes built plans again and again, and takes seconds each time."""


@dataclass(frozen=True)
class Task:
    """One replay.

    Attributes:
        results: folder with the files of the model.
        model: its name.
        sampler: of ``SAMPLERS``.
        seed: of the sampler.
        budget: builds.
        laws: of the model; None fits them.
        deadline: by the system's clock (``time.time``): none is begun after it.
    """

    results: Path
    model: str
    sampler: str
    seed: int
    budget: int
    laws: Laws | None = None
    deadline: float = float("inf")


def run(task: Task) -> dict[str, Any]:
    """Replay one search; how it failed where it does."""
    document: dict[str, Any] = {"sampler": task.sampler, "seed": task.seed, "budget": task.budget}
    if time.time() >= task.deadline:
        return {**document, "failure": "not begun: no time was left"}
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    world = open_world(task.results, task.model, task.seed, task.laws)
    try:
        sampler = _sampler(task, world)
        tries = _GP_TRIES * task.budget if task.sampler == "gp" else None
        first = world.first if task.sampler == "precision" else None
        plans, _ = search(world, sampler, task.budget, tries=tries, first=first)
    except Exception as error:  # whatever a peer raises is its result
        return {**document, "failure": f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"}
    return {
        **document,
        "built": len(plans),
        "fronts": {
            str(n): [world.bits(plan) for plan in few_points(world, plans[:n])] for n in FINAL if n <= len(plans)
        },
        "at": {str(n): at_limits(world, plans[:n]) for n in FINAL if n <= len(plans)},
        "curve": [rounded(world.hypervolume(plans[:n])) for n in range(1, len(plans) + 1)],
    }


def _sampler(task: Task, world: World) -> BaseSampler:
    if task.sampler == "precision":
        return PrecisionSampler(world.prior(), seed=task.seed, emulate=world.emulate)
    return make_compared(task.sampler, task.seed, world.groups)


def at_limits(world: World, plans: Bools) -> dict[str, list[float | None]]:
    """The least latency within each of ``LIMITS``, and the least error within each of ``LATENCY_LIMITS``; None: none.

    Both by the law, with what the plans deviate by.
    """
    plans = plans[world.finite(plans)]
    latency, error = world.latency(plans), world.error(plans)
    fp16_ms, fp16_error = all_fp16(world)
    most_ms = [fp16_ms + share * (world.base - fp16_ms) for share in LATENCY_LIMITS]
    return {
        "latency_ms": [_least(latency[error <= limit * fp16_error]) for limit in LIMITS],
        "error": [_least(error[latency <= limit]) for limit in most_ms],
    }


def all_fp16(world: World) -> tuple[float, float]:
    """Latency and error of all-FP16; where its outputs are not finite, of all groups that alone have finite outputs."""
    plan = ~world.overflows[None]
    return float(world.latency(plan)[0]), float(world.error(plan)[0])


def _least(values: Floats) -> float | None:
    return rounded(float(values.min())) if len(values) else None


def bisected(world: World) -> list[dict[str, Any]]:
    """The plans that Polygraphy's bisection comes to for each of ``LIMITS``, from both ends."""
    free = [k for k, is_free in enumerate(world.known.is_free) if is_free]
    found = []
    for limit in LIMITS:
        most = limit * all_fp16(world)[1]

        def is_good(bits: str, most: float = most) -> bool:
            row = bools_of([bits])[:, world.known.is_free]
            return bool(world.finite(row)[0] and world.error(row)[0] <= most)

        for forward in (True, False):
            plan, builds = bisect(free, len(world.known.groups), is_good, forward=forward)
            row = bools_of([plan])[:, world.known.is_free]
            found.append(
                {
                    "name": bisection_name(limit, forward=forward),
                    "plan": plan,
                    "builds": builds,
                    "latency_ms": rounded(float(world.latency(row)[0])),
                    "error": rounded(float(world.error(row)[0])),
                }
            )
    return found


def bisection_name(limit: float, *, forward: bool) -> str:
    """Of its plan."""
    return f"bisection {'forward' if forward else 'backward'}, error {limit:g}"


def few_points(world: World, plans: Bools, count: int = MOST_POINTS) -> Bools:
    """Plans of a search that are built and timed, at most ``count``: first those for the limits, then of its front.

    A plan's deviations from the law are drawn, and no engine has them: for a limit the plan is taken that is the
    fastest by the law itself, of those within the limit by twice the law's residual. Then what dominates most.
    """
    plans = plans[world.finite(plans) & plans.any(axis=1)]
    latency, error = world.by_law(plans)
    most = world.by_law(~world.overflows[None])[1][0] * math.exp(-2.0 * world.laws.residual.log_error)
    within = [np.flatnonzero(error <= limit * most) for limit in LIMITS]
    chosen = [plans[which[np.argmin(latency[which])]] for which in within if len(which)]
    front = world.front(plans) if len(plans) else plans
    found: Bools = np.unique(np.array([*chosen, *front], dtype=bool).reshape(-1, world.groups), axis=0)
    first = list(dict.fromkeys(int(np.flatnonzero((found == plan).all(axis=1))[0]) for plan in chosen))
    gain, exact = world.coordinates(found)
    while len(first) < min(count, len(found)):
        added = hypervolume_improvement(gain, exact, *pareto_staircase(gain[first], exact[first]))
        added[first] = -1.0
        first.append(int(np.argmax(added)))
    few: Bools = found[first]
    return few


def replay(
    results: Path,
    model: str,
    out: Path,
    *,
    samplers: Sequence[str],
    seeds: int,
    budget: int,
    stock_budget: int,
    jobs: int,
    limit_s: float,
) -> dict[str, Any]:
    """Replay what is not in ``out`` yet, and write it after every run.

    Args:
        results: folder with the files of the model.
        model: its name.
        out: the file.
        samplers: of ``SAMPLERS``.
        seeds: how many of each.
        budget: builds of mptune's sampler.
        stock_budget: builds of the others.
        jobs: processes at a time.
        limit_s: no run is begun after so many seconds.
    """
    world = open_world(results, model)
    known = _known(out)
    deadline = time.time() + limit_s
    tasks = [
        Task(
            results.resolve(),
            model,
            sampler,
            seed,
            budget if sampler == "precision" else stock_budget,
            world.laws,
            deadline,
        )
        for seed in range(seeds)
        for sampler in samplers
    ]
    # runs of an older version lack figures: they are made again
    left = [task for task in tasks if "at" not in known.get((task.sampler, task.seed, task.budget), {})]
    document = {
        "model": model,
        "replayed": True,
        "baseline_and_fp16": [[rounded(world.base), 0.0], [rounded(value) for value in all_fp16(world)]],
        "bisected": bisected(world),
        "law": world.laws.to_json(),
        "baseline_ms": rounded(world.base),
        "own_front": rounded(world.own_front()),
    }
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(jobs, max(1, len(left))), maxtasksperchild=1) as pool:
        for found in pool.imap_unordered(run, left):
            known[found["sampler"], found["seed"], found["budget"]] = found
            runs = sorted(known.values(), key=lambda one: (SAMPLERS.index(one["sampler"]), one["seed"]))
            save(out, {**document, "runs": runs}, lists=("runs",))
            print(row(found), flush=True)
    return {**document, "runs": list(known.values())}


def row(found: Mapping[str, Any]) -> str:
    """A line about one run."""
    what = f"{found['sampler']:<10} seed {found['seed']}"
    if "failure" in found:
        return f"{what}: {found['failure']}"
    shares = ", ".join(f"{found['curve'][n - 1]:.4f} at {n}" for n in AT if n <= found["built"])
    return f"{what}: {shares}"


def _known(out: Path) -> dict[tuple[str, int, int], dict[str, Any]]:
    """The runs of an earlier call that came to an end."""
    runs = json.loads(out.read_text())["runs"] if out.exists() else []
    return {(one["sampler"], one["seed"], one["budget"]): one for one in runs if "failure" not in one}
