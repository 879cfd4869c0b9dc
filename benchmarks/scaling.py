"""How much sooner a search has its builds with more workers: time from the first proposal to the last of 50 plans.

    python -m benchmarks.scaling                          # a fake toolchain of fixed durations; 1, 2 and 4 workers
    python -m benchmarks.scaling --gpus 0,1 --model MODEL --data DATA --json results/scaling.json

Each search has a new run directory with a journal. With ``--gpus`` they run on real GPUs, with one worker, then with
two, and so on. Without, each build takes ``--build-s`` seconds of doing nothing, so that what is measured is how well
workers share a search, not what a GPU does. The workers' start and the one-group errors come before the first proposal
and are printed apart. The hypervolume is that of all evaluations, before the front is confirmed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import mptune
from benchmarks.common import rounded, save
from mptune.engines.context import RunContext
from mptune.rundir import read_run
from mptune.tuning import crew
from mptune.tuning.bench import Silent
from mptune.tuning.evaluation import ORIGIN_FP32
from mptune.tuning.fronts.dominance import hypervolume, pareto
from mptune.tuning.runs.result import read_record
from tests.fakes import FakeToolchain, Law
from tests.graph import models


@dataclass(frozen=True)
class FixedDurations:
    """Opens a toolchain whose every evaluation takes the same time, in whatever process it is called."""

    build_s: float

    def __call__(self, context: RunContext) -> FakeToolchain:
        law = Law([group.id for group in context.groups])
        return FakeToolchain(law, delay_s=self.build_s, device="fixed durations")


_WORKER = """
import functools, sys
from benchmarks.scaling import FixedDurations
from mptune.api import deploying
from mptune.cli import main
deploying.worker = functools.partial(deploying.worker, open_toolchain=FixedDurations({build_s}))
sys.exit(main())
"""
"""``mptune worker`` with the fake toolchain."""


@dataclass(frozen=True)
class Searched:
    """One search.

    Attributes:
        workers: how many shared it.
        device: what built.
        before_s: from the start of the search to the first proposal.
        builds_s: from the first proposal to the last of ``builds`` plans.
        builds: plans evaluated, failures counted in.
        failures: of these, plans that failed.
        built_twice: plans that were evaluated more than once.
        hypervolume: of all evaluations.
        slowest_after_5th: the largest latency after the fifth plan, as a multiple of all-FP32's.
    """

    workers: int
    device: str
    before_s: float
    builds_s: float
    builds: int
    failures: int
    built_twice: int
    hypervolume: float
    slowest_after_5th: float


def searched(model: Path, workers: int, gpus: Sequence[int], budget: int, options: dict[str, Any]) -> Searched:
    """Search once, and read from the study how long it took."""
    with tempfile.TemporaryDirectory(prefix="mptune-scaling-") as folder:
        place, started = Path(folder) / "run.mptune", time.time()
        mptune.search(model, out=place, budget=budget, gpus=tuple(gpus)[:workers], listener=Silent(), **options)
        directory, file = read_run(place)
        record = read_record(directory, file)
        evaluations, failures = record.evaluations(), record.failures()
        trials = [t for t in mptune.open_run(place).study.trials if t.state.name in ("COMPLETE", "PRUNED")]
        record.close()
    begun = min(t.datetime_start.timestamp() for t in trials if t.datetime_start is not None)
    ended = sorted(t.datetime_complete.timestamp() for t in trials if t.datetime_complete is not None)
    fp32 = next(e for e in evaluations if e.origin == ORIGIN_FP32)
    plans = [e.plan.fingerprint for e in evaluations]
    later = [e.latency.median_ms / fp32.latency.median_ms for e in evaluations[5:]]
    return Searched(
        workers=workers,
        device="" if file.target is None else f"{file.target.engine} on {file.target.device}",
        before_s=begun - started,
        builds_s=ended[-1] - begun,
        builds=len(trials),
        failures=len(failures),
        built_twice=len(plans) - len(set(plans)),
        hypervolume=hypervolume(pareto(evaluations), fp32),
        slowest_after_5th=max(later, default=float("nan")),
    )


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
    np.savez(path.with_suffix(".npz"), x=generator.standard_normal((24, 8)).astype(np.float32))


def as_json(one: Searched) -> dict[str, Any]:
    """All fields as JSON types."""
    return {name: rounded(value) if isinstance(value, float) else value for name, value in asdict(one).items()}


def main() -> None:
    """Search with each number of workers and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", help="real GPUs, such as 0,1; without, a fake toolchain")
    parser.add_argument("--model", type=Path, help="ONNX file; with the fake toolchain a small model by default")
    parser.add_argument("--data", type=Path, help="calibration samples")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--workers", help="numbers of workers; 1, 2, ... all GPUs, or 1,2,4 by default")
    parser.add_argument("--builds", type=int, default=50)
    parser.add_argument("--build-s", type=float, default=1.0, help="of the fake toolchain")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    options: dict[str, Any] = {"data": arguments.data, "batch": arguments.batch, "confirm_rounds": 1}
    with tempfile.TemporaryDirectory(prefix="mptune-scaling-") as folder:
        if arguments.gpus is None:
            from benchmarks import scaling  # not ``__main__``, whose name the workers do not find

            crew.PROGRAM = (sys.executable, "-c", _WORKER.format(build_s=arguments.build_s))
            print(f"a fake toolchain: each build takes {arguments.build_s:g} s of doing nothing; no GPU is used")
            gpus, counts = range(16), [1, 2, 4]
            model = arguments.model or Path(folder) / "model.onnx"
            if arguments.model is None:
                save_chain(model, layers=24)
            options.update(open_toolchain=scaling.FixedDurations(arguments.build_s))
        else:
            if arguments.model is None:
                parser.error("--gpus needs --model")
            gpus = [int(number) for number in arguments.gpus.split(",")]
            counts, model = list(range(1, len(gpus) + 1)), arguments.model
            options.update(engine=arguments.engine)
            os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        if arguments.workers:
            counts = [int(number) for number in arguments.workers.split(",")]
        found = []
        print("workers  before s  builds s  times  builds  failed  twice  hypervolume  slowest after 5th")
        for workers in counts:
            one = searched(model, workers, gpus, arguments.builds, options)
            found.append(one)
            print(
                f"{one.workers:7}  {one.before_s:8.1f}  {one.builds_s:8.1f}  {found[0].builds_s / one.builds_s:5.2f}  "
                f"{one.builds:6}  {one.failures:6}  {one.built_twice:5}  {one.hypervolume:11.4f}  "
                f"{one.slowest_after_5th:17.2f}",
                flush=True,
            )
        print(f"on {found[0].device}")
    save(arguments.json, {"searches": [as_json(one) for one in found]})


if __name__ == "__main__":
    main()
