"""The graph of a session as ONNX Runtime optimised it, and what its nodes were before.

ONNX Runtime fuses and renames nodes; only the names of tensors survive. So each node of the optimised graph is traced
back to nodes of the graph that was given by its inputs and outputs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from functools import partial
from pathlib import Path

import onnx

from mptune.engines.base import EngineError, FailureKind
from mptune.engines.ort.session import OPTIMISED_MODEL

# How ONNX Runtime names what it computes in another type than the graph has it (insert_cast_transformer.cc).
_RETYPED = re.compile(r"^InsertedPrecisionFreeCast_(?P<name>.+?)(?:_token_\d+)?$")

_BLOCKED = "_nchwc"
"""Suffix of the name of a node whose output has blocked channels; before it stands the name of the tensor, which is no
longer in the graph (nchwc_transformer.cc)."""

Nodes = tuple[str, ...]


def take_optimised(folder: Path) -> onnx.GraphProto:
    """Read the graph that a session saved as it was optimised, and delete it: beside it lies a copy of all weights.

    Raises:
        EngineError: there is none.
    """
    graph = load_graph(folder / OPTIMISED_MODEL)
    for path in folder.glob("optimised.*"):
        path.unlink()
    return graph


def load_graph(path: Path) -> onnx.GraphProto:
    """The graph of a model, without its external data.

    Raises:
        EngineError: there is none, or it cannot be read.
    """
    try:
        return onnx.load(path, load_external_data=False).graph
    except (OSError, ValueError) as error:
        raise EngineError(FailureKind.ERROR, f"ONNX Runtime left no graph as it optimised it: {error}") from error


def computed_nodes(typed: onnx.GraphProto, optimised: onnx.GraphProto) -> list[Nodes]:
    """The nodes of the typed model that each node of the optimised graph computes.

    A node with an output of the typed model computes the producer of that output there, and the nodes between that and
    the tensors that are still in the optimised graph, which were fused into it. A node without such an output (a layout
    change before a product) counts for its first reader, or else for the producer of its first input.

    Args:
        typed: the graph that was given to ONNX Runtime; its nodes have unique names.
    """
    producer = {name: node for node in typed.node for name in node.output if name}
    varying = _varying(typed)

    known = partial(given_name, producer=producer)
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


def given_name(name: str, producer: Container[str]) -> str | None:
    """The name that a tensor of the optimised graph has in the one that was given; None where it is a new one."""
    if name in producer:
        return name
    match = _RETYPED.match(name)
    return match["name"] if match and match["name"] in producer else None


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
