"""Where the time of a search goes: the sampler, building, measuring and emulating.

    python -m benchmarks.overhead vit_s.onnx vit_s.npz --out vit_s.mptune

Runs what ``mptune search`` runs, in a real run directory, with a clock around each part.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import mptune
from benchmarks.common import rounded, save
from mptune.engines.toolchains.onnxruntime import OnnxRuntimeToolchain
from mptune.engines.toolchains.shared import BaseToolchain
from mptune.tuning.sampler.precision import PrecisionSampler

PARTS: tuple[tuple[str, type, str], ...] = (
    ("the sampler thinks", PrecisionSampler, "sample_relative"),
    ("emulating", BaseToolchain, "emulate"),
    ("building and measuring", OnnxRuntimeToolchain, "evaluate"),
)


class Clock:
    """Seconds in each part, without those of the parts that it calls."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._running: list[str] = []
        self._since = time.perf_counter()

    def switch(self) -> None:
        """Add the time so far to the running part."""
        now = time.perf_counter()
        self.seconds[self._running[-1] if self._running else "the rest"] += now - self._since
        self._since = now

    def around(self, part: str, owner: type, name: str) -> Any:
        """A patch that times a method."""
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.switch()
            self._running.append(part)
            try:
                return original(*args, **kwargs)
            finally:
                self.switch()
                self._running.pop()

        return mock.patch.object(owner, name, timed)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for part in PARTS:
                stack.enter_context(self.around(*part))
            self._since = time.perf_counter()
            yield
            self.switch()


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
