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
from benchmarks.peers.replay import BUILDS, LIMITS, NAMES, SHARES
from mptune.json_form import decode_float

Row = dict[str, Any]


def compare(results: Path, models: Sequence[str]) -> Row:
    """What there is of these models, by name, in a folder with the files of the other steps."""
    entries: Row = {}
    for model in models:
        paths = (results / f"{stem}_{model}.json" for stem in ("peers_replay", "h200_peers"))
        replays, final = (json.loads(path.read_text()) if path.exists() else None for path in paths)
        entries[model] = {"what": MODELS[model].what}
        if replays is not None:
            entries[model]["replayed"] = replayed(replays)
        if final is not None and final["measured"]:
            entries[model]["measured"] = measured(final, {} if replays is None else fronts(replays))
    return entries


def replayed(document: Mapping[str, Any]) -> Row:
    """Of each sampler the hypervolume and the best at each limit: the median over its seeds.

    mptune's best within a limit is of its searches that aim at that limit.
    """
    samplers: Row = {}
    for sampler, name in NAMES.items():
        every = [run for run in document["runs"] if run["sampler"] == sampler and run["budget"] >= BUILDS]
        if runs := [run for run in every if "curve" in run and run["limit"] is None]:
            # A sampler that found no more new plans within its tries keeps what it had.
            volumes = [run["curve"][min(BUILDS, run["built"]) - 1] for run in runs]
            samplers[name] = {"hypervolume": rounded(median(volumes)), "latency_ms": []}
            for k, limit in enumerate(LIMITS):
                aimed = [run for run in every if run["limit"] == limit and "curve" in run] or runs
                if least := [run["within_ms"][str(BUILDS)][k] for run in aimed if "within_ms" in run]:
                    value = median(math.inf if ms is None else ms for ms in least)
                    samplers[name]["latency_ms"].append(rounded(value) if math.isfinite(value) else None)
    if "bisected" in document:
        points = np.array([(row["latency_ms"], row["error"]) for row in document["bisected"]])
        samplers["bisection"] = {
            "hypervolume": rounded(hypervolume(*points.T, document["baseline_ms"])),
            "latency_ms": [min((ms for ms, e in points.tolist() if e <= limit), default=None) for limit in LIMITS],
        }
    best = document["own_gains"]
    for row in samplers.values():
        latencies = [math.inf if ms is None else ms for ms in row["latency_ms"]]
        gains = [max(0.0, 1.0 - ms / document["baseline_ms"]) for ms in latencies]
        row["gains"] = [rounded(gain / most) if most else None for gain, most in zip(gains, best, strict=False)]
    return {"law": document["law"], "own_front": document["own_front"], "samplers": samplers}


def fronts(document: Mapping[str, Any]) -> dict[str, list[str]]:
    """Sampler -> the plans of its first seed's searches, which ``final`` builds some of."""
    plans: dict[str, list[str]] = {}
    for run in document["runs"]:
        if run["seed"] == 0:
            plans.setdefault(NAMES[run["sampler"]], []).extend(run.get("fronts", {}).get(str(BUILDS), ()))
    return plans


def measured(document: Mapping[str, Any], fronts: Mapping[str, Sequence[str]] = MappingProxyType({})) -> Row:
    """Every peer's best at the limits, from what was built and timed.

    Args:
        document: of ``benchmarks.peers.final``.
        fronts: of ``fronts``: these count as a sampler's own also where they were built for another, such as all-FP16.
    """
    figures = {
        key: (decode_float(row["latency_ms"]), decode_float(row["error"]), row["ci95_ms"])
        for key, row in document["measured"].items()
    }
    plans: dict[str, set[str]] = {}
    for row in document["made"]:
        if row["budget"] is None:
            name = "bisection" if row["peer"].startswith("bisection") else row["peer"]
            plans.setdefault(name, set()).add(row["plan"])
        elif row["budget"] == BUILDS:
            name = f"{row['peer']}, {BUILDS} builds"
            plans.setdefault(name, set(fronts.get(row["peer"], ()))).add(row["plan"])
    # What limits are taken from.
    fp16_error = figures[document["all_fp16"]][1] if document["all_fp16"] in figures else math.inf
    peers = {}
    for name, built in plans.items():
        points = [figures[plan] for plan in sorted(built) if plan in figures]
        if points:
            latency, error = (np.array([point[column] for point in points]) for column in (0, 1))
            limits = [share * fp16_error for share in SHARES] if math.isfinite(fp16_error) else None
            peers[name] = {
                "points": len(points),
                "not_built": len(built) - len(points),
                "at_error": None if limits is None else [_fastest(points, limit) for limit in limits],
                "hypervolume": rounded(hypervolume(latency, error, document["baseline_ms"])),
            }
    latency_ms, error, ci95_ms = figures["0" * len(document["all_fp16"])]
    fp32 = {"latency_ms": rounded(latency_ms), "ci95_ms": ci95_ms, "error": rounded(error)}
    return {"device": document["device"], "rounds": document["rounds"], "fp32": fp32, "peers": peers}


def _fastest(points: Iterable[tuple[float, float, Any]], limit: float) -> Row | None:
    """The fastest point within an error, with its interval; None where there is none."""
    latency, error, interval = min((point for point in points if point[1] <= limit), default=(None, None, None))
    if latency is None or error is None:
        return None
    return {"latency_ms": rounded(latency), "ci95_ms": interval, "error": rounded(error)}
