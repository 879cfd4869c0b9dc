"""Inputs and outputs in FP16, what other converters call ``keep_io_types=False``: the model with Casts beside them.

A plan merges these Casts with its own, as it does the model's (``value_types.OwnCasts``): a group in FP16 reads such an
input as it is given, and computes such an output under its name. The all-FP32 plan keeps the model's interface.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from mptune.graph.facts import facts_of
from mptune.graph.groups import GroupedModel
from mptune.graph.loading.model import Node, new_node, once, with_nodes
from mptune.graph.plan import Precision
from mptune.graph.value_types import new_suffix


@once
def reduced_interface(grouped: GroupedModel) -> frozenset[str]:
    """The inputs and outputs that mixed models have in ``grouped.io``: all that are FP32, but for a few.

    These are what a subgraph reads, by its name in there; an input that decides a shape, or is an output; a constant.
    """
    model = grouped.model
    if grouped.io == Precision.FP32:
        return frozenset()
    inputs, outputs = ({info.name for info in infos if info.is_float32} for infos in (model.inputs, model.outputs))
    inputs -= {*facts_of(model).shape_inputs, *outputs}
    outputs = {name for name in outputs if name in model.producer and name not in model.initializers}
    return frozenset(inputs | outputs).difference(*(node.captures for node in model.nodes))


@once
def with_reduced_interface(grouped: GroupedModel) -> GroupedModel:
    """The model whose interface is in ``grouped.io``, which takes the same plans; ``proto`` stays the model's.

    *Ensures*: inside, each of these values is FP32 under another name; nodes, groups and constants are the same.
    """
    model, names, to = grouped.model, reduced_interface(grouped), Precision.named(grouped.io)
    if not names:
        return grouped
    inside, interface = new_suffix(model, "inside"), new_suffix(model, "interface")

    def cast(source: str, result: str, precision: Precision) -> Node:
        return new_node("Cast", (source,), result, result + interface, to=precision.onnx_type)

    def renamed(names_of: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name + inside if name in names else name for name in names_of)

    nodes = [
        *(cast(info.name, info.name + inside, Precision.FP32) for info in model.inputs if info.name in names),
        *(replace(node, inputs=renamed(node.inputs), outputs=renamed(node.outputs)) for node in model.nodes),
        *(cast(info.name + inside, info.name, to) for info in model.outputs if info.name in names),
    ]
    tensors = {name: replace(model.info(name), dtype=to.dtype) for name in names}
    inner = {name + inside: replace(model.info(name), name=name + inside) for name in names}
    changed = with_nodes(model, nodes, model.initializers, tensors | inner)
    inputs, outputs = (tuple(changed.info(info.name) for info in infos) for infos in (model.inputs, model.outputs))
    return replace(grouped, model=replace(changed, inputs=inputs, outputs=outputs), io=Precision.FP32)


def interface_lines(grouped: GroupedModel, samples: Sequence[Mapping[str, np.ndarray]] = ()) -> list[str]:
    """What is particular about a reduced interface, one line each: what stays FP32, and inputs that become infinite."""
    model, names, largest, lines = grouped.model, reduced_interface(grouped), Precision.FP16.largest, list[str]()
    for name in dict.fromkeys(i.name for i in (*model.inputs, *model.outputs) if i.is_float32):
        if name not in names and grouped.io != Precision.FP32:
            lines.append(f"{name!r} stays FP32: a subgraph reads it, a shape depends on it, or nothing computes it")
        fed = [sample[name] for sample in samples if name in names and name in sample]
        if any((np.isfinite(array) & (np.abs(array) > largest)).any() for array in fed):
            lines.append(f"input {name!r} has values beyond {largest:g}, which --io fp16 makes infinite: scale them")
    return lines
