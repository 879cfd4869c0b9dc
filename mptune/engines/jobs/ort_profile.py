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
import re
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
from mptune.engines.ort.session import OPTIMISED_MODEL, SessionOptions
from mptune.engines.worker.child import WorkerState

_KERNEL = "_kernel_time"
_WITH_SUBGRAPH = frozenset({"If", "Loop", "Scan", "SequenceMap"})

# How ONNX Runtime names what it computes in another type than the graph has it (insert_cast_transformer.cc).
_RETYPED = re.compile(r"^InsertedPrecisionFreeCast_(?P<name>.+?)(?:_token_\d+)?$")

_BLOCKED = "_nchwc"
"""Suffix of the name of a node whose output has blocked channels; before it stands the name of the tensor, which is no
longer in the graph (nchwc_transformer.cc)."""

Nodes = tuple[str, ...]


@dataclass(frozen=True)
class OrtProfileJob:
    """Take the layer times of a typed model in a session of its own.

    Attributes:
        model: the typed model of a plan.
        samples: file of samples; the first one is run.
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
            optimised = _load_graph(self.folder / OPTIMISED_MODEL)
            for path in self.folder.glob("optimised.*"):
                path.unlink()  # A copy of all weights: deleted as soon as it is read.
            state.enter(Stage.TIME)
            watch = session.stopwatch(feed)
            for _ in range(UNTIMED_RUNS + PROFILED_RUNS):
                watch.run_once()
            events = json.loads(session.end_profile().read_text(encoding="utf-8"))
        finally:
            _clear(self.folder)
        computed = computed_nodes(_load_graph(self.model), optimised)
        return layer_times(events, optimised, computed)


def computed_nodes(typed: onnx.GraphProto, optimised: onnx.GraphProto) -> list[Nodes]:
    """The nodes of the typed model that each node of the optimised graph computes.

    A node with an output of the typed model computes the producer of that output there, and the nodes between that and
    the tensors that are still in the optimised graph, which were fused into it. A node without such an output (a layout
    change before a product) counts for its first reader, or else for the producer of its first input.

    Args:
        typed: the graph that was given to ONNX Runtime; its nodes have unique names.
        optimised: the graph as ONNX Runtime optimised it.

    Returns:
        Names of nodes of ``typed``, for each node of ``optimised``.
    """
    producer = {name: node for node in typed.node for name in node.output if name}
    varying = _varying(typed)

    def known(name: str) -> str | None:
        if name in producer:
            return name
        match = _RETYPED.match(name)
        return match["name"] if match and match["name"] in producer else None

    given = [
        [name for name in map(known, (*node.output, _blocked(node))) if name is not None] for node in optimised.node
    ]
    left = {known(name) or name for node in optimised.node for name in (*node.input, *node.output)}
    left.update(name for names in given for name in names)
    found = [_between(names, producer, left, varying) for names in given]
    readers: dict[str, list[int]] = defaultdict(list)
    for index, node in enumerate(optimised.node):
        for name in node.input:
            readers[name].append(index)
    for index in reversed(range(len(found))):
        behind = (found[reader] for name in optimised.node[index].output for reader in readers[name])
        found[index] = found[index] or next(filter(None, behind), ())
    for index, node in enumerate(optimised.node):
        before = (producer[name].name for name in map(known, node.input) if name is not None)
        found[index] = found[index] or tuple(before)[:1]
    return found


def layer_times(
    events: Sequence[Mapping[str, Any]], optimised: onnx.GraphProto, computed: Sequence[Nodes]
) -> tuple[LayerTime, ...]:
    """Read ONNX Runtime's profile: the mean of each node over the last runs, without the longest.

    Args:
        events: of the profile.
        optimised: the graph that was run.
        computed: what each of its nodes computes.

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


def _blocked(node: onnx.NodeProto) -> str:
    """Name of a node's output with blocked channels; empty where it has none."""
    return str(node.name)[: -len(_BLOCKED)] if node.name.endswith(_BLOCKED) else ""


def _varying(graph: onnx.GraphProto) -> frozenset[str]:
    """Names of the nodes that cannot be folded: an input of theirs depends on the inputs of the model."""
    constants = {value.name for value in graph.initializer}
    values = {value.name for value in graph.input} - constants
    found = set()
    for node in graph.node:
        has_subgraph = any(attribute.HasField("g") for attribute in node.attribute)
        if has_subgraph or not values.isdisjoint(node.input):
            found.add(node.name)
            values.update(node.output)
    return frozenset(found)


def _between(
    given: Sequence[str], producer: Mapping[str, onnx.NodeProto], left: set[str], varying: frozenset[str]
) -> Nodes:
    """The producers of these tensors, and of their inputs as far as those are not in the optimised graph."""
    nodes: dict[str, None] = {}
    pending = list(given)
    while pending:
        node = producer[pending.pop()]
        if node.name in nodes:
            continue
        nodes[node.name] = None
        before = [name for name in node.input if name in producer and name not in left]
        pending += [name for name in before if producer[name].name in varying]
    return tuple(nodes)


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


def _load_graph(path: Path) -> onnx.GraphProto:
    try:
        return onnx.load(path, load_external_data=False).graph
    except (OSError, ValueError) as error:
        raise EngineError(FailureKind.ERROR, f"ONNX Runtime left no graph to profile: {error}") from error


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
