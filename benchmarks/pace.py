"""How long searches take, and for what: two checkouts in turn on the same machine, the same models, the same seeds.

    mkdir /tmp/before && git archive a90c339 | tar -x -C /tmp/before
    python -m benchmarks.pace --before /tmp/before --work /tmp/pace --limit 570 --json pace.json

A search runs in a process of its own, which imports one checkout, in a new run directory, and prints where its seconds
went: each call into the toolchain, within it each stage that the worker announces, and what the rest was for by cause
(the main thread is looked at every 3 ms). Every search is a line in
``searches.jsonl`` in the work folder: the same command goes on where it was, and begins nothing that would not end
within ``--limit``. Digits is the model in ``benchmarks/models``; any other is made by its script there (torch,
torchvision), or is the path of an ONNX file with its samples beside it (``.npz``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
SIDES = ("after", "before")
OWN_FILES = {"digits_vit": (HERE / "models" / "digits_vit.onnx", HERE / "models" / "digits_calib.npz")}
BATCH = {"digits_vit": 8}
EXPECTED_S = {("swin_t", "before"): 345.0, ("swin_t", "after"): 190.0, ("digits_vit", "before"): 180.0}
"""What a search of 50 plans takes on an H200, with room; nothing is begun that would not end within the limit."""
MADE_WITH = {"swin_t": ("--batch", "8", "--samples", "16")}
WORK = ("builds, measuring", "emulation")
"""The parts that the ratio of all time to them is taken of: what a search is there for. A build begins when its typed
model is written, and holds the start of the worker process that it waits for. All time is that of the whole call, its
imports among it. What runs beside another part costs nothing unless it is waited for: the parts never add up to more
than all time, and the wait counts where it is (for ranges that are observed beside the reference: "reference, ranges").
"""
FP32 = "reference, ranges"
"""Runs of the model in FP32 before the first build. ``ratio_with_fp32`` counts them as work, too, as ``ratio`` did in
files of before 23 November."""


PERIOD_S = 0.003
"""Between two looks at the main thread."""

IMPORTS = "imports"
OTHER = "other"

CAUSES: tuple[tuple[str, str], ...] = (
    ("tuning/steps/limits", "limits: time, disk"),
    ("tuning/steps/remeasure", "confirmation: what to measure"),
    ("tuning/record/", "study: asking, telling, writing"),
    ("tuning/steps/knowledge", "sampler: prior"),
    ("tuning/steps/prior", "sampler: prior"),
    ("tuning/measuring:make_tuner", "sampler: prior"),
    ("processes/parent:end", "processes: end"),
    ("processes/parent:kill", "processes: end"),
    ("engines/toolchains/choose", "GPU: detect, choose the target"),
    ("targets/detect", "GPU: detect, choose the target"),
    ("engines/environment", "GPU: detect, choose the target"),
    ("arguments:loaded_model", "model: read, check, type"),
    ("graph/groups", "model: layer groups"),
    ("tuning/facts:find_space", "model: hazards, search space"),
    ("tuning/measuring:open_record", "study: open"),
    ("tuning/copies", "run directory: copy of the model"),
    ("tuning/runs/result", "front: reasons, choice"),
    ("reporting/", "files of the finished run"),
    ("tuning/samples", "samples: read, check, write"),
    ("data/", "samples: read, check, write"),
    ("rundir", "run directory: open, write"),
    ("tuning/search", "run directory: open, write"),
)
"""A module of mptune, a folder of modules, or a function in one, and what a search does there; the first that fits. A
look counts for the innermost call on the stack that has a cause."""


class Causes:
    """Seconds of each cause, while ``is_counted`` holds for the main thread.

    Attributes:
        seconds: of each cause.
        is_counted: set by whoever knows what the main thread is at.
    """

    def __init__(self) -> None:
        """Nothing is looked at before ``start``."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.is_counted = True
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, args=(threading.main_thread().ident,), daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._ended.set()
        self._thread.join()

    def _look(self, thread: int) -> None:
        last = time.perf_counter()
        while not self._ended.wait(PERIOD_S):
            frame, now = sys._current_frames().get(thread), time.perf_counter()
            if self.is_counted and frame is not None:
                self.seconds[cause_of(frame)] += now - last
            last = now


def cause_of(frame: FrameType | None) -> str:
    """The cause of the innermost call that has one."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_find_and_load" and "importlib" in code.co_filename:
            return IMPORTS
        _, package, module = code.co_filename.rpartition("/mptune/")
        if package:
            place = f"{module.removesuffix('.py')}:{code.co_name}"
            cause = next((cause for name, cause in CAUSES if _names(name, place)), None)
            if cause is not None:
                return cause
        frame = frame.f_back
    return OTHER


def _names(name: str, place: str) -> bool:
    return place == name if ":" in name else place.startswith(name if name.endswith("/") else f"{name}:")


class Clock:
    """Seconds in each part, without those of the parts that it calls, and in each stage of each kind of job."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.stages: defaultdict[str, float] = defaultdict(float)
        self._running: list[str] = []
        self._since = time.perf_counter()
        self._job, self._stage, self._stage_since = "", "", 0.0
        self.causes = Causes()

    def _switch(self) -> None:
        now = time.perf_counter()
        self.seconds[self._running[-1] if self._running else "the rest"] += now - self._since
        self._since = now

    def _goes_on(self) -> None:
        """Causes are counted of what is in no part."""
        self.causes.is_counted = not self._running

    def around(self, part: str, owner: type, name: str) -> Any:
        """A patch that times a method."""
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._running.append(part)
            self._goes_on()
            self.calls[f"{part}: {name}"] += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._switch()
                self._running.pop()
                self._goes_on()

        return mock.patch.object(owner, name, timed)

    def stage(self, name: str) -> None:
        """The job in work enters a stage, or ends where the name is empty."""
        now = time.perf_counter()
        if self._stage:
            self.stages[f"{self._job}: {self._stage}"] += now - self._stage_since
        self._stage, self._stage_since = name, now

    def around_jobs(self, process: type, worker: type) -> list[Any]:
        """Patches that time the stages of jobs, as the worker announces them."""
        call = worker._call  # type: ignore[attr-defined]
        name = "_receive" if hasattr(process, "_receive") else "_messages"  # in older checkouts several at once
        receive = getattr(process, name)

        def watch(message: Any) -> Any:
            if message[0] == "stage" and threading.current_thread() is threading.main_thread():
                self.stage(str(getattr(message[1], "value", message[1])))
            return message

        def watched(of: Any) -> Any:
            received = receive(of)
            return watch(received) if name == "_receive" else map(watch, received)

        def called(of: Any, job: Any, timeout_s: float | None = None) -> Any:
            if threading.current_thread() is not threading.main_thread():  # beside what the search does
                return call(of, job, timeout_s)
            self._job = type(job).__name__
            self.calls[f"job: {self._job}"] += 1
            self.stage("send, start")
            try:
                return call(of, job, timeout_s)
            finally:
                self.stage("")

        return [mock.patch.object(process, name, watched), mock.patch.object(worker, "_call", called)]

    @contextlib.contextmanager
    def running(self, toolchain: type | None = None) -> Iterator[None]:
        """Times a search of whichever checkout is imported, on ONNX Runtime, or on another toolchain of a class."""
        from mptune.engines.toolchains.reference import ReferenceModel
        from mptune.engines.toolchains.toolchain import Toolchain
        from mptune.processes import parent
        from mptune.tuning.sampler.precision import PrecisionSampler

        parts: tuple[tuple[str, type, str], ...] = (
            ("thinking", PrecisionSampler, "sample_relative"),
            ("emulation", Toolchain, "emulate"),
            ("builds, measuring", Toolchain, "evaluate"),
            ("builds, measuring", Toolchain, "reopen"),
            ("builds, measuring", Toolchain, "missing_kernels"),
            ("builds, measuring", Toolchain, "fused_nodes"),
            ("builds, measuring", Toolchain, "restart"),
            (FP32, ReferenceModel, "reference"),
            (FP32, ReferenceModel, "observe"),
        )
        if toolchain is not None:
            parts = tuple(
                (part, owner if owner is PrecisionSampler else toolchain, name) for part, owner, name in parts
            )
        with contextlib.ExitStack() as stack:
            for part in parts:
                if hasattr(part[1], part[2]):  # not in every older checkout
                    stack.enter_context(self.around(*part))
            process = getattr(parent, "_Process", None) or parent.WorkerProcess  # the first in older checkouts
            for patch in self.around_jobs(process, parent.Worker):
                stack.enter_context(patch)
            self._since = time.perf_counter()
            self.causes.start()
            try:
                yield
            finally:
                self.causes.stop()
            self._switch()


def search(options: argparse.Namespace) -> dict[str, Any]:
    """One search, in this process."""
    import mptune

    clock = Clock()
    name, path, data = options.one
    out = options.work / f"{name}-{options.side}-{options.seed}.mptune"
    shutil.rmtree(out, ignore_errors=True)
    started = time.perf_counter()
    with clock.running():
        front = mptune.search(
            path,
            data=data,
            out=out,
            budget=options.budget,
            target=options.target,
            metric="relative_l2",
            batch=BATCH.get(name, 1),
            seed=options.seed,
            progress=False,
        )
    whole = time.perf_counter() - started
    work = sum(clock.seconds[part] for part in WORK)
    return {
        "model": name,
        "side": options.side,
        "seed": options.seed,
        "budget": options.budget,
        "package": str(Path(mptune.__file__ or "").parent),
        "device": front.device,
        "seconds": round(whole, 2),
        "plans": front.evaluations,
        "failures": front.failures,
        "points": len(front.points),
        "remeasured": sum(point.remeasured for point in front.points),
        "hypervolume": front.hypervolume,
        "fp32_ms": None if front.fp32 is None else front.fp32.latency.median_ms,
        "front": [[point.latency.median_ms, *point.latency.ci95_ms, point.error_value] for point in front.points],
        "ratio": round(whole / work, 3) if work else None,
        "ratio_with_fp32": round(whole / (work + clock.seconds[FP32]), 3) if work else None,
        "parts": _rounded(clock.seconds),
        "causes": _rounded(clock.causes.seconds),
        "stages": _rounded(clock.stages),
        "calls": dict(clock.calls),
        "warnings": list(front.warnings)[:8],
    }


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(taken, 2) for name, taken in sorted(seconds.items(), key=lambda item: -item[1])}


def make_model(name: str, work: Path) -> tuple[str, Path, Path]:
    """Name and files of a model."""
    if name in OWN_FILES:
        return name, *OWN_FILES[name]
    path = Path(name) if name.endswith(".onnx") else work / f"{name}.onnx"
    data = path.with_suffix(".npz")
    if not (path.exists() and data.exists()):
        command = [sys.executable, "-m", f"benchmarks.models.{name}", "--out", str(path.with_suffix(""))]
        subprocess.run([*command, *MADE_WITH.get(name, ())], check=True, cwd=HERE.parent, stdout=subprocess.DEVNULL)
    return path.stem, path.resolve(), data.resolve()


def start(options: argparse.Namespace, model: tuple[str, Path, Path], side: str, seed: int) -> dict[str, Any]:
    """One search, in a process that imports one checkout."""
    root = HERE.parent if side == "after" else options.before.resolve()
    paths = [str(root), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    command = [sys.executable, "-P", str(HERE / "pace.py"), "--one", *map(str, model), "--side", side]
    command += ["--seed", str(seed), "--budget", str(options.budget), "--target", options.target]
    command += ["--work", str(options.work)]
    log = options.work / f"{model[0]}-{side}-{seed}.log"
    with log.open("w") as errors:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(command, env=environment, cwd=root, stdout=subprocess.PIPE, stderr=errors, text=True)
    if done.returncode:
        raise SystemExit(f"{model[0]}, {side}, seed {seed}: exit status {done.returncode}\n{log.read_text()[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if Path(found["package"]) != root / "mptune":
        raise SystemExit(f"imported {found['package']} instead of {root / 'mptune'}")
    return found


def report(rows: Sequence[dict[str, Any]]) -> None:
    """Each model's searches, and what has become of them."""
    for name in dict.fromkeys(row["model"] for row in rows):
        of = {side: [row for row in rows if row["model"] == name and row["side"] == side] for side in SIDES}
        print(f"\n{name}")
        for side in reversed(SIDES):
            for row in of[side]:
                parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in row["parts"].items())
                print(
                    f"  {side:6} seed {row['seed']}: {row['seconds']:6.1f} s, {row['seconds'] / row['plans']:.2f} s a "
                    f"plan, hypervolume {row['hypervolume']:.5f}, {row['points']} points, all/work {row['ratio']}, "
                    f"with reference and ranges {row.get('ratio_with_fp32')}"
                )
                print(f"      {parts}")
                for cause, seconds in row.get("causes", {}).items():
                    print(f"          {seconds:5.2f} s  {cause}")
        if all(of.values()):
            seconds, volumes = ({s: median(r[k] for r in of[s]) for s in SIDES} for k in ("seconds", "hypervolume"))
            emulated = {s: median(r["parts"].get("emulation", 0.0) for r in of[s]) for s in SIDES}
            print(f"  time: {seconds['after'] / seconds['before']:.3f} of before (goal 0.5)")
            print(f"  emulation: {emulated['after'] / (emulated['before'] or 1.0):.3f} of before (goal 0.333)")
            if volumes["before"]:
                print(f"  hypervolume: {volumes['after'] / volumes['before'] - 1.0:+.3%} (goal within 0.5 %)")


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Tables as Markdown: each search, and what its seconds beside the work were for.

    A row may name the ``commit`` that was timed, where a file holds several.
    """
    lines = [
        "| network | seed | version | seconds | building and measuring | emulating | thinking | all / work | "
        "hypervolume (points) |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in sorted(rows, key=lambda row: (row["model"], row["side"] != "before", row["seed"])):
        parts = [row["parts"].get(part, 0.0) for part in (*WORK, "thinking")]
        cells = (
            row["model"],
            row["seed"],
            row.get("commit") or ("before" if row["side"] == "before" else "this one"),
            f"{row['seconds']:.1f}",
            *(f"{seconds:.1f}" for seconds in parts),
            f"{row['ratio']:.2f} ({row.get('ratio_with_fp32') or math.nan:.2f})",
            f"{row['hypervolume']:.4f} ({row['points']})",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    looked = [row for row in rows if row.get("causes")]
    if looked:
        names = [f"{row['model']}, seed {row['seed']}" for row in looked]
        lines += ["", f"| seconds beside the work | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
        seconds = [
            {**row["causes"], **{part: row["parts"].get(part, 0.0) for part in ("thinking", FP32)}} for row in looked
        ]
        total = {cause: sum(of.get(cause, 0.0) for of in seconds) for of in seconds for cause in of}
        for cause in sorted(total, key=lambda cause: -total[cause]):
            lines.append(f"| {cause} | {' | '.join(f'{of.get(cause, 0.0):.2f}' for of in seconds)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout; without it this one alone is timed")
    parser.add_argument("--models", nargs="+", default=["digits_vit", "swin_t"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--budget", type=int, default=50)
    parser.add_argument("--target", default="auto")
    parser.add_argument("--work", type=Path, default=Path("pace.work"))
    parser.add_argument("--limit", type=float, default=1e9, help="seconds in which all that is begun must end")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--table", type=Path, help="print the tables of such a JSON file, and search nothing")
    options = parser.parse_args()
    began = time.monotonic()
    if options.table is not None:
        print(tables(json.loads(options.table.read_text())["searches"]))
        return
    if options.one:
        print(json.dumps(search(options)))
        return
    options.work = options.work.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    lines = options.work / "searches.jsonl"
    rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    models = [make_model(name, options.work) for name in options.models]
    sides = [side for side in options.sides if side == "after" or options.before is not None]
    for seed in options.seeds:
        for model in models:
            for side in sides:
                if any((r["model"], r["side"], r["seed"]) == (model[0], side, seed) for r in rows):
                    continue
                known = [r["seconds"] for r in rows if (r["model"], r["side"]) == (model[0], side)]
                needed = 1.1 * max(known) if known else EXPECTED_S.get((model[0], side), 100.0)
                if time.monotonic() - began + needed > options.limit:
                    print(f"{model[0]}, {side}, seed {seed}: no time left; the same command goes on", flush=True)
                    continue
                row = start(options, model, side, seed)
                rows.append(row)
                with lines.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{model[0]}, {side}, seed {seed}: {row['seconds']} s", flush=True)
                if options.json is not None:
                    options.json.parent.mkdir(parents=True, exist_ok=True)
                    options.json.write_text(json.dumps({"searches": rows}, indent=1))
    report(rows)


if __name__ == "__main__":
    main()
