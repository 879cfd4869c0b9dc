"""What a search finds in FP32, FP16 and BF16, against what one finds in FP32 and FP16, on this machine's GPU.

    python -m benchmarks.bf16_search --networks decoder --seeds 0 1 2 --limit 400 --json bf16_search.json
    python -m benchmarks.bf16_search --model vit_s.onnx vit_s.npz --batch 8

The two searches of a seed are compared after as many plans as the shorter one built, by the ratio of their
hypervolumes. Latencies that two searches took at two times differ by more than their plans: on a decoder the first two
plans, the same in both, gave hypervolumes of 1 and 0.978. So the plans of all searches that are on their fronts, or
nearly, are built again and timed in turn with all-FP32: each once a round, a plan of several searches too, and every
round in a new worker process (as ``benchmarks.peers``). Errors are the searches' own, one for each plan. The ratio is
that of latencies averaged over the rounds, and its interval the jackknife's over rounds (Miller, Biometrika 61, 1974):
it says how well these searches are compared, not how much others would differ, which the seeds show.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import mptune
from benchmarks.common import hypervolume, labels_of, rounded, save
from benchmarks.measuring import Bench
from benchmarks.models.overflowing import add_options, each_network
from benchmarks.pace import Clock
from benchmarks.peers.final import Sessions, in_order, measure
from mptune.data.metrics.paired import t_quantile
from mptune.engines.environment import read_gpus
from mptune.engines.workload import Workload
from mptune.errors import RunError
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import PrecisionPlan
from mptune.rundir import read_run
from mptune.targets.target import load_target
from mptune.tuning.runs.result import read_record

KINDS = {"two": ("fp32", "fp16"), "three": ("fp32", "fp16", "bf16")}
_NEAR = 0.01
"""Plans that are slower than a better one by less than this share may be on the front when they are timed again."""

_SEARCHING = 0.65
"""Share of a network's time until which its searches end; the rest is for timing their plans in turn."""


@dataclass(frozen=True)
class Built:
    """A plan that a search built and found finite."""

    plan: PrecisionPlan
    latency_ms: float
    error: float

    @property
    def key(self) -> str:
        """Names the plan in files: 0, 1 or b for each group."""
        return labels_of(self.plan)


def search(
    path: Path, data: Path, out: Path, what: str, seed: int, options: argparse.Namespace, timeout_s: float
) -> tuple[list[Built], dict[str, Any]]:
    """One search: its finite plans in the order they were built, all-FP32 first, and its figures.

    ``parts`` says where the seconds went, ``stages`` what jobs did in them.
    """
    started, clock = time.monotonic(), Clock()
    with clock.running():
        front = mptune.search(
            path,
            data=data,
            out=out,
            target="h200" if options.predicted else "auto",
            budget=options.budget,
            batch=options.batch,
            opset=options.opset,
            seed=seed,
            timeout_s=timeout_s,
            precisions=KINDS[what],
            confirm_rounds=1,
            confirm_points=1,
            progress=False,
        )
    evaluations = read_record(*read_run(out)).evaluations()
    built = [Built(e.plan, e.latency.median_ms, e.error_value) for e in evaluations if e.is_finite]
    seconds = round(time.monotonic() - started)
    print(f"  seed {seed}, {what}: {len(front.points)} points of {len(built)} plans, {seconds} s", flush=True)
    print(f"    {', '.join(f'{part} {taken:.1f} s' for part, taken in clock.seconds.items())}", flush=True)
    return built, {
        "evaluations": front.evaluations,
        "plans": [[one.key, rounded(one.latency_ms), rounded(one.error)] for one in built],
        "seconds": seconds,
        "findings": [finding.text for finding in front.findings if finding.code == "no-bf16-kernel"],
        "parts": {part: round(taken, 2) for part, taken in clock.seconds.items()},
        "stages": {stage: round(taken, 2) for stage, taken in clock.stages.items()},
        "calls": dict(clock.calls),
    }


def near_front(built: Sequence[Built]) -> list[Built]:
    """Those that no other one beats in error and, clearly, in latency."""

    def beats(other: Built, one: Built) -> bool:
        return other.error <= one.error and other.latency_ms * (1.0 + _NEAR) <= one.latency_ms

    return [one for one in built if math.isfinite(one.error) and not any(beats(other, one) for other in built)]


def ratio_of(
    two: Sequence[str], three: Sequence[str], errors: Mapping[str, float], log_ratios: Mapping[str, Sequence[float]]
) -> float:
    """Hypervolume of the plans of one search over that of another, by latencies averaged over rounds.

    Args:
        two: keys of the plans of the search in two precisions.
        three: the same in three.
        errors: of every plan.
        log_ratios: of every plan's latency to all-FP32's, one for each round.
    """

    def area(keys: Sequence[str]) -> float:
        latency = np.exp([np.mean(log_ratios[key]) for key in keys])
        return hypervolume(latency, np.array([errors[key] for key in keys]), 1.0)

    divisor = area(two)
    return area(three) / divisor if divisor else math.nan


@dataclass(frozen=True)
class Compared:
    """Ratios of hypervolumes, three precisions over two.

    Attributes:
        by_seed: each with its 95 % interval; not a number where rounds are fewer than two.
        overall: the geometric mean over the seeds, the same.
        rounds: that timed every plan.
    """

    by_seed: tuple[tuple[float, float, float], ...]
    overall: tuple[float, float, float]
    rounds: int


def compare(
    pairs: Sequence[tuple[Sequence[str], Sequence[str]]],
    errors: Mapping[str, float],
    log_ratios: Mapping[str, Mapping[str, float]],
) -> Compared:
    """The ratio of each pair of searches, and over all of them, with intervals.

    Args:
        pairs: keys of the plans of the search in two precisions and of that in three, for each seed.
        errors: of every plan.
        log_ratios: of every plan's latency to all-FP32's, by round; a plan without any is left out of its search, and
            a round that lacks any other plan is not counted.
    """
    every = dict.fromkeys(key for pair in pairs for keys in pair for key in keys)
    timed = [key for key in every if log_ratios.get(key)]
    rounds = [one for one in log_ratios[timed[0]] if all(one in log_ratios[key] for key in timed)] if timed else []

    def logs(counted: Sequence[str]) -> np.ndarray:
        values = {key: [log_ratios[key][one] for one in counted] for key in timed}
        found = [
            ratio_of([k for k in two if k in values], [k for k in three if k in values], errors, values)
            for two, three in pairs
        ]
        return np.log([*found, math.exp(float(np.mean(np.log(found))))])

    n = len(rounds)
    if not n:
        return Compared(tuple((math.nan,) * 3 for _ in pairs), (math.nan,) * 3, 0)
    whole, half = logs(rounds), np.full(len(pairs) + 1, math.nan)
    if n > 1:
        without = np.array([logs([one for one in rounds if one != left_out]) for left_out in rounds])
        pseudo = n * whole - (n - 1) * without
        half = t_quantile(0.975, n - 1) * pseudo.std(axis=0, ddof=1) / math.sqrt(n)
    found = tuple(tuple(map(float, row)) for row in np.exp(np.column_stack([whole, whole - half, whole + half])))
    return Compared(found[:-1], found[-1], n)  # type: ignore[arg-type]


def timed_in_turn(
    path: Path, data: Path, folder: Path, plans: Mapping[str, PrecisionPlan], options: argparse.Namespace, end: float
) -> Sessions:
    """Time every plan once a round, each round in a new worker process, until the rounds or the time ends."""
    provider, begun = "cpu" if options.predicted else "cuda", f"{time.time():.3f}"
    with Bench(
        path,
        data,
        folder / "bench",
        load_target("h200"),
        provider=provider,
        samples=1,
        batch=options.batch,
        workers=1,
        duration_ms=options.duration_ms,
        statistics=False,
    ) as bench:
        model = load_model(path, opset=options.opset)
        grouped = GroupedModel(model, find_groups(model))
        rewriter = Workload(grouped, bench.space, KINDS["three"]).rewriter
        files = {key: rewriter.write(plan, bench.space.weights_dir / f"{key}.onnx") for key, plan in plans.items()}
        sessions = Sessions(folder / "sessions.jsonl")
        for number in range(options.rounds):
            bench.renew()
            for key in in_order(list(files), number):
                if time.monotonic() < end and key not in sessions.failures:
                    measure(bench, sessions, key, files[key], begun)
    return sessions


def run(path: Path, data: Path, folder: Path, deadline: float, options: argparse.Namespace) -> dict[str, Any]:
    """Both searches for every seed, and their comparison."""
    begun, figures, pairs = time.monotonic(), [], []
    plans: dict[str, PrecisionPlan] = {}
    errors: dict[str, float] = {}
    search_end = begun + _SEARCHING * (deadline - begun)
    for number, seed in enumerate(options.seeds):
        found: dict[str, tuple[list[Built], dict[str, Any]]] = {}
        try:
            for place, what in enumerate(KINDS):
                left_s = max(search_end - time.monotonic(), 2.0) / (2 * (len(options.seeds) - number) - place)
                found[what] = search(path, data, folder / f"{seed}.{what}", what, seed, options, left_s)
        except RunError as error:  # as where the time ended before all-FP32 was timed
            print(f"  seed {seed} is left out: {error}", flush=True)
            continue
        count = min(len(built) for built, _ in found.values())
        near = {what: near_front(built[:count]) for what, (built, _) in found.items()}
        for one in (one for of in near.values() for one in of):
            plans.setdefault(one.key, one.plan)
            errors.setdefault(one.key, one.error)
        pairs.append(([one.key for one in near["two"]], [one.key for one in near["three"]]))
        figures.append({"seed": seed, "compared_after": count, **{what: rest for what, (_, rest) in found.items()}})
    sessions = timed_in_turn(path, data, folder, plans, options, deadline)
    log_ratios = {key: {one.baseline: one.log_ratio for one in of} for key, of in sessions.timings.items()}
    compared = compare(pairs, errors, log_ratios)
    for of, (ratio, low, high), (two, three) in zip(figures, compared.by_seed, pairs, strict=True):
        of |= {"ratio": rounded(ratio), "ci95": [rounded(low), rounded(high)], "near_front": [len(two), len(three)]}
        print(f"{path.stem}, seed {of['seed']}, after {of['compared_after']} plans of each: {ratio:.4f} times "
              f"({low:.4f} to {high:.4f}), {len(two)} and {len(three)} plans", flush=True)  # fmt: skip
    ratio, low, high = compared.overall
    print(f"{path.stem}: {ratio:.4f} times ({low:.4f} to {high:.4f}), {len(pairs)} seeds, {len(plans)} plans, "
          f"{compared.rounds} rounds", flush=True)  # fmt: skip
    return {
        "ratio": rounded(ratio),
        "ci95": [rounded(low), rounded(high)],
        "rounds": compared.rounds,
        "seeds": figures,
        "pairs": pairs,
        "errors": {key: rounded(error) for key, error in errors.items()},
        "log_ratios": {key: [round(value, 6) for value in of.values()] for key, of in log_ratios.items()},
        "failures": sessions.failures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, samples=12, predicted="an H200's roofline, plans timed on the CPU")
    parser.add_argument("--budget", type=int, default=20, help="plans of each search")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the searches")
    parser.add_argument("--rounds", type=int, default=4, help="worker processes that every plan is timed in")
    parser.add_argument("--duration-ms", type=float, default=100.0, help="of one timing of the baseline")
    options = parser.parse_args()
    gpus = read_gpus()
    if not gpus and not options.predicted:
        raise SystemExit("no GPU here: --predicted takes an H200's roofline, and this machine's CPU to time plans")
    document: dict[str, Any] = {}
    for name, path, data, place, deadline in each_network(options):
        document[name] = run(path, data, place, deadline, options)
        save(options.json, {"device": gpus[0].name if gpus else "predicted", "searches": document})


if __name__ == "__main__":
    main()
