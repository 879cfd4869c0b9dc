"""Small models with samples, engines and latencies of one session, for tests of jobs and toolchains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from mptune.data.archive import save_samples
from mptune.engines.base import EngineError, EngineSession, Failure, Measurement
from mptune.engines.context import RunContext
from mptune.engines.latency import Latency, Repetitions, time_in_turn
from mptune.engines.ort import backend as onnxruntime
from mptune.engines.tensorrt import backend as tensorrt
from mptune.engines.tensorrt.builder import BuildOptions, build_engine
from mptune.engines.tensorrt.library import RTX_CAPABILITIES, Kind, LibraryReport, load_library
from mptune.engines.toolchains import choose
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import Model
from mptune.processes.child import Job, WorkerState
from mptune.settings import LatencySettings, SearchSettings
from mptune.targets.detect import detect_gpus
from tests.graph import models

T = TypeVar("T")
QUICK = LatencySettings(warmup_ms=0.0, duration_ms=1.0, min_iterations=10)
ONCE = Repetitions(10)


def run_here(job: Job[T]) -> T:
    """Run a job in this process and close what it used."""
    state = WorkerState()
    try:
        return job.run(state)
    finally:
        state.close()


class InProcess:
    """Stands for a worker, and runs its jobs in this process."""

    def __init__(self, state: WorkerState) -> None:
        self.state = state

    def call(self, job: Job[T], timeout_s: float | None = None) -> T:
        return job.run(self.state)


def make_context(
    model: Model, folder: Path, samples: dict[str, np.ndarray], count: int = 4, settings: SearchSettings | None = None
) -> RunContext:
    """A model with ``count`` search and held-out samples that vary around the given feed."""
    generator = np.random.default_rng(5)
    context = RunContext.in_folder(GroupedModel(model, find_groups(model)), folder, settings)
    for which in ("search", "held_out"):
        feeds = tuple(
            {k: (v + generator.normal(0, 0.1, v.shape)).astype(v.dtype) for k, v in samples.items()}
            for _ in range(count)
        )
        save_samples(context.samples(which), feeds)
    return context


def prepare(folder: Path, shift: float = 0.0) -> tuple[Path, Path, Path]:
    """A model, two samples, and reference outputs that are off by a shift."""
    model = models.save(models.text("(float[n, 2] x) => (float[n, 2] y) { y = Relu (x) }"), folder)
    feeds = [np.array([[3, 4]], np.float32), np.array([[6, 8]], np.float32)]
    save_samples(folder / "s.npz", [{"x": feed} for feed in feeds])
    save_samples(folder / "r.npz", [{"y": feed + np.float32(shift)} for feed in feeds])
    return model, folder / "s.npz", folder / "r.npz"


def build_here(kind: Kind, model: Path, path: Path, samples: Sequence[Mapping[str, np.ndarray]]) -> Path:
    """An engine for the GPU here; skips the test where there is none with such a TensorRT."""
    try:
        library = load_library(kind)
    except EngineError as error:
        pytest.skip(error.message)
    capability = detect_gpus()[0].compute_capability
    if kind == "tensorrt-rtx" and capability not in RTX_CAPABILITIES:
        pytest.skip(f"TensorRT-RTX does not run on compute capability {capability}")
    options = BuildOptions(kind, capabilities=() if capability is None else (capability,))
    path.write_bytes(build_engine(library, model, options, samples)[0])
    return path


def install(monkeypatch: pytest.MonkeyPatch, no_cuda: str | None = None, **reports: LibraryReport | str) -> None:
    """Stand for the packages of this machine: what ``find_library`` says of each, and why there is no CUDA provider."""
    known = {kind.replace("_", "-"): report for kind, report in reports.items()}
    monkeypatch.setattr(tensorrt, "find_library", lambda kind: known.get(kind, f"{kind} is not installed"))
    monkeypatch.setattr(tensorrt, "is_installed", lambda kind: kind in known)
    for module in (onnxruntime, choose):
        monkeypatch.setattr(module, "probe", lambda provider: no_cuda)


def timed(session: EngineSession, feeds: Mapping[str, np.ndarray], repetitions: Repetitions = ONCE) -> Latency:
    """The latency of a session alone."""
    return time_in_turn([session.stopwatch(feeds)], repetitions, QUICK)[0]


def measured(result: Measurement | Failure | None) -> Measurement:
    assert isinstance(result, Measurement), result
    return result


def failed(result: object) -> Failure:
    assert isinstance(result, Failure), result
    return result
