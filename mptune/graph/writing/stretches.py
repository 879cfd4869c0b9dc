"""Where a model can be entered between two nodes, and its groups divided into stretches at such places."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mptune.errors import ModelError
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.loading.model import Model
from mptune.graph.loading.tensors import fixed_shape


@dataclass(frozen=True)
class Waist:
    """A place between two nodes where a model can be entered.

    Attributes:
        last: index of the last node before it; -1 before all nodes.
        tensors: the values computed before it and read after it, without constants and the model's inputs.
        nbytes: of these values together, for one sample.
    """

    last: int = -1
    tensors: tuple[str, ...] = ()
    nbytes: int = 0


@dataclass(frozen=True)
class Stretch:
    """Consecutive groups, and the waist before all their nodes."""

    start: Waist
    groups: tuple[str, ...]


def find_stretches(
    grouped: GroupedModel, shapes: Mapping[str, Sequence[int]], count: int, max_bytes: int
) -> tuple[Stretch, ...]:
    """Divide the groups into about ``count`` stretches of about as many groups each, at waists.

    Args:
        shapes: concrete shape of FP32 values; no waist is made where one is missing.
        max_bytes: what the values of all waists together may take for one sample.

    Returns:
        In the model's order; the first starts before all nodes.
    """
    index = {node.name: node.index for node in grouped.model.nodes}
    begins = {group.id: min(index[name] for name in group.nodes) for group in grouped.groups}
    ordered = sorted(begins, key=lambda group: begins[group])
    waists = _waists(grouped.model, shapes)
    start, left, done = Waist(), max_bytes, 0
    stretches = []
    for number in range(1, count + 1):
        # End at the narrowest waist within half a stretch of the even division; without one, the next stretch starts
        # at the same waist.
        low, middle, high = (int(len(ordered) * (number + shift) / count + 0.5) for shift in (-0.5, 0, 0.5))
        end, following = middle, start
        if number < count and high < len(ordered):
            first, last = begins[ordered[max(low, done)]], begins[ordered[high]]
            near = [w for w in waists if max(first, start.last + 1) <= w.last < last and w.nbytes <= left]
            if near:
                following = min(near, key=lambda w: (w.nbytes, abs(2 * w.last - first - last)))
                left -= following.nbytes
                end = sum(begins[group] <= following.last for group in ordered)
        if end > done:
            stretches.append(Stretch(start, tuple(ordered[done:end])))
        start, done = following, max(end, done)
    return tuple(stretches)


def _waists(model: Model, shapes: Mapping[str, Sequence[int]]) -> list[Waist]:
    """The cuts of the graph before the first output of the model whose tensors all have known sizes."""
    outputs, last_read = {output.name for output in model.outputs}, dict[str, int]()
    for node in model.nodes:
        read = (*node.inputs, *node.captures)
        last_read.update((n, node.index) for n in read if n in model.producer and n not in model.initializers)
    waists: list[Waist] = []
    live: dict[str, float] = {}
    for node in model.nodes:
        if not outputs.isdisjoint(node.outputs):
            break
        live.update((name, _nbytes(model, name, shapes)) for name in node.outputs if name in last_read)
        live = {name: nbytes for name, nbytes in live.items() if last_read[name] > node.index}
        if live and math.isfinite(sum(live.values())):
            waists.append(Waist(node.index, tuple(live), int(sum(live.values()))))
    return waists


def _nbytes(model: Model, name: str, shapes: Mapping[str, Sequence[int]]) -> float:
    """Size of a value; infinite where it is not known, or no tensor."""
    info = model.info(name)
    sizes = fixed_shape(tuple(shapes[name]) if name in shapes else info.shape)
    try:
        return math.inf if sizes is None else math.prod(sizes) * info.numpy_dtype.itemsize
    except ModelError:
        return math.inf
