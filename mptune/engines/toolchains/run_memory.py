"""How much memory one run of a model takes on a CPU, before anything has run: so many runs fit side by side."""

from __future__ import annotations

import math
from pathlib import Path

from mptune.data.archive import read_sample_shapes
from mptune.graph.loading.model import Model
from mptune.graph.loading.shapes import static_shapes
from mptune.targets.memory import memory_need

_VALUES_EACH = 3
"""What a run holds of a value at once, in FP32 values at most: in an emulation as computed, in FP16, and rounded."""


def run_bytes(model: Model, samples: Path) -> int | None:
    """Memory for the values of one run in FP32, emulated or observed, on the largest sample.

    Args:
        model: the model.
        samples: file of samples.

    Returns:
        Bytes, more rather than less. None where a value's size is not known, or a subgraph has values of its own.
    """
    if any(node.has_subgraph for node in model.nodes):
        return None
    every = [shapes for shapes in read_sample_shapes(samples) if shapes]
    if not every or any(model.info(out).dtype == "undefined" for node in model.nodes for out in node.outputs if out):
        return None
    names = {tensor.name for tensor in model.inputs}
    largest = max(every, key=lambda shapes: sum(map(math.prod, shapes.values())))
    found = static_shapes(model, given={name: shape for name, shape in largest.items() if name in names})
    return None if found.unknown else _VALUES_EACH * memory_need(model, found.shapes).fp32_activations
