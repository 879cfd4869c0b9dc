"""How long a study of many evaluations takes to open, to read and to go on with: goal F, under 3 s for 2,000.

The study is written as a search writes it, record by record, with 24 samples of all statistics and 40 timed values in
every evaluation; only the syncs to the disk are left out while it is made.

    python -m benchmarks.study --evaluations 2000 --groups 40 --out benchmarks/results/study.json
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np

from mptune.data.metrics.accuracy import OutputError
from mptune.data.metrics.table import STATISTICS
from mptune.engines.base import Measurement
from mptune.engines.timing.latency import summarise
from mptune.graph.grouping.groups import LayerGroup
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.settings import LatencySettings
from mptune.tuning.evaluation import ORIGIN_FP32, Evaluation, Origin
from mptune.tuning.front import pareto
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.record.study import open_study, read_study
from mptune.tuning.sampler.posterior import Prior
from mptune.tuning.space import SearchSpace, Seed

SAMPLES, TIMED = 24, 40
SHA = "0" * 64
QUICK = LatencySettings()


def make_space(groups: int) -> SearchSpace:
    """A space of so many free groups."""
    ids = tuple(f"g{i:03d}" for i in range(groups))
    layers = tuple(LayerGroup(i, f"layer/{i}", "matmul", (f"{i}/MatMul",), {"MatMul": 1}) for i in ids)
    seed = Seed(ORIGIN_FP32, PrecisionPlan.uniform(SHA, ids, Precision.FP32))
    return SearchSpace(SHA, layers, ids, {}, (seed,))


def evaluate(plan: PrecisionPlan, number: int, origin: Origin, generator: np.random.Generator) -> Evaluation:
    """An evaluation of the size that real ones have."""
    half = len(plan.fp16_groups)
    error = 1e-6 + 1e-4 * half**0.5 * float(generator.lognormal(0.0, 0.5))
    statistics = {
        name: tuple(error * generator.uniform(0.5, 1.5, SAMPLES)) for name in STATISTICS if name != "non_finite"
    }
    timed = (10.0 - 0.1 * half) * generator.normal(1.0, 0.01, TIMED)
    measurement = Measurement(
        latency=summarise(list(map(float, timed)), QUICK),
        baseline=None,
        drift=1.0,
        error=OutputError({"y": {**statistics, "non_finite": (0.0,) * SAMPLES}}),
        error_source="measured",
        build_s=1.0,
    )
    return Evaluation.from_measurement(
        plan, measurement, number=number, origin=origin, metric="relative_l2", baseline_ms=10.0
    )


def open_one(space: SearchSpace, journal: Path) -> StudyRecord:
    """The study of the journal."""
    return open_study(space, name="large", metric="relative_l2", identity={}, journal=journal)


def fill(space: SearchSpace, journal: Path, count: int) -> None:
    """Write so many evaluations."""
    generator = np.random.default_rng(0)
    record = open_one(space, journal)
    record.enqueue(space.seeds[0].plan, ORIGIN_FP32)
    for _ in range(count):
        proposal = record.ask()
        record.tell_evaluation(proposal, evaluate(proposal.plan, proposal.number, proposal.origin, generator))
    record.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluations", type=int, default=2000)
    parser.add_argument("--groups", type=int, default=40)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    space = make_space(arguments.groups)
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "study.journal"
        with patch.object(os, "fsync", lambda descriptor: None):
            fill(space, journal, arguments.evaluations)
        size = journal.stat().st_size

        def clock(name: str, started: float) -> float:
            seconds[name] = round(time.process_time() - started, 2)  # Other programs on the machine do not count.
            return time.process_time()

        now = time.process_time()
        record = open_one(space, journal)
        assert record.spent == arguments.evaluations
        now = clock("open", now)
        evaluations = record.evaluations()
        now = clock("read all evaluations", now)
        front = pareto(evaluations)
        now = clock("front", now)
        record.guide(Prior(space.free), 0)
        proposal = record.ask()
        now = clock("next proposal", now)
        record.release(proposal)
        record.close()
        now = time.process_time()
        read = read_study(model_sha256=SHA, name="large", metric="relative_l2", journal=journal)
        read.evaluations()
        clock("read_study and all evaluations", now)
        read.close()
    figures = {
        "evaluations": arguments.evaluations,
        "groups": arguments.groups,
        "journal_mb": round(size / 1e6, 1),
        "front": len(front),
        "seconds": seconds,
    }
    print(json.dumps(figures, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
