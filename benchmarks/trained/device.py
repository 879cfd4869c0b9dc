"""Every variant on this machine's GPU: latency in turn with FP32, error, task result; and one-group errors.

ONNX Runtime's CUDA provider, TF32 off. Each network has a process of its own, which starts again behind a variant that
ended it. One-group errors are emulated and measured by ``benchmarks.emulation`` for a few networks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import make_context, plan_of, rounded
from benchmarks.emulation import agreement, emulate, measure, name_of
from benchmarks.trained.archive import SAMPLES
from benchmarks.trained.judging import compared, held_out
from benchmarks.trained.variants import FP32, ROOT, VARIANTS, Row, file_of
from mptune.engines.base import EngineError
from mptune.engines.ort.cuda_session import NO_TF32, open_session
from mptune.engines.ort.session import SessionOptions, Tf32
from mptune.engines.timing.latency import calibrate, monotonic_ms, time_in_turn
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.json_form import decode_float
from mptune.settings import LatencySettings
from mptune.targets.costs import is_convolutional

GROUP_ERRORS_OF = ("text-detector", "text-recogniser", "body-detector", "speech-quality", "speaker", "pitch")
RATIOS = (0.8, 1.25)
"""Emulated over measured, within which an emulation is said to hold."""
AT_ONCE = 3
NETWORK_TIMEOUT_S, GROUPS_TIMEOUT_S = 60.0, 200.0


def run_on_device(folder: Path, names: Sequence[str], group_errors_of: Sequence[str], limit_s: float) -> dict[str, Any]:
    """All that there is time for; latencies first, as what runs beside them would disturb them."""
    deadline = time.monotonic() + limit_s
    networks = {name: _measured(folder / name, deadline) for name in names}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        jobs = {n: pool.submit(_in_process, "groups", folder / n, GROUPS_TIMEOUT_S, deadline) for n in group_errors_of}
    return {"networks": networks, "groups": {name: job.result() for name, job in jobs.items()}}


def _measured(folder: Path, deadline: float) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    while not rows.keys() >= set(VARIANTS):
        found = _in_process("measure", folder, NETWORK_TIMEOUT_S, deadline, *rows)
        rows |= found.get("rows", {})
        if "failure" not in found:
            break
        rows[found.get("at", FP32)] = {"failure": found["failure"]}
        if FP32 in rows and "failure" in rows[FP32]:
            break
    return rows


def _in_process(step: str, folder: Path, timeout_s: float, deadline: float, *done: str) -> dict[str, Any]:
    """What a step writes, with ``failure`` where its process did not end well."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out.json"
        command = [sys.executable, "-m", "benchmarks.trained.device", step, str(folder), str(out), *done]
        left = min(timeout_s, deadline - time.monotonic())
        failure = "no time left"
        if left > 5:
            try:
                ended = subprocess.run(command, cwd=ROOT, env={**os.environ, **NO_TF32}, timeout=left, text=True,
                                       capture_output=True, check=False)  # fmt: skip
                lines = [line for line in ended.stderr.splitlines() if line.strip()]
                failure = "" if ended.returncode == 0 else (lines or [f"exit status {ended.returncode}"])[-1][:240]
            except subprocess.TimeoutExpired:
                failure = f"more than {left:.0f} s"
        document: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
        return {**document, "failure": failure} if failure else document


def measure_network(folder: Path, out: Path, done: Sequence[str]) -> None:
    """Time, run and judge the variants that are not done; ``out`` is written after each."""
    model = load_model(file_of(folder, FP32))
    latency = LatencySettings(warmup_ms=50.0, duration_ms=200.0, min_iterations=5)
    tf32: Tf32 = "off by environment" if is_convolutional(model, {}) else "off"
    options = SessionOptions("cuda", "timed", tf32=tf32, cuda_graph=latency.cuda_graph)
    samples, rows = held_out(folder), {}
    baseline = open_session(file_of(folder, FP32), options)
    wanted = [baseline.run(sample) for sample in samples]
    base_watch = baseline.stopwatch(samples[0])
    repetitions = calibrate(base_watch.run_once, monotonic_ms, LatencySettings(warmup_ms=500.0, duration_ms=200.0))
    for variant in VARIANTS:
        if variant in done or not file_of(folder, variant).exists():
            continue
        out.write_text(json.dumps({"rows": rows, "at": variant}))
        try:
            session = open_session(file_of(folder, variant), options)
            row = compared(folder, wanted, [session.run(sample) for sample in samples])
            base, timed = time_in_turn([base_watch, session.stopwatch(samples[0])], repetitions, latency)
        except EngineError as error:
            rows[variant] = {"failure": error.message[:240]}
            continue
        rows[variant] = {**row, "ms": timed.median_ms, "fp32_ms": base.median_ms, "ci95_ms": timed.ci95_ms,
                         "warnings": [*session.warnings, *timed.warnings]}  # fmt: skip
        session.close()
    out.write_text(json.dumps({"rows": rows}))


def measure_groups(folder: Path, out: Path) -> None:
    """One-group errors of a network, emulated and measured."""
    model = load_model(file_of(folder, FP32))
    groups = find_groups(model)
    with tempfile.TemporaryDirectory() as scratch:
        context = make_context(GroupedModel(model, groups), folder / "search", Path(scratch), SAMPLES, 1)
        pairs = measure(context, 0)
        errors = emulate(context, [plan_of(model, groups, pair.precision) for pair in pairs], few=False)
    pairs = [replace(pair, emulated=error) for pair, error in zip(pairs, errors, strict=True)]
    rows = [{"group": name_of(groups, pair.precision), "ops": dict(groups[pair.precision.index("1")].ops),
             "measured": rounded(pair.measured), "emulated": rounded(pair.emulated)} for pair in pairs]  # fmt: skip
    held = agreement(pairs)
    out.write_text(
        json.dumps(
            {
                "log_correlation": rounded(held.log_correlation),
                "ratios": [rounded(r) for r in held.ratios],
                "rows": rows,
            }
        )
    )


def report(document: Mapping[str, Any]) -> str:
    """The short table of what ``run_on_device`` found."""
    lines = []
    for name, rows in document["networks"].items():
        for variant, row in rows.items():
            if "failure" in row:
                lines.append(f"{name:<17}{variant:<22}failed: {row['failure'][:90]}")
            else:
                error = "not finite" if row["error"] is None else f"{row['error']:.1e}"
                speedup = row["fp32_ms"] / row["ms"]
                kept = "" if row["kept"] else "  LOST"
                lines.append(
                    f"{name:<17}{variant:<22}{row['ms']:8.3f} ms {speedup:5.2f}x {error:>10}  {row['result']}{kept}"
                )
    for name, found in document["groups"].items():
        if "rows" not in found:
            lines.append(f"{name:<17}one-group errors failed: {found['failure'][:90]}")
            continue
        low, high = map(decode_float, found["ratios"])
        lines.append(f"{name:<17}{len(found['rows'])} groups, log-correlation {found['log_correlation']}, emulated / "
                     f"measured {low:.3f} to {high:.3f}; outside {RATIOS[0]} to {RATIOS[1]}:")  # fmt: skip
        lines += [f"    {row['group'][:60]:<62}{ratio:6.3f}  {' '.join(row['ops'])}" for row in found["rows"]
                  if (ratio := _ratio(row)) is not None and not RATIOS[0] <= ratio <= RATIOS[1]]  # fmt: skip
    return "\n".join(lines)


def _ratio(row: Mapping[str, Any]) -> float | None:
    """Emulated over measured; None where neither says anything."""
    measured, emulated = decode_float(row["measured"]), decode_float(row["emulated"])
    if measured == emulated or not (math.isfinite(measured) or math.isfinite(emulated)):
        return None
    return emulated / measured if measured else math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=("measure", "groups"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("done", nargs="*", default=[])
    options = parser.parse_args()
    if options.step == "measure":
        measure_network(options.folder, options.out, options.done)
    else:
        measure_groups(options.folder, options.out)


if __name__ == "__main__":
    main()
