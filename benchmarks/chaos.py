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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
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


@dataclass(frozen=True)
class Kill:
    """A kill to come: when so many jobs of the run have been done, or so long after the process began.

    Attributes:
        kind: of ``KINDS``.
        jobs: done since the run began; None where time decides.
        delay_s: after that.
    """

    kind: str
    jobs: int | None
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
        by_time = at < first and generator.random() < 0.2
        delay_s = generator.uniform(0, 2.5) if by_time else generator.uniform(0, 0.06)
        kills.append(Kill(generator.choice(KINDS), None if by_time else at, delay_s))
    return kills


class Run:
    """One run: processes that are killed and started again."""

    def __init__(self, folder: Path, number: int, options: argparse.Namespace, kills: Sequence[Kill]) -> None:
        self.folder = folder
        self.number = number
        self.out = folder / "model.mptune"
        self.diary = folder / "diary"
        self.tally = Tally(number)
        self._options = options
        self._kills = list(kills)
        self._killed: list[int] = []
        self._known: list[Known] = []
        self._output = ""
        (folder / "tmp").mkdir(parents=True)
        self._environment = {
            **os.environ,
            MARK: str(folder),
            "TMPDIR": str(folder / "tmp"),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }

    def finish(self) -> Tally:
        """Go on until the search ends by itself, and count."""
        started = time.monotonic()
        while self.tally.sessions < MOST_SESSIONS and not self._session():
            pass
        self.tally.seconds = time.monotonic() - started
        self._count()
        return self.tally

    def jobs_done(self) -> int:
        """How many jobs of the run were finished so far."""
        with contextlib.suppress(FileNotFoundError):
            return self.diary.read_bytes().count(b'"done"')
        return 0

    def lines(self) -> list[tuple[int, str, str, str]]:
        """The diary."""
        if not self.diary.exists():
            raise SystemExit(f"run {self.number} never began: {self.tally.gave_up[-1:]}")
        return [tuple(json.loads(line)) for line in self.diary.read_text().splitlines()]

    # -- one process --------------------------------------------------------------------------------------------

    def _session(self) -> bool:
        """Start a process and watch it to its end. Returns whether it finished the search."""
        options, number = self._options, self.tally.sessions
        self.tally.sessions += 1
        session = Session(
            model=str(options.work / "model.onnx"),
            data=str(options.work / "data.npz"),
            out=str(self.out),
            diary=str(self.diary),
            seed=self.number,
            number=number,
            budget=options.budget,
            fault_rate=options.faults if self._options.disturbed else 0.0,
            confirm_points=options.confirm_points,
            job_s=options.job_s,
            timeout_s=options.timeout_s,
        )
        session.save(self.folder / "session.json")
        command = [sys.executable, "-c", PROGRAM, str(self.folder / "session.json")]
        with (self.folder / "output").open("w+") as output, (self.folder / "errors").open("w+") as errors:
            process = subprocess.Popen(command, env=self._environment, stdout=output, stderr=errors)
            is_over = self._watch(process)
            output.seek(0)
            self._output = output.read()
            errors.seek(0)
            said = errors.read().strip().splitlines()
        self._orphans()
        if not is_over:
            self._killed.append(number)
            self._known.append(self._read()[0])
            return False
        if process.returncode:
            self.tally.gave_up.append(said[-1] if said else f"status {process.returncode}")
        return process.returncode == 0

    def _watch(self, process: subprocess.Popen[bytes]) -> bool:
        """Kill what is to be killed when its time comes. Returns False where the process itself was killed."""
        begun = last = time.monotonic()
        size = -1
        while process.poll() is None:
            now = time.monotonic()
            grown = self.diary.stat().st_size if self.diary.exists() else 0
            if grown != size:
                size, last = grown, now
            if now - last > HANG_S + self._options.timeout_s:
                self.tally.hangs += 1
                process.kill()
                process.wait()
                return False
            if self._kills and self._is_due(self._kills[0], now - begun):
                kill = self._kills[0]
                if kill.jobs is not None:
                    time.sleep(kill.delay_s)
                workers = _workers_of(process.pid)
                if kill.kind == "parent" or workers:  # else: wait for a worker
                    self._kills.pop(0)
                    if self._kill(process, kill.kind, workers):
                        return False
            time.sleep(0.004)
        return True

    def _is_due(self, kill: Kill, seconds: float) -> bool:
        return seconds >= kill.delay_s if kill.jobs is None else self.jobs_done() >= kill.jobs

    def _kill(self, process: subprocess.Popen[bytes], kind: str, workers: Sequence[psutil.Process]) -> bool:
        if process.poll() is not None:
            return False
        self.tally.kills[kind] += 1
        if kind != "worker":
            process.kill()
        if kind != "parent":
            for worker in workers:
                with contextlib.suppress(psutil.Error):
                    worker.kill()
        if kind == "worker":
            return False
        process.wait()
        return True

    def _orphans(self) -> None:
        """Count the processes that outlive the search, and end them."""
        deadline = time.monotonic() + ORPHAN_S
        while (alive := _marked(str(self.folder))) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.tally.orphans += len(alive)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()

    # -- the count ----------------------------------------------------------------------------------------------

    def _read(self) -> tuple[Known, Front | None]:
        """What the record holds now, and its front; nothing where there is none yet."""
        try:
            directory, file = read_run(self.out)
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

    def _count(self) -> None:
        tally = self.tally
        known, front = self._read()
        tally.evaluations = len(known.evaluations)
        tally.lost = sum(earlier.missing_in(later) for earlier, later in pairwise([*self._known, known]))
        lines = self.lines()
        tally.faults = sum(state == "failed" for _, state, _, _ in lines)
        tally.repeated = sum(repeated(lines, known, self._killed).values())
        tally.dropped = known.failed
        if front is None:
            tally.lost += self._options.budget
            return
        spent = front.evaluations
        converged = any(word in self._output for word in ("no plan is expected", "every plan"))
        tally.lost += 0 if converged else max(0, self._options.budget - spent)
        tally.dropped += sum("dropped" in warning for warning in front.warnings)
        tally.unconfirmed = sum(not point.remeasured for point in front.points)
        tally.hypervolume = front.hypervolume
        tally.left = sorted(
            name for name in _files(self.folder) if name not in self._options.usual and not name.startswith("logs/")
        )


def repeated(
    lines: Sequence[tuple[int, str, str, str]], known: Known, killed: Sequence[int]
) -> dict[tuple[str, str], int]:
    """Measurements beyond those that the record holds, by plan and samples; less those in flight at kills."""
    done = Counter((what, plan) for _, state, what, plan in lines if state == "done" and what in ("search", "held_out"))
    held = Counter(("search", plan) for plan in known.evaluations)
    held.update(("held_out", key.split(":")[1]) for key in known.confirmations)
    # The last line of a process that was killed: begun (its end is no line), or done and not written down yet.
    last = {session: (what, plan) for session, _, what, plan in lines}
    held.update(last[session] for session in killed if session in last)
    return {key: count - held[key] for key, count in done.items() if count > held[key]}


def _files(folder: Path) -> Iterator[str]:
    """Files of the run directory by their names in it, process numbers left out, and of the temporary folder."""
    for root in (folder / "model.mptune", folder / "tmp"):
        for path in root.rglob("*"):
            if path.is_file():
                yield str(path.relative_to(folder / "model.mptune" if root.name != "tmp" else folder))


def _workers_of(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return [child for child in psutil.Process(pid).children() if "mptune.processes" in child.cmdline()]
    return []


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
    return found


def undisturbed(options: argparse.Namespace, number: int) -> Run:
    """A run without kills and faults."""
    quiet = argparse.Namespace(**{**vars(options), "disturbed": False, "usual": frozenset()})
    run = Run(options.work / f"undisturbed{number}", number, quiet, [])
    run.finish()
    return run


def disturbed(options: argparse.Namespace, first: int, jobs: int, number: int) -> Tally:
    """A run with both."""
    folder = options.work / f"run{number}"
    run = Run(folder, number, options, plan_kills(number, options.kills, first, jobs))
    tally = run.finish()
    print(_row(tally), flush=True)
    if tally.is_sound and not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return tally


COLUMNS = ("run", "kills", "faults", "processes", "lost", "repeated", "dropped", "hangs", "orphans", "left", "gave up")


def _row(tally: Tally) -> str:
    kills = sum(tally.kills.values())
    cells = [tally.run, kills, tally.faults, tally.sessions, tally.lost, tally.repeated, tally.dropped, tally.hangs]
    cells += [tally.orphans, len(tally.left), len(tally.gave_up)]
    text = "".join(f"{cell:>{len(name) + 2}}" for cell, name in zip(cells, COLUMNS, strict=True))
    return f"{text}  {tally.hypervolume:.4f}  {tally.seconds:5.1f} s"


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
        quiet = list(pool.map(partial(undisturbed, options), range(max(1, options.undisturbed))))
        volumes = [run.tally.hypervolume for run in quiet]
        median = statistics.median(volumes)
        print(f"undisturbed: hypervolume {median:.4f}, {min(volumes):.4f} to {max(volumes):.4f} in {len(quiet)} runs")
        whats = [what for _, state, what, _ in quiet[0].lines() if state == "done"]
        first, jobs = whats.index("held_out"), len(whats)
        options.usual = frozenset(name for run in quiet for name in _files(run.folder))
        options.disturbed = True
        print("".join(f"  {name}" for name in COLUMNS) + "  hypervolume")
        tallies = list(pool.map(partial(disturbed, options, first, jobs), range(options.runs)))
    return tallies, median


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
    kills = sum((tally.kills for tally in tallies), Counter())
    names = ("faults", "lost", "repeated", "dropped", "hangs", "orphans", "unconfirmed")
    sums = {name: sum(getattr(tally, name) for tally in tallies) for name in names}
    sums |= {name: sum(len(getattr(tally, name)) for tally in tallies) for name in ("left", "gave_up")}
    least = min(tally.hypervolume for tally in tallies) / median if median else float("nan")
    words = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in sums.items())
    print(f"{len(tallies)} runs, kills: {dict(kills)}, {words}")
    print(f"least hypervolume: {least:.4f} of the undisturbed median; below {GOAL}: {short or 'none'}")
    figures = {"kills": dict(kills), **sums, "undisturbed": rounded(median), "least": rounded(least)}
    runs = [{**vars(tally), "kills": dict(tally.kills)} for tally in tallies]
    save(options.json, {**figures, "runs": runs})
    return 0 if all(tally.is_sound for tally in tallies) and not short else 1


if __name__ == "__main__":
    sys.exit(main())
