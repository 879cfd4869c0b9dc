"""A search of 1,000 plans on a toolchain that runs nothing: what opening, reporting, memory and thinking come to.

The toolchain answers at once, with records of the size that real ones have: 24 samples of all statistics, 40 timed
values. Everything else is a search as a user runs it: journal with its syncs to the disk, sampler with emulated
errors, confirmation, report. Thinking is the processor time between one evaluation and the next.

    python -m benchmarks.long_run --plans 1000 --layers 64 --out benchmarks/results/long_run.json
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil  # type: ignore[import-untyped]
from numpy.typing import NDArray

import mptune
from mptune.data.metrics.accuracy import OutputError
from mptune.data.metrics.table import STATISTICS
from mptune.engines.base import Failure, Measurement, SampleSet
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import PrecisionPlan
from mptune.rundir import read_run
from mptune.tuning.runs.result import read_record
from mptune.tuning.steps import tuner
from tests.fakes import FakeToolchain, Law
from tests.graph import models

EARLY = 100
"""Figures of later plans are compared with those of this one."""

_SAMPLES, _TIMED = 24, 40
_CALLS = 5
_AROUND = 10
"""Memory and thinking are medians of so many plans before the one that is named."""


@dataclass
class Watched(FakeToolchain):
    """Counts what the process holds and how long it thought whenever it is asked to evaluate a plan."""

    rss_mib: list[float] = field(default_factory=list)
    thinking_s: list[float] = field(default_factory=list)
    answered_s: float = 0.0

    def evaluate(
        self, plan: PrecisionPlan, which: SampleSet = "search", *, profile: bool = False
    ) -> Measurement | Failure:
        if which == "search":
            self.thinking_s.append(time.process_time() - self.answered_s)
            self.rss_mib.append(psutil.Process().memory_info().rss / 2**20)
        try:
            return super().evaluate(plan, which, profile=profile)
        finally:
            self.answered_s = time.process_time()

    def _output_error(self, plan: PrecisionPlan, factor: float) -> OutputError:
        generator = np.random.default_rng(len(plan.fp16_groups))
        error = self.law.error(plan) * factor * generator.uniform(0.9, 1.1, _SAMPLES)
        statistics = {name: tuple(map(float, error)) for name in STATISTICS if name != "non_finite"}
        return OutputError({"y": {**statistics, "non_finite": (0.0,) * _SAMPLES}})


def save_chain(path: Path, layers: int) -> None:
    """A chain of matrix products, each with its activation: as many groups as layers."""
    nodes, x = [], "x"
    for k in range(layers):
        nodes.append(models.node("MatMul", [x, "w"], f"m{k}", f"/layers.{k}/fc/MatMul"))
        nodes.append(models.node("Tanh", [f"m{k}"], f"t{k}", f"/layers.{k}/Tanh"))
        x = f"t{k}"
    proto = models.model(nodes, [models.value("x", [1, 8])], [models.value(x, [1, 8])], [models.weight("w", 8, 8)])
    path.write_bytes(proto.SerializeToString())
    generator = np.random.default_rng(0)
    np.savez(path.with_suffix(".npz"), x=generator.standard_normal((_SAMPLES, 8)).astype(np.float32))


def search(model: Path, plans: int) -> dict[str, Any]:
    """Run the search in this process; its figures."""
    toolchain = Watched(Law([group.id for group in find_groups(load_model(str(model)))]))
    with patch.object(tuner, "LEAST_IMPROVEMENT", -1.0):  # It goes on to its budget, whatever there is to gain.
        before = _now()
        mptune.search(
            str(model),
            data=str(model.with_suffix(".npz")),
            out=str(model.with_suffix(".mptune")),
            budget=plans,
            target="cpu",
            open_toolchain=toolchain.open,
        )
    seconds, cpu_seconds = map(float, _now() - before)
    return {
        "groups": len(toolchain.law.groups),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "memory_mib": {str(at): _around(toolchain.rss_mib, at) for at in (EARLY, plans)},
        "thinking_s": {str(at): _around(toolchain.thinking_s, at) for at in (EARLY, plans)},
    }


def _around(values: Sequence[float], plan: int) -> float:
    return median(values[plan - _AROUND : plan])


def read(run: Path) -> dict[str, float]:
    """Open the study and report, each once, in this process."""
    directory, file = read_run(run)
    before = _now()
    record = read_record(directory, file)
    opened = _now() - before
    record.close()
    before = _now()
    mptune.report(run)
    reported = _now() - before
    figures = {"open_s": opened[0], "open_cpu_s": opened[1], "report_s": reported[0], "report_cpu_s": reported[1]}
    return {name: float(seconds) for name, seconds in figures.items()}


def report_command(run: Path) -> dict[str, float]:
    """Wall and processor seconds of the command, the median of some calls after a first one."""
    command = [sys.executable, "-m", "mptune", "report", str(run)]
    taken = []
    for _ in range(1 + _CALLS):
        started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = now.ru_utime + now.ru_stime - before.ru_utime - before.ru_stime
        taken.append((time.monotonic() - started, cpu_s))
    seconds, cpu_seconds = (median(values) for values in zip(*taken[1:], strict=True))
    return {"report_command_s": seconds, "report_command_cpu_s": cpu_seconds}


def _now() -> NDArray[np.float64]:
    """Wall and processor time of this process, in seconds: on a busy machine the first says little."""
    return np.array([time.monotonic(), time.process_time()])


def _in_fresh_process(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.long_run", *arguments]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--out", type=Path, help="write the figures here as JSON, too")
    parser.add_argument("--search", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.search is not None:
        print(json.dumps(search(arguments.search, arguments.plans)))
        return
    if arguments.read is not None:
        print(json.dumps(read(arguments.read)))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "chain.onnx"
        save_chain(model, arguments.layers)
        run = model.with_suffix(".mptune")
        figures = _in_fresh_process("--search", str(model), "--plans", str(arguments.plans))
        journal = run / "study.journal"
        figures["journal_mb"] = journal.stat().st_size / 1e6
        with journal.open("rb") as file:
            figures["journal_lines"] = sum(1 for _ in file)
        figures.update(_in_fresh_process("--read", str(run)))
        figures |= report_command(run)
    text = json.dumps({"plans": arguments.plans, **_rounded(figures)}, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


def _rounded(figures: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _rounded(value) if isinstance(value, dict) else round(value, 3) if isinstance(value, float) else value
        for key, value in figures.items()
    }


if __name__ == "__main__":
    main()
