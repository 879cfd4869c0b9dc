"""Names of nodes: unique ones where the file has none, or has one more than once."""

from __future__ import annotations

import onnx

from mptune.graph.loading.tensors import all_graphs


def unique_names(graph: onnx.GraphProto) -> list[str]:
    """The nodes' names; made where there is none, numbered where one is there again."""
    stated = {node.name for node in graph.node}
    used: set[str] = set()
    count: dict[str, int] = {}
    names = []
    for position, node in enumerate(graph.node):
        name = node.name or f"{node.op_type}_{position}"
        if name in used or (not node.name and name in stated):
            stem, number = name, count.get(name, 2)
            while (name := f"{stem}_{number}") in stated or name in used:
                number += 1
            count[stem] = number + 1
        used.add(name)
        names.append(name)
    return names


def name_apart(graph: onnx.GraphProto) -> None:
    """Number, in place, nodes of one graph or subgraph that have one name: ONNX Runtime 1.31 refuses such a model."""
    for inner in all_graphs(graph):
        names = [node.name for node in inner.node if node.name]
        if len(set(names)) == len(names):
            continue
        for node, name in zip(inner.node, unique_names(inner), strict=True):
            node.name = name
