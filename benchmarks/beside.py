"""What a plan costs beside its timing, and whether a build or an emulation beside a timing disturbs it.

    python -m benchmarks.models.swin_t --out swin_t --batch 8
    python -m benchmarks.beside swin_t.onnx swin_t.npz --json beside.json

Printed are the seconds of each step of an evaluation; of the switched emulation, opened and run in each way that a
session can be; and the ratio of all-FP16 to all-FP32, timed in turn again and again in the same two sessions: with
nothing beside, while a thread of the same process opens sessions, while another process opens sessions on the same
device, and while another process computes on the CPU alone. A disturbance is a ratio that lies elsewhere, or scatters
more, than with nothing beside.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.common import rounded, save, workspace
from mptune.data.archive import read_samples
from mptune.engines.environment import foreign_gpu_processes, read_gpus
from mptune.engines.ort.cuda_session import NO_TF32, open_session
from mptune.engines.ort.probe import ProbeJob
from mptune.engines.ort.session import OrtSession, Provider, SessionOptions
from mptune.engines.timing.latency import Repetitions, calibrate, monotonic_ms, time_in_turn, warm_up
from mptune.engines.timing.session_timing import SessionTiming
from mptune.engines.worker.parent import Worker
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.rounding_steps import with_rounding_steps
from mptune.graph.writing.switched import SwitchedEmulator
from mptune.graph.writing.weights import WeightBank
from mptune.settings import LatencySettings

T = TypeVar("T")

SETTINGS = LatencySettings()

OPENER = """
import sys, time
from pathlib import Path
from mptune.engines.ort.cuda_session import open_session
from mptune.engines.ort.session import SessionOptions
path, provider = Path(sys.argv[1]), sys.argv[2]
while True:
    open_session(path, SessionOptions(provider, timing=False)).close()
    print("opened", flush=True)
"""


class Steps:
    """Seconds of steps, each taken several times; the median is printed."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def time(self, step: str, call: Callable[[], T]) -> T:
        started = time.perf_counter()
        result = call()
        self.seconds.setdefault(step, []).append(time.perf_counter() - started)
        return result

    def show(self) -> dict[str, float]:
        found = {step: float(np.median(taken)) for step, taken in self.seconds.items()}
        for step, taken in found.items():
            print(f"  {1e3 * taken:9.1f} ms  {step}", flush=True)
        return {step: float(rounded(taken)) for step, taken in found.items()}


class Bench:
    """One model, its files, and the sessions of both uniform plans."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.provider: Provider = options.provider
        self.model = load_model(options.model)
        self.space = workspace(options.model.resolve(), options.data, folder, 4, options.batch)
        self.samples = read_samples(self.space.samples("search"))
        self.grouped = GroupedModel(self.model, find_groups(self.model))
        self.bank = WeightBank.write(self.model, self.space.weights_dir)
        self.rewriter = Rewriter(self.grouped, self.bank)
        fp32, fp16 = (self.grouped.uniform(precision) for precision in (Precision.FP32, Precision.FP16))
        self.fp32 = self.rewriter.write(fp32, self.space.weights_dir / "fp32.onnx")
        self.fp16 = self.rewriter.write(fp16, self.space.weights_dir / "fp16.onnx")
        self.plan16 = fp16

    def open(self, path: Path, **more: Any) -> OrtSession:
        return open_session(path, SessionOptions(self.provider, **more))

    def evaluation(self, rounds: int) -> dict[str, float]:
        """The steps of an evaluation."""
        steps, baseline = Steps(), self.open(self.fp32)
        watch = baseline.stopwatch(self.samples[0])
        repetitions = calibrate(watch.run_once, monotonic_ms, SETTINGS)
        for number in range(rounds):
            path = self.space.weights_dir / f"{number}.onnx"
            steps.time("write the typed model", lambda path=path: self.rewriter.write(self.plan16, path))
            session = steps.time("open a session", lambda path=path: self.open(path))
            steps.time("first run", lambda s=session: s.run(self.samples[0]))
            steps.time("second run", lambda s=session: s.run(self.samples[0]))
            other = steps.time("bind and capture", lambda s=session: s.stopwatch(self.samples[0]))
            runs = [watch.run_once, other.run_once]
            steps.time("warm up", lambda runs=runs: warm_up(runs, monotonic_ms, repetitions))
            count = repetitions.executions_per_value
            steps.time("one value of the baseline", lambda n=count: watch.value_ms(n))
            steps.time("one value of the plan", lambda o=other, n=count: o.value_ms(n))
            steps.time("close", session.close)
            steps.time("nvidia-smi: state", read_gpus)
            steps.time("nvidia-smi: processes", foreign_gpu_processes)
        baseline.close()
        for _ in range(2):
            with Worker(self.space.logs_dir, None, NO_TF32) as worker:
                steps.time("worker: start, import, first session", lambda w=worker: w.call(ProbeJob(self.provider), 60))
                steps.time("worker: a further small job", lambda w=worker: w.call(ProbeJob(self.provider), 60))
        return steps.show()

    def emulation(self, runs: int) -> dict[str, float]:
        """The switched emulation of the whole model, opened and run in each way."""
        steps = Steps()
        computed = with_rounding_steps(self.grouped) if self.provider == "cuda" else self.grouped
        emulator = SwitchedEmulator(computed, self.bank)
        path = self.space.weights_dir / "switched.onnx"
        switched = emulator.switches[Precision.FP16]
        steps.time("write", lambda: emulator.write(path, tuple(switched)))
        print(f"  {len(self.model.nodes)} nodes, {len(switched)} switches")
        off = {name: np.array(False) for name in switched.values()}
        on = {name: np.array(True) for name in switched.values()}
        for reuses in (True, False):
            for graph in (False, True) if self.provider == "cuda" else (False,):
                way = (
                    f"{'buffers planned' if reuses else 'no plan of buffers'}, {'CUDA graph' if graph else 'launched'}"
                )
                opened = steps.time(
                    f"open ({way})", lambda g=graph, r=reuses: self.open(path, timing=g, reuses_buffers=r)
                )
                steps.time(f"first run ({way})", lambda s=opened: s.replay({**self.samples[0], **off}))
                for k in range(runs):
                    switches = {**off, **dict(list(on.items())[k :: k + 2])}
                    steps.time(f"run ({way})", lambda s=opened, w=switches: s.replay({**self.samples[0], **w}))
                for warning in opened.warnings:
                    print(f"  {way}: {warning}")
                opened.close()
        return steps.show()

    def ratios(self, watches: list[Any], repetitions: Repetitions, seconds: float) -> list[float]:
        """Log ratios of the plan to the baseline, in the same two sessions, for so long."""
        found, until = [], time.monotonic() + seconds
        while time.monotonic() < until:
            base, plan = time_in_turn(watches, repetitions, SETTINGS)
            found.append(SessionTiming.of_values("", plan.raw_ms, base.raw_ms).log_ratio)
        return found

    def disturbance(self, seconds: float) -> dict[str, dict[str, float]]:
        """The ratio with something beside it."""
        baseline, plan = self.open(self.fp32), self.open(self.fp16)
        watches = [session.stopwatch(self.samples[0]) for session in (baseline, plan)]
        calibrated = calibrate(watches[0].run_once, monotonic_ms, SETTINGS)
        repetitions = Repetitions(1, 10, calibrated.executions_per_value, 20.0)
        rows: dict[str, dict[str, float]] = {}
        quiet = 0.0
        for name, beside in (
            ("nothing beside", contextlib.nullcontext),
            ("a thread opens sessions", self._thread),
            ("a process opens sessions here", lambda: self._process(self.provider)),
            ("a process opens sessions on the CPU", lambda: self._process("cpu")),
            ("nothing beside, again", contextlib.nullcontext),
        ):
            with beside():
                found = self.ratios(watches, repetitions, seconds)
            mean, spread = float(np.mean(found)), float(np.std(found, ddof=1)) if len(found) > 1 else math.nan
            quiet = quiet or mean
            rows[name] = {"ratio": math.exp(mean), "shift": mean - quiet, "spread": spread, "timings": len(found)}
            print(f"  {name:37} ratio {math.exp(mean):.4f}, shifted by {mean - quiet:+.3%}, "
                  f"spread {spread:.3%} over {len(found)}", flush=True)  # fmt: skip
        for session in (plan, baseline):
            session.close()
        return rows

    @contextlib.contextmanager
    def _thread(self) -> Iterator[None]:
        done = threading.Event()

        def opening() -> None:
            while not done.is_set():
                self.open(self.fp16, timing=False).close()

        thread = threading.Thread(target=opening)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    @contextlib.contextmanager
    def _process(self, provider: Provider) -> Iterator[None]:
        command = [sys.executable, "-c", OPENER, str(self.fp16), provider]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()  # it opens the next one now
                yield
            finally:
                process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--provider", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of timing with each thing beside")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.update(NO_TF32)
    document: dict[str, Any] = {"model": options.model.stem}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        print("steps of an evaluation", flush=True)
        document["evaluation"] = bench.evaluation(options.rounds)
        print("emulation, switched", flush=True)
        document["emulation"] = bench.emulation(4 * options.rounds)
        print("a timing with something beside", flush=True)
        document["beside"] = bench.disturbance(options.seconds)
        save(options.json, document)


if __name__ == "__main__":
    main()
