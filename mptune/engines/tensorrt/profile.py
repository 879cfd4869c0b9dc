"""The time of each layer under TensorRT or TensorRT-RTX, by ``IProfiler``.

TensorRT reports the time of every layer after each execution, under the layer's name in the inspector, which has the
ONNX nodes that the layer came from. Layers that TensorRT added (reformats) come from none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from mptune.engines.base import EngineError, FailureKind, Stage
from mptune.engines.jobs.layer_times import PROFILED_RUNS, UNTIMED_RUNS, LayerTime, steady_mean
from mptune.engines.jobs.samples import cached_samples
from mptune.engines.tensorrt.inspect import Layer, read_layers
from mptune.engines.tensorrt.library import Kind
from mptune.engines.tensorrt.session import EngineOptions, TensorRtSession
from mptune.engines.worker.child import WorkerState
from mptune.settings import LatencySettings


@dataclass(frozen=True)
class EngineProfileJob:
    """Take the layer times of an engine file in a session of its own, since the one that is timed has a CUDA graph.

    Attributes:
        runtime_cache: File in which TensorRT-RTX keeps compiled kernels; None for none.
    """

    engine: Path
    samples: Path
    kind: Kind
    latency: LatencySettings = field(default_factory=LatencySettings)
    runtime_cache: Path | None = None
    fp64_inputs: frozenset[str] = frozenset()

    def run(self, state: WorkerState) -> tuple[LayerTime, ...]:
        """The layer times of one execution, in the engine's order.

        Raises:
            EngineError: the engine cannot be loaded or run.
        """
        feed = cached_samples(state, self.samples)[0]
        plain = replace(self.latency, cuda_graph=False)
        options = EngineOptions(self.kind, plain, self.runtime_cache, fp64_inputs=self.fp64_inputs)
        session = state.transient(partial(TensorRtSession, self.engine, options))
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
    """Combine the profiler's times with the inspector's layers.

    Args:
        executions: layer name -> milliseconds, of each execution.

    Raises:
        EngineError: the profiler reported no layer, or none that the inspector traces to the model.
    """
    nodes: dict[str, tuple[str, ...]] = {}
    for layer in layers:
        nodes[layer.name] = nodes.get(layer.name, ()) + layer.nodes
    names = dict.fromkeys(name for execution in executions for name in execution)
    if not any(nodes.get(name) for name in names):
        reported = f"{len(names)} layers, none of which the inspector traces to the model" if names else "no layers"
        raise EngineError(FailureKind.UNSUPPORTED, f"the profiler reports {reported}")
    return tuple(
        LayerTime(nodes.get(name, ()), steady_mean([execution.get(name, 0.0) for execution in executions]))
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
