"""Searches that are killed again and again, on a machine where a fifth of the jobs fail: what is lost by that?

    python -m benchmarks.chaos --runs 30 --jobs 2 --json results/chaos.json

Each run is a search of a small model, which is killed with SIGKILL at random moments (the parent, its worker, or
both; at least once while the front is confirmed) and started again until it ends by itself. A fault meets 20 % of the
jobs (``benchmarks.chaos_jobs.FAULTS``), never two in a row, and none is any plan's doing. All is drawn from the
number of the run. Wanted: nothing lost, repeated, dropped, hung or left, and in every run at least 0.99 of the median
hypervolume of undisturbed searches. The toolchain is the tests' fake one, whose latencies are exact to 1e-4.

    lost         evaluations and confirmations that the record held when a kill came, and does not hold at the end;
                 and what the record lacks of the budget
    repeated     measurements whose result was there already, other than the job in flight at a kill
    dropped      plans that the record calls failed, and points of the front that a confirmation dropped
    hangs        processes that neither ended nor did anything for a minute
    orphans      processes that outlived the search by more than five seconds
    left         files that an undisturbed search does not leave; logs are kept
    gave up      searches that ended with an error; they are started again
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]

from benchmarks.chaos_session import Session
from benchmarks.common import rounded, save
from mptune.errors import MptuneError
from mptune.rundir import read_run
from mptune.tuning.front import Front
from mptune.tuning.result import front_of, read_record
from tests.graph import models

MARK = "MPTUNE_CHAOS"
"""Environment variable that every process of a run has, so that orphans are found."""

PROGRAM = "from benchmarks.chaos_session import main; main()"
"""Imported, so that the worker finds the jobs by the name of their module."""

KINDS = ("parent", "worker", "both")
HANG_S = 60.0
ORPHAN_S = 5.0
MOST_SESSIONS = 20
GOAL = 0.99
COUNTS = ("faults", "sessions", "lost", "repeated", "dropped", "hangs", "orphans", "unconfirmed", "left", "gave_up")

Line = tuple[int, str, str, str]
"""Of the diary: session, state, what, plan."""


@dataclass
class Tally:
    """What became of one run; see the module."""

    run: int
    kills: Counter[str] = field(default_factory=Counter)
    faults: int = 0
    sessions: int = 0
    evaluations: int = 0
    lost: int = 0
    repeated: int = 0
    dropped: int = 0
    hangs: int = 0
    orphans: int = 0
    left: list[str] = field(default_factory=list)
    gave_up: list[str] = field(default_factory=list)
    unconfirmed: int = 0
    hypervolume: float = 0.0
    seconds: float = 0.0

    @property
    def is_sound(self) -> bool:
        """Whether nothing was lost, the hypervolume aside."""
        return not (self.lost or self.repeated or self.dropped or self.hangs or self.orphans or self.left)


def sums(tallies: Sequence[Tally]) -> dict[str, int]:
    """Of each of ``COUNTS``, over runs."""
    values = {name: [getattr(tally, name) for tally in tallies] for name in COUNTS}
    return {name: sum(v if isinstance(v, int) else len(v) for v in column) for name, column in values.items()}


@dataclass(frozen=True)
class Kill:
    """A kill to come, of one of ``KINDS``: when so many jobs of the run were done, and some seconds later."""

    kind: str
    jobs: int
    delay_s: float


@dataclass(frozen=True)
class Known:
    """What a record held at one time: evaluations and confirmations, with their errors."""

    evaluations: dict[str, Any]
    confirmations: dict[str, Any]
    failed: int = 0

    def missing_in(self, later: Known) -> int:
        pairs = ((self.evaluations, later.evaluations), (self.confirmations, later.confirmations))
        return sum(key not in now or now[key] != value for then, now in pairs for key, value in then.items())


def plan_kills(seed: int, count: int, first: int, jobs: int) -> list[Kill]:
    """Kills spread over a run that does so many jobs, the last one while the front is confirmed.

    Args:
        seed: of the draw.
        count: how many kills.
        first: jobs before the first confirmation.
        jobs: of an undisturbed run.
    """
    generator = random.Random(f"kills {seed}")
    times = [*(generator.randrange(jobs) for _ in range(count - 1)), generator.randrange(first, jobs)]
    kills = []
    for at in sorted(times):
        if at < first and generator.random() < 0.2:  # by time, so that a process is killed while it starts, too
            kills.append(Kill(generator.choice(KINDS), 0, generator.uniform(0, 2.5)))
        else:
            kills.append(Kill(generator.choice(KINDS), at, generator.uniform(0, 0.06)))
    return kills


class Run:
    """One run: processes that are killed and started again until the search ends by itself."""

    def __init__(self, options: argparse.Namespace, number: int, kills: Sequence[Kill] | None) -> None:
        """``kills`` is None for a run without kills and faults."""
        self.folder = options.work / f"{'undisturbed' if kills is None else 'run'}{number}"
        self.diary = self.folder / "diary"
        self.tally = Tally(number)
        self._options, self._kills = options, list(kills or ())
        self._fault_rate = 0.0 if kills is None else options.faults
        self._killed: list[int] = []
        self._known: list[Known] = []
        self._output = ""
        (self.folder / "tmp").mkdir(parents=True)
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        self._environment = {**os.environ, MARK: str(self.folder), "TMPDIR": str(self.folder / "tmp"), **threads}

    def finish(self, usual: Collection[str] = ()) -> Tally:
        """Go on until the search ends by itself, and count; ``usual`` are the files that a search leaves."""
        started = time.monotonic()
        while self.tally.sessions < MOST_SESSIONS and not self._session():
            pass
        self.tally.seconds = time.monotonic() - started
        self._count(usual)
        return self.tally

    def lines(self) -> list[Line]:
        """The diary."""
        if not self.diary.exists():
            raise SystemExit(f"run {self.tally.run} never began: {self.tally.gave_up[-1:]}")
        return [tuple(json.loads(line)) for line in self.diary.read_text().splitlines()]

    def files(self) -> set[str]:
        """Files of the run directory by their names in it, and of the temporary folder."""
        roots = {self.folder / "model.mptune": self.folder / "model.mptune", self.folder / "tmp": self.folder}
        paths = ((path, start) for root, start in roots.items() for path in root.rglob("*"))
        return {str(path.relative_to(start)) for path, start in paths if path.is_file()}

    def _session(self) -> bool:
        """Start a process and watch it to its end. Returns whether it finished the search."""
        options, tally = self._options, self.tally
        paths = (options.work / "model.onnx", options.work / "data.npz", self.folder / "model.mptune", self.diary)
        given = {name: getattr(options, name) for name in ("budget", "confirm_points", "job_s", "timeout_s")}
        session = Session(*map(str, paths), tally.run, tally.sessions, fault_rate=self._fault_rate, **given)
        tally.sessions += 1
        file = self.folder / "session.json"
        file.write_text(json.dumps(asdict(session)))
        with (self.folder / "output").open("w+") as output, (self.folder / "errors").open("w+") as errors:
            command = [sys.executable, "-c", PROGRAM, str(file)]
            process = subprocess.Popen(command, env=self._environment, stdout=output, stderr=errors)
            was_killed = self._watch(process)
            for stream in (output, errors):
                stream.seek(0)
            self._output, words = output.read(), errors.read().strip().splitlines()
        # Processes that outlive the search are counted, and ended.
        deadline = time.monotonic() + ORPHAN_S
        while (alive := _marked(str(self.folder))) and time.monotonic() < deadline:
            time.sleep(0.05)
        tally.orphans += len(alive)
        _kill(alive)
        if was_killed:
            self._killed.append(session.number)
            self._known.append(self._read()[0])
        elif process.returncode:
            tally.gave_up.append(words[-1] if words else f"status {process.returncode}")
        return not was_killed and process.returncode == 0

    def _watch(self, process: subprocess.Popen[bytes]) -> bool:
        """Kill what is to be killed when its time comes. Returns whether the process itself was killed."""
        last, size = time.monotonic(), 0
        while process.poll() is None:
            diary = self.diary.read_bytes() if self.diary.exists() else b""
            if len(diary) != size:
                size, last = len(diary), time.monotonic()
            if time.monotonic() - last > HANG_S + self._options.timeout_s:
                self.tally.hangs += 1
                process.kill()
                process.wait()
                return True
            if self._kills and diary.count(b'"done"') >= self._kills[0].jobs:
                kill = self._kills[0]
                time.sleep(kill.delay_s)
                workers = _workers_of(process.pid)
                if kill.kind == "parent" or workers:  # else: wait for a worker
                    self._kills.pop(0)
                    if process.poll() is not None:
                        break
                    self.tally.kills[kill.kind] += 1
                    if kill.kind != "worker":
                        process.kill()
                    _kill(workers if kill.kind != "parent" else ())
                    if kill.kind != "worker":
                        process.wait()
                        return True
            time.sleep(0.004)
        return False

    def _read(self) -> tuple[Known, Front | None]:
        """What the record holds now, and its front; nothing where there is none yet."""
        try:
            directory, file = read_run(self.folder / "model.mptune")
            with contextlib.closing(read_record(directory, file)) as record:
                notes = record.notes("confirm:")
                known = Known(
                    {e.plan.fingerprint: e.error.to_json() for e in record.evaluations()},
                    {key: note["error"] for key, note in notes.items() if "error" in note},
                    len(record.failures()),
                )
                return known, front_of(directory, file, record)
        except MptuneError:
            return Known({}, {}), None

    def _count(self, usual: Collection[str]) -> None:
        tally, lines = self.tally, self.lines()
        known, front = self._read()
        tally.evaluations = len(known.evaluations)
        tally.lost = sum(earlier.missing_in(later) for earlier, later in pairwise([*self._known, known]))
        tally.faults = sum(state == "failed" for _, state, _, _ in lines)
        tally.repeated = sum(repeated(lines, known, self._killed).values())
        tally.dropped = known.failed
        if front is None:
            tally.lost += self._options.budget
            return
        converged = any(words in self._output for words in ("no plan is expected", "every plan"))
        tally.lost += 0 if converged else max(0, self._options.budget - front.evaluations)
        tally.dropped += sum("dropped" in warning for warning in front.warnings)
        tally.unconfirmed = sum(not point.remeasured for point in front.points)
        tally.hypervolume = front.hypervolume
        if usual:
            tally.left = sorted(name for name in self.files() - set(usual) if not name.startswith("logs/"))


def repeated(lines: Sequence[Line], known: Known, killed: Sequence[int]) -> dict[tuple[str, str], int]:
    """Measurements beyond those that the record holds, by plan and samples; less those in flight at kills."""
    done = Counter((what, plan) for _, state, what, plan in lines if state == "done" and what in ("search", "held_out"))
    held = Counter(("search", plan) for plan in known.evaluations)
    held.update(("held_out", key.split(":")[1]) for key in known.confirmations)
    # The last line of a process that was killed: begun (its end is no line), or done and not written down yet.
    last = {session: (what, plan) for session, _, what, plan in lines}
    held.update(last[session] for session in killed if session in last)
    return {key: count - held[key] for key, count in done.items() if count > held[key]}


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _workers_of(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return [child for child in psutil.Process(pid).children() if "mptune.processes" in " ".join(child.cmdline())]
    return []


def _marked(mark: str) -> list[psutil.Process]:
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                processes.append(process)
    return processes


def save_model(path: Path) -> None:
    """Twelve products, every other one with a residual: twelve layer groups."""
    nodes, x = [], "x"
    for k in range(12):
        nodes.append(models.node("MatMul", [x, "w"], f"m{k}", f"/blocks.{k // 6}/fc{k}/MatMul"))
        if k % 2:
            nodes.append(models.node("Add", [f"m{k}", x], f"r{k}", f"/blocks.{k // 6}/fc{k}/Add"))
        x = nodes[-1].output[0]
    weights = [models.weight("w", 16, 16)]
    proto = models.model(nodes, [models.value("x", ["n", 16])], [models.value(x, ["n", 16])], weights)
    path.write_bytes(proto.SerializeToString())


def measure(options: argparse.Namespace) -> tuple[list[Tally], float]:
    """All runs, and the median hypervolume of the undisturbed ones."""
    options.work.mkdir(parents=True, exist_ok=True)
    save_model(options.work / "model.onnx")
    np.savez(options.work / "data.npz", x=np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32))
    with ThreadPoolExecutor(options.jobs) as pool:
        quiet = [Run(options, number, None) for number in range(max(1, options.undisturbed))]
        volumes = [tally.hypervolume for tally in pool.map(Run.finish, quiet)]
        median = statistics.median(volumes)
        print(f"undisturbed: hypervolume {median:.4f}, {min(volumes):.4f} to {max(volumes):.4f} in {len(quiet)} runs")
        jobs = [what for _, state, what, _ in quiet[0].lines() if state == "done"]
        usual = set[str]().union(*(run.files() for run in quiet))

        def disturbed(number: int) -> Tally:
            run = Run(options, number, plan_kills(number, options.kills, jobs.index("held_out"), len(jobs)))
            tally = run.finish(usual)
            words = ", ".join(f"{name} {count}" for name, count in sums([tally]).items() if count)
            end = f"{words}; {tally.hypervolume:.4f}, {tally.seconds:.1f} s"
            print(f"run {number}: {dict(tally.kills)}, {end}", flush=True)
            if tally.is_sound and not options.keep:
                shutil.rmtree(run.folder, ignore_errors=True)
            return tally

        return list(pool.map(disturbed, range(options.runs))), median


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--undisturbed", type=int, default=9, help="runs without kills and faults")
    parser.add_argument("--kills", type=int, default=4, help="in each run")
    parser.add_argument("--faults", type=float, default=0.2, help="share of the jobs that meet a fault")
    parser.add_argument("--budget", type=int, default=24)
    parser.add_argument("--confirm-points", type=int, default=6)
    parser.add_argument("--job-s", type=float, default=0.01, help="how long a job of the fake toolchain takes")
    parser.add_argument("--timeout-s", type=float, default=3.0, help="of a job")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--work", type=Path, default=None, help="keep the runs here that are not sound")
    parser.add_argument("--keep", action="store_true", help="keep all")
    parser.add_argument("--json", type=Path, default=None)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="mptune-chaos-") as folder:
        options.work = (options.work or Path(folder)).resolve()
        tallies, median = measure(options)
    short = [t.run for t in tallies if not t.hypervolume >= GOAL * median]
    for tally in tallies:
        for text in (*tally.left, *tally.gave_up):
            print(f"run {tally.run}: {text}")
    kills = dict(sum((tally.kills for tally in tallies), Counter()))
    counts = sums(tallies)
    least = min(tally.hypervolume for tally in tallies) / median if median else float("nan")
    words = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.items())
    print(f"{len(tallies)} runs, kills: {kills}, {words}")
    print(f"least hypervolume: {least:.4f} of the undisturbed median; below {GOAL}: {short or 'none'}")
    figures = {"kills": kills, **counts, "undisturbed": rounded(median), "least": rounded(least)}
    save(options.json, {**figures, "runs": [{**vars(tally), "kills": dict(tally.kills)} for tally in tallies]})
    return 0 if all(tally.is_sound for tally in tallies) and not short else 1


if __name__ == "__main__":
    sys.exit(main())
