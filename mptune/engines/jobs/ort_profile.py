"""The time of each layer under ONNX Runtime, by its own profiler.

The profiler names the nodes of the graph as ONNX Runtime optimised it: fused, renamed, with blank and repeated names.
Only the names of tensors survive. So that graph is saved for a moment, and each of its nodes is traced back to nodes of
the typed model by its inputs and outputs.

For the CPU provider. The CUDA provider's kernels run asynchronously, and what it reports of a node is the launch. With
``CUDA_LAUNCH_BLOCKING=1`` a node costs about 15 us more, and the difference of all-FP32 and all-FP16 comes out at 0.8
to 4.4 times that of their engines (four models on an H200): no better than the roofline.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import onnx

from mptune.engines.base import EngineError, FailureKind, Stage
from mptune.engines.jobs.layer_times import PROFILED_RUNS, UNTIMED_RUNS, LayerTime, steady_mean
from mptune.engines.jobs.samples import cached_samples
from mptune.engines.ort.cuda_session import open_session
from mptune.engines.ort.optimised import Nodes, computed_nodes, load_graph, take_optimised
from mptune.engines.ort.session import SessionOptions
from mptune.engines.worker.child import WorkerState

_KERNEL = "_kernel_time"
_WITH_SUBGRAPH = frozenset({"If", "Loop", "Scan", "SequenceMap"})


@dataclass(frozen=True)
class OrtProfileJob:
    """Take the layer times of a typed model in a session of its own.

    Attributes:
        folder: an empty folder for the profiler's files; it is empty again afterwards.
    """

    model: Path
    samples: Path
    folder: Path

    def run(self, state: WorkerState) -> tuple[LayerTime, ...]:
        """See the class."""
        feed = cached_samples(state, self.samples)[0]
        try:
            options = SessionOptions("cpu", profile_dir=self.folder)
            session = state.transient(partial(open_session, self.model, options))
            optimised = take_optimised(self.folder)
            state.enter(Stage.TIME)
            watch = session.stopwatch(feed)
            for _ in range(UNTIMED_RUNS + PROFILED_RUNS):
                watch.run_once()
            events = json.loads(session.end_profile().read_text(encoding="utf-8"))
        finally:
            _clear(self.folder)
        computed = computed_nodes(load_graph(self.model), optimised)
        return layer_times(events, optimised, computed)


def layer_times(
    events: Sequence[Mapping[str, Any]], optimised: onnx.GraphProto, computed: Sequence[Nodes]
) -> tuple[LayerTime, ...]:
    """Read ONNX Runtime's profile: the mean of each node over the last runs, without the longest.

    Raises:
        EngineError: the profile holds no node.
    """
    durations: dict[tuple[str, str, str], list[float]] = {}
    for event in _outermost([event for event in events if _is_kernel(event)]):
        facts = event["args"]
        key = (str(facts["node_index"]), event["name"][: -len(_KERNEL)], str(facts["op_name"]))
        durations.setdefault(key, []).append(float(event["dur"]))
    if not durations:
        raise EngineError(FailureKind.ERROR, "ONNX Runtime's profile names no node")
    waiting: dict[tuple[str, str], deque[int]] = defaultdict(deque)
    for index, node in enumerate(optimised.node):
        waiting[node.name, node.op_type].append(index)
    found = []
    for (number, name, op), values in durations.items():
        # Nodes without a name are named by operator and number; nodes of the same name come in the graph's order.
        queue = waiting.get((name, op)) or (waiting.get(("", op)) if name == f"{op}_{number}" else None)
        nodes = computed[queue.popleft()] if queue else ()
        found.append(LayerTime(nodes, steady_mean(values[-PROFILED_RUNS:]) / 1e3))
    return tuple(found)


def _is_kernel(event: Mapping[str, Any]) -> bool:
    return event.get("cat") == "Node" and str(event.get("name", "")).endswith(_KERNEL)


def _outermost(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The events without those of subgraphs, whose time is part of the outer node's, which is reported after them."""
    kept: list[Mapping[str, Any]] = []
    for event in events:
        if event["args"]["op_name"] in _WITH_SUBGRAPH:
            while kept and kept[-1]["ts"] >= event["ts"]:
                kept.pop()
        kept.append(event)
    return kept


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
