"""Each peer's plans and each replay's front, built and timed in turn with the baseline; errors on held-out samples.

Every plan is opened several times, each time in another worker process, so that its interval holds what differs from
process to process (``mptune.engines.spread``, ``shared_degrees``): a process chooses its kernels anew,
and two sessions of one process agree more closely than two of different ones. What was measured stays in a file of one
line a session: a later call goes on with it.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import failure_words, read_measured_plans, rounded, save
from benchmarks.measuring import NORMAL_95, Bench
from benchmarks.peers.collect import PLAN_TIMEOUT_S
from benchmarks.peers.converters import CONVERTERS
from benchmarks.peers.known import Known, read_known
from benchmarks.peers.models import PeerModel
from benchmarks.peers.own import converted
from benchmarks.peers.replay import BUILDS, NAMES
from mptune.engines.base import Failure
from mptune.engines.spread import SessionSpread, SessionTiming

Timings = Mapping[str, Sequence[SessionTiming]]
"""Key of a plan -> its sessions."""


@dataclass(frozen=True)
class Candidate:
    """What a peer came to.

    Attributes:
        peer: its name.
        plan: one 0 or 1 per layer group, or a model file.
        builds: engines that it built to get there.
        budget: builds that it was allowed, of a search; None where it takes none.
    """

    peer: str
    plan: str | Path
    builds: int = 0
    budget: int | None = None

    @property
    def key(self) -> str:
        """A plan's bits, or the name of a model file."""
        return self.plan if isinstance(self.plan, str) else f"file: {self.peer}"


def final(model: PeerModel, options: argparse.Namespace, deadline: float) -> bool:
    """Time what is left of a model's candidates, until the deadline (``time.monotonic``); whether nothing is left.

    Args:
        model: which.
        options: ``work``, ``results``, ``packed`` and ``searched`` folders, ``budgets`` of replays, ``points`` of each
            front, and ``rounds``: sessions of each plan.
        deadline: nothing is begun after it.
    """
    known = read_known(options.results / f"peers_known_{model.name}.json")
    plans = options.results / f"h200_plans_{model.name}.json"
    # FP32 in it: what has no switch, and what has no FP16 kernel.
    all_fp16 = read_measured_plans(plans).of_kind("uniform")[1].precision
    lacking = json.loads(plans.read_text()).get("without_kernel", {})
    candidates, crashes = _candidates(model, options, known, all_fp16, lacking)
    keys: dict[str, str | Path] = {"0" * len(known.groups): "0" * len(known.groups)}
    keys |= {candidate.key: candidate.plan for candidate in candidates}
    # These run nodes on the CPU, as operators without an FP16 kernel are FP16 in them.
    without_kernel = [k for k, group in enumerate(known.groups) if group in lacking.get("groups", ())]
    on_cpu = {
        candidate.key
        for candidate in candidates
        if (candidate.peer in CONVERTERS and model.without_kernel)
        or (isinstance(candidate.plan, str) and any(candidate.plan[k] == "1" for k in without_kernel))
    }
    begun = f"{time.time():.3f}"  # names this program, as process numbers come again
    with Bench(model, "final", options, which="held_out", plan_timeout_s=PLAN_TIMEOUT_S) as bench:
        if known.groups != tuple(group.id for group in bench.groups):
            raise SystemExit(f"{model.name}: the layer groups are not those of its files; collect again")
        sessions = Sessions(options.work / f"{model.name}.final" / "sessions.jsonl")
        for number in range(options.rounds):
            # Every plan that lacks some is in the next round, so that all are timed in the same processes. The first
            # round is in the order of importance, as time may end within it; others are shuffled, so that what a plan's
            # latency owes to the plan before it, or to its place in a round, differs from round to round.
            left = [key for key in keys if sessions.lacks(key, options.rounds)]
            if left and time.monotonic() < deadline:
                bench.renew()  # for the first round, too: that process has done other work before
            for k in np.random.default_rng(number).permutation(len(left)) if number else range(len(left)):
                if time.monotonic() < deadline:
                    sessions.add(_session(bench, left[k], keys[left[k]], begun))
        document = {
            **{k: v for k, v in bench.description().items() if k not in ("groups", "repetitions")},
            "held_out": True,
            "rounds": options.rounds,
            "processes": len({timing.baseline for timings in sessions.timings.values() for timing in timings}),
            "all_fp16": all_fp16,
            "without_kernel": lacking.get("operators", []),
            "made": [{**asdict(candidate), "plan": candidate.key} for candidate in candidates],
            "crashed": [{"peer": peer, "words": words} for peer, words in (crashes | sessions.failures).items()],
            "measured": sessions.figures(bench.record.baseline_ms, on_cpu),
        }
    save(options.results / f"h200_peers_{model.name}.json", document, lists=("made",))
    left = [key for key in keys if sessions.lacks(key, options.rounds)]
    print(f"{model.name}: {len(keys) - len(left)} of {len(keys)} plans measured, {len(crashes)} peers failed")
    return not left


def _candidates(
    model: PeerModel, options: argparse.Namespace, known: Known, all_fp16: str, lacking: Mapping[str, Any]
) -> tuple[list[Candidate], dict[str, str]]:
    """What is timed, in the order of importance, as time may end within the first round; peers that crashed."""
    rules = [Candidate("all-FP16", all_fp16)]
    for plan in lacking.get("plans", ())[:1]:
        rules.append(Candidate(f"all-FP16, {' and '.join(lacking['operators'])} too", plan["precision"]))
    name = "norm and softmax in FP32"
    rules += [Candidate(name, bits) for seed, bits in known.seeds if seed.removeprefix("seed: ") == name]
    path = options.results / f"peers_replay_{model.name}.json"
    replays = json.loads(path.read_text()) if path.exists() else {"runs": (), "bisected": ()}
    # The fronts of each sampler's first seed.
    fronts = [
        Candidate(NAMES[run["sampler"]], bits, int(budget), budget=int(budget))
        for run in replays["runs"]
        if run["seed"] == 0
        for budget, front in run.get("fronts", {}).items()
        if int(budget) in options.budgets
        for bits in front[: options.points]
    ]
    bisected = [Candidate(row["name"], row["plan"], row["builds"]) for row in replays["bisected"]]
    files, crashes = [], {}
    if (chosen := options.searched / f"{model.name}.onnx").exists():
        files.append(Candidate(NAMES["precision"], chosen, BUILDS, budget=BUILDS))
    for peer, outcome in converted(model, options.work, options.packed):
        if isinstance(outcome, Path):
            files.append(Candidate(peer, outcome))
        else:
            crashes[peer] = outcome
    ours = [candidate for candidate in fronts if candidate.peer == NAMES["precision"]]
    others = [candidate for candidate in fronts if candidate.peer != NAMES["precision"]]
    return [*rules, *ours, *files, *others, *bisected], crashes


def _session(bench: Bench, key: str, plan: str | Path, begun: str) -> dict[str, Any]:
    """Open a plan, or a model file, once more, and time it in turn with the baseline: a line of ``Sessions``."""
    result = bench.time_again(plan)
    if isinstance(result, Failure):
        return {"key": key, "failure": failure_words(result)[:300]}
    low, high = result.latency.ci95_ms
    sd = (high - low) / (2 * NORMAL_95) / result.latency.median_ms
    log_ratio = math.log(result.latency.median_ms / result.baseline.median_ms)
    timing = SessionTiming(f"{begun}.{bench.process}", log_ratio, sd)  # a session of the baseline for each process
    error = result.error.value("relative_l2")
    is_finite = result.error.non_finite == 0
    return {"key": key, "timing": timing.to_json(), "error": error if is_finite else 0.0, "finite": is_finite}


@dataclass
class Sessions:
    """What was measured of each plan so far, by key, kept in a file."""

    path: Path
    timings: dict[str, list[SessionTiming]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            self._take(json.loads(line))

    def add(self, entry: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        self._take(entry)

    def lacks(self, key: str, number: int) -> bool:
        """Whether a plan has fewer timings than this number, and may have more."""
        return key not in self.failures and len(self.timings.get(key, ())) < number

    def _take(self, entry: Mapping[str, Any]) -> None:
        key = entry["key"]
        if "failure" in entry:
            self.failures[key] = entry["failure"]
            return
        self.timings.setdefault(key, []).append(SessionTiming.from_json(entry["timing"]))
        self.errors[key] = entry["error"] if entry["finite"] else math.inf

    def figures(self, baseline_ms: float, apart: Collection[str] = ()) -> dict[str, dict[str, Any]]:
        """Latency with its 95 % interval, and the error, of every plan that was timed.

        Args:
            baseline_ms: of all-FP32.
            apart: keys of plans that differ from process to process in another way than the others, so that their
                spread says nothing of the others'.
        """
        figures = {}
        for is_apart in (False, True):
            part = {key: timings for key, timings in self.timings.items() if (key in apart) is is_apart}
            counts = Counter(timing.baseline for timings in part.values() for timing in timings)
            if not part:
                continue
            # Relative to the process that timed the most plans: one that crashed early says little of all the others.
            spread = SessionSpread(part, max(counts, key=lambda process: counts[process]))
            degrees = shared_degrees(part)
            for key, timings in part.items():
                estimate = spread.estimate(timings)
                low, high = replace(estimate, degrees=min(estimate.degrees, degrees)).interval()
                figures[key] = {
                    "latency_ms": rounded(baseline_ms * math.exp(estimate.log_ratio)),
                    "ci95_ms": [rounded(baseline_ms * low), rounded(baseline_ms * high)],
                    "error": rounded(self.errors[key]),
                    "sessions": len(timings),
                }
        return figures


def shared_degrees(timings: Timings) -> float:
    """Degrees of freedom of the spread between processes, as plans share what a process does.

    A process chooses kernels once, and every plan that runs them is faster or slower in it: of the digits model on an
    H200, 28 plans in four processes, one pattern had 85 % of the squares by which plans differed from process to
    process. Then the residuals of all plans say little more than those of one. In the residuals of plans and processes,
    shape (plans, processes), ``n = processes - 1`` patterns are possible. Where each plan varies by itself they are
    about equally strong; where all follow one pattern, that one has everything. The sum of the squared shares, scaled
    to 0 and 1 at these two ends, divides ``n``; the result is never less than ``n``, nor more than the residuals.

    Returns:
        ``n`` for two processes, of which nobody can tell. Processes that timed less than half of the plans are left
        out; 1 where fewer than two are left, and infinite for a single process, which says nothing of others.
    """
    rows = [{timing.baseline: timing.log_ratio for timing in sessions} for sessions in timings.values()]
    counts = Counter(process for row in rows for process in row)
    processes = [process for process, count in counts.items() if 2 * count >= len(rows)]
    values = np.array([[row[process] for process in processes] for row in rows if set(processes) <= set(row)])
    n = len(processes) - 1
    if n < 1 or len(values) < 2:
        return 1.0 if len(counts) > 1 else math.inf
    residuals = values - values.mean(0) - values.mean(1, keepdims=True) + values.mean()
    strengths = np.linalg.svd(residuals, compute_uv=False)[:n] ** 2
    if n == 1 or strengths.sum() <= 0.0:
        return float(n)
    squared = float(np.sum((strengths / strengths.sum()) ** 2))
    alike = (squared - 1.0 / n) / (1.0 - 1.0 / n)
    return n / max(alike, 1.0 / (len(values) - 1))
