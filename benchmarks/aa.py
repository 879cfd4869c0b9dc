"""A/A: sessions of one plan must not be called different, and their intervals must hold what they scatter around.

    python -m benchmarks.aa digits_vit vit_s swin_t flow_net --work /tmp/aa --json results/h200_aa.json

A model is a name of ``benchmarks/models``, made in ``--work`` where it is not there yet, or the path of an ONNX file
with its samples beside it (``.npz``). For each, as a search begins: all-FP32 and all-FP16 are evaluated and opened
anew, which gives the spread between sessions. Then all-FP16 is opened and evaluated 20 times more, each time in turn
with the baseline and corrected by it. Printed are the share of pairs of sessions that are called different (at
most 5 % wanted on each model), the share of intervals that hold the median of all sessions (at least 88 % over all),
and their mean half-width over the standard deviation of the sessions (at most 3), each three times: by all timings, as
a finished search reads them (its confirmation adds about as many degrees of freedom as the 20 sessions do here); by
those that were there before the 20; and by the bootstrap of each session's values alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import require, save, workspace
from benchmarks.h200 import OWN, READY
from mptune.engines.backends.onnxruntime import ONNXRUNTIME
from mptune.engines.ort.session import Provider
from mptune.engines.timing.latency import Latency, are_lower
from mptune.engines.timing.spread import RatioEstimate, SessionSpread, SessionTiming
from mptune.engines.toolchains.toolchain import MeasuredToolchain
from mptune.engines.workload import Workload
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.settings import LatencySettings, SearchSettings, WorkerSettings
from mptune.targets.target import load_target
from mptune.tuning.steps.tuner import REOPENED

Interval = tuple[float, float]

GOALS = {"pairs": 0.05, "held": 0.88, "width": 3.0}


@dataclass(frozen=True)
class Judged:
    """What intervals of sessions of one plan are worth.

    Attributes:
        pairs: share of pairs of sessions that are called different.
        held: share of intervals that hold the median of all sessions.
        width: mean half-width over the standard deviation of the sessions.
    """

    pairs: float
    held: float
    width: float

    @classmethod
    def of(cls, known: Sequence[Latency], measured: Sequence[float]) -> Judged:
        """By latencies with their intervals, and by those that were measured, both relative to the baseline."""
        middle, spread = float(np.median(measured)), float(np.std(measured, ddof=1))
        lows, highs = np.array([latency.ci95_ms for latency in known]).T
        return cls(
            float(are_lower(known).sum()) / math.comb(len(known), 2),
            float(np.mean((lows <= middle) & (middle <= highs))),
            float(np.mean(highs - lows)) / 2 / spread if spread else math.inf,
        )


def find_model(name: str, work: Path) -> tuple[Path, Path]:
    """The ONNX file and the samples of a model, made by its script where they are not there."""
    if name in READY:
        return READY[name]
    path = Path(name) if name.endswith(".onnx") else work / f"{name}.onnx"
    data = path.with_suffix(".npz")
    if not (path.exists() and data.exists()):
        if importlib.util.find_spec(f"benchmarks.models.{name}") is None:
            raise SystemExit(f"no {path} with {data.name} beside it, and no script benchmarks/models/{name}.py")
        made = [sys.executable, "-m", f"benchmarks.models.{name}", "--out", str(path.with_suffix("")), "--samples", "2"]
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
    return path, data


def run(name: str, path: Path, data: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All sessions of one model."""
    model = load_model(path)
    batch = int(OWN.get(name, {}).get("batch", options.batch))
    space = workspace(path.resolve(), data, options.work / f"{path.stem}.aa", 1, batch)
    workload = Workload(GroupedModel(model, find_groups(model)), space)
    timing = LatencySettings(options.warmup_ms, options.duration_ms)
    settings = SearchSettings(latency=timing, worker=WorkerSettings(max_jobs=None))
    provider: Provider = options.provider
    target = load_target("cpu" if provider == "cpu" else options.target)
    fp32, fp16 = (workload.grouped.uniform(precision) for precision in (Precision.FP32, Precision.FP16))
    with MeasuredToolchain(ONNXRUNTIME, target, workload, settings, provider) as toolchain:
        require(toolchain.reference_model.reference("search"))
        known = {plan.fingerprint: [_session(toolchain, plan)[0]] for plan in (fp32, fp16)}
        started = time.monotonic()
        for plan in (fp32, fp16):
            known[plan.fingerprint] += require(toolchain.reopen(plan, options.reopened))
        reopening_s = time.monotonic() - started
        found = [_session(toolchain, fp16) for _ in range(options.sessions)]
    sessions = [session for session, _ in found]
    latencies = [math.exp(session.log_ratio) for session in sessions]
    first = SessionSpread(known)
    final = SessionSpread({**known, fp16.fingerprint: [*known[fp16.fingerprint], *sessions]})
    bootstrap = zip(latencies, (interval for _, interval in found), strict=True)
    known_as = {
        "final": [_latency(final.estimate([session])) for session in sessions],
        "first": [_latency(first.estimate([session])) for session in sessions],
        "bootstrap": [Latency(ms, ms, ms, interval, 0.0, "measured") for ms, interval in bootstrap],
    }
    return {
        "model": name,
        "sessions": [session.to_json() for session in sessions],
        "known": {plan: [session.to_json() for session in sessions] for plan, sessions in known.items()},
        "ratio": float(np.median(latencies)),
        "spread": float(np.std(latencies, ddof=1) / np.mean(latencies)),
        "estimated spread": {"first": first.sd, "final": final.sd},
        "degrees of freedom": {"first": first.degrees, "final": final.degrees},
        "within": float(np.mean([session.sd for session in sessions])),
        "reopening, s": reopening_s,
        **{name: vars(Judged.of(taken, latencies)) for name, taken in known_as.items()},
    }


def _latency(estimate: RatioEstimate) -> Latency:
    """Relative to the baseline."""
    ratio = math.exp(estimate.log_ratio)
    return Latency(ratio, ratio, ratio, estimate.interval(), 0.0, "measured", degrees=estimate.degrees)


def _session(toolchain: MeasuredToolchain, plan: PrecisionPlan) -> tuple[SessionTiming, Interval]:
    """A session opened and evaluated, and the bootstrap's interval of its latency relative to the baseline."""
    measurement = require(toolchain.evaluate(plan))
    session, baseline = measurement.latency.session, measurement.baseline
    assert session is not None
    assert baseline is not None
    low, high = (bound / measurement.drift / baseline.median_ms for bound in measurement.latency.ci95_ms)
    return session, (low, high)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows and all of them together."""
    titles = f"{'pairs that differ, %':>20} {'hold the median, %':>20} {'width / spread':>16}"
    lines = [
        f"{'model':13} {'spread':>7} {'first':>7} {'final':>7} {titles} {'s':>4}",
        " " * 38 + "final/first/bootstrap",
    ]
    for row in rows:
        taken = [row[name] for name in ("final", "first", "bootstrap")]
        pairs, held = ("/".join(f"{100 * one[key]:.0f}" for one in taken) for key in ("pairs", "held"))
        widths = "/".join(f"{one['width']:.2f}" for one in taken)
        known = " ".join(f"{row['estimated spread'][name] or 0.0:7.3%}" for name in ("first", "final"))
        figures = f"{pairs:>20} {held:>20} {widths:>16} {row['seconds']:4.0f}"
        lines.append(f"{row['model'][:13]:13} {row['spread']:7.3%} {known} {figures}")
    for name in ("final", "first", "bootstrap"):
        worst = max(row[name]["pairs"] for row in rows)
        share, width = (float(np.mean([row[name][key] for row in rows])) for key in ("held", "width"))
        met = worst <= GOALS["pairs"] and share >= GOALS["held"] and width <= GOALS["width"]
        told = f"worst pairs {worst:.1%} (goal 5 %), hold {share:.1%} (goal 88 %), width {width:.2f} (goal 3)"
        lines.append(f"{name:10} {told}: {'met' if met else 'not met'}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="names of benchmarks/models, or ONNX files")
    parser.add_argument("--work", type=Path, default=Path("aa.work"))
    parser.add_argument("--provider", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--target", default="h200", help="whose roofline names the device")
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--reopened", type=int, default=REOPENED)
    parser.add_argument("--batch", type=int, default=1, help="rows per sample where the batch is dynamic")
    parser.add_argument("--warmup-ms", type=float, default=50.0)
    parser.add_argument("--duration-ms", type=float, default=100.0, help="of one timing of the baseline")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(options.models)) as pool:
        files = list(pool.map(lambda name: find_model(name, options.work), options.models))
    rows = []
    for path, data in files:
        started = time.monotonic()
        row = run(path.stem, path, data, options)
        rows.append({**row, "seconds": time.monotonic() - started})
        print(f"{path.stem}: {rows[-1]['seconds']:.0f} s, {row['reopening, s']:.1f} s of them to reopen", flush=True)
        save(options.json, {"goals": GOALS, "sessions": options.sessions, "reopened": options.reopened, "models": rows})
    print(table(rows))


if __name__ == "__main__":
    main()
