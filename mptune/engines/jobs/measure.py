"""The jobs of a search: reference, ranges, errors, measurements. Frozen dataclasses that run inside the worker.

They name files and carry settings; samples, reference outputs and the baseline's session stay in the worker from job
to job (``WorkerState.cached``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from mptune.data.calibration import read_outputs, read_samples, save_outputs
from mptune.data.metrics.accuracy import OutputError, compare_outputs
from mptune.data.metrics.tasks import resolve_metric
from mptune.engines.base import EngineError, FailureKind, ReferenceReport, Session, Stage, TensorRange
from mptune.engines.environment import GpuState, foreign_gpu_processes, process_warnings, read_gpus, state_warnings
from mptune.engines.ort.library import open_session
from mptune.engines.ort.session import PROVIDERS, OrtSession, Provider, SessionOptions
from mptune.engines.timing.latency import Latency, Repetitions, calibrate, monotonic_ms, time_in_turn
from mptune.engines.worker.child import WorkerState
from mptune.graph.writing.observe import Tap
from mptune.settings import LatencySettings

Feed = Mapping[str, np.ndarray]
Outputs = dict[str, np.ndarray]


@dataclass(frozen=True)
class ProbeReport:
    """What a provider showed when it ran a tiny model.

    Attributes:
        cuda_python: why CUDA events cannot be had; None where they can (or the provider is the CPU's).
        cuda_versions: of driver and runtime as CUDA counts them (12060 is 12.6); None where unknown.
    """

    cuda_python: str | None = None
    cuda_versions: tuple[int, int] | None = None


@dataclass(frozen=True)
class ProbeJob:
    """Find out whether a provider really starts: what ONNX Runtime lists as available may lack its libraries."""

    provider: Provider

    def run(self, state: WorkerState) -> ProbeReport:
        """See the class.

        Raises:
            EngineError: it does not.
        """
        from onnx import TensorProto, helper

        from mptune.engines.cuda import runtime as cuda

        info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 2]) for name in ("x", "y")]
        node = helper.make_node("MatMul", ["x", "x"], ["y"])
        graph = helper.make_graph([node], "probe", info[:1], info[1:])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        session = open_session(model.SerializeToString(), SessionOptions(self.provider, timing=False))
        try:
            state.enter(Stage.RUN)
            session.run({"x": np.eye(2, dtype=np.float32)})
        finally:
            session.close()
        if self.provider == "cpu":
            return ProbeReport()
        reason = cuda.unavailable_reason()
        return ProbeReport(reason, None if reason else cuda.versions())


@dataclass(frozen=True)
class ReferenceJob:
    """Run the untouched model over a set of samples in true FP32 and keep the outputs in a file.

    Attributes:
        model: the user's model.
        samples: file of samples.
        outputs: file to write.
        provider: who computes; TF32 is off.
    """

    model: Path
    samples: Path
    outputs: Path
    provider: Provider

    def run(self, state: WorkerState) -> ReferenceReport:
        """See the class."""
        session = open_session(self.model, SessionOptions(self.provider, tf32=False, timing=False))
        try:
            state.enter(Stage.RUN)
            samples = cached_samples(state, self.samples)
            outputs = [session.run(sample) for sample in samples]
            again = session.run(samples[0])
            rows = _identical_rows(session, samples[0])
        finally:
            session.close()
        save_outputs(self.outputs, outputs)
        return ReferenceReport(
            provider=PROVIDERS[self.provider],
            outputs={name: _facts([values[name] for values in outputs]) for name in outputs[0]},
            repeat_error=max(relative_l2(again[name], outputs[0][name]) for name in again),
            identical_rows_error=rows.identical,
            batch_size_error=rows.batch_size,
            warnings=rows.warnings,
        )


@dataclass(frozen=True)
class ObserveJob:
    """Run an observing model (``mptune.graph.writing.observe``) over the samples and reduce its outputs to ranges.

    Attributes:
        model: the observing model: the untouched graph plus reductions of every float tensor.
        taps: which of its outputs describe which value.
        samples: file of samples.
        provider: who computes.
    """

    model: Path
    taps: tuple[Tap, ...]
    samples: Path
    provider: Provider

    def run(self, state: WorkerState) -> dict[str, TensorRange]:
        """See the class."""
        session = open_session(self.model, SessionOptions(self.provider, timing=False))
        ranges: dict[str, TensorRange] = {}
        try:
            state.enter(Stage.RUN)
            for sample in cached_samples(state, self.samples):
                values = session.run(sample)
                for tap in self.taps:
                    seen = ranges.get(tap.tensor)
                    ranges[tap.tensor] = TensorRange(
                        absmax=max(float(values[tap.absmax]), seen.absmax if seen else 0.0),
                        shape=seen.shape if seen else tuple(int(dim) for dim in values[tap.shape]),
                        non_finite=int(values[tap.non_finite]) + (seen.non_finite if seen else 0),
                    )
        finally:
            session.close()
        return ranges


@dataclass(frozen=True)
class MeasureResult:
    """What ``MeasureJob`` found.

    Attributes:
        latency: the candidate's, not corrected for drift.
        baseline: the FP32 baseline's, taken in turn with it.
        repetitions: what both were taken with.
        error: the candidate's, from the session that was timed.
        build_s: seconds to the candidate's session.
        warnings: of both sessions and of the device.
    """

    latency: Latency
    baseline: Latency
    repetitions: Repetitions
    error: OutputError
    build_s: float
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class MeasureJob:
    """Build a candidate, compute its outputs, and time it in turn with the FP32 baseline.

    Attributes:
        model: the typed model of the plan.
        baseline: the typed model of the all-FP32 plan; its session stays open in the worker.
        samples: file of samples.
        timing_samples: file of samples on whose first one the latency is taken: always the same, so that latencies
            can be compared whatever samples the error is taken on.
        reference: file of reference outputs on the same samples.
        provider: who computes.
        tf32: for the candidate; the baseline never uses it.
        tf32_by_environment: for both sessions (``SessionOptions``).
        latency: how latencies are taken.
        repetitions: frozen ones; None calibrates them on the baseline.
        metric: the objective, so that task metrics are taken too.
    """

    model: Path
    baseline: Path
    samples: Path
    timing_samples: Path
    reference: Path
    provider: Provider
    tf32: bool = False
    tf32_by_environment: bool = False
    latency: LatencySettings = field(default_factory=LatencySettings)
    repetitions: Repetitions | None = None
    metric: str = "relative_l2"

    def run(self, state: WorkerState) -> MeasureResult:
        """See the class."""
        feed = cached_samples(state, self.timing_samples)[0]
        key = (*file_identity(self.baseline), self.provider, self.tf32_by_environment, self.latency)
        baseline = state.cached("baseline", key, partial(self._open, self.baseline, tf32=False))
        started = time.perf_counter()
        candidate = self._open(self.model, tf32=self.tf32)
        build_s = time.perf_counter() - started
        try:
            state.enter(Stage.RUN)
            outputs = [candidate.run(sample) for sample in cached_samples(state, self.samples)]
            error = output_error(state, outputs, self.reference, self.metric)
            state.enter(Stage.TIME)
            watches = [session.stopwatch(feed) for session in (baseline, candidate)]
            repetitions = self.repetitions or calibrate(watches[0].run_once, monotonic_ms, self.latency)
            baseline_latency, latency = time_in_turn(watches, repetitions, self.latency)
            device_warnings = self._device_warnings(state)
            warnings = (*candidate.warnings, *baseline.warnings, *self._compare(candidate, baseline), *device_warnings)
        finally:
            candidate.close()
        return MeasureResult(
            latency=latency,
            baseline=baseline_latency,
            repetitions=repetitions,
            error=error,
            build_s=build_s,
            warnings=tuple(dict.fromkeys(warnings)),
        )

    def _open(self, model: Path, *, tf32: bool) -> Session:
        by_environment = self.tf32_by_environment
        options = SessionOptions(self.provider, tf32=tf32, tf32_by_environment=by_environment, latency=self.latency)
        return open_session(model, options)

    def _compare(self, candidate: Session, baseline: Session) -> tuple[str, ...]:
        """Warnings about what the candidate's engine does beside the baseline's; ONNX Runtime does not say."""
        return ()

    def _device_warnings(self, state: WorkerState) -> tuple[str, ...]:
        """Throttling, fallen clocks and other processes, read while the clocks are still where the timing had them."""
        if self.provider != "cuda":
            return ()
        gpus = read_gpus()
        first: tuple[GpuState, ...] = state.cached("first gpu state", self.provider, lambda: gpus)
        before = {gpu.index: gpu for gpu in first}
        found = [text for gpu in gpus for text in state_warnings(gpu, before.get(gpu.index))]
        return (*found, *process_warnings(foreign_gpu_processes()))


@dataclass(frozen=True)
class _Rows:
    identical: float | None = None
    batch_size: float | None = None
    warnings: tuple[str, ...] = ()


def relative_l2(values: np.ndarray, reference: np.ndarray) -> float:
    """``norm(values - reference) / norm(reference)``; NaN and Inf at the same places with the same value agree."""
    if values.shape != reference.shape:
        return float("inf")
    a, b = np.asarray(values, dtype=np.float64).ravel(), np.asarray(reference, dtype=np.float64).ravel()
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return 0.0
    finite = np.isfinite(a) & np.isfinite(b)
    if not (finite | same).all():
        return float("inf")
    norm = float(np.linalg.norm(b[finite]))
    difference = float(np.linalg.norm(a[finite] - b[finite]))
    return difference / norm if norm > 0 else float("inf")


def _identical_rows(session: OrtSession, feed: Feed) -> _Rows:
    """Run one sample with its first row in every row of the batch, and hold the rows against each other.

    The batch is dimension 0: of the inputs that share the first dynamic dimension 0, else of those that share the
    first fixed one above 1. Rows of a dynamic batch are also held against the row computed alone.
    """
    declared = {name: shape[0] for name, shape in session.inputs.items() if shape and name in feed}
    dynamic = [name for name, dim in declared.items() if not isinstance(dim, int)]
    if dynamic:
        size = max(2, feed[dynamic[0]].shape[0])
        batched = [name for name in dynamic if declared[name] == declared[dynamic[0]]]
    else:
        size = next((dim for dim in declared.values() if isinstance(dim, int) and dim > 1), 1)
        batched = [name for name, dim in declared.items() if dim == size]
    if size < 2 or not batched or any(feed[name].shape[0] < 1 for name in batched):
        return _Rows()
    repeated = {**feed, **{name: np.repeat(feed[name][:1], size, axis=0) for name in batched}}
    try:
        many = session.run(repeated)
        alone = session.run({**feed, **{name: feed[name][:1] for name in batched}}) if dynamic else None
    except EngineError as error:
        if not dynamic or error.kind is not FailureKind.ERROR:
            raise
        text = f"the model's first dimension is dynamic, but it fails with {size} rows ({error.message}): fix it at 1"
        return _Rows(warnings=(text,))
    # An output whose first dimension is not the batch has no rows to compare.
    rows = {name: values for name, values in many.items() if values.ndim and values.shape[0] == size}
    if not rows:
        return _Rows()
    identical = max(relative_l2(values[row], values[0]) for values in rows.values() for row in range(1, size))
    if alone is None:
        return _Rows(identical)
    single = [relative_l2(values[0], alone[name][0]) for name, values in rows.items() if alone[name].shape[:1] == (1,)]
    return _Rows(identical, max(single, default=None))


def _facts(values: Sequence[np.ndarray]) -> dict[str, float]:
    """Non-finite count, share of zeros and largest finite magnitude of one output over all samples."""
    count = sum(array.size for array in values)
    finite = [np.abs(array[np.isfinite(array)].astype(np.float64)) for array in values]
    return {
        "non_finite": float(count - sum(array.size for array in finite)),
        "zero_fraction": float(sum(int((array == 0).sum()) for array in finite)) / max(1, count),
        "absmax": max((float(array.max(initial=0.0)) for array in finite), default=0.0),
    }


def output_error(state: WorkerState, outputs: Sequence[Outputs], reference: Path, metric: str) -> OutputError:
    """Hold the outputs on the first samples against the reference.

    Args:
        state: keeps what is read.
        outputs: of each sample.
        reference: file of reference outputs on the same samples; there may be more of them.
        metric: the objective, so that task metrics are taken too.

    Raises:
        EngineError: an output has another shape than the reference.
    """
    known = state.cached(f"reference {reference}", file_identity(reference), partial(read_outputs, reference))
    wanted = known[: len(outputs)]
    _, extra = state.cached("metric", metric, partial(resolve_metric, metric))
    for got, expected in zip(outputs, wanted, strict=True):
        for name, array in expected.items():
            # The plan's doing (a detector keeps another number of boxes), so no error of the user's.
            if name in got and got[name].shape != array.shape:
                text = f"output {name!r} has shape {got[name].shape}, the reference has {array.shape}"
                raise EngineError(FailureKind.ERROR, text)
    return compare_outputs(outputs, wanted, extra)


def cached_samples(state: WorkerState, path: Path) -> tuple[dict[str, np.ndarray], ...]:
    """The samples in a file, read once per worker."""
    return state.cached(f"samples {path}", file_identity(path), partial(read_samples, path))


def file_identity(path: Path) -> tuple[str, int, int]:
    """Changes when the file is written anew."""
    facts = path.stat()
    return str(path), facts.st_mtime_ns, facts.st_size
