"""Where the time of a search goes: the sampler, building, measuring and emulating.

    python -m benchmarks.overhead vit_s.onnx vit_s.npz --out vit_s.mptune

Runs what ``mptune search`` runs, in a real run directory, with a clock around each part. With ``--stand-in`` nothing is
built: each plan takes so many seconds, in which this process waits as it waits for a GPU, and what is left is the time
that a search takes beside its work on any machine.

    python -m benchmarks.overhead benchmarks/models/digits_vit.onnx benchmarks/models/digits_calib.npz --stand-in 0.3
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import mptune
from benchmarks.common import rounded, save
from benchmarks.pace import WORK, Clock
from mptune.engines.workload import Workload
from mptune.settings import SearchSettings
from mptune.tuning.front import Front
from tests.fakes import FakeToolchain, Law

_SESSION_SPREAD = 0.002
"""As sessions of one plan differ on an H200."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget", type=int, default=50)
    parser.add_argument("--target", default="auto")
    parser.add_argument("--stand-in", type=float, metavar="S", help="no engine is built: each plan takes S seconds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder) / "run.mptune"
        front = search(options, out, clock) if options.stand_in is None else search_stand_in(options, out, clock)
    whole = sum(clock.seconds.values())
    work = sum(clock.seconds[part] for part in WORK)
    print(f"{options.model.stem}: {front.evaluations} plans, {whole:.1f} s; all / work {whole / work:.3f}")
    for part, seconds in sorted(clock.seconds.items(), key=lambda item: -item[1]):
        print(f"  {part}: {seconds:.2f} s, {seconds / whole:.1%}")
    for cause, seconds in sorted(clock.causes.seconds.items(), key=lambda item: -item[1]):
        print(f"    {cause}: {seconds:.2f} s")
    found = {part: rounded(taken) for part, taken in clock.seconds.items()}
    save(options.json, {"model": options.model.name, "plans": front.evaluations, "seconds": found})


def search(options: argparse.Namespace, out: Path, clock: Clock) -> Front:
    """What ``mptune search`` runs."""
    with clock.running():
        return mptune.search(
            options.model, data=options.data, out=out, budget=options.budget, target=options.target, progress=False
        )


def search_stand_in(options: argparse.Namespace, out: Path, clock: Clock) -> Front:
    """The same on a toolchain that runs nothing, and waits."""

    def open_toolchain(workload: Workload, settings: SearchSettings) -> FakeToolchain:
        law = Law([group.id for group in workload.groups])
        return FakeToolchain(law, delay_s=options.stand_in, session_spread=_SESSION_SPREAD)

    with clock.running(FakeToolchain):
        return mptune.search(
            options.model,
            data=options.data,
            out=out,
            budget=options.budget,
            target="cpu",
            open_toolchain=open_toolchain,
            progress=False,
        )


if __name__ == "__main__":
    main()
