"""Repeatability of latencies relative to FP32: one after the other, and in turn (``mptune.engines.timing.latency``).

    python -m benchmarks.models.vit_s --out vit_s --samples 1
    python -m benchmarks.in_turn vit_s.onnx vit_s.npz --rounds 8

Each round opens a new session of the plan, as a search does. Both ways spend the same time on each engine.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.common import plan_of, save, workspace
from benchmarks.measured_plans import random_plans
from mptune.data.archive import read_samples
from mptune.engines.ort.cuda_session import NO_TF32, open_session
from mptune.engines.ort.session import SessionOptions
from mptune.engines.timing.latency import Repetitions, Stopwatch, calibrate, monotonic_ms, time_in_turn
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from mptune.settings import LatencySettings
from mptune.targets.costs import is_convolutional

WAYS = ("one after the other", "in turn")


def ratios(watches: Sequence[Stopwatch], repetitions: Repetitions, settings: LatencySettings) -> list[float]:
    """Ratio of the plan's median to the baseline's, each way; ``watches`` are the baseline's and the plan's."""
    base, plan = (time_in_turn([watch], repetitions, settings)[0].median_ms for watch in watches)
    base_in_turn, plan_in_turn = (latency.median_ms for latency in time_in_turn(watches, repetitions, settings))
    return [plan / base, plan_in_turn / base_in_turn]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--duration-ms", type=float, default=100.0)
    parser.add_argument("--provider", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.update(NO_TF32)
    model = load_model(options.model)
    groups = find_groups(model)
    settings = LatencySettings(warmup_ms=50.0, duration_ms=options.duration_ms, min_iterations=5)
    by_environment = is_convolutional(model, {})  # as in a search, but for the shapes that it would observe
    opening = SessionOptions(options.provider, tf32_by_environment=by_environment, latency=settings)
    with tempfile.TemporaryDirectory() as folder:
        space = workspace(options.model.resolve(), options.data, Path(folder), 1, options.batch)
        sample = read_samples(space.samples("search"))[0]
        rewriter = Rewriter(GroupedModel(model, groups), WeightBank.write(model, space.weights_dir))
        fp32, mixed = "0" * len(groups), random_plans(groups, 4, 0)[-1]
        paths = [
            rewriter.write(plan_of(model, groups, bits), space.weights_dir / f"{bits}.onnx") for bits in (fp32, mixed)
        ]
        baseline = open_session(paths[0], opening)
        watch = baseline.stopwatch(sample)
        repetitions = calibrate(watch.run_once, monotonic_ms, LatencySettings(duration_ms=options.duration_ms))
        found = []
        for _ in range(options.rounds):
            candidate = open_session(paths[1], opening)
            found.append(ratios([watch, candidate.stopwatch(sample)], repetitions, settings))
            candidate.close()
        baseline.close()
    rows = {}
    for way, values in zip(WAYS, np.array(found).T, strict=True):
        rows[way] = {"ratio": float(np.median(values)), "standard deviation": float(values.std(ddof=1) / values.mean())}
        print(f"{options.model.stem}, {way}: {rows[way]['ratio']:.4f} of FP32, standard deviation "
              f"{rows[way]['standard deviation']:.3%} over {len(values)} rounds")  # fmt: skip
    save(options.json, {"model": options.model.name, "rounds": options.rounds, "rows": rows})


if __name__ == "__main__":
    main()
