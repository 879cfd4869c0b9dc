"""Jobs of a comparison: outputs of an engine on samples, again, at the same time, and value by value of two models."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mptune.data.archive import read_samples, save_samples
from mptune.engines.base import Engine, EngineError, FailureKind, Stage
from mptune.engines.ort.cuda_session import OrtEngine, open_session
from mptune.engines.ort.session import OrtSession, SessionOptions
from mptune.engines.samples import Feed, Outputs, cached_samples
from mptune.processes.child import WorkerState

Run = Callable[[Feed], Outputs]  # computes all outputs of one sample
_BLOCK = 1 << 16  # values of a block, few enough for a cache


@dataclass(frozen=True)
class OutputsJob:
    """Run an engine over the samples and write its outputs to a file."""

    engine: Engine
    samples: Path
    outputs: Path
    wanted: tuple[str, ...] = ()  # outputs that the file gets; none named: all

    def run(self, state: WorkerState) -> int:
        (run,) = _open_runs(state, self.engine, self.wanted, 1)
        state.enter(Stage.RUN)
        outputs = [run(feed) for feed in cached_samples(state, self.samples)]
        save_samples(self.outputs, outputs)
        return len(outputs)


@dataclass(frozen=True)
class RepeatJob:
    """Run an engine again and again, alone or at the same time in several threads, and keep the runs that differ."""

    engine: Engine
    samples: Path
    outputs: Path
    times: int
    threads: int
    worst: Path  # file to write: the outputs of the repetition that differs most from the isolated runs
    wanted: tuple[str, ...] = ()

    def run(self, state: WorkerState) -> float:
        """Returns the largest relative L2 over repetitions, samples and outputs; 0 where all runs are equal."""
        runs = _open_runs(state, self.engine, self.wanted, self.threads)
        state.enter(Stage.RUN)
        samples, isolated = cached_samples(state, self.samples), read_samples(self.outputs)
        count, largest = self.threads, 0.0
        with ThreadPoolExecutor(count) as pool:
            for _ in range(self.times):
                # Sample k runs on thread k mod count.
                shares = [samples[k::count] for k in range(count)]
                results = list(pool.map(lambda run, share: [run(feed) for feed in share], runs, shares))
                outputs = [results[k % count][k // count] for k in range(len(samples))]
                error = max(value_error(a[n], b[n]) for a, b in zip(outputs, isolated, strict=True) for n in b)
                if error > largest:
                    largest = error
                    save_samples(self.worst, outputs)
        return largest


def _open_runs(state: WorkerState, engine: Engine, wanted: Sequence[str], count: int) -> list[Run]:
    """What runs a sample, for each thread, until the job ends.

    A session of ONNX Runtime serves all threads; of other engines each has one, with a context and a stream of its own.
    """
    sessions: ExitStack[bool | None] = state.transient(lambda: ExitStack())
    if isinstance(engine, OrtEngine):
        return [_of_its_inputs(sessions.enter_context(closing(engine.open())))] * count

    def run_of(session: Any) -> Run:
        missing = [name for name in wanted if name not in session.outputs]
        if missing:
            outputs = ", ".join(session.outputs)
            raise EngineError(
                FailureKind.ERROR, f"the engine has no output {missing[0]!r}, which the model has: {outputs}"
            )
        return lambda feed: {name: value for name, value in session.run(feed).items() if not wanted or name in wanted}

    return [run_of(sessions.enter_context(closing(engine.open()))) for _ in range(count)]


def _of_its_inputs(session: OrtSession) -> Run:
    """What runs a session on samples; inputs that it has not are left out."""
    return lambda feed: session.run({name: array for name, array in feed.items() if name in session.inputs})


@dataclass(frozen=True)
class TraceJob:
    """Compare values inside two models, sample by sample; only figures are kept."""

    left: Path
    right: Path
    pairs: tuple[tuple[str, str], ...]
    samples: Path
    right_samples: Path | None = None
    """File of the same samples under the right model's names of the inputs; None where they are alike."""

    def run(self, state: WorkerState) -> tuple[float, ...]:
        """Returns, for each pair, the largest error over the samples: ``value_error``."""
        samples = cached_samples(state, self.samples)
        others = samples if self.right_samples is None else read_samples(self.right_samples)
        errors = [0.0] * len(self.pairs)
        options = SessionOptions(preset="values")
        with closing(open_session(self.left, options)) as left, closing(open_session(self.right, options)) as right:
            state.enter(Stage.RUN)
            run_left, run_right = _of_its_inputs(left), _of_its_inputs(right)
            for sample, other_sample in zip(samples, others, strict=True):
                expected, values = run_left(sample), run_right(other_sample)
                for index, (name, other) in enumerate(self.pairs):
                    errors[index] = max(errors[index], value_error(values[other], expected[name]))
        return tuple(errors)


def value_error(values: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square of the difference by that of the reference; inf where shapes or non-finite places differ."""
    if values.shape != expected.shape:
        return math.inf
    a, b = values.ravel(), expected.ravel()
    difference = total = 0.0
    for start in range(0, a.size, _BLOCK):
        x = a[start : start + _BLOCK].astype(np.float64)
        y = b[start : start + _BLOCK].astype(np.float64)
        with np.errstate(invalid="ignore"):
            gap = x - y
        if not np.isfinite(gap).all():
            gap, y = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, gap), np.where(np.isfinite(y), y, 0.0)
        difference += float(np.einsum("i,i->", gap, gap))
        total += float(np.einsum("i,i->", y, y))
    if difference == 0:
        return 0.0
    return math.sqrt(difference / total) if total > 0 and math.isfinite(difference) else math.inf
