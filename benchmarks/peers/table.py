"""The comparison as JSON, from the files of replays and of final measurements; ``pages`` makes tables of it.

What is replayed is marked with a star: it follows from the fitted law, whose residual stands beside it. Everything else
was built and timed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import numpy as np

from benchmarks.common import hypervolume, rounded
from benchmarks.peers.models import MODELS
from benchmarks.peers.replay import FINAL, LATENCY_LIMITS, LIMITS, NAMES
from mptune.json_form import decode_float

Row = dict[str, Any]


def compare(results: Path, models: Sequence[str]) -> Row:
    """What there is of these models, by name; an empty entry where nothing is.

    Args:
        results: folder with the files of the other steps.
        models: names.
    """
    found: Row = {}
    for model in models:
        replays, final = (read(results / f"{stem}_{model}.json") for stem in ("peers_replay", "h200_peers"))
        entry: Row = {"what": MODELS[model].what}
        if replays is not None:
            entry["replayed"] = replayed(replays)
        if final is not None and final["measured"]:
            fronts = {} if replays is None else replayed_fronts(replays)
            entry["measured"] = measured(final, fronts)
        found[model] = entry
    return found


def replayed(document: Mapping[str, Any]) -> Row:
    """Of each sampler the hypervolumes and the best at limits: the median over its seeds, and the extremes.

    A sampler that found no more new plans within its tries keeps what it had.
    """
    found: Row = {"law": document["law"], "own_front": document["own_front"], "samplers": {}}
    for sampler, name in NAMES.items():
        runs = [run for run in document["runs"] if run["sampler"] == sampler]
        whole = [run for run in runs if "curve" in run]
        if not whole:
            words = sorted({run["failure"] for run in runs if "failure" in run})
            if words:
                found["samplers"][name] = {"failure": words[0]}
            continue
        budgets = [n for n in FINAL if all(n <= run["budget"] for run in whole)]
        found["samplers"][name] = {
            "seeds": len(whole),
            "built": min(run["built"] for run in whole),
            "hypervolume": {
                str(n): [
                    rounded(pick([run["curve"][min(n, run["built"]) - 1] for run in whole]))
                    for pick in (median, min, max)
                ]
                for n in budgets
            },
            "at": {str(n): _at(whole, n) for n in budgets},
        }
    if "bisected" in document:
        found["samplers"]["bisection"] = _bisection(document)
    return found


def _at(runs: Sequence[Mapping[str, Any]], budget: int) -> Row:
    """Medians over the seeds of what stands at each limit; None where half of the seeds have nothing."""
    ones = [run.get("at", {}).get(str(min(budget, run["built"])), run.get("at", {}).get(str(budget))) for run in runs]
    ones = [one for one in ones if one is not None]
    if not ones:
        return {}
    found: Row = {}
    for key, count in (("latency_ms", len(LIMITS)), ("error", len(LATENCY_LIMITS))):
        values = [[math.inf if one[key][k] is None else one[key][k] for one in ones] for k in range(count)]
        medians = [median(column) if column else math.inf for column in values]
        found[key] = [rounded(value) if math.isfinite(value) else None for value in medians]
    return found


def _bisection(document: Mapping[str, Any]) -> Row:
    """Of the plans that the bisections come to; each limit has its own two searches."""
    (base_ms, _), (fp16_ms, fp16_error) = document["baseline_and_fp16"]
    points = [(one["latency_ms"], one["error"]) for one in document["bisected"]]
    most_ms = [fp16_ms + share * (base_ms - fp16_ms) for share in LATENCY_LIMITS]
    at = {
        "latency_ms": [min((ms for ms, e in points if e <= limit * fp16_error), default=None) for limit in LIMITS],
        "error": [min((e for ms, e in points if ms <= limit), default=None) for limit in most_ms],
    }
    volume = rounded(hypervolume(*(np.array(column) for column in zip(*points, strict=True)), base_ms))
    builds = sum(one["builds"] for one in document["bisected"])
    first = str(FINAL[0])
    return {"builds": builds, "hypervolume": {first: [volume] * 3}, "at": {first: at}}


def replayed_fronts(document: Mapping[str, Any]) -> dict[tuple[str, int], list[str]]:
    """(sampler, budget) -> the plans of the front of its first seed, which ``final`` builds some of."""
    return {
        (NAMES[run["sampler"]], int(budget)): plans
        for run in document["runs"]
        if run["seed"] == 0
        for budget, plans in run.get("fronts", {}).items()
    }


def measured(
    document: Mapping[str, Any],
    fronts: Mapping[tuple[str, int], Sequence[str]] = MappingProxyType({}),
) -> Row:
    """Every peer's best at the limits, from what was built and timed.

    Args:
        document: of ``benchmarks.peers.final``.
        fronts: of ``replayed_fronts``: a plan on a sampler's front counts as its own also where it was built for
            another peer, such as all-FP16.
    """
    figures = {
        key: (decode_float(one["latency_ms"]), decode_float(one["error"]), one["ci95_ms"])
        for key, one in document["measured"].items()
    }
    fp32 = figures["0" * len(document["all_fp16"])]
    all_fp16 = figures.get(document["all_fp16"])
    fp16 = all_fp16 if all_fp16 is not None and math.isfinite(all_fp16[1]) else None  # what limits are taken from
    base_ms = document["baseline_ms"]
    peers: dict[str, list[Mapping[str, Any]]] = {}
    for one in document["made"]:
        budget = f", {one['budget']} builds" if one["budget"] is not None else ""
        name = "bisection" if one["peer"].startswith("bisection") else one["peer"]
        peers.setdefault(f"{name}{budget}", []).append(one)
    rows = {}
    for name, ones in peers.items():
        front = fronts.get((ones[0]["peer"], ones[0]["budget"]))
        plans = {one["plan"] for one in ones} | set(front or ())
        points = [figures[plan] for plan in sorted(plans) if plan in figures]
        not_built = len(plans) - len(points)
        if not points:
            continue
        rows[name] = {
            "points": len(points),
            "not_built": not_built,
            "at_error": None if fp16 is None else [_fastest(points, limit * fp16[1]) for limit in LIMITS],
            "at_latency": None
            if fp16 is None
            else [_most_exact(points, fp16[0] + share * (fp32[0] - fp16[0])) for share in LATENCY_LIMITS],
            "hypervolume": rounded(
                hypervolume(np.array([p[0] for p in points]), np.array([p[1] for p in points]), base_ms)
            ),
        }
    names = {one["plan"]: one["peer"] for one in reversed(document["made"])}  # a plan that failed is noted by its key
    return {
        "baseline_ms": base_ms,
        "fp32": {"latency_ms": rounded(fp32[0]), "ci95_ms": fp32[2], "error": rounded(fp32[1])},
        "fp16": None if all_fp16 is None else {"latency_ms": rounded(all_fp16[0]), "error": rounded(all_fp16[1])},
        "device": document["device"],
        "rounds": document["rounds"],
        "processes": document.get("processes", 1),  # files that do not name them are of one
        "without_kernel": document.get("without_kernel", []),
        "peers": rows,
        "crashed": {names.get(one["peer"], one["peer"]): one["words"] for one in document["crashed"]},
    }


def _fastest(points: Iterable[tuple[float, float, Any]], limit: float) -> Row | None:
    """The fastest point within an error, with its interval; None where there is none."""
    within = [point for point in points if point[1] <= limit]
    if not within:
        return None
    latency, error, interval = min(within)
    return {"latency_ms": rounded(latency), "ci95_ms": interval, "error": rounded(error)}


def _most_exact(points: Iterable[tuple[float, float, Any]], limit_ms: float) -> Row | None:
    """The most exact point within a latency; None where there is none."""
    within = [(error, latency, interval) for latency, error, interval in points if latency <= limit_ms]
    if not within:
        return None
    error, latency, interval = min(within)
    return {"error": rounded(error), "latency_ms": rounded(latency), "ci95_ms": interval}


def read(path: Path) -> Any:
    """A file of another step; None where it is not there."""
    return json.loads(path.read_text()) if path.exists() else None
