"""Build, time and compare many plans of one model on this machine's device, as quickly as possible.

One worker does everything that runs on the device, as in mptune: on an H200 each run took a constant 60 to 100 us less
while a second process used the device, so latencies from before and after an emulation could not be compared. Every
plan is timed in alternation with the FP32 baseline, and its latency is scaled to the baseline's first timing.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

from benchmarks.common import Record, bits_of, failure_words, make_context, plan_of, require, rounded
from benchmarks.peers.models import PeerModel
from benchmarks.timing import FIRST_WARMUP_MS, ReadyJob, Timed, TimeJob
from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import Failure, SampleSet
from mptune.engines.environment import read_gpus
from mptune.engines.latency import Repetitions
from mptune.engines.ort.backend import ONNXRUNTIME
from mptune.engines.ort.session import Provider
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.files import read_form, write_json
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import PrecisionPlan
from mptune.settings import LatencySettings, SearchSettings, WorkerSettings
from mptune.targets.target import load_target
from mptune.tuning.facts import MissingKernels, ask_for_kernels

JOB_TIMEOUT_S = 120.0

NORMAL_95 = 1.96


class Emulating(Toolchain):
    """Emulates as mptune does for this engine."""

    def emulate_all(self, plan: PrecisionPlan) -> OutputError:
        """On all samples; the tool does so before a build on a few."""
        return require(self.prediction.emulation.errors([plan]))[0]


class Bench:
    """One model with its worker and the record of its measurements."""

    def __init__(
        self,
        model: PeerModel,
        name: str,
        options: argparse.Namespace,
        which: SampleSet = "search",
        plan_timeout_s: float = JOB_TIMEOUT_S,
    ) -> None:
        """Open everything, take the reference and the observed shapes, and the record of an earlier call.

        Args:
            model: which.
            name: of the model's folder in ``options.work`` with weights, samples and ``plans.jsonl``.
            options: ``provider``, and the ``target`` whose roofline is taken.
            which: the samples that errors of engines are taken on.
            plan_timeout_s: of opening, running and timing one plan; more is a failure of that plan.
        """
        path, data = model.make(options.work)
        folder = options.work / f"{model.name}.{name}"
        self.model = load_model(path)
        self.groups = find_groups(self.model)
        self.provider: Provider = options.provider
        self.settings = SearchSettings(
            latency=LatencySettings(FIRST_WARMUP_MS, model.duration_ms, min_iterations=5),
            worker=WorkerSettings(max_jobs=None),
        )
        grouped = GroupedModel(self.model, self.groups)
        self.context = make_context(grouped, data, folder, model.samples, model.rows, self.settings)
        self._emulating = Emulating(ONNXRUNTIME, load_target(options.target), self.context, self.provider)
        for samples in dict.fromkeys(("search", which)):
            require(self._emulating.reference(samples))
        self.ranges = require(self._emulating.observe())
        self.terms = require(self._emulating.latency_terms())
        self.kernels = self._missing_kernels()
        self.without_kernel = self.kernels.pins(self.context.grouped)
        self._baseline = self.context.rewriter.write(
            self.plan("0" * len(self.groups)), self.context.weights_dir / "baseline.onnx"
        )
        self.record = Record(folder / "plans.jsonl", len(self.groups))
        self.samples, self._which = model.samples, which
        self._plan_timeout_s = plan_timeout_s
        gpus = read_gpus() if self.provider == "cuda" else ()
        self.device = gpus[0].name if gpus else self.provider
        self._worker = self._emulating.worker
        self._open()

    def plan(self, bits: str) -> PrecisionPlan:
        return plan_of(self.model, self.groups, bits)

    def bits(self, plan: PrecisionPlan) -> str:
        return bits_of(self.groups, plan)

    def measure(self, bits: str) -> dict[str, Any]:
        """Build and time a plan, or read it from the record."""
        if bits in self.record.plans:
            return self.record.plans[bits]
        started = time.monotonic()
        result = self.time_again(bits)
        if isinstance(result, Failure):
            failed = {"failure": failure_words(result), "finite": False}
            return self.record.add(bits, failed, keep=not result.is_machine_fault)
        latency = result.latency.scaled(self.record.baseline_ms / result.baseline.median_ms)
        low, high = latency.ci95_ms
        entry = {
            "latency_ms": latency.median_ms,
            "latency_sd_ms": (high - low) / (2 * NORMAL_95),
            "baseline_ms": result.baseline.median_ms,
            "error": result.error.value("relative_l2"),
            "finite": result.error.non_finite == 0,
            "seconds": [result.build_s, result.device_s, time.monotonic() - started],
        }
        return self.record.add(bits, entry)

    def emulate(self, bits: str) -> float:
        """The relative L2 error of a plan by emulation, on all samples; infinite where it is not finite."""
        if bits not in self.record.emulated:
            error = self._emulating.emulate_all(self.plan(bits))
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

    @property
    def process(self) -> int | None:
        """Number of the worker's process; None while there is none."""
        return self._worker.pid

    def renew(self) -> None:
        """Go on in a new worker process, with a session of the baseline of its own.

        What differs from process to process (kernels are chosen anew, memory lies elsewhere) is not seen within one.

        Raises:
            SystemExit: the worker cannot be started again, or fails to time the baseline.
        """
        self._worker.restart()
        self._open()

    def close(self) -> None:
        self._emulating.close()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self) -> None:
        """Prepare the worker; the first call of all fixes the repetitions of the baseline and its latency."""
        known = self.record.repetitions
        job = ReadyJob(repetitions=None if known is None else Repetitions.from_json(known), **self._session())
        ready = require(self._worker.call(job, JOB_TIMEOUT_S))
        if known is None:
            self.record.begin(ready.repetitions.to_json(), ready.baseline_ms)

    def _session(self) -> dict[str, Any]:
        """What every job opens."""
        shared = {"baseline": self._baseline, "samples": self.context.samples(self._which), "provider": self.provider}
        tf32 = self._emulating.builder.tf32_by_environment
        return {**shared, "latency": self.settings.latency, "tf32_by_environment": tf32}

    def _missing_kernels(self) -> MissingKernels:
        """Operators without an FP16 kernel, as a search finds them; asked once, and kept in the folder.

        On the CPU no node can fall to another provider.
        """
        path = self.context.data_dir / "kernels.json"
        if self.provider == "cuda" and not path.exists():
            write_json(path, ask_for_kernels(self._emulating).to_json())
        return read_form(MissingKernels, path, "delete it: it is asked for again") or MissingKernels()

    def time_again(self, plan: str | Path) -> Timed | Failure:
        """Open and time a plan, or a model of the same inputs and outputs, whatever the record holds; not recorded."""
        if isinstance(plan, str):
            whole = self.plan(plan)
            path = self.context.rewriter.write(whole, self.context.weights_dir / f"{whole.fingerprint}.onnx")
            try:
                return self.time_again(path)
            finally:
                path.unlink(missing_ok=True)
        assert self.record.repetitions is not None
        repetitions, reference = Repetitions.from_json(self.record.repetitions), self.context.reference(self._which)
        job = TimeJob(model=plan, reference=reference, repetitions=repetitions, **self._session())
        return self._worker.call(job, self._plan_timeout_s)
