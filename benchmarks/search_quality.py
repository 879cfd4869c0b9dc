"""What each sampler finds with a budget of builds, on simulated models: the gain within a limit, and the front.

The gain within a limit is the share of the latency that the fastest plan within it saves, over that of the fastest plan
that there is; mptune's sampler aims at the limit. The front is the hypervolume of what was built, over a near-exact
front's. Both are of true latencies and errors; the two builds that begin every search, all-FP32 and all-FP16, are
counted in. ``benchmarks/simulator.py`` says what is simulated. Writes the figures as JSON; what the file holds of other
samplers, sizes and limits stays.

    python -m benchmarks.search_quality --jobs 8 --out benchmarks/results/search_quality.json

With ``--hard`` the models are less like the law that the sampler knows, and less is known of them (``simulator.Hard``).

    python -m benchmarks.search_quality --hard --samplers precision "no designed emulations" --out hard.json

With ``--against precision`` the differences on the same models are shown, too, with their standard errors.
"""

from __future__ import annotations

import os

for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")  # before numpy is imported, here and in the workers

import argparse  # noqa: E402
import dataclasses  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import warnings  # noqa: E402
from collections.abc import Iterable, Iterator, Sequence  # noqa: E402
from concurrent.futures import ProcessPoolExecutor, as_completed  # noqa: E402
from functools import lru_cache, partial  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import optuna  # noqa: E402
from optuna.samplers import BaseSampler  # noqa: E402

from benchmarks.common import save  # noqa: E402
from benchmarks.samplers import make_compared  # noqa: E402
from benchmarks.simulator import Hard, Truth, search  # noqa: E402
from mptune.tuning.dominance import REFERENCE_ERROR  # noqa: E402
from mptune.tuning.sampler.plans import Bools, Floats  # noqa: E402
from mptune.tuning.sampler.precision import EMULATIONS_TO_LEARN, PrecisionSampler  # noqa: E402

OURS = ("precision", "profiled", "no designed emulations", "no limit")
SAMPLERS = (*OURS, "tpe", "nsga2", "gp", "random")
GP_GROUPS = 40
"""Optuna's GPSampler is left out above this: a proposal takes too long."""

SHOWN = (10, 25, 50)

Task = tuple[int, int, str, int, Hard | None, float]
"""Groups, seed, sampler, budget, how the models are harder, and the limit on the error."""


def make(kind: str, truth: Truth, limit: float) -> BaseSampler:
    """The sampler of a name."""
    if kind in OURS:
        return PrecisionSampler(
            truth.prior(),
            truth.seed,
            limit=None if kind == "no limit" else limit,
            emulate=truth.emulate,
            emulations_to_learn=0 if kind == "no designed emulations" else EMULATIONS_TO_LEARN,
        )
    return make_compared(kind, truth.seed, truth.groups)


def run_one(task: Task) -> dict[str, Any]:
    """One search; "reachable" builds the best points of the near-exact front, which is known to no sampler."""
    groups, seed, kind, budget, hard, limit = task
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    truth, front, exact = _model(groups, seed, hard)
    document = {"groups": groups, "seed": seed, "sampler": kind, "limit": limit}
    if kind == "reachable":
        # All-FP32 and all-FP16 are built in any case, and are seldom of use.
        shares = [truth.reachable(front, max(0, b - 2)) / exact for b in range(1, budget + 1)]
        gains = [1.0] * budget
        return {**document, "gains": gains, "shares": _rounded(shares), "finite": budget, "propose_ms": None}
    # GPSampler proposes built plans again and again, and takes seconds each time.
    tries = (2 if kind == "gp" else 20) * budget
    plans, seconds = search(truth, make(kind, truth, limit), budget, profiled=kind == "profiled", tries=tries)
    shares = [truth.hypervolume(plans[:b]) / exact for b in range(1, budget + 1)]
    best = truth.gain_within(front, limit)
    return {
        **document,
        "gains": _rounded(truth.gain_within(plans[:b], limit) / best for b in range(1, budget + 1)),
        "shares": _rounded(shares),
        "finite": int(truth.finite(plans).sum()),
        "propose_ms": round(1e3 * float(np.median(seconds)), 2) if seconds else None,
    }


@lru_cache(maxsize=100)
def _model(groups: int, seed: int, hard: Hard | None) -> tuple[Truth, Bools, float]:
    truth = Truth(groups, seed, hard=hard)
    front = truth.near_exact()
    return truth, front, truth.hypervolume(front)


def _rounded(values: Iterable[float]) -> list[float]:
    return [round(float(value), 4) for value in values]


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the table shows of one sampler's runs at one size."""
    gains, shares = (np.array([run[name] for run in runs]) for name in ("gains", "shares"))
    timed = [run["propose_ms"] for run in runs if run["propose_ms"] is not None]
    return {
        "groups": runs[0]["groups"],
        "sampler": runs[0]["sampler"],
        "limit": runs[0]["limit"],
        "seeds": len(runs),
        "gain": {
            str(b): [round(float(of(gains[:, b - 1])), 4) for of in (np.mean, partial(np.quantile, q=0.1))]
            for b in SHOWN
            if b <= gains.shape[1]
        },
        "median": {str(b): round(float(np.median(shares[:, b - 1])), 4) for b in SHOWN if b <= shares.shape[1]},
        "median error": round(median_error(shares[:, -1]), 4),
        "10th percentile": round(float(np.quantile(shares[:, -1], 0.1)), 4),
        "finite": round(float(np.mean([run["finite"] for run in runs])), 1),
        "propose_ms": round(float(np.median(timed)), 1) if timed else None,
    }


def differences(runs: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]], name: str) -> str:
    """Mean difference of two samplers on the same models, with its standard error, after 10, 25 and 50 builds."""
    of_each = np.array([run[name] for run in runs]) - np.array([run[name] for run in others])
    mean, error = of_each.mean(axis=0), of_each.std(axis=0, ddof=1) / math.sqrt(len(of_each))
    return ", ".join(f"{mean[b - 1]:+.4f} ± {error[b - 1]:.4f} ({b} builds)" for b in SHOWN if b <= len(mean))


def median_error(values: Floats) -> float:
    """Standard error of the median of values, shape (n_values,), by bootstrap (Efron and Tibshirani, 1993)."""
    drawn = np.random.default_rng(0).choice(values, (2000, len(values)))
    return float(np.median(drawn, axis=1).std())


def results(tasks: Sequence[Task], jobs: int) -> Iterator[dict[str, Any]]:
    """Every task's result, as it comes; the longest tasks are begun first."""
    if jobs == 1:
        yield from map(run_one, tasks)
        return
    slow = {"gp": 100, **dict.fromkeys(OURS, 4)}
    ordered = sorted(tasks, key=lambda task: -task[0] * slow.get(task[2], 1))
    with ProcessPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(run_one, task) for task in ordered]):
            yield done.result()


def main() -> None:
    """Run, print a table, write."""
    every = (*SAMPLERS, "reachable")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[12, 40, 120])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--limits", type=float, nargs="+", default=[1e-2, 3e-3, 1e-3], metavar="ERROR")
    parser.add_argument("--samplers", nargs="+", default=list(every), choices=every, metavar="NAME")
    parser.add_argument("--budget", type=int, default=50)
    parser.add_argument("--hard", action="store_true", help="models that are less like the law, and less known")
    parser.add_argument("--against", choices=every, metavar="NAME", help="show differences to this sampler by model")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    hard = Hard() if arguments.hard else None
    models: dict[str, Any] = {}
    if hard is not None:
        models["hard"] = json.loads(json.dumps(dataclasses.asdict(hard)))
    # Before anything runs: figures of other models are not for the same file.
    runs_before = {} if arguments.out is None else _earlier(arguments.out, models)
    tasks = [
        (groups, seed, kind, arguments.budget, hard, limit)
        for groups in arguments.groups
        for limit in arguments.limits
        for kind in arguments.samplers
        if kind != "gp" or groups <= GP_GROUPS
        for seed in range(arguments.seeds)
    ]
    builds = [b for b in SHOWN if b <= arguments.budget]
    heads = ["groups", "sampler", "limit", *(f"gain within it after {b} builds (10th percentile)" for b in builds)]
    heads += [*(f"front, median after {b}" for b in builds), "± of the last", "10th percentile", "finite"]
    heads.append("ms a proposal")
    print("| " + " | ".join(heads) + " |")
    print("| " + " | ".join("---" for _ in heads) + " |")
    runs: dict[_Key, list[dict[str, Any]]] = {}
    rows = {}
    for result in results(tasks, arguments.jobs):
        mine = runs.setdefault(_key(result), [])
        mine.append(result)
        if len(mine) < arguments.seeds:
            continue
        mine.sort(key=lambda run: run["seed"])
        row = rows[_key(result)] = summary(mine)
        medians = [f"{median:.3f}" for median in row["median"].values()]
        spent = "-" if row["propose_ms"] is None else f"{row['propose_ms']:.0f}"
        of_all = [f"{row[name]:.{digits}f}" for name, digits in (("median error", 4), ("10th percentile", 3))]
        gains = [f"{mean:.3f} ({low:.2f})" for mean, low in row["gain"].values()]
        cells = [row["groups"], row["sampler"], f"{row['limit']:g}", *gains, *medians, *of_all, row["finite"], spent]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    for (groups, kind, limit), mine in runs.items():
        others = runs.get((groups, arguments.against, limit), [])
        if kind != arguments.against and len(others) == len(mine) == arguments.seeds:
            for name in ("gains", "shares"):
                of = f"{groups} groups, {kind} - {arguments.against}, {name} within {limit:g}"
                print(f"{of}: {differences(mine, others, name)}")
    if arguments.out is not None:
        for key, earlier in runs_before.items():
            if key not in runs:
                runs[key], rows[key] = earlier, summary(earlier)
        order = sorted(runs, key=lambda key: (key[0], every.index(key[1]) if key[1] in every else len(every), -key[2]))
        document = {"budget": arguments.budget, "reference_error": REFERENCE_ERROR, **models}
        document |= {"summary": [rows[key] for key in order], "runs": [run for key in order for run in runs[key]]}
        save(arguments.out, document, lists=("summary", "runs"))


_Key = tuple[int, str, float]
"""Groups, sampler, limit."""


def _key(run: dict[str, Any]) -> _Key:
    return run["groups"], run["sampler"], run["limit"]


def _earlier(path: Path, models: dict[str, Any]) -> dict[_Key, list[dict[str, Any]]]:
    """The runs that a file of figures holds; the file must be of the same simulated models."""
    runs: dict[_Key, list[dict[str, Any]]] = {}
    document = json.loads(path.read_text()) if path.exists() else {"runs": [], **models}
    if {name: document[name] for name in ("hard",) if name in document} != models:
        raise SystemExit(f"{path} has figures of other models: give another --out")
    for run in document["runs"]:
        if "gains" in run:
            runs.setdefault(_key(run), []).append(run)
    return runs


if __name__ == "__main__":
    main()
