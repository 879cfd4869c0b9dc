"""The tables of ``python -m benchmarks.trained``, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.trained.recipes import BY_NAME
from benchmarks.trained.variants import CHOSEN, CONVERTERS, FP32, VARIANTS

Row = Mapping[str, Any]


def table(results: Mapping[str, Mapping[str, Row]], measured: Mapping[str, Mapping[str, Row]]) -> str:
    """One line for each variant of each network; ``measured`` is of ``benchmarks.trained device``, and may be empty."""
    heads = ["network", "variant", "loads", "task result", "error", "emulated", "pred. ms", "speedup", "MB", "s", "MiB"]
    if measured:
        heads[8:8] = ["GPU ms", "GPU speedup", "GPU error", "GPU result"]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for name, rows in results.items():
        for variant in VARIANTS:
            cells = _cells(rows[variant], rows[FP32])
            if measured:
                cells[6:6] = _on_device(measured.get(name, {}).get(variant, {}))
            title = f"{name}, {BY_NAME[name].kind}" if variant == FP32 else ""
            lines.append("| " + " | ".join([title, variant, *cells]) + " |")
    return "\n".join(lines)


def _cells(row: Row, fp32: Row) -> list[str]:
    ms, base = row.get("predicted_ms"), fp32.get("predicted_ms")
    failure = row.get("failure", "")
    return [
        f"no: {failure[:100]}".replace("|", "/") if failure else "yes",
        _result(row),
        _error(row),
        _number(row.get("emulated"), ".1e"),
        _number(ms, ".3g"),
        f"{base / ms:.2f}" if ms and base else "-",
        _number(row["bytes"] / 1e6 if "bytes" in row else None, ".3g"),
        _number(row.get("seconds"), ".0f"),
        _number(row.get("peak_mib"), ".0f"),
    ]


def _on_device(row: Row) -> list[str]:
    if "failure" in row:
        return ["-", "-", "-", f"no: {row['failure'][:60]}".replace("|", "/")]
    ms, base = row.get("ms"), row.get("fp32_ms")
    return [_number(ms, ".3g"), f"{base / ms:.2f}" if ms and base else "-", _error(row), _result(row)]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _error(row: Row) -> str:
    if "kept" not in row:
        return "-"
    return f"{row['non_finite']} not finite" if row["error"] is None else f"{row['error']:.1e}"


def _result(row: Row) -> str:
    return f"{'' if row['kept'] else '**lost** '}{row['result']}" if "kept" in row else "-"


def summary(results: Mapping[str, Mapping[str, Row]]) -> str:
    """Of each variant: how many load, keep the task's result, and the median of the predicted speedups of those."""
    lines = []
    for variant in VARIANTS[1:]:
        rows = [(rows[variant], rows[FP32]) for rows in results.values()]
        kept = [(row, base) for row, base in rows if row.get("kept")]
        loaded = sum("failure" not in row for row, _ in rows)
        ratios = sorted(b["predicted_ms"] / r["predicted_ms"] for r, b in kept if r.get("predicted_ms"))
        median = f", predicted speedup {ratios[len(ratios) // 2]:.2f} in the median" if ratios else ""
        lines.append(f"{variant}: {loaded} of {len(rows)} load, {len(kept)} keep the task's result{median}")
    return "\n".join(lines)


def better_elsewhere(results: Mapping[str, Mapping[str, Row]]) -> list[str]:
    """Where a converter's file keeps the task's result and mptune's front has nothing as exact that is as fast.

    Latencies are predicted; errors are those of the file on a CPU, and on the front emulated.
    """
    lines = []
    for name, rows in results.items():
        for variant in CONVERTERS:
            row = rows[variant]
            if not row.get("kept") or not row.get("error") or not row.get("predicted_ms"):
                continue
            front = [point for point in rows[CHOSEN].get("front", ()) if point[1] is not None]
            within = min((ms for ms, error in front if error <= row["error"]), default=None)
            if within is None or within > 1.005 * row["predicted_ms"]:
                ours = "nothing" if within is None else f"{within:.3g} ms"
                lines.append(f"- {name}: {variant} {row['predicted_ms']:.3g} ms at {row['error']:.1e}, mptune {ours}")
    return lines
