"""Each peer's plans and each replay's front, built and timed in turn with the baseline; errors on held-out samples.

Every plan is opened several times, each time in another worker process, so that its interval holds what differs from
process to process (``mptune.engines.spread``, ``benchmarks.peers.shared``): a process chooses its kernels anew,
and two sessions of one process agree more closely than two of different ones. What was measured stays in a file of one
line a session: a later call goes on with it.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import read_measured_plans, rounded, save
from benchmarks.measuring import Bench
from benchmarks.peers.collect import PLAN_TIMEOUT_S
from benchmarks.peers.converters import CONVERTERS
from benchmarks.peers.known import read_known
from benchmarks.peers.models import PeerModel
from benchmarks.peers.own import Crashed, Made, bisect, calls, convert, unpack_all
from benchmarks.peers.replay import FINAL, LIMITS, MOST_POINTS, NAMES, bisection_name
from benchmarks.peers.shared import shared_degrees
from mptune.engines.base import Failure
from mptune.engines.spread import SessionSpread, SessionTiming


@dataclass
class Sessions:
    """What was measured of each plan so far, kept in a file. A key is a plan's bits, or the name of a model file."""

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

    @property
    def processes(self) -> int:
        """How many worker processes timed them."""
        return len({timing.baseline for sessions in self.timings.values() for timing in sessions})

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
        parts = [{k: v for k, v in self.timings.items() if (k in apart) is one} for one in (False, True)]
        return {key: figure for part in parts if part for key, figure in self._figures(part, baseline_ms).items()}

    def _figures(self, timings: Mapping[str, list[SessionTiming]], baseline_ms: float) -> dict[str, dict[str, Any]]:
        counts = Counter(timing.baseline for sessions in timings.values() for timing in sessions)
        # relative to the process that timed the most plans: one that crashed early says little of all the others
        spread = SessionSpread(timings, max(counts, key=lambda process: counts[process]))
        degrees = shared_degrees(timings)
        found = {}
        for key, sessions in timings.items():
            estimate = spread.estimate(sessions)
            low, high = replace(estimate, degrees=min(estimate.degrees, degrees)).interval()
            found[key] = {
                "latency_ms": rounded(baseline_ms * math.exp(estimate.log_ratio)),
                "ci95_ms": [rounded(baseline_ms * low), rounded(baseline_ms * high)],
                "error": rounded(self.errors[key]),
                "sessions": len(sessions),
            }
        return found


class Final:
    """The measurement of one model."""

    def __init__(
        self,
        model: PeerModel,
        work: Path,
        results: Path,
        *,
        provider: str,
        target: str,
        limit_s: float,
        packed: Path | None = None,
        budgets: Sequence[int] = FINAL,
        points: int = MOST_POINTS,
    ) -> None:
        self._packed, self._budgets, self._points = packed, budgets, points
        self._model, self._work, self._results = model, work, results
        self._provider, self._target = provider, target
        self._deadline = time.monotonic() + limit_s
        self._known = read_known(results / f"peers_known_{model.name}.json")
        plans = results / f"h200_plans_{model.name}.json"
        # FP32 in it: what has no switch, and what has no FP16 kernel
        self._fp16 = read_measured_plans(plans).of_kind("uniform")[1].precision
        self._without_kernel: Mapping[str, Any] = json.loads(plans.read_text()).get("without_kernel", {})
        self._begun = f"{time.time():.3f}"

    @property
    def _left_s(self) -> float:
        return self._deadline - time.monotonic()

    def run(self, out: Path, rounds: int, steps: Sequence[str]) -> bool:
        """Measure what is left; returns whether nothing is.

        Args:
            out: the file of figures, written after every round.
            rounds: sessions of each plan.
            steps: of "bisect" and "time".
        """
        made, crashed = self._candidates(with_bisect="bisect" in steps)
        options = self._model.options(self._work, "final", provider=self._provider, target=self._target)
        with Bench(options, which="held_out", plan_timeout_s=PLAN_TIMEOUT_S) as bench:
            if self._known.groups != tuple(group.id for group in bench.groups):
                raise SystemExit(f"{self._model.name}: the layer groups are not those of its files; collect again")
            sessions = Sessions(self._work / f"{self._model.name}.final" / "sessions.jsonl")
            keys = {_key(one): one.plan for one in made}
            keys = {"0" * len(self._known.groups): "0" * len(self._known.groups), **keys}
            for number in range(rounds if "time" in steps else 0):
                # every plan that lacks some is in the next round, so that all are timed in the same processes
                todo = [key for key in keys if sessions.lacks(key, rounds)]
                if not todo or self._left_s <= 0:
                    break
                bench.renew()  # for the first round, too: that process has done other work before
                for key in in_order(todo, number):
                    if self._left_s > 0:
                        measure(bench, sessions, key, keys[key], self._begun)
                self._save(out, bench, sessions, made, crashed, rounds)
            self._save(out, bench, sessions, made, crashed, rounds)
            left = [key for key in keys if sessions.lacks(key, rounds)]
        print(f"{self._model.name}: {len(keys) - len(left)} of {len(keys)} plans measured, {len(crashed)} peers failed")
        return not left

    # -- candidates -----------------------------------------------------------------------------------------------

    def _candidates(self, *, with_bisect: bool) -> tuple[list[Made], list[Crashed]]:
        model, data = self._model.make(self._work)
        if self._packed is not None:
            unpack_all(self._model, self._work, self._packed)
        folder = self._model.peers(self._work)
        rows = self._model.first_rows
        converted = [convert(name, model, data, rows, folder, excluded=ops) for name, ops in calls(self._model)]
        replayed = list(self._replayed())
        ours = [one for one in replayed if one.peer == NAMES["precision"]]
        others = [one for one in replayed if one.peer != NAMES["precision"]]
        # in the order of importance: time may end within the first round
        every = [*self._rules(), *ours, *converted, *others, *self._bisected(with_bisect)]
        return [one for one in every if isinstance(one, Made)], [one for one in every if isinstance(one, Crashed)]

    def _rules(self) -> Iterator[Made]:
        yield Made("all-FP16", self._fp16)
        for plan in self._without_kernel.get("plans", ())[:1]:
            yield Made(f"all-FP16, {' and '.join(self._without_kernel['operators'])} too", plan["precision"])
        for name, bits in self._known.seeds:
            if name.removeprefix("seed: ") == "norm and softmax in FP32":
                yield Made("norm and softmax in FP32", bits)

    def _bisected(self, allowed: bool) -> Iterator[Made | Crashed]:
        """Plans of the bisection for each error limit and both directions, on the search samples; else by the law."""
        note = self._work / f"{self._model.name}.final" / "bisected.json"
        if note.exists():
            for entry in json.loads(note.read_text()):
                yield Made(**entry)
            return
        if not allowed:
            replays = self._results / f"peers_replay_{self._model.name}.json"
            for entry in json.loads(replays.read_text()).get("bisected", ()) if replays.exists() else ():
                yield Made(entry["name"], entry["plan"], entry["builds"])
            return
        options = self._model.options(self._work, "bench", provider=self._provider, target=self._target)
        found = []
        with Bench(options) as bench:
            whole = bench.measure(self._fp16).get("error", math.inf)
            if not math.isfinite(whole):
                yield Crashed("bisection", "all-FP16 has no finite error to take limits from")
                return
            for limit in LIMITS:
                for forward in (True, False):
                    if self._left_s <= 0:
                        return  # begun anew in the next call, which finds the builds in the bench's record
                    name = bisection_name(limit, forward=forward)
                    found.append(self._bisect(bench, name, limit * whole, forward=forward))
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps([asdict(one) for one in found]))
        yield from found

    def _bisect(self, bench: Bench, name: str, limit: float, *, forward: bool) -> Made:
        free = [k for k, is_free in enumerate(self._known.is_free) if is_free]

        def is_good(bits: str) -> bool:
            entry = bench.measure(bits)
            return bool(entry["finite"]) and entry["error"] <= limit

        plan, builds = bisect(free, len(self._known.groups), is_good, forward=forward)
        return Made(name, plan, builds)

    def _replayed(self) -> Iterator[Made]:
        """The fronts of the first seed's replays, at each budget."""
        path = self._results / f"peers_replay_{self._model.name}.json"
        for run in json.loads(path.read_text())["runs"] if path.exists() else ():
            if run["seed"] == 0 and "failure" not in run:
                fronts = {budget: run["fronts"][budget] for budget in run["fronts"] if int(budget) in self._budgets}
                for budget, front in fronts.items():
                    for bits in front[: self._points]:
                        yield Made(NAMES[run["sampler"]], bits, int(budget), budget=int(budget))

    def _on_cpu(self, made: Sequence[Made]) -> set[str]:
        """Keys of what runs nodes on the CPU, as operators without an FP16 kernel are FP16 in it."""
        lacking = [k for k, g in enumerate(self._known.groups) if g in self._without_kernel.get("groups", ())]
        return {
            _key(one)
            for one in made
            if (one.peer in CONVERTERS and self._model.without_kernel)
            or (isinstance(one.plan, str) and any(one.plan[k] == "1" for k in lacking))
        }

    # -- the file -------------------------------------------------------------------------------------------------

    def _save(
        self, out: Path, bench: Bench, sessions: Sessions, made: Sequence[Made], crashed: Sequence[Crashed], rounds: int
    ) -> None:
        document = {
            **{k: v for k, v in bench.description().items() if k not in ("groups", "repetitions")},
            "held_out": True,
            "rounds": rounds,
            "processes": sessions.processes,
            "all_fp16": self._fp16,
            "without_kernel": self._without_kernel.get("operators", []),
            "made": [{**asdict(one), "plan": _key(one)} for one in made],
            "crashed": [asdict(one) for one in crashed] + [
                {"peer": key, "words": words} for key, words in sessions.failures.items()
            ],
            "measured": sessions.figures(bench.record.baseline_ms, self._on_cpu(made)),
        }  # fmt: skip
        save(out, document, lists=("made",))


def measure(bench: Bench, sessions: Sessions, key: str, plan: str | Path, begun: str) -> None:
    """Open a plan, or a model file, once more, time it in turn with the baseline, and keep what came of it.

    Args:
        bench: of the model.
        sessions: takes the timing.
        key: of the plan.
        plan: its bits, or its model file.
        begun: names the program that measures, as process numbers come again.
    """
    found = bench.time_again(plan)
    if isinstance(found, Failure):
        words = f"{found.kind.value} ({found.stage.value}): {found.message}"
        sessions.add({"key": key, "failure": words[:300]})
        return
    ratio = found.latency.median_ms / found.baseline.median_ms
    low, high = found.latency.ci95_ms
    sd = (high - low) / (2 * 1.96) / found.latency.median_ms
    session = f"{begun}.{bench.process}"  # of the baseline: one for each worker process
    timing = SessionTiming(session, math.log(ratio), sd)
    error, finite = found.error.value("relative_l2"), found.error.non_finite == 0
    sessions.add(
        {
            "key": key,
            "timing": timing.to_json(),
            "error": error if math.isfinite(error) else 0.0,
            "finite": finite,
        }
    )


def in_order(keys: Sequence[str], number: int) -> list[str]:
    """The order of a round: of importance in the first, as time may end within it; shuffled in the others.

    So what a plan's latency owes to the plan before it, or to its place in a round, differs from round to round.
    """
    return [keys[k] for k in np.random.default_rng(number).permutation(len(keys))] if number else list(keys)


def _key(one: Made) -> str:
    return one.plan if isinstance(one.plan, str) else f"file: {one.peer}"
