"""The jobs of TensorRT in the worker: load, build, measure, profile, check an engine's types, run an engine file."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from mptune.data.archive import read_samples
from mptune.engines.base import EngineError, EngineSession, FailureKind, Stage
from mptune.engines.cuda import runtime as cuda
from mptune.engines.jobs.layer_times import PROFILED_RUNS, UNTIMED_RUNS, LayerTime, steady_mean
from mptune.engines.jobs.outputs import OutputsJob, RepeatJob, Run
from mptune.engines.jobs.samples import Feed, Outputs, cached_samples
from mptune.engines.tensorrt.builder import BuildObjects, BuildOptions, build_engine, engine_faults
from mptune.engines.tensorrt.library import Kind, install_line, load_library, made, open_log
from mptune.engines.tensorrt.session import EngineOptions, TensorRtSession
from mptune.files import whole_file
from mptune.graph.plan import PRECISIONS, REDUCED, Precision
from mptune.processes.child import WorkerState
from mptune.targets.detect import detect_gpus

_TYPE_KEYS = ("Datatype", "DataType", "Format/Datatype", "Format/DataType", "Format")

# "Row major linear FP16 format", "Channel major FP16 format where channel % 8 == 0", "Half"; "Row major linear BF16".
_BRAIN = re.compile(r"BF16|BFloat16", re.IGNORECASE)
_HALF = re.compile(r"(?<!B)FP16|(?<!B)Float16|\bHalf\b", re.IGNORECASE)
_SINGLE = re.compile(r"FP32|Float32|(?<!B)\bFloat\b|\bTF32\b", re.IGNORECASE)
_NODE = re.compile(r"^\[ONNX Layer: (?P<name>.*)\]$", re.DOTALL)
_SEPARATORS = re.compile(r"[\x1e\x1f]")


@dataclass(frozen=True)
class Layer:
    """One layer of a built engine."""

    name: str
    nodes: tuple[str, ...]
    """The ONNX nodes that it came from; empty for a reformat of TensorRT's own."""
    inputs: frozenset[Precision]
    outputs: frozenset[Precision]


def read_layers(information: str) -> tuple[Layer, ...]:
    """The layers in the inspector's JSON; none where the engine was built without detailed verbosity."""
    return tuple(_layer(entry) for entry in _listed(information))


def type_warnings(
    nodes: Mapping[str, Precision], layers: Sequence[Layer], baseline: Sequence[Layer]
) -> tuple[str, ...]:
    """Compare an engine with its plan and with the all-FP32 engine.

    Only layers whose nodes all have the same precision count: what is fused across a boundary has both.
    """
    warnings = []
    realised = _realised(nodes, layers)
    if not {*nodes.values()}.isdisjoint(REDUCED) and realised and realised == _realised(nodes, baseline):
        warnings.append(
            "the engine computes in the same types as the all-FP32 engine, so the plan changed nothing: update"
            " TensorRT, or treat the plan as FP32"
        )
    other = [(layer, wanted) for layer in layers if (wanted := _broken(nodes, layer)) is not None]
    if other and not warnings:
        layer, wanted = other[0]
        got = ", ".join(sorted(precision.value for precision in layer.outputs))
        warnings.append(
            f"{len(other)} of {len(layers)} layers of the engine run in another type than the plan says, such as"
            f" {layer.name!r} ({got} in place of {wanted.value}): latency and error are those of this engine; update"
            " TensorRT to have the plan's"
        )
    return tuple(warnings)


def _listed(information: str) -> list[Mapping[str, Any]]:
    """The entries of the layers that have more than a name."""
    try:
        document = json.loads(information)
    except ValueError:
        return []
    listed = document.get("Layers", ()) if isinstance(document, dict) else ()
    return [entry for entry in listed if isinstance(entry, dict)]


def _layer(entry: Mapping[str, Any]) -> Layer:
    metadata = str(entry.get("Metadata") or "")
    matches = (_NODE.match(part.strip()) for part in _SEPARATORS.split(metadata))
    return Layer(
        name=str(entry.get("Name", "")),
        nodes=tuple(match["name"] for match in matches if match),
        inputs=_types(entry.get("Inputs", ())),
        outputs=_types(entry.get("Outputs", ())),
    )


def _types(tensors: Any) -> frozenset[Precision]:
    precisions = (_type(tensor) for tensor in tensors if isinstance(tensor, dict)) if isinstance(tensors, list) else ()
    return frozenset(precision for precision in precisions if precision is not None)


def _type(description: Mapping[str, Any]) -> Precision | None:
    """The floating type of a tensor; None for integers, other floats, and where TensorRT gives none."""
    text = _type_text(description)
    if _BRAIN.search(text):
        return Precision.BF16
    if _HALF.search(text):
        return Precision.FP16
    return Precision.FP32 if _SINGLE.search(text) else None


def _type_text(description: Mapping[str, Any]) -> str:
    return next((str(description[key]) for key in _TYPE_KEYS if description.get(key)), "")


def _realised(nodes: Mapping[str, Precision], layers: Sequence[Layer]) -> dict[str, frozenset[Precision]]:
    """Types of the inputs and outputs of the layers that each of the plan's nodes became part of."""
    realised: dict[str, frozenset[Precision]] = {}
    for layer in layers:
        for node in layer.nodes:
            if node in nodes:
                realised[node] = realised.get(node, frozenset()) | layer.inputs | layer.outputs
    return {node: types for node, types in realised.items() if types}


def _broken(nodes: Mapping[str, Precision], layer: Layer) -> Precision | None:
    """The precision that a layer should have, where none of its outputs has that type."""
    wanted = {nodes.get(node) for node in layer.nodes}
    if len(wanted) != 1 or not layer.outputs:
        return None
    precision = wanted.pop()
    return precision if precision is not None and precision not in layer.outputs else None


_OPEN_SESSIONS = ("baseline", "switched", "waists")
"""What stays open in the worker from job to job and holds memory of the device."""
_SHAPE_VALUES = 64
"""An integer input of at most so many elements may be a shape; of all others only the shape is needed to build."""


@dataclass(frozen=True)
class LibraryReport:
    """The result of ``LibraryJob``."""

    version: str
    warnings: tuple[str, ...] = ()
    cuda_obstacle: str | None = None
    """Why no GPU can be used through cuda-python or the system's CUDA."""
    cuda_install: str = ""
    """The command that removes the obstacle, where one does."""


@dataclass(frozen=True)
class LibraryJob:
    """Check that TensorRT or TensorRT-RTX loads, that its version is supported, and that it makes a builder.

    A builder of TensorRT needs a GPU, and fails where the driver is older than the library's CUDA; one of TensorRT-RTX
    needs none.
    """

    kind: Kind

    def run(self, state: WorkerState) -> LibraryReport:
        library = load_library(self.kind)
        obstacle, install = None, ""
        try:
            cuda.require_device()
        except EngineError as error:
            obstacle = error.message
            install = "" if error.kind is FailureKind.DEVICE_LOST else cuda.install_line()
        if obstacle is None or library.is_rtx:
            try:
                log = open_log(library.trt)
                made(lambda: library.trt.Builder(log), log)
            except EngineError as error:
                if library.is_rtx:
                    raise
                obstacle = f"it makes no builder: {error.message}"
                install = install_line(self.kind, detect_gpus()) if error.kind is FailureKind.DRIVER else ""
        return LibraryReport(library.version, library.warnings, obstacle, install)


@dataclass(frozen=True)
class BuildResult:
    """The result of ``BuildJob``."""

    build_s: float
    nbytes: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class BuildJob:
    """Build the engine of a typed model and write it to a file, whole or not at all."""

    model: Path
    engine_path: Path
    options: BuildOptions
    samples: tuple[Path, ...]
    """Files of samples whose shapes the engine must take; it is tuned for the first sample of the first."""
    timeout_s: float
    alone: bool = False
    """Close the sessions that stay open in the worker before the build. Where CPU and GPU share their memory, TensorRT
    would skip tactics in some builds and not in others, by what is open."""

    def run(self, state: WorkerState) -> BuildResult:
        for slot in _OPEN_SESSIONS if self.alone else ():
            state.drop(slot)
        library = load_library(self.options.kind, self.options.plugins)
        outlines = state.cached("outlines", self.samples, lambda: _outlines(self.samples))
        objects = state.transient(BuildObjects)  # Freed once the answer is sent.
        started = time.perf_counter()
        built = build_engine(
            library,
            self.model,
            self.options,
            outlines,
            timeout_s=self.timeout_s,
            report=state.report,
            objects=objects,
        )
        build_s = time.perf_counter() - started
        faults = engine_faults(library, built.memory, objects) if library.is_rtx else ()
        if faults:
            raise EngineError(FailureKind.ERROR, f"TensorRT-RTX refuses the engine that it built: {', '.join(faults)}")
        with whole_file(self.engine_path) as partial:
            partial.write_bytes(built.memory)
        return BuildResult(build_s, built.memory.nbytes, built.warnings)


@dataclass(frozen=True)
class TensorRtEngine:
    """An engine file. Implements ``Engine`` and ``ComparesSessions``."""

    path: Path
    options: EngineOptions
    nodes: Mapping[str, Precision] = field(default_factory=dict)

    def open(self) -> TensorRtSession:
        return TensorRtSession(self.path, self.options)

    def compare(self, candidate: EngineSession, baseline: EngineSession) -> tuple[str, ...]:
        """See ``ComparesSessions``: about layers in another type than the plan says."""
        assert isinstance(candidate, TensorRtSession)
        assert isinstance(baseline, TensorRtSession)
        return type_warnings(self.nodes, read_layers(candidate.information()), read_layers(baseline.information()))


def _outlines(paths: tuple[Path, ...]) -> tuple[Feed, ...]:
    """The samples' shapes as arrays that take no memory; an input that may be a shape keeps its values."""
    return tuple(
        {name: _outline(array) for name, array in sample.items()} for path in paths for sample in read_samples(path)
    )


def _outline(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind in "iu" and array.size <= _SHAPE_VALUES:
        return array
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)


@dataclass(frozen=True)
class EngineProfileJob:
    """Take the layer times of an engine file in a session of its own, since the one that is timed has a CUDA graph."""

    built: TensorRtEngine
    samples: Path

    def run(self, state: WorkerState) -> tuple[LayerTime, ...]:
        """The layer times of one execution, in the engine's order."""
        feed = cached_samples(state, self.samples)[0]
        options = self.built.options
        plain = replace(options, latency=replace(options.latency, cuda_graph=False))
        session = state.transient(partial(TensorRtSession, self.built.path, plain))
        state.enter(Stage.TIME)
        profiler = profiler_class(session.library.trt)()
        session.attach(profiler)
        watch = session.stopwatch(feed)
        for _ in range(UNTIMED_RUNS):
            watch.run_once()
        for _ in range(PROFILED_RUNS):
            profiler.start_execution()
            watch.run_once()
        return layer_times(profiler.executions, read_layers(session.information()))


def layer_times(executions: Sequence[Mapping[str, float]], layers: Sequence[Layer]) -> tuple[LayerTime, ...]:
    """Combine the profiler's times with the inspector's layers."""
    nodes: dict[str, tuple[str, ...]] = {}
    types: dict[str, frozenset[Precision]] = {}
    for layer in layers:
        nodes[layer.name] = nodes.get(layer.name, ()) + layer.nodes
        types[layer.name] = types.get(layer.name, frozenset()) | layer.outputs
    names = dict.fromkeys(name for execution in executions for name in execution)
    if not any(nodes.get(name) for name in names):
        reported = f"{len(names)} layers, none of which the inspector traces to the model" if names else "no layers"
        raise EngineError(FailureKind.UNSUPPORTED, f"the profiler reports {reported}")
    return tuple(
        LayerTime(
            nodes.get(name, ()),
            steady_mean([execution.get(name, 0.0) for execution in executions]),
            name,
            tuple(precision for precision in PRECISIONS if precision in types.get(name, ())),
        )
        for name in names
    )


@cache
def profiler_class(trt: Any) -> Any:
    """An ``IProfiler`` of this module that keeps the time of each layer, execution by execution."""

    class Profiler(trt.IProfiler):  # type: ignore[misc]
        """Times of the same layer name within an execution are summed."""

        def __init__(self) -> None:
            super().__init__()
            self.executions: list[dict[str, float]] = []

        def start_execution(self) -> None:
            """Begin another execution; what is reported before the first one is dropped."""
            self.executions.append({})

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            if self.executions:
                times = self.executions[-1]
                times[layer_name] = times.get(layer_name, 0.0) + ms

    return Profiler


@dataclass(frozen=True)
class ModelNames:
    """How a model calls what goes into an engine and comes out of it."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    wanted: tuple[str, ...]


@dataclass(frozen=True)
class EngineOutputsJob(OutputsJob):
    """``OutputsJob`` with an engine file as ``model``."""

    kind: Kind = "tensorrt"
    names: ModelNames = ModelNames((), (), ())
    """Of the ONNX model's inputs and outputs; the samples have those inputs, the file gets those outputs."""

    def _open(self, state: WorkerState) -> Run:
        return _opened(state, self.model, self.kind, self.names, 1)[0]


@dataclass(frozen=True)
class EngineRepeatJob(RepeatJob):
    """``RepeatJob`` with an engine file as ``model``: each thread has a session with its own context and stream."""

    kind: Kind = "tensorrt"
    names: ModelNames = ModelNames((), (), ())

    def _open(self, state: WorkerState) -> list[Run]:
        return _opened(state, self.model, self.kind, self.names, self.threads)


def _opened(state: WorkerState, path: Path, kind: Kind, names: ModelNames, count: int) -> list[Run]:
    """What runs an engine file under the names of the model, each in a session of its own until the job ends."""
    sessions: ExitStack[bool | None] = state.transient(lambda: ExitStack())
    return [
        _renamed(sessions.enter_context(closing(TensorRtSession(path, EngineOptions(kind)))), names)
        for _ in range(count)
    ]


def _renamed(session: TensorRtSession, names: ModelNames) -> Run:
    """Runs a session on a model's feeds: inputs and outputs correspond by name, else by position."""
    mode = session.library.trt.TensorIOMode
    theirs = session.tensor_names(mode.INPUT)
    inputs = _pairs("inputs", theirs, theirs, names.inputs)
    types = {name: session.tensor_type(name) for name in theirs}
    outputs = _pairs("outputs", names.wanted, names.outputs, session.tensor_names(mode.OUTPUT))

    def run(feed: Feed) -> Outputs:
        values = session.run({name: _cast(feed[ours], name, types[name]) for name, ours in inputs.items()})
        return {ours: values[name] for ours, name in outputs.items()}

    return run


def _pairs(what: str, wanted: Sequence[str], names: Sequence[str], others: Sequence[str]) -> Mapping[str, str]:
    """Each wanted name -> the other side's: the same, else the one at its place where there are as many."""
    if set(wanted) <= set(others):
        return {name: name for name in wanted}
    if len(names) != len(others):
        text = f"the {what} of the engine and of the model differ: {', '.join(names)} and {', '.join(others)}"
        raise EngineError(FailureKind.ERROR, text)
    by_place = dict(zip(names, others, strict=True))
    return {name: by_place[name] for name in wanted}


def _cast(array: np.ndarray, name: str, dtype: np.dtype[np.generic]) -> np.ndarray:
    """A feed in the type of the engine's input: other widths of floats, and of integers that keep their values."""
    if array.dtype == dtype:
        return array
    if array.dtype.kind == dtype.kind == "f":
        return array.astype(dtype)
    if array.dtype.kind in "iu" and dtype.kind in "iu":
        cast = array.astype(dtype)
        if np.array_equal(cast, array):
            return cast
        raise EngineError(FailureKind.ERROR, f"input {name!r} is of type {dtype}, which does not hold all its values")
    return array  # The session says what it wants.
