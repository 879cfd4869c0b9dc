"""The variants of one network: a search of mptune and its all-FP16, and the converters; each judged on this CPU.

Every step is a process of its own with a time limit, so that a crash is a row. Peak memory is that of the step's whole
process tree (proportional set size), five times a second.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from benchmarks.common import error_line

FP32, CHOSEN, WITHIN, ALL_FP16 = "FP32", "mptune, chosen", "mptune, error 1e-2", "mptune, all-FP16"
MAX_ERROR = "1e-2"
"""Of ``WITHIN``: the fastest plan of the same search within it."""
CONVERTERS = {
    "onnxconverter-common": "onnxconverter-common float16",
    "ONNX Runtime": "ONNX Runtime float16",
    "AutoCast": "AutoCast, calibrated",
}
"""Name in the table -> name in ``benchmarks.peers.converters``."""
OWN = (CHOSEN, WITHIN, ALL_FP16)
VARIANTS = (FP32, *OWN, *CONVERTERS)
ROOT = Path(__file__).parents[2]

Row = dict[str, Any]


def file_of(folder: Path, variant: str) -> Path:
    """Where a variant of a network lies."""
    return folder / "fp32.onnx" if variant == FP32 else folder / "variants" / f"{variant.replace(', ', '-')}.onnx"


def run_step(command: Sequence[str], timeout_s: float) -> Row:
    """Seconds and peak memory of a command; ``failure`` where it did not end well."""
    started = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    peaks, ended = [0.0], threading.Event()
    watch = threading.Thread(target=_watch, args=(process.pid, peaks, ended))
    watch.start()
    failure = None
    try:
        _, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        for each in _tree(process.pid):
            with contextlib.suppress(psutil.Error):
                each.kill()
        process.communicate()
        failure = f"more than {timeout_s:.0f} s"
    else:
        if process.returncode < 0:
            failure = f"ended by signal {-process.returncode}"
        elif process.returncode not in (0, 3):
            failure = error_line(stderr, process.returncode)
    ended.set()
    watch.join()
    row: Row = {"seconds": round(time.monotonic() - started, 1), "peak_mib": round(max(peaks))}
    return row if failure is None else {**row, "failure": failure}


def _tree(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return []


def _watch(pid: int, peaks: list[float], ended: threading.Event) -> None:
    while not ended.wait(0.2):
        total = 0
        for process in _tree(pid):
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
        peaks.append(total / 2**20)


def search(folder: Path, budget: int, timeout_s: float) -> dict[str, Row]:
    """Search, and write the models of mptune's three variants."""
    run, rows = folder / "run.mptune", {}
    shutil.rmtree(run, ignore_errors=True)
    mptune = [sys.executable, "-m", "mptune"]
    settings = ["--data", str(folder / "search"), "--metric", "relative_l2", "--budget", str(budget), "--knee"]
    step = run_step([*mptune, "search", str(folder / "fp32.onnx"), *settings, "--out", str(run)], timeout_s)
    rows[CHOSEN] = step
    if not (run / "front.json").exists():
        return {variant: {"failure": "no front", **step} for variant in OWN}
    front = json.loads((run / "front.json").read_text())
    fp16 = front["baseline"]["fp16"]["plan"]
    for variant, limit in ((CHOSEN, ()), (WITHIN, ("--max-error", MAX_ERROR)), (ALL_FP16, ("--plan", fp16))):
        row = rows.setdefault(variant, {})
        source = run / "chosen" / "model.onnx"
        step = run_step([*mptune, "pick", str(run), *limit], timeout_s) if limit else row
        plan = json.loads((run / "front.json").read_text())["chosen"]
        if limit and "failure" in step:  # an all-FP16 whose outputs are not finite cannot be picked
            plan, source = fp16, folder / "variants" / "applied.onnx"
            written = ["--data", str(folder / "search"), "--force", "-o", str(source)]
            step = run_step([*mptune, "apply", str(folder / "fp32.onnx"), "--fp16-all", *written], timeout_s)
        row.update(step)
        point = next(p for p in [*front["points"], *front["baseline"].values()] if p["plan"] == plan)
        errors = [point["error"][which] for which in ("held_out", "value")]
        row.update(
            plan=plan,
            predicted_ms=point["latency"]["median_ms"],
            emulated=next((error for error in errors if isinstance(error, float)), None),
            fp32_groups=[f"{g['group']}: {g['reason']}" for g in point["fp32"]],
        )
        shutil.copy(source, file_of(folder, variant))
    rows[FP32] = {"predicted_ms": front["baseline"]["fp32"]["latency"]["median_ms"], "target": front["target"]["name"]}
    rows[CHOSEN].update(
        chosen_by=front["choice"]["reason"],
        findings=[f["code"] for f in front["findings"]],
        warnings=front["warnings"],
        front=[(p["latency"]["median_ms"], p["error"]["held_out"]) for p in front["points"]],
    )
    return rows


def convert(folder: Path, variant: str, python: str, timeout_s: float) -> Row:
    """What a converter makes of the network; the first sample of the search is its calibration data."""
    out = file_of(folder, variant)
    command = [python, "-m", "benchmarks.peers.converters", CONVERTERS[variant], str(folder / "fp32.onnx")]
    step = run_step([*command, str(folder / "search" / "00.npz"), "1000000", str(out)], timeout_s)
    own = out.with_suffix(".json")
    if own.exists():  # the process's own peak, where it is too short for a look at it
        step["peak_mib"] = max(step["peak_mib"], round(json.loads(own.read_text())["peak_mib"]))
    return step


def judge(folder: Path, variant: str, timeout_s: float) -> Row:
    """Load the variant, run it on the held-out samples, and compare it with FP32."""
    out = folder / "variants" / "judged.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.trained.judging", str(folder), variant, str(out)]
    step = run_step(command, timeout_s)
    row: Row = json.loads(out.read_text()) if out.exists() else {}
    if "failure" in step and "failure" not in row:
        row["failure"] = f"{row.pop('stage', 'opening')}: {step['failure']}"
    return row


def run_model(folder: Path, budget: int, converters: str, timeout_s: float, kept: Mapping[str, Row]) -> dict[str, Row]:
    """All variants of one network; those of the converters are taken from ``kept`` where they are there."""
    (folder / "variants").mkdir(exist_ok=True)
    rows = search(folder, budget, timeout_s)
    for variant in CONVERTERS:
        steps = {k: v for k, v in kept.get(variant, {}).items() if k in ("seconds", "peak_mib", "conversion")}
        if not steps:
            steps = convert(folder, variant, converters, timeout_s)
            if "failure" in steps:
                steps["conversion"] = steps.pop("failure")
        rows[variant] = steps
    for variant in VARIANTS:
        row = rows.setdefault(variant, {})
        if file_of(folder, variant).exists():
            judged = judge(folder, variant, timeout_s)
            rows[variant] = {**judged, **row} if "predicted_ms" in row else {**row, **judged}
        elif "conversion" in row:
            row["failure"] = f"conversion: {row['conversion']}"
    return {variant: rows[variant] for variant in VARIANTS}
