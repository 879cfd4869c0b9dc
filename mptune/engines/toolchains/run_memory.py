"""How much memory one run of a model takes on a CPU, before anything has run: so many runs fit side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from mptune.data.archive import read_sample_shapes
from mptune.graph.loading.model import Model
from mptune.graph.loading.once import once
from mptune.graph.loading.shapes import static_shapes
from mptune.targets.flops import Shape
from mptune.targets.memory import memory_need

_VALUES_EACH = 3
"""What a run holds of a value at once, in FP32 values at most: in an emulation as computed, in FP16, and rounded."""


def run_bytes(model: Model, samples: Path) -> int | None:
    """Memory for the values of one run in FP32, emulated or observed, on the largest sample.

    Returns:
        Bytes, more rather than less. None where a value's size is not known, or a subgraph has values of its own.
    """
    every = [shapes for shapes in read_sample_shapes(samples) if shapes]
    if not every:
        return None
    names = {tensor.name for tensor in model.inputs}
    largest = max(every, key=lambda shapes: sum(map(math.prod, shapes.values())))
    given = tuple(sorted((name, shape) for name, shape in largest.items() if name in names))
    known = _by_inputs(model)
    if given not in known:
        known[given] = _bytes_of(model, dict(given))
    return known[given]


@once
def _by_inputs(model: Model) -> dict[tuple[tuple[str, Shape], ...], int | None]:
    """What has been found of a model, by the shapes of its inputs: it takes a tenth of a second for 600 nodes."""
    return {}


def _bytes_of(model: Model, inputs: Mapping[str, Shape]) -> int | None:
    outputs = (out for node in model.nodes for out in node.outputs if out)
    if any(node.has_subgraph for node in model.nodes) or any(model.info(out).dtype == "undefined" for out in outputs):
        return None
    found = static_shapes(model, given=inputs)
    return None if found.unknown else _VALUES_EACH * memory_need(model, found.shapes).fp32_activations
