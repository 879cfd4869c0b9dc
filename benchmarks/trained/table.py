"""The tables of ``python -m benchmarks.trained``, in Markdown: a line for each network, a column for each variant."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.trained.recipes import BY_NAME
from benchmarks.trained.variants import CHOSEN, CONVERTERS, FP32, OWN, VARIANTS

Row = Mapping[str, Any]
Results = Mapping[str, Mapping[str, Row]]


def pages(results: Results, measured: Results) -> str:
    """All tables; ``measured`` is of ``benchmarks.trained device``, and may be empty."""
    predicted = _table(results, "FP32, pred. ms", lambda rows: _number(rows[FP32].get("predicted_ms")), _predicted)
    parts = ["Predicted speedup, relative L2 error on this CPU, and the task's result where it is lost:", predicted]
    if measured:
        words = "Measured on the GPU: speedup, error, and the task's result where it is lost:"
        parts += [words, measured_table(measured)]
    sizes = _table(results, "FP32, MB", lambda rows: _megabytes(rows[FP32]), _costs)
    return "\n\n".join([*parts, "Megabytes of the file; seconds and peak MiB of the step that made it:", sizes])


def measured_table(measured: Results) -> str:
    """Of ``benchmarks.trained device`` alone."""
    return _table(measured, "FP32, ms", lambda rows: _number(rows.get(FP32, {}).get("ms")), _measured)


def _table(
    results: Results, head: str, first: Callable[[Mapping[str, Row]], str], cell: Callable[[Row, Row], str]
) -> str:
    heads = ["network", head, *VARIANTS[1:]]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for name, rows in results.items():
        cells = [cell(rows.get(variant, {}), rows.get(FP32, {})) for variant in VARIANTS[1:]]
        lines.append("| " + " | ".join([f"{name}, {BY_NAME[name].kind}", first(rows), *cells]) + " |")
    return "\n".join(lines)


def _predicted(row: Row, fp32: Row) -> str:
    if "failure" in row:
        return _failed(row["failure"])
    ms, base = row.get("predicted_ms"), fp32.get("predicted_ms")
    return f"{f'{base / ms:.2f}x' if ms and base else '-'}, {_outcome(row)}"


def _measured(row: Row, fp32: Row) -> str:
    if "ms" not in row:
        return _failed(row["failure"]) if "failure" in row else "-"
    return f"{row['fp32_ms'] / row['ms']:.2f}x, {_outcome(row)}"


def _costs(row: Row, fp32: Row) -> str:
    seconds, peak = row.get("seconds"), row.get("peak_mib")
    return f"{_megabytes(row)}; {_number(seconds)} s, {_number(peak, '.0f')} MiB"


def _megabytes(row: Row) -> str:
    return _number(row["bytes"] / 1e6) if "bytes" in row else "-"


def _number(value: float | None, form: str = ".3g") -> str:
    return "-" if value is None else format(value, form)


def _failed(failure: str) -> str:
    """Where it failed: converting, loading or running; the message is in the JSON file."""
    where = failure.partition(":")[0]
    return {"loading": "does not load", "conversion": "not converted", "running": "does not run"}.get(where, "fails")


def _outcome(row: Row) -> str:
    if "kept" not in row:
        return "not judged"
    error = f"{row['non_finite']} values not finite" if row.get("error") is None else f"{row['error']:.1e}"
    return error if row["kept"] else f"{error}, **lost**: {row['result']}"


def summary(results: Results) -> str:
    """Of each variant: how many load and keep the task's result, and the mean speedup, that of the others being 1."""
    lines = []
    for variant in VARIANTS[1:]:
        pairs = [(rows.get(variant, {}), rows[FP32]) for rows in results.values()]
        kept = [(row, fp32) for row, fp32 in pairs if row.get("kept")]
        ratios = [fp32["predicted_ms"] / row["predicted_ms"] for row, fp32 in kept if row.get("predicted_ms")]
        mean = math.exp(sum(map(math.log, ratios)) / len(pairs))
        lines.append(f"| {variant} | {sum('kept' in row for row, _ in pairs)} | {len(kept)} | {mean:.2f}x |")
    head = f"| of {len(results)} networks | load | keep the task's result | geometric mean of predicted speedups |"
    return "\n".join([head, "| --- | --- | --- | --- |", *lines])


def better_elsewhere(results: Results) -> list[str]:
    """Where a converter's file keeps the task's result, and mptune has nothing as exact (within 5 %) that is as fast.

    Latencies are predicted. Of mptune there are the three files of the table, and its front, whose errors are emulated.
    """
    lines = []
    for name, rows in results.items():
        points = [point for point in rows[CHOSEN].get("front", ()) if point[1] is not None]
        own = [rows[variant] for variant in OWN if rows.get(variant, {}).get("kept")]
        points += [(row["predicted_ms"], row["error"]) for row in own if row["error"] is not None]
        for variant in CONVERTERS:
            row = rows[variant]
            if not row.get("kept") or not row.get("error") or not row.get("predicted_ms"):
                continue
            within = min((ms for ms, error in points if error <= 1.05 * row["error"]), default=None)
            if within is None or within > 1.005 * row["predicted_ms"]:
                ours = "nothing" if within is None else f"{within:.3g} ms"
                lines.append(f"- {name}: {variant} {row['predicted_ms']:.3g} ms at {row['error']:.1e}, mptune {ours}")
    return lines


def lines_of(name: str, rows: Mapping[str, Row]) -> str:
    """One line for each variant of a network, with where and why it failed."""
    lines = [f"{name}:"]
    for variant in VARIANTS:
        row = rows[variant]
        words = row["failure"] if "failure" in row else f"{_predicted(row, rows[FP32])}, {row['result']}"
        emulated = f", emulated {row['emulated']:.1e}" if row.get("emulated") is not None else ""
        lines.append(f"  {variant:<22}{words}{emulated}; {_costs(row, {})}")
    return "\n".join(lines)
