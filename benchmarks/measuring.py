"""Build, time and compare many plans of one model on this machine's device, as quickly as possible.

One worker does everything that runs on the device, as in mptune: on an H200 each run took a constant 60 to 100 us less
while a second process used the device, so latencies from before and after an emulation could not be compared. Every
plan is timed in alternation with the FP32 baseline, and its latency is scaled to the baseline's first timing.

If there are several workers, the one that times holds a lock, and so does the first one while it emulates. They still
open sessions while another one times: on an H200 with ResNet-50, the latencies of four workers differed by 8.7 %
(standard deviation) from those of one.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common import Record, bits_of, plan_of, require, rounded, workspace
from benchmarks.timing import FIRST_WARMUP_MS, ReadyJob, Timed, TimeJob, alone
from mptune.data.metrics.accuracy import OutputError
from mptune.engines.backends.onnxruntime import ONNXRUNTIME
from mptune.engines.base import Failure, SampleSet
from mptune.engines.environment import read_gpus
from mptune.engines.ort.cuda_session import NO_TF32
from mptune.engines.ort.session import Provider
from mptune.engines.timing.latency import Repetitions
from mptune.engines.toolchains.toolchain import MeasuredToolchain
from mptune.engines.workload import Workload
from mptune.graph.fused import FusedNodes
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import PrecisionPlan
from mptune.processes.parent import Worker
from mptune.settings import LatencySettings, SearchSettings, WorkerSettings
from mptune.targets.target import Target, load_target
from mptune.tuning.steps.kernels import KERNELS_JSON, MissingKernels, ask_for_kernels

JOB_TIMEOUT_S = 120.0

_NORMAL_95 = 1.96


class Emulating(MeasuredToolchain):
    """Emulates as mptune does for this engine."""

    @property
    def worker(self) -> Worker:
        """The process that does it; it may be given other jobs too."""
        return self._worker

    def emulate_all(self, plan: PrecisionPlan) -> OutputError:
        """On all samples; the tool does so before a build on a few."""
        return require(self.predictor.emulation.errors([plan]))[0]


class Alone:
    """Its own predictor: a toolchain whose emulation never runs beside other work on the device; for several threads.

    ``turn`` is held before the device is: a job that its worker has begun may itself be waiting for the device.
    """

    def __init__(self, toolchain: Emulating, lock: Path, turn: threading.Lock) -> None:
        self._toolchain = toolchain
        self._device = lock
        self._turn = turn

    @property
    def predictor(self) -> Alone:
        """Nothing else is asked of it."""
        return self

    def emulate(self, plans: Sequence[PrecisionPlan]) -> tuple[OutputError, ...] | Failure:
        """As the tool does it before a build: on a few samples."""
        with self._turn, alone(self._device):
            return self._toolchain.predictor.emulate(plans)

    def emulate_all(self, plan: PrecisionPlan) -> OutputError:
        """On all samples."""
        with self._turn, alone(self._device):
            return self._toolchain.emulate_all(plan)


class Bench:
    """One model with its workers and the record of their measurements. Thread-safe."""

    def __init__(
        self,
        model: Path,
        data: Path,
        folder: Path,
        target: Target,
        *,
        provider: Provider,
        samples: int,
        batch: int,
        workers: int,
        duration_ms: float,
        statistics: bool,
        which: SampleSet = "search",
        plan_timeout_s: float = JOB_TIMEOUT_S,
    ) -> None:
        """Open everything, take the reference and the observed shapes, and the record of an earlier call.

        Args:
            model: ONNX file.
            data: its samples.
            folder: kept between calls: weights, samples, ``plans.jsonl``.
            target: whose roofline is taken.
            provider: who computes.
            samples: calibration batches that errors are taken on.
            batch: rows per sample where the batch is dynamic.
            workers: processes that open sessions at once.
            duration_ms: of one timing of the baseline.
            statistics: keep all statistics of errors, not the relative L2 error alone.
            which: the samples that errors of engines are taken on.
            plan_timeout_s: of opening, running and timing one plan; more is a failure of that plan.
        """
        self.model = load_model(model)
        self.groups = find_groups(self.model)
        self.provider: Provider = provider
        self.space = workspace(model.resolve(), data, folder, samples, batch)
        self.settings = SearchSettings(
            latency=LatencySettings(FIRST_WARMUP_MS, duration_ms, min_iterations=5),
            worker=WorkerSettings(max_jobs=None),
        )
        self.workload = Workload(GroupedModel(self.model, self.groups), self.space)
        self._emulating = Emulating(ONNXRUNTIME, target, self.workload, self.settings, provider)
        for one in dict.fromkeys(("search", which)):
            require(self._emulating.reference_model.reference(one))
        self.ranges = require(self._emulating.reference_model.observe())
        self.terms = require(self._emulating.predictor.latency_terms())
        self.kernels = self._missing_kernels()
        self.without_kernel = self.kernels.pins(self.workload.grouped)
        self._tf32_by_environment = self._emulating.builder.tf32_by_environment
        self._turn = threading.Lock()
        self.toolchain = Alone(self._emulating, self._lock, self._turn)
        self._rewriter = self.workload.rewriter
        self._baseline = self._rewriter.write(self.plan("0" * len(self.groups)), self._scratch("baseline"))
        self.record = Record(folder / "plans.jsonl", len(self.groups))
        self.samples, self._statistics, self._which = samples, statistics, which
        self._plan_timeout_s = plan_timeout_s
        gpus = read_gpus() if provider == "cuda" else ()
        self.device = gpus[0].name if gpus else provider
        self._workers: queue.SimpleQueue[tuple[Worker, float]] = queue.SimpleQueue()
        more = [Worker(self.space.logs_dir, self.settings.worker, NO_TF32) for _ in range(1, workers)]
        self._all = [self._emulating.worker, *more]
        # While one thread waits for a worker, another one has the next job ready for it.
        self._pool = ThreadPoolExecutor(2 * workers)
        for worker in self._all:
            self._open(worker)
            self._workers.put((worker, time.monotonic()))
        self._asking, self._rewriting = threading.Lock(), threading.Lock()
        self._asked: dict[str, Future[dict[str, Any]]] = {}

    def plan(self, bits: str) -> PrecisionPlan:
        return plan_of(self.model, self.groups, bits)

    def bits(self, plan: PrecisionPlan) -> str:
        return bits_of(self.groups, plan)

    def measure(self, bits: str) -> dict[str, Any]:
        """Build and time a plan, or read it from the record; waits for a free worker."""
        return self.start(bits).result()

    def start(self, bits: str) -> Future[dict[str, Any]]:
        """The same without waiting."""
        with self._asking:
            if bits not in self._asked:
                known = self.record.plans.get(bits)
                if known is None:
                    self._asked[bits] = self._pool.submit(self._measured, bits)
                else:
                    done: Future[dict[str, Any]] = Future()
                    done.set_result(known)
                    self._asked[bits] = done
            return self._asked[bits]

    def emulate(self, bits: str) -> float:
        """The relative L2 error of a plan by emulation, on all samples; infinite where it is not finite."""
        if bits not in self.record.emulated:
            error = self.toolchain.emulate_all(self.plan(bits))
            self.record.add_emulated(bits, error.value("relative_l2") if error.non_finite == 0 else math.inf)
        return self.record.emulated[bits]

    def description(self) -> dict[str, Any]:
        """The part of a result file that describes the model and the measurement."""
        return {
            "model": self.model.path.stem,
            "model_sha256": self.model.sha256,
            "device": self.device,
            "provider": self.provider,
            "samples": self.samples,
            "baseline_ms": rounded(self.record.baseline_ms),
            "repetitions": self.record.repetitions,
            "groups": [[group.id, group.name, group.kind] for group in self.groups],
        }

    def fused_nodes(self) -> tuple[FusedNodes, ...]:
        """What the device's engine computes as one in FP16."""
        return require(self._emulating.fused_nodes())

    @property
    def process(self) -> int | None:
        """Number of the first worker's process; None while there is none."""
        return self._all[0].pid

    def renew(self) -> None:
        """Go on in new worker processes, each with a session of the baseline of its own.

        What differs from process to process (kernels are chosen anew, memory lies elsewhere) is not seen within one.

        Raises:
            SystemExit: a worker cannot be started again, or fails to time the baseline.
        """
        for worker in self._all:
            worker.close()
            self._open(worker)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for worker in self._all:
            worker.close()
        self._emulating.close()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self, worker: Worker) -> None:
        """Prepare a worker; the first one of all fixes the repetitions of the baseline and its latency."""
        known = self.record.repetitions
        job = ReadyJob(
            baseline=self._baseline,
            samples=self.space.samples(self._which),
            lock=self._lock,
            provider=self.provider,
            latency=self.settings.latency,
            repetitions=None if known is None else Repetitions.from_json(known),
            tf32_by_environment=self._tf32_by_environment,
        )
        ready = require(worker.call(job, JOB_TIMEOUT_S))
        if known is None:
            self.record.begin(ready.repetitions.to_json(), ready.baseline_ms)

    def _missing_kernels(self) -> MissingKernels:
        """Operators without an FP16 kernel, as a search finds them; asked once, and kept in the folder.

        On the CPU no node can fall to another provider.
        """
        path = self.space.data_dir / KERNELS_JSON
        if self.provider == "cuda" and not path.exists():
            ask_for_kernels(self._emulating).save(path)
        return MissingKernels.load(path)

    def _scratch(self, name: str) -> Path:
        return self.space.weights_dir / f"{name}.onnx"

    def with_tf32(self, plans: Sequence[str]) -> list[tuple[float, float]]:
        """Latency in ms and error of plans where TF32 is allowed; NaN where that fails. Not recorded."""
        found = []
        with Worker(self.space.logs_dir, self.settings.worker) as worker:  # NO_TF32 holds for a whole process
            self._open(worker)
            for bits in plans:
                with self._job(bits, tf32=True) as job:
                    result = worker.call(job, JOB_TIMEOUT_S)
                if isinstance(result, Failure):
                    found.append((math.nan, math.nan))
                else:
                    found.append((result.latency.median_ms, _l2(result.error)))
        return found

    @contextlib.contextmanager
    def _job(self, bits: str, *, tf32: bool = False) -> Iterator[TimeJob]:
        """The job of a plan; its model is there as long."""
        plan = self.plan(bits)
        with self._rewriting:
            path = self._rewriter.write(plan, self._scratch(f"{plan.fingerprint}{'-tf32' * tf32}"))
        try:
            yield self._job_of_file(path, tf32=tf32)
        finally:
            path.unlink(missing_ok=True)

    def _job_of_file(self, model: Path, *, tf32: bool = False) -> TimeJob:
        assert self.record.repetitions is not None
        return TimeJob(
            model=model,
            baseline=self._baseline,
            samples=self.space.samples(self._which),
            reference=self.space.reference(self._which),
            lock=self._lock,
            provider=self.provider,
            latency=self.settings.latency,
            repetitions=Repetitions.from_json(self.record.repetitions),
            statistics=self._statistics,
            tf32=tf32,
            tf32_by_environment=self._tf32_by_environment,
        )

    def time_again(self, plan: str | Path) -> Timed | Failure:
        """Open and time a plan, or a model of the same inputs and outputs, whatever the record holds; not recorded."""
        with contextlib.ExitStack() as stack:
            job = self._job_of_file(plan) if isinstance(plan, Path) else stack.enter_context(self._job(plan))
            worker, _ = self._workers.get()
            try:
                return worker.call(job, self._plan_timeout_s)
            finally:
                self._workers.put((worker, time.monotonic()))

    def _timed(self, bits: str) -> tuple[Timed | Failure, float, float]:
        """A worker's result, its seconds, and the seconds since its last such job, emulation included."""
        with self._job(bits) as job:
            worker, idle_since = self._workers.get()
            try:
                with self._turn if worker is self._emulating.worker else contextlib.nullcontext():
                    began = time.monotonic()
                    result = worker.call(job, self._plan_timeout_s)
            finally:
                ended = time.monotonic()
                self._workers.put((worker, ended))
        return result, ended - began, began - idle_since

    def _measured(self, bits: str) -> dict[str, Any]:
        result, taken_s, idle_s = self._timed(bits)
        if isinstance(result, Failure):
            failed = {"failure": f"{result.kind.value} ({result.stage.value}): {result.message}", "finite": False}
            return self.record.add(bits, failed, keep=not result.is_machine_fault)
        latency = result.latency.scaled(self.record.baseline_ms / result.baseline.median_ms)
        low, high = latency.ci95_ms
        entry = {
            "latency_ms": latency.median_ms,
            "latency_sd_ms": (high - low) / (2 * _NORMAL_95),
            "baseline_ms": result.baseline.median_ms,
            "error": _l2(result.error),
            "finite": result.error.non_finite == 0,
            "seconds": [result.build_s, result.device_s, taken_s, idle_s],
        }
        if self._statistics:
            entry["statistics"] = result.error.summary()
        return self.record.add(bits, entry)

    @property
    def _lock(self) -> Path:
        return self.space.data_dir / "device.lock"


def _l2(error: OutputError) -> float:
    return error.value("relative_l2")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every benchmark of many plans."""
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--folder", type=Path, help="kept between calls; default: the model's path with .bench")
    parser.add_argument("--provider", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--target", default="h200", help="whose roofline is taken")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1, help="rows per sample where the batch is dynamic")
    parser.add_argument("--workers", type=int, default=1, help="sessions that are opened at once: disturbs timings")
    parser.add_argument("--duration-ms", type=float, default=100.0, help="of one timing of the baseline")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds until it saves the results so far and ends")
    parser.add_argument("--json", type=Path)


def open_bench(
    options: argparse.Namespace,
    *,
    statistics: bool,
    which: SampleSet = "search",
    plan_timeout_s: float = JOB_TIMEOUT_S,
) -> Bench:
    """The bench that the options describe."""
    return Bench(
        options.model,
        options.data,
        options.folder or options.model.with_suffix(".bench"),
        load_target(options.target),
        provider=options.provider,
        samples=options.samples,
        batch=options.batch,
        workers=options.workers,
        duration_ms=options.duration_ms,
        statistics=statistics,
        which=which,
        plan_timeout_s=plan_timeout_s,
    )
