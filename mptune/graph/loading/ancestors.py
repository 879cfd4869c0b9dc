"""What a value is computed from."""

from __future__ import annotations

from collections.abc import Iterable

from mptune.graph.loading.model import Model, Node


def needed_nodes(model: Model, values: Iterable[str]) -> list[Node]:
    """The nodes that these values depend on, in topological order."""
    wanted = set(values)
    needed = []
    for node in reversed(model.nodes):
        if not wanted.isdisjoint(node.outputs):
            needed.append(node)
            wanted.update(node.inputs)
            wanted.update(node.captures)
            wanted.discard("")  # an omitted input is nobody's output
    return needed[::-1]
