"""Jobs of a comparison: outputs of models on samples, again, at the same time, and value by value of two models."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from mptune.data.archive import read_samples, save_samples
from mptune.engines.base import Stage
from mptune.engines.jobs.samples import Feed, Outputs, cached_samples
from mptune.engines.ort.cuda_session import open_session
from mptune.engines.ort.session import OrtSession, SessionOptions
from mptune.processes.child import WorkerState

Run = Callable[[Feed], Outputs]
"""Computes all outputs of one sample."""


@dataclass(frozen=True)
class OutputsJob:
    """Run a model over the samples on the CPU and write its outputs to a file."""

    model: Path
    samples: Path
    outputs: Path

    def run(self, state: WorkerState) -> int:
        """Returns the number of samples."""
        run = self._open(state)
        state.enter(Stage.RUN)
        outputs = [run(feed) for feed in cached_samples(state, self.samples)]
        save_samples(self.outputs, outputs)
        return len(outputs)

    def _open(self, state: WorkerState) -> Run:
        return _widening(state.transient(partial(open_session, self.model, SessionOptions(timing=False))))


@dataclass(frozen=True)
class RepeatJob:
    """Run a model again and again, alone or at the same time in several threads, and keep the runs that differ."""

    model: Path
    samples: Path
    outputs: Path
    times: int
    threads: int
    worst: Path
    """File to write: the outputs of the repetition that differs most from the isolated runs."""

    def run(self, state: WorkerState) -> float:
        """Returns the largest relative L2 over repetitions, samples and outputs; 0 where all runs are equal."""
        from mptune.data.archive import read_samples

        runs = self._open(state)
        state.enter(Stage.RUN)
        samples = cached_samples(state, self.samples)
        isolated = read_samples(self.outputs)
        largest = 0.0
        with ThreadPoolExecutor(self.threads) as pool:
            for _ in range(self.times):
                outputs = _shared_out(runs, samples, pool)
                error = max(value_error(a[n], b[n]) for a, b in zip(outputs, isolated, strict=True) for n in b)
                if error > largest:
                    largest = error
                    save_samples(self.worst, outputs)
        return largest

    def _open(self, state: WorkerState) -> list[Run]:
        """What runs a sample, for each thread."""
        run = _widening(state.transient(partial(open_session, self.model, SessionOptions(timing=False))))
        return [run] * self.threads


def _shared_out(runs: Sequence[Run], samples: Sequence[Feed], pool: ThreadPoolExecutor) -> list[Outputs]:
    """Each thread runs every n-th sample, one after another: what is not thread-safe has a thread of its own."""
    results = list(pool.map(lambda k: [runs[k](feed) for feed in samples[k :: len(runs)]], range(len(runs))))
    return [results[k % len(runs)][k // len(runs)] for k in range(len(samples))]


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
        options = SessionOptions(timing=False, node_by_node=True)
        state.enter(Stage.BUILD)
        with closing(open_session(self.left, options)) as left, closing(open_session(self.right, options)) as right:
            state.enter(Stage.RUN)
            run_left, run_right = _taking_some(left), _taking_some(right)
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
        square = _square(gap)
        if not math.isfinite(square):
            gap = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, gap)
            if not np.isfinite(gap).all():
                return math.inf
            square, y = _square(gap), np.where(np.isfinite(y), y, 0.0)
        difference += square
        total += _square(y)
    if difference == 0:
        return 0.0
    return math.sqrt(difference / total) if total > 0 else math.inf


_BLOCK = 1 << 16
"""Values of a block, few enough for a cache."""


def _square(values: np.ndarray) -> float:
    return float(np.einsum("i,i->", values, values))


def _taking_some(session: OrtSession) -> Run:
    """What runs a session on those of the inputs that it has."""
    wanted, run = session.inputs.keys(), _widening(session)
    return lambda feed: run({name: array for name, array in feed.items() if name in wanted})


def _widening(session: OrtSession) -> Run:
    """What runs a session on samples in FP16 where its inputs are FP32: these values are the same in both."""
    wide = {name for name, kind in session.input_types.items() if kind == "tensor(float)"}

    def run(feed: Feed) -> Outputs:
        fed = {name: a.astype(np.float32) if name in wide and a.dtype == np.float16 else a for name, a in feed.items()}
        return session.run(fed)

    return run
