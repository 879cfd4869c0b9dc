"""All real models on the GPUs of this machine, one model per GPU: measured plans, then the samplers.

    python -m benchmarks.h200 --work /tmp/h200 --results benchmarks/results --limit 580

Each model is made by its script, measured by ``benchmarks.measured_plans`` and searched by ``benchmarks.real_search``,
which share their measurements in ``--work``: the same command resumes. Writes ``h200_plans_MODEL.json`` and
``h200_search_MODEL.json``; other output of the tools goes to log files.
"""

from __future__ import annotations

import argparse
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

from mptune.engines.environment import read_gpus

HERE = Path(__file__).resolve().parent
MODELS = ("vit_s", "resnet50", "flow_net", "text_encoder")
READY = {
    "digits_vit": (HERE / "models" / "digits_vit.onnx", HERE / "models" / "digits_calib.npz"),
    "line_encoder": (HERE / "models" / "line_encoder.onnx", HERE / "models" / "line_encoder.npz"),
}
"""Models that are in the repository, with their samples."""

OWN: dict[str, dict[str, float]] = {
    "digits_vit": {"batch": 8, "samples": 12},
    "line_encoder": {"batch": 8, "samples": 6},
    "flow_net": {"samples": 32, "duration_ms": 200.0},
}
"""What a model has instead of the options: a small one has time for all of its samples; where matches hang on the last
bits and executions take one of two times, few samples and values say little."""

STAGES = ("plans", "search")
LEAST_S = 20.0
"""A stage is not begun with less time than this."""

THREADS = {"OPENBLAS_NUM_THREADS": "4", "OMP_NUM_THREADS": "4"}
"""A process that takes all cores for its small matrices keeps the others from opening their sessions."""


class Chain:
    """One model through all stages on one GPU."""

    def __init__(self, options: argparse.Namespace, model: str, deadline: float) -> None:
        self._options = options
        self._model = model
        self._deadline = deadline
        self._stem = options.work / model
        self._environment = dict(os.environ)

    def run(self, gpu: str | None) -> None:
        options = self._options
        self._environment = {**os.environ, **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})}
        onnx, data = READY.get(self._model, (self._stem.with_suffix(".onnx"), self._stem.with_suffix(".npz")))
        if not data.exists():
            made = ["--out", str(self._stem), *self._own("samples")]
            self._call("model", [f"benchmarks.models.{self._model}", *made])
        self._environment.update(THREADS)
        common = [str(onnx), str(data), "--folder", str(self._stem.with_suffix(".bench"))]
        common += self._own("provider", "workers", "batch", "samples", "duration_ms")
        if "plans" in options.stages:
            limit = min(options.plans_limit, self._left())
            arguments = ["--emulate", "--random", str(options.random), "--limit", str(limit)]
            arguments += ["--json", str(options.results / f"h200_plans_{self._model}.json")]
            self._call("plans", ["benchmarks.measured_plans", *common, *arguments])
        if "search" in options.stages:
            limit = min(options.search_limit, self._left())
            arguments = ["--limit", str(limit), "--around", str(options.around)]
            arguments += ["--budget", str(options.budget), "--stock-budget", str(options.stock_budget)]
            arguments += ["--json", str(options.results / f"h200_search_{self._model}.json")]
            self._call("search", ["benchmarks.real_search", *common, *arguments])

    def _own(self, *names: str) -> list[str]:
        """These options of a benchmark, as this model has them."""
        values = {**vars(self._options), "batch": None, **OWN.get(self._model, {})}
        given = [(name, values[name]) for name in names if values[name] is not None]
        return [text for name, value in given for text in (f"--{name.replace('_', '-')}", str(value))]

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _call(self, stage: str, arguments: list[str]) -> None:
        if self._left() < LEAST_S:
            print(f"{self._model}, {stage}: no time left", flush=True)
            return
        started = time.monotonic()
        log = self._stem.with_suffix(f".{stage}.log")
        with log.open("w") as errors:
            done = subprocess.run(
                [sys.executable, "-m", *arguments],
                env=self._environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                check=False,
            )
        took = time.monotonic() - started
        failed = log.read_text()[-2000:] if done.returncode else ""
        text = f"{self._model}, {stage}: {took:.0f} s, exit status {done.returncode}\n{done.stdout}{failed}"
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=[*MODELS, *READY])
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=STAGES)
    parser.add_argument("--work", type=Path, default=Path("h200.work"))
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--provider", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", nargs="+", help="indices; default: all")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--duration-ms", type=float, default=100.0)
    parser.add_argument("--random", type=int, default=100)
    parser.add_argument("--budget", type=int, default=50)
    parser.add_argument("--stock-budget", type=int, default=200)
    parser.add_argument("--around", type=int, default=300)
    parser.add_argument("--plans-limit", type=float, default=200.0, help="seconds for the measured plans of a model")
    parser.add_argument("--search-limit", type=float, default=580.0, help="seconds for the search of a model")
    parser.add_argument("--limit", type=float, default=580.0, help="seconds in all")
    options = parser.parse_args()
    deadline = time.monotonic() + options.limit - 10.0
    options.work.mkdir(parents=True, exist_ok=True)
    options.results.mkdir(parents=True, exist_ok=True)
    gpus: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    for gpu in options.gpus or [str(gpu.index) for gpu in read_gpus()] if options.provider == "cuda" else [None]:
        gpus.put(gpu)
    chains = [Chain(options, model, deadline) for model in options.models]

    def work(chain: Chain) -> None:
        gpu = gpus.get()
        try:
            chain.run(gpu)
        finally:
            gpus.put(gpu)

    threads = [threading.Thread(target=work, args=(chain,)) for chain in chains]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
