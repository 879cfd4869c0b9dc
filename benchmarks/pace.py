"""How long searches take, and for what: two checkouts in turn on the same machine, the same models, the same seeds.

    mkdir /tmp/before && git archive 672f8217 | tar -x -C /tmp/before
    python -m benchmarks.pace --before /tmp/before --work /tmp/pace --limit 570 --json pace.json

A search runs in a process of its own, which imports one checkout, in a new run directory. Its seconds are those of the
whole process; its parts are the calls into the toolchain and the sampler, without those that they call in turn. Each
search is a line in ``searches.jsonl`` in the work folder: the same command goes on where it was, and begins no search
that would not end within ``--limit``. A model is one of ``benchmarks.peers``, made by its script (torch, torchvision),
or the path of an ONNX file with its samples beside it (``.npz``). What a part is busy
with inside, py-spy says: ``py-spy record --subprocesses``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
SIDES = ("before", "after")
FIRST_S = 200.0
"""Seconds that a first search of a model may take; later ones may take 1.1 times the longest before."""


def time_parts(seconds: defaultdict[str, float], calls: Counter[str]) -> ExitStack:
    """Patch the imported checkout so that ``seconds`` and ``calls`` hold those of each part; the stack ends it.

    Older checkouts name their classes differently: of them there are only the seconds of the whole.
    """
    try:
        from mptune.engines.toolchains.reference import ReferenceModel
        from mptune.engines.toolchains.toolchain import Toolchain
        from mptune.processes.parent import Worker
        from mptune.tuning.sampler.precision import PrecisionSampler
    except ImportError:
        return ExitStack()

    parts: dict[str, tuple[type, tuple[str, ...]]] = {
        "thinking": (PrecisionSampler, ("sample_relative",)),
        "emulation": (Toolchain, ("emulate",)),
        "builds, measuring": (Toolchain, ("evaluate", "missing_kernels", "fused_nodes", "evaluate_tf32")),
        "reference, ranges": (ReferenceModel, ("reference", "observe")),
    }
    running: list[str] = ["the rest"]
    since = time.perf_counter()

    def switch() -> None:
        nonlocal since
        now = time.perf_counter()
        seconds[running[-1]] += now - since
        since = now

    def timed(part: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            switch()
            running.append(part)
            calls[part] += 1
            try:
                return method(*args, **kwargs)
            finally:
                switch()
                running.pop()

        return call

    call_job = Worker.call

    def counted(self: Any, job: Any, *args: Any) -> Any:
        """The work of a job, which does not depend on how busy the machine is."""
        kind, result = type(job).__name__, call_job(self, job, *args)
        calls[f"jobs: {kind}"] += getattr(job, "count", 1)  # of sessions, where a job opens several
        if kind in ("ErrorsJob", "SwitchedErrorsJob") and isinstance(result, tuple):
            calls["emulated inferences"] += sum(error.sample_count for error in result if error is not None)
        return result

    stack = ExitStack()
    stack.enter_context(mock.patch.object(Worker, "call", counted))
    for part, (owner, names) in parts.items():
        for name in names:
            stack.enter_context(mock.patch.object(owner, name, timed(part, getattr(owner, name))))
    stack.callback(switch)
    return stack


def search(job: dict[str, Any]) -> dict[str, Any]:
    """One search, in this process."""
    import mptune

    name, side, seed = job["name"], job["side"], job["settings"]["seed"]
    out = Path(job["work"]) / f"{name}-{side}-{seed}.mptune"
    shutil.rmtree(out, ignore_errors=True)
    seconds: defaultdict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    with time_parts(seconds, calls):
        front = mptune.search(job["model"], data=job["data"], out=out, progress=False, **job["settings"])
    chosen = front.chosen
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "processor_s": round(sum(each.ru_utime + each.ru_stime for each in usage), 1),
        "memory_gb": round(sum(each.ru_maxrss for each in usage) / (1 << 20), 2),  # of this process and its largest
        "model": name,
        "side": side,
        "seed": seed,
        "package": str(Path(mptune.__file__ or "").parent),
        "device": front.device,
        "plans": front.evaluations,
        "hypervolume": front.hypervolume,
        "chosen": None if chosen is None else [chosen.latency.median_ms, chosen.speedup, chosen.error_value],
        "calls": calls,
        "parts": {part: round(s, 2) for part, s in sorted(seconds.items(), key=lambda item: -item[1])},
    }


def make_model(name: str, work: Path) -> tuple[str, Path, Path, int]:
    """Name and files of a model, and rows a sample."""
    from benchmarks.peers.models import MODELS

    if name.endswith(".onnx"):
        return Path(name).stem, Path(name).resolve(), Path(name).with_suffix(".npz").resolve(), 1
    return name, *(path.resolve() for path in MODELS[name].make(work)), MODELS[name].rows


def start(options: argparse.Namespace, model: tuple[str, Path, Path, int], side: str, seed: int) -> dict[str, Any]:
    """One search, in a process that imports one checkout."""
    root = HERE.parent if side == "after" else options.before.resolve()
    paths = [str(root), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    settings = {"budget": options.budget, "target": options.target, "seed": seed, "batch": model[3]}
    settings |= {} if options.max_error is None else {"max_error": options.max_error}
    job = dict(zip(("name", "model", "data"), map(str, model), strict=False))
    job |= {"side": side, "work": str(options.work), "settings": settings}
    command = [sys.executable, "-P", str(HERE / "pace.py"), "--one", json.dumps(job)]
    log = options.work / f"{model[0]}-{side}-{seed}.log"
    began = time.monotonic()
    with log.open("w") as errors:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(command, env=environment, cwd=root, stdout=subprocess.PIPE, stderr=errors, text=True)
    if done.returncode:
        raise SystemExit(f"{model[0]}, {side}, seed {seed}: exit status {done.returncode}\n{log.read_text()[-3000:]}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if Path(row["package"]) != root / "mptune":
        raise SystemExit(f"imported {row['package']} instead of {root / 'mptune'}")
    return {"seconds": round(time.monotonic() - began, 2), **row}


def report(rows: Sequence[dict[str, Any]]) -> None:
    """Each search, and the ratio of the two checkouts' medians."""
    for name in dict.fromkeys(row["model"] for row in rows):
        print(f"\n{name}")
        sides = {side: [row for row in rows if row["model"] == name and row["side"] == side] for side in SIDES}
        for row in (*sides["before"], *sides["after"]):
            counts = {part: f" in {count} calls" for part, count in row["calls"].items()}
            parts = ", ".join(f"{part} {seconds:.1f}{counts.get(part, '')}" for part, seconds in row["parts"].items())
            works = ", ".join(f"{kind} {count}" for kind, count in row["calls"].items() if kind not in row["parts"])
            print(f"  {row['side']:6} seed {row['seed']}: {row['seconds']:6.1f} s ({parts})")
            print(f"      {row.get('processor_s')} s of processors, {row.get('memory_gb')} GB; {works}")
            print(f"      hypervolume {row['hypervolume']:.5f}; chosen: ms, speedup, error {row['chosen']}")
        if all(sides.values()):
            before, after = (median(row["seconds"] for row in sides[side]) for side in SIDES)
            print(f"  time: {after / before:.3f} of before")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout; without it this one alone is timed")
    parser.add_argument("--models", nargs="+", default=["digits_vit", "swin_t"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--budget", type=int, default=50)
    parser.add_argument("--max-error", type=float)
    parser.add_argument("--target", default="auto")
    parser.add_argument("--work", type=Path, default=Path("pace.work"))
    parser.add_argument("--limit", type=float, default=1e9, help="seconds in which all that is begun must end")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(search(options.one)))
        return
    began = time.monotonic()
    options.work = options.work.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    lines = options.work / "searches.jsonl"
    rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    models = [make_model(name, options.work) for name in options.models]
    sides = SIDES if options.before is not None else ("after",)
    for seed, model, side in ((s, m, side) for s in options.seeds for m in models for side in sides):
        if any((row["model"], row["side"], row["seed"]) == (model[0], side, seed) for row in rows):
            continue
        taken = [row["seconds"] for row in rows if row["model"] == model[0]]
        if time.monotonic() - began + (1.1 * max(taken) if taken else FIRST_S) > options.limit:
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
