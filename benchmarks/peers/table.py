"""The comparison as JSON, as a table and as a figure, from the files of replays and of final measurements.

What is replayed is marked with a star: it follows from the fitted law, whose residual stands beside it. Everything else
was built and timed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import hypervolume, rounded, save
from benchmarks.curves import draw
from benchmarks.peers.models import MODELS
from benchmarks.peers.replay import LATENCY_LIMITS, LIMITS, NAMES
from mptune.data.numbers import decode_float
from mptune.files import write_text

AT = (50, 200)
"""Builds at which hypervolumes are compared."""

Row = dict[str, Any]


def write(
    results: Path, models: Sequence[str], json_path: Path | None, markdown: Path | None, svg: Path | None
) -> None:
    """Write what there is of these models, and print the tables.

    Args:
        results: folder with the files of the other steps.
        models: names.
        json_path: the figures; None writes none.
        markdown: the tables; None writes none.
        svg: the replays' hypervolumes against builds; None writes none.
    """
    document: dict[str, Any] = {"models": {}}
    curves: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for model in models:
        replays, final = (_read(results / f"{stem}_{model}.json") for stem in ("peers_replay", "h200_peers"))
        if replays is None and final is None:
            continue
        entry: Row = {"what": MODELS[model].what}
        if replays is not None:
            entry["replayed"] = replayed(replays)
            for run in replays["runs"]:
                if "curve" in run:
                    shares = [value / replays["own_front"] for value in run["curve"]]
                    curves.setdefault((MODELS[model].what, NAMES[run["sampler"]]), []).append({"shares": shares})
        if final is not None:
            entry["measured"] = measured(final, _build_s(results, model))
        document["models"][model] = entry
    text = "\n\n".join(tables(document["models"]))
    print(text)
    save(json_path, document)
    if markdown is not None:
        write_text(markdown, text + "\n")
    if svg is not None and curves:
        write_text(svg, draw(_as_long(curves)))


def replayed(document: Mapping[str, Any]) -> Row:
    """Hypervolumes of the replays: for each sampler the median over its seeds, and the extremes."""
    found: Row = {"law": document["law"], "own_front": document["own_front"], "samplers": {}}
    for sampler, name in NAMES.items():
        runs = [run for run in document["runs"] if run["sampler"] == sampler]
        whole = [run for run in runs if "curve" in run]
        if not whole:
            words = sorted({run["failure"] for run in runs if "failure" in run})
            if words:
                found["samplers"][name] = {"failure": words[0]}
            continue
        found["samplers"][name] = {
            "seeds": len(whole),
            "hypervolume": {
                str(n): [rounded(pick([run["curve"][n - 1] for run in whole])) for pick in (median, min, max)]
                for n in AT
                if all(n <= run["built"] for run in whole)
            },
            "cpu_s": rounded(median(run["cpu_s"] for run in whole)),
            "emulated": median(run["emulated"] for run in whole),
            "peak_mib": rounded(max(run["peak_mib"] for run in whole)),
        }
    return found


def measured(document: Mapping[str, Any], build_s: float | None) -> Row:
    """Every peer's best at the limits, from what was built and timed.

    Args:
        document: of ``benchmarks.peers.final``.
        build_s: median seconds to build and measure a plan; None where nobody took them.
    """
    figures = {
        key: (decode_float(one["latency_ms"]), decode_float(one["error"]), one["ci95_ms"])
        for key, one in document["measured"].items()
    }
    fp32 = figures["0" * len(document["all_fp16"])]
    fp16 = figures.get(document["all_fp16"])
    base_ms = document["baseline_ms"]
    peers: dict[str, list[Mapping[str, Any]]] = {}
    for one in document["made"]:
        budget = f", {one['budget']} builds" if one["budget"] is not None else ""
        name = "bisection" if one["peer"].startswith("bisection") else one["peer"]
        peers.setdefault(f"{name}{budget}", []).append(one)
    rows = {}
    for name, ones in peers.items():
        points = [figures[one["plan"]] for one in ones if one["plan"] in figures]
        if not points:
            continue
        rows[name] = {
            "points": len(points),
            "at_error": None if fp16 is None else [_fastest(points, limit * fp16[1]) for limit in LIMITS],
            "at_latency": None
            if fp16 is None
            else [_most_exact(points, fp16[0] + share * (fp32[0] - fp16[0])) for share in LATENCY_LIMITS],
            "hypervolume": rounded(
                hypervolume(np.array([p[0] for p in points]), np.array([p[1] for p in points]), base_ms)
            ),
            "seconds": _seconds(ones, build_s, document["emulation_s"]),
            "peak_mib": max((one["peak_mib"] for one in ones if one["peak_mib"] is not None), default=None),
        }
    return {
        "baseline_ms": base_ms,
        "fp16": None if fp16 is None else {"latency_ms": rounded(fp16[0]), "error": rounded(fp16[1])},
        "device": document["device"],
        "rounds": document["rounds"],
        "peers": rows,
        "crashed": {one["peer"]: one["words"] for one in document["crashed"]},
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


def _seconds(ones: Sequence[Mapping[str, Any]], build_s: float | None, emulation_s: float | None) -> float | None:
    """What a peer took: its own seconds, the builds of a search, and its emulations.

    A bisection's seconds hold its builds already; where plans share a process, the most is taken, not the sum.
    """
    own = [one["seconds"] for one in ones if one["seconds"] is not None]
    if ones[0]["budget"] is None:
        return rounded_or_none(sum(own)) if own else None
    if build_s is None or not own:
        return None
    emulating = ones[0].get("emulated", 0) * (emulation_s or 0.0)
    return rounded_or_none(max(own) + ones[0]["budget"] * build_s + emulating)


def rounded_or_none(value: float) -> float | None:
    """Three digits; None where it is no number."""
    return float(f"{value:.3g}") if math.isfinite(value) else None


def tables(models: Mapping[str, Row]) -> list[str]:
    """The tables in Markdown."""
    found = []
    with_replays = {entry["what"]: entry["replayed"] for entry in models.values() if "replayed" in entry}
    if with_replays:
        found.append(_replay_table(with_replays))
    for entry in models.values():
        if "measured" in entry:
            found.append(_measured_table(entry["what"], entry["measured"]))
    return found


def _replay_table(models: Mapping[str, Row]) -> str:
    names = [name for name in NAMES.values() if any(name in entry["samplers"] for entry in models.values())]
    columns = [(name, at) for name in names for at in AT if name != NAMES["precision"] or at == AT[0]]
    lines = [
        "Hypervolume as a share of the law's own front, replayed*: median of the seeds.",
        "",
        "| network | " + " | ".join(f"{name}, {at}*" for name, at in columns) + " | law is off by (latency, error) |",
        "| --- " * (len(columns) + 2) + "|",
    ]
    for what, entry in models.items():
        cells = []
        for name, at in columns:
            volume = entry["samplers"].get(name, {}).get("hypervolume", {}).get(str(at))
            cells.append("-" if volume is None else f"{volume[0] / entry['own_front']:.3f}")
        law = entry["law"]["residual"]
        off = f"{law['latency']:.2%}, {math.expm1(law['log_error']):.1%}"
        lines.append(f"| {what} | " + " | ".join(cells) + f" | {off} |")
    return "\n".join(lines)


def _measured_table(what: str, entry: Row) -> str:
    fp16 = entry["fp16"]
    head = f"{what}: all-FP32 {entry['baseline_ms']:.4g} ms"
    if fp16 is not None:
        head += f", all-FP16 {fp16['latency_ms']:.4g} ms with error {fp16['error']:.2g}"
    errors = [f"ms at {limit:g} of its error" for limit in LIMITS]
    latencies = [f"error at FP16 + {share:.0%}" for share in LATENCY_LIMITS]
    columns = [*errors, *latencies, "hypervolume", "s", "MiB"]
    lines = [head, "", "| peer | " + " | ".join(columns) + " |", "| --- " * (len(columns) + 1) + "|"]
    for name, row in entry["peers"].items():
        cells = [_latency_cell(one) for one in row["at_error"] or [None] * len(LIMITS)]
        cells += ["-" if one is None else f"{one['error']:.2g}" for one in row["at_latency"] or [None] * len(errors)]
        figures = (row["seconds"], row["peak_mib"])
        cells += [f"{row['hypervolume']:.4f}", *("-" if value is None else f"{value:.3g}" for value in figures)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [f"| {name} | {words} |" + " |" * (len(columns) - 1) for name, words in entry["crashed"].items()]
    return "\n".join(lines)


def _latency_cell(one: Row | None) -> str:
    if one is None:
        return "-"
    low, high = one["ci95_ms"]
    return f"{one['latency_ms']:.4g} ({low:.4g} to {high:.4g})"


def _build_s(results: Path, model: str) -> float | None:
    document = _read(results / f"h200_plans_{model}.json")
    return None if document is None else document.get("plan_s")


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def _as_long(curves: Mapping[tuple[str, str], list[Mapping[str, Any]]]) -> dict[tuple[str, str], list[Row]]:
    """Curves of one length each: the median is taken at every build."""
    found = {}
    for key, runs in curves.items():
        length = min(len(run["shares"]) for run in runs)
        found[key] = [{"shares": run["shares"][:length]} for run in runs]
    return found
