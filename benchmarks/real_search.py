"""How much of the front a sampler finds with a budget of builds, on a real model and the device here.

    python -m benchmarks.models.vit_s --out vit_s --batch 8
    python -m benchmarks.real_search vit_s.onnx vit_s.npz --json benchmarks/results/h200_search_vit_s.json

Every plan is built, run and timed, once: samplers share what was measured, and so do calls with the same ``--folder``.
The sampler of mptune has what the tool gives it: emulated one-group errors, the roofline's terms, the seeds of the
search space, which count as builds, and emulation of what it proposes. Optuna's own start from all-FP32 and all-FP16.
Quality is the hypervolume of what a sampler built (latency gained against all-FP32, error on a log axis from 3e-2 down
to 1e-7) as a share of that of everything built: all samplers, 300 builds around their common front, and what
``benchmarks.measured_plans`` left in the folder.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import math
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import optuna
from optuna.distributions import CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.trial import Trial, TrialState

from benchmarks.additive_law import AdditiveLaw
from benchmarks.common import bools_of, hypervolume, rounded, save
from benchmarks.measuring import Bench, add_options, open_bench
from benchmarks.samplers import make_compared
from mptune.engines.base import Toolchain
from mptune.graph.hazards.find import find_hazards
from mptune.graph.precision import Precision
from mptune.tuning.fronts.hypervolume import ERROR_FLOOR
from mptune.tuning.listener import Silent
from mptune.tuning.sampler.plan_rows import Bools, Floats, unique_plans
from mptune.tuning.sampler.posterior import Prior
from mptune.tuning.sampler.precision import PrecisionSampler
from mptune.tuning.sampler.trials import TIMING_ATTR, set_feasible
from mptune.tuning.space import SearchSpace, load_space, make_space
from mptune.tuning.steps.emulated import PlanEmulator
from mptune.tuning.steps.prior import make_prior
from mptune.tuning.steps.sensitivity import SENSITIVITY_JSON, OneGroupErrors

AROUND = "around the front"
AT = (10, 25, 50, 100, 200)
STOCK = ("tpe", "nsga2", "random")
SAVE_EVERY_S = 10.0
SWITCH_S = 5e-4
"""The thread that feeds the worker waits for the others that think at most this long, each time."""
ROUND, WIDENINGS = 60, 4
REPEATS_PER_BUILD = 20


@dataclass
class Run:
    """What one sampler built, in its order."""

    sampler: str
    seed: int
    budget: int
    built: list[str] = field(default_factory=list)
    propose_s: list[float] = field(default_factory=list)


class Search:
    """All samplers on one model, each in a thread of its own: they wait for the bench most of the time."""

    def __init__(self, bench: Bench, deadline: float) -> None:
        self.bench = bench
        self.deadline = deadline
        self.space = default_space(bench)
        self.prior = self._prior()
        self.runs: list[Run] = []

    def _prior(self) -> Prior:
        """What the tool would know: emulated one-group errors and the roofline's terms."""
        path = self.bench.space.data_dir / SENSITIVITY_JSON
        toolchain = cast("Toolchain", self.bench.toolchain)  # nothing but its emulation is asked for
        errors = OneGroupErrors(self.space, toolchain, "relative_l2", path, Silent())
        errors.take(math.inf, wait=True)
        return make_prior(self.space, errors.sensitivity(), self.bench.terms, exact=False)

    def _emulator(self) -> PlanEmulator:
        """What lets the sampler ask for the errors of plans before one is built."""
        return PlanEmulator(self.space, cast("Toolchain", self.bench.toolchain), "relative_l2", Silent())

    def _bits(self, row: Sequence[bool] | Bools) -> str:
        """A plan of the free groups as the bench's text."""
        chosen = {g: "fp16" if half else "fp32" for g, half in zip(self.space.free, row, strict=True)}
        return self.bench.bits(self.space.plan(chosen))

    def sampler(self, run: Run) -> BaseSampler:
        if run.sampler == "precision":
            return PrecisionSampler(self.prior, seed=run.seed, emulate=self._emulator())
        return make_compared(run.sampler, run.seed, len(self.space.free))

    def run(self, run: Run) -> None:
        """Ask, build, tell until the budget or the time is spent; a plan that it has built already costs nothing."""
        study = optuna.create_study(directions=["minimize", "minimize"], sampler=self.sampler(run))
        distributions = {g: CategoricalDistribution(("fp32", "fp16")) for g in self.space.free}
        for seed in self.space.seeds[: None if run.sampler == "precision" else 2]:
            study.enqueue_trial(self.space.choices(seed.plan))
        for _ in range(REPEATS_PER_BUILD * run.budget):
            if len(run.built) >= run.budget or time.monotonic() >= self.deadline:
                return
            started = time.thread_time()
            trial = study.ask(distributions)
            propose_s = time.thread_time() - started
            bits = self._bits([trial.params[g] == "fp16" for g in self.space.free])
            if bits in run.built:
                study.tell(trial, state=TrialState.FAIL)
                continue
            entry = self.bench.measure(bits)
            run.built.append(bits)
            run.propose_s.append(propose_s)
            _tell(study, trial, entry)

    def around(self, budget: int) -> None:
        """Build plans around the front of everything that is built, by a law fitted to all of it."""
        run = Run(AROUND, 0, budget, built=list(self.bench.record.marked.get(AROUND, ())))
        self.runs.append(run)
        rng = np.random.default_rng(len(run.built))
        while len(run.built) < budget and time.monotonic() < self.deadline:
            law = _Law(self, *self.evaluated())
            chosen = [self._bits(row) for row in law.best(min(ROUND, budget - len(run.built)), rng)]
            if not chosen:
                return
            futures = [self.bench.start(bits) for bits in chosen]
            for bits, future in zip(chosen, futures, strict=True):
                with_time = max(0.0, self.deadline - time.monotonic())
                if concurrent.futures.wait([future], with_time).done:
                    self.bench.record.mark(bits, AROUND)
                    run.built.append(bits)
                else:
                    future.cancel()

    def evaluated(self) -> tuple[Bools, Floats, Floats]:
        """Free groups, latencies and errors of everything built that is finite and obeys the pins."""
        known = {b: e for b, e in list(self.bench.record.plans.items()) if e["finite"]}
        rows = bools_of(list(known)).reshape(len(known), len(self.bench.groups))
        free = np.array([g.id in self.space.free for g in self.bench.groups])
        obeys = ~rows[:, ~free].any(axis=1)
        figures = np.array([[e["latency_ms"], e["error"]] for e in known.values()]).reshape(-1, 2)
        return rows[obeys][:, free], figures[obeys, 0], figures[obeys, 1]

    # -- the results ----------------------------------------------------------------------------------------------

    def share(self, built: Sequence[str], whole: float) -> float:
        taken = [e for bits in built if (e := self.bench.record.plans[bits])["finite"]]
        figures = np.array([[e["latency_ms"], e["error"]] for e in taken]).reshape(-1, 2)
        return hypervolume(figures[:, 0], figures[:, 1], self.bench.record.baseline_ms) / whole

    def document(self) -> dict[str, Any]:
        built = [list(run.built) for run in self.runs]  # before the plans, of which there may be more meanwhile
        rows, latency, error = self.evaluated()
        whole = hypervolume(latency, error, self.bench.record.baseline_ms)
        plans = list(self.bench.record.plans)
        number = {bits: k for k, bits in enumerate(plans)}
        runs = [
            {
                "sampler": run.sampler,
                "seed": run.seed,
                "built": [number[bits] for bits in bits_built],
                "shares": {str(n): rounded(self.share(bits_built[:n], whole)) for n in AT if n <= len(bits_built)},
                "propose_ms": rounded(1e3 * float(np.median(run.propose_s))) if run.propose_s else None,
            }
            for run, bits_built in zip(self.runs, built, strict=True)
        ]
        entries = [self.bench.record.plans[bits] for bits in plans]
        return {
            **self.bench.description(),
            "pooled": {"builds": len(rows), "hypervolume": rounded(whole), "front": _front(latency, error)},
            "runs": runs,
            "columns": ["precision", "latency_ms", "latency_sd_ms", "error"],
            "plans": [
                [bits, *(rounded(e.get(k, math.nan)) for k in ("latency_ms", "latency_sd_ms", "error"))]
                for bits, e in zip(plans, entries, strict=True)
            ],
        }

    def save(self, path: Path | None) -> None:
        save(path, self.document(), lists=("groups", "runs", "plans"))


class _Law:
    """The additive law, fitted to all plans that were built; proposes plans around their front."""

    def __init__(self, search: Search, rows: Bools, latency: Floats, error: Floats) -> None:
        self._boundaries = search.prior.boundaries
        self._rows, self._latency, self._error = rows, latency, error
        self.predict = AdditiveLaw.fit(search.prior, rows, latency, error, search.bench.record.baseline_ms).predict

    def best(self, count: int, rng: np.random.Generator) -> Bools:
        """New plans, spread over the errors of the front, each the fastest that is predicted at its error."""
        groups = self._rows.shape[1]
        known = {row.tobytes() for row in np.packbits(self._rows, axis=1)}
        pool = self._rows[_fastest(self._latency, np.log(np.maximum(self._error, ERROR_FLOOR)), 2 * ROUND)]
        for _ in range(WIDENINGS):
            near = pool[_fastest(*self.predict(pool), 2 * ROUND)]
            pool = unique_plans([pool, *self._neighbours(near, rng)], groups)
        new = pool[[row.tobytes() not in known for row in np.packbits(pool, axis=1)]]
        return new[_fastest(*self.predict(new), count)] if len(new) else new

    def _neighbours(self, near: Bools, rng: np.random.Generator) -> Iterator[Bools]:
        groups = near.shape[1]
        masks = [np.eye(groups, dtype=bool)]
        ends = np.sort(rng.integers(0, groups + 1, (2 * groups, 2)), axis=1)
        masks.append(
            (np.arange(groups) >= ends[:, :1]) & (np.arange(groups) < np.minimum(ends[:, 1:], ends[:, :1] + 6))
        )
        pairs = np.zeros((len(self._boundaries), groups), dtype=bool)
        for row, boundary in zip(pairs, self._boundaries, strict=True):
            row[list(boundary.members[:2])] = True
        masks.append(pairs)
        yield (near[:, None] ^ np.vstack(masks)[None]).reshape(-1, groups)
        others = near[rng.permutation(len(near))]
        cut = rng.integers(0, groups, (len(near), 1))
        yield np.where(np.arange(groups) < cut, near, others)


def _fastest(latency: Floats, log_error: Floats, count: int) -> np.ndarray:
    """Positions of plans along the front: of ``count`` levels of error, the fastest plan under each, and as many of the
    second and third fastest as there is room for."""
    order = np.argsort(latency, kind="stable")
    left, found = np.ones(len(order), dtype=bool), list[int]()
    while len(found) < count and left.any():
        candidates = order[left[order]]
        best = np.minimum.accumulate(log_error[candidates])
        front = candidates[np.append(True, best[1:] < best[:-1])]
        front = front[log_error[front] < math.log(3e-2)]
        if not len(front):
            break
        room = count - len(found)
        spread = front[np.unique(np.linspace(0, len(front) - 1, min(len(front), room)).astype(int))]
        found += spread.tolist()
        left[front] = False
    return np.array(found, dtype=int)


def _front(latency: Floats, error: Floats) -> list[list[float | str]]:
    order = np.lexsort((error, latency))
    best = np.minimum.accumulate(error[order])
    kept = order[np.append(True, best[1:] < best[:-1])]
    return [[rounded(latency[k]), rounded(error[k])] for k in kept]


def default_space(bench: Bench) -> SearchSpace:
    """The default search space, as the tool makes it."""
    absmax = {tensor: seen.absmax for tensor, seen in bench.ranges.items()}
    grouped = bench.workload.grouped
    hazards = find_hazards(grouped, absmax)
    return make_space(grouped, load_space("default"), hazards, absmax, {Precision.FP16: bench.without_kernel})


def _tell(study: optuna.Study, trial: Trial, entry: dict[str, Any]) -> None:
    """As the tool's record tells it."""
    finite = bool(entry["finite"])
    if "latency_ms" in entry:
        measured = {"latency_ms": entry["latency_ms"], "sd_ms": entry["latency_sd_ms"]}
        trial.set_user_attr(TIMING_ATTR, measured)
    set_feasible(trial, finite)
    if finite:
        study.tell(trial, [entry["latency_ms"], entry["error"]])
    else:
        study.tell(trial, state=TrialState.PRUNED)


def _in_threads(tasks: Sequence[Callable[[], None]], save: Callable[[], None]) -> None:
    """Run all to their end; ``save`` is called every few seconds meanwhile."""
    threads = [threading.Thread(target=task, daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(SAVE_EVERY_S)
            save()


def report(document: dict[str, Any]) -> None:
    pooled = document["pooled"]
    print(f"{document['model']}: front of {pooled['builds']} plans, hypervolume {pooled['hypervolume']:.4f}, FP32 "
          f"{document['baseline_ms']:.4f} ms")  # fmt: skip
    print("| sampler | seed | builds | " + " | ".join(f"at {n}" for n in AT) + " | ms a proposal |")
    print("| --- " * (len(AT) + 4) + "|")
    for run in document["runs"]:
        shares = [f"{run['shares'][str(n)]:.3f}" if str(n) in run["shares"] else "-" for n in AT]
        proposing = "-" if run["propose_ms"] is None else f"{run['propose_ms']:.0f}"
        print(f"| {run['sampler']} | {run['seed']} | {len(run['built'])} | " + " | ".join(shares) + f" | {proposing} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--budget", type=int, default=50, help="builds of mptune's sampler")
    parser.add_argument("--seeds", type=int, default=3, help="runs of mptune's sampler")
    parser.add_argument("--stock-budget", type=int, default=200, help="builds of Optuna's samplers")
    parser.add_argument("--stock", nargs="*", default=list(STOCK), choices=STOCK)
    parser.add_argument("--around", type=int, default=300, help="builds around the common front")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    sys.setswitchinterval(SWITCH_S)
    started = time.monotonic()
    # The rest is for the builds around the front, and for saving.
    deadline = started + options.limit
    with open_bench(options, statistics=False) as bench:
        bench.measure("0" * len(bench.groups))
        search = Search(bench, started + (0.8 if options.around else 1.0) * options.limit)
        search.runs += [Run("precision", seed, options.budget) for seed in range(options.seeds)]
        search.runs += [Run(kind, 0, options.stock_budget) for kind in options.stock]
        save = partial(search.save, options.json)
        _in_threads([partial(search.run, run) for run in search.runs], save)
        search.deadline = deadline
        _in_threads([partial(search.around, options.around)], save)
        report(search.document())


if __name__ == "__main__":
    main()
