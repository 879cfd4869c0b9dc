"""Emulations in processes of their own on the CPU, beside the process that measures on the device.

Each process takes every so-manieth plan, and writes a line for each that it has emulated: what is there when time ends
is kept. What the device's engine fuses, and that it rounds after each step, is told to them by the process that asked
it: an emulation for the CPU provider would leave roundings out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import make_context, plan_of, require
from benchmarks.measuring import Bench, Emulating
from mptune.engines.environment import usable_cores
from mptune.engines.ort.backend import ONNXRUNTIME
from mptune.graph.fused import FusedNodes
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.targets.target import load_target

_LEAST_PLANS = 4
"""Fewer for a process are not worth its start."""

_NICENESS = 10
"""The process that measures goes first: it may run on any core."""


class AsOnDevice(Emulating):
    """Emulates on the CPU what the CUDA provider computes."""

    def __init__(self, options: argparse.Namespace, fused: tuple[FusedNodes, ...]) -> None:
        """Open it.

        Args:
            options: of ``PeerModel.options``.
            fused: what the device's engine computes as one in FP16.
        """
        model = load_model(options.model)
        grouped = GroupedModel(model, find_groups(model))
        context = make_context(grouped, options.data, options.folder, options.samples, options.batch)
        super().__init__(ONNXRUNTIME, load_target(options.target), context, "cpu")
        self.prediction.fuses = False  # as the CUDA provider
        self.builder._fused = fused
        require(self.reference("search"))

    def relative_l2(self, bits: str) -> float:
        """Of a plan; infinite where it is not finite."""
        grouped = self.context.grouped
        error = self.emulate_all(plan_of(grouped.model, grouped.groups, bits))
        return error.value("relative_l2") if error.non_finite == 0 else math.inf


class Beside:
    """Processes that emulate plans."""

    def __init__(self, bench: Bench, options: argparse.Namespace, plans: Sequence[str], jobs: int) -> None:
        """Start them.

        Args:
            bench: measures on the device; gets the emulated errors.
            options: of ``PeerModel.options``.
            plans: one 0 or 1 per layer group; those that the bench's record holds are left out.
            jobs: processes, at most.
        """
        self._bench = bench
        wanted = [bits for bits in dict.fromkeys(plans) if bits not in bench.record.emulated]
        jobs = min(jobs, math.ceil(len(wanted) / _LEAST_PLANS), max(1, usable_cores() - 1))
        self._out = [options.folder / f"beside.{part}" / "emulated.jsonl" for part in range(jobs)]
        fused = bench.fused_nodes() if jobs else ()
        self._processes = [
            _start(argparse.Namespace(**{**vars(options), "folder": out.parent}), fused, wanted[part::jobs], part, jobs)
            for part, out in enumerate(self._out)
        ]

    def take(self, deadline: float) -> None:
        """Wait until all have ended, at most until then (monotonic seconds), and record what they found.

        Raises:
            SystemExit: one of them failed; its last words.
        """
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self.close()
        for out in self._out:
            for line in out.read_text().splitlines() if out.exists() else ():
                entry = json.loads(line)
                if entry["plan"] not in self._bench.record.emulated:
                    self._bench.record.add_emulated(entry["plan"], entry["error"])
        for process, out in zip(self._processes, self._out, strict=True):
            if process.returncode > 0:
                raise SystemExit(f"emulation failed: {out.with_name('log.txt').read_text()[-500:]}")

    def close(self) -> None:
        """End those that still run."""
        for process in self._processes:
            process.kill()
            process.wait()

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _start(
    options: argparse.Namespace, fused: tuple[FusedNodes, ...], plans: Sequence[str], part: int, jobs: int
) -> subprocess.Popen[bytes]:
    options.folder.mkdir(parents=True, exist_ok=True)
    task = options.folder / "task.pickle"
    task.write_bytes(pickle.dumps((options, fused, plans, part, jobs)))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.peers.beside", str(task)]
    with (options.folder / "log.txt").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def main() -> None:
    parser = argparse.ArgumentParser(description="the plans of one task, in this process")
    parser.add_argument("task", type=Path)
    options, fused, plans, part, jobs = pickle.loads(parser.parse_args().task.read_bytes())
    os.nice(_NICENESS)
    if hasattr(os, "sched_setaffinity"):  # samples run side by side on as many cores as there are
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[1:][part::jobs] or cores)  # the first one is left to the device's process
    with AsOnDevice(options, fused) as emulating, (options.folder / "emulated.jsonl").open("w") as file:
        for bits in plans:
            file.write(json.dumps({"plan": bits, "error": emulating.relative_l2(bits)}) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
