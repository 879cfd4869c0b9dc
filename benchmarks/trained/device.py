"""Every variant on this machine's GPU: latency in turn with FP32, error, task result.

ONNX Runtime's CUDA provider, TF32 off. Each network has a process of its own, which starts again behind a variant that
ended it. One-group errors are emulated and measured by ``benchmarks.emulation``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.own import last_words
from benchmarks.trained.judging import compared, held_out
from benchmarks.trained.variants import FP32, ROOT, VARIANTS, Row, file_of
from mptune.engines.base import EngineError
from mptune.engines.latency import calibrate, monotonic_ms, time_in_turn
from mptune.engines.ort.cuda_session import NO_TF32, open_session
from mptune.engines.ort.session import SessionOptions, Tf32
from mptune.graph.loading.model import load_model
from mptune.settings import LatencySettings
from mptune.targets.costs import is_convolutional

NETWORK_TIMEOUT_S = 60.0


def run_on_device(folder: Path, names: Sequence[str], limit_s: float) -> dict[str, Any]:
    """All that there is time for."""
    deadline = time.monotonic() + limit_s
    return {"networks": {name: _measured(folder / name, deadline) for name in names}}


def _measured(folder: Path, deadline: float) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    while not rows.keys() >= set(VARIANTS):
        found = _in_process(folder, deadline, *rows)
        rows |= found.get("rows", {})
        if "failure" not in found:
            break
        rows[found.get("at", FP32)] = {"failure": found["failure"]}
        if FP32 in rows and "failure" in rows[FP32]:
            break
    return rows


def _in_process(folder: Path, deadline: float, *done: str) -> dict[str, Any]:
    """What ``measure_network`` writes, with ``failure`` where its process did not end well."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out.json"
        command = [sys.executable, "-m", "benchmarks.trained.device", str(folder), str(out), *done]
        left = min(NETWORK_TIMEOUT_S, deadline - time.monotonic())
        environment = {**os.environ, **NO_TF32}
        failure = last_words(command, left, cwd=ROOT, env=environment) if left > 5 else "no time left"
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("done", nargs="*", default=[])
    options = parser.parse_args()
    measure_network(options.folder, options.out, options.done)


if __name__ == "__main__":
    main()
