"""Where the time of a search goes: the sampler, building, measuring and emulating.

    python -m benchmarks.overhead vit_s.onnx vit_s.npz --out vit_s.mptune

Runs what ``mptune search`` runs, in a real run directory, with a clock around each part.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import mptune
from benchmarks.common import rounded, save
from benchmarks.pace import Clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget", type=int, default=50)
    parser.add_argument("--target", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    clock = Clock()
    with clock.running():
        front = mptune.search(
            options.model, data=options.data, out=options.out, budget=options.budget, target=options.target
        )
    whole = sum(clock.seconds.values())
    print(f"{options.model.stem}: {front.evaluations} plans, {whole:.1f} s")
    for part, seconds in sorted(clock.seconds.items(), key=lambda item: -item[1]):
        print(f"  {part}: {seconds:.1f} s, {seconds / whole:.1%}")
    seconds = {part: rounded(taken) for part, taken in clock.seconds.items()}
    save(options.json, {"model": options.model.name, "plans": front.evaluations, "seconds": seconds})


if __name__ == "__main__":
    main()
