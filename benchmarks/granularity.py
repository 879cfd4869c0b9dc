"""Coarse or fine: what is found of a simulated front by layer groups, by blocks of them, and by blocks that split.

The model is ``search_quality``'s. Blocks are runs of neighbours. "split" starts with blocks and, until half of the
budget is spent, splits those first whose groups differ most in what they err for what they gain; each plan that was
built is constant within every finer unit, so nothing that was learned is lost. The figure is the hypervolume of what
was built, as a share of what searching by groups finds with the whole budget.

    python -m benchmarks.granularity --groups 120 200 --seeds 3 --out benchmarks/results/granularity.json
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np

from benchmarks.simulator import TIMING, Truth
from mptune.tuning.sampler.cuts.boundaries import Boundary
from mptune.tuning.sampler.posterior import BuiltPlans, Prior
from mptune.tuning.sampler.precision import PrecisionSampler

BUDGETS = (10, 25, 50)
Units = list[list[int]]


def merged(prior: Prior, units: Units) -> Prior:
    """The prior over units: gains and squared errors add up, boundaries within a unit are never crossed."""
    unit_of = {group: index for index, unit in enumerate(units) for group in unit}
    squares, gains = np.array(prior.log_square_errors), np.array(prior.gains_ms)
    boundaries: dict[Boundary, float] = {}
    for boundary, cost in zip(prior.boundaries, prior.boundary_costs_ms, strict=True):
        members = tuple(sorted({unit_of[member] for member in boundary.members}))
        if len(members) + len(boundary.fixed) > 1:
            kept = Boundary.among(members, *boundary.fixed)
            boundaries[kept] = boundaries.get(kept, 0.0) + cost
    return Prior(
        tuple(f"u{index:03d}" for index in range(len(units))),
        tuple(float(np.logaddexp.reduce(squares[unit])) for unit in units),
        tuple(float(gains[unit].sum()) for unit in units),
        tuple(boundaries),
        tuple(boundaries.values()),
    )


def split(units: Units, prior: Prior, wanted: int) -> Units:
    """Split units into their groups, those that differ most within first, until there are so many."""
    squares, gains = np.array(prior.log_square_errors), np.array(prior.gains_ms)
    rates = np.minimum(squares, math.log(1e6)) - np.log(np.maximum(gains, 1e-6 * gains.max()))
    while len(units) < wanted and any(len(unit) > 1 for unit in units):
        widest = max(range(len(units)), key=lambda k: float(np.ptp(rates[units[k]])) if len(units[k]) > 1 else -1.0)
        units = [*units[:widest], *([group] for group in units[widest]), *units[widest + 1 :]]
    return units


def search(truth: Truth, size: int, budget: int, splits: bool) -> tuple[np.ndarray, float]:
    """The plans that were built, in their order, and the seconds of computing."""
    whole = truth.prior("precision")
    units = [list(range(start, min(start + size, truth.groups))) for start in range(0, truth.groups, size)]
    blocks = len(units)
    rng = np.random.default_rng([truth.seed, 7])
    rows = [np.zeros(truth.groups, dtype=bool), np.ones(truth.groups, dtype=bool)]
    timed: list[float] = []
    started = time.process_time()
    for number in range(budget):
        if number >= len(rows):
            if splits:
                share = min(1.0, 2 * number / budget)
                units = split(units, whole, round(blocks + share * (truth.groups - blocks)))
            plans = np.array(rows)
            latency, finite = np.array(timed), truth.finite(plans).astype(float)
            seen = BuiltPlans(
                plans=plans[:, [unit[0] for unit in units]],
                latency_ms=latency,
                latency_sd_ms=TIMING * latency,
                error=np.where(finite > 0, truth.error(plans), np.nan),
                finite=finite,
                base_ms=latency[0],
                base_sd_ms=TIMING * latency[0],
            )
            prior = merged(whole, units)
            proposed, *_ = PrecisionSampler(prior, seed=truth.seed).propose(prior, seen, rng)
            if proposed is None:
                break
            row = np.zeros(truth.groups, dtype=bool)
            for unit, half in zip(units, proposed, strict=True):
                row[unit] = half
            rows.append(row)
        timed.append(float(truth.latency(rows[number][None])[0]) * (1 + TIMING * rng.normal()))
    return np.array(rows[: len(timed)]), time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[120, 200])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--size", type=int, default=6, help="groups in a block")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = []
    print("| groups | searched by | " + " | ".join(f"{budget} builds" for budget in BUDGETS) + " | s of thought |")
    print("| --- | --- | --- | --- | --- | --- |")
    for groups in arguments.groups:
        found: dict[str, list[list[float]]] = {}
        seconds: dict[str, list[float]] = {}
        for seed in range(arguments.seeds):
            truth = Truth(groups, seed)
            best = math.nan
            for name, size, splits in (
                ("groups", 1, False),
                (f"blocks of {arguments.size}", arguments.size, False),
                ("blocks that split", arguments.size, True),
            ):
                plans, spent = search(truth, size, max(BUDGETS), splits)
                reached = [truth.hypervolume(plans[:budget]) for budget in BUDGETS]
                best = reached[-1] if size == 1 else best
                found.setdefault(name, []).append([value / best for value in reached])
                seconds.setdefault(name, []).append(spent)
        for name, rows in found.items():
            shares = [round(float(np.median(column)), 3) for column in zip(*rows, strict=True)]
            spent = round(float(np.median(seconds[name])), 1)
            results.append({"groups": groups, "searched by": name, "shares": shares, "seconds": spent})
            print(f"| {groups} | {name} | " + " | ".join(f"{share:.3f}" for share in shares) + f" | {spent} |")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"budgets": BUDGETS, "rows": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
