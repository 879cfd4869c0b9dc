"""Masks that are made of constants beyond a precision's range, and are cast to it: they are held as the constants are.

A mask that is computed in FP32 holds -1e9. Cast to FP16 it would be -inf, and a row that is masked whole, such as those
of the padding before a decoder's sequence, would be NaN after the softmax. Held as -65504 it is what it is where its
group runs in FP16. What is folded into a constant (``mptune.graph.folded``) is one, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from mptune.graph.folded import comes_from_beyond
from mptune.graph.grouping.lookup import Lookup
from mptune.graph.hazards.constants import LIMITS, comes_to_softmax, is_limit
from mptune.graph.hazards.saturated import PRODUCTS, SELECTS, SUMS
from mptune.graph.loading.model import Model, Node
from mptune.graph.loading.once import once
from mptune.graph.loading.tensors import fill_value
from mptune.graph.plan import LARGEST, Precision
from mptune.graph.writing.weights import chunks, largest_magnitude

_CARRY = SELECTS | SUMS | PRODUCTS


def is_held(model: Model, value: str, precision: Precision) -> bool:
    """Whether a value that is computed in FP32 is limited to a precision's range before it is cast to it."""
    return _masks(model).get(value, 0.0) > LARGEST[precision] or comes_from_beyond(model, value, precision)


@once
def _masks(model: Model) -> Mapping[str, float]:
    """FP32 values that bring masks to a softmax -> the largest magnitude of the constants that these are made of.

    Values with an infinite constant in them are left out: infinities stay.
    """
    look, largest = Lookup(model), dict[str, float]()
    magnitudes: dict[str, float] = {}
    for node in model.nodes:
        if node.op_type not in _CARRY and node.op_type != "ConstantOfShape":
            continue
        if not node.is_standard or not model.info(node.outputs[0]).is_float32:
            continue
        made_of = [magnitudes[name] for name in node.inputs if name in magnitudes]
        if node.op_type == "ConstantOfShape":
            made_of = [_filled(look, node)]
        elif node.op_type not in LIMITS:  # the bounds of these are none that values have
            for name in node.inputs:
                if name in model.initializers and name not in largest:
                    largest[name] = _largest_of(look, name)
            made_of += [largest[name] for name in node.inputs if name in largest]
        magnitude = max(made_of, default=0.0)
        if magnitude > LARGEST[Precision.FP16]:
            magnitudes.update(dict.fromkeys(node.outputs, magnitude))
    return {
        name: magnitude
        for name, magnitude in magnitudes.items()
        if math.isfinite(magnitude) and comes_to_softmax(look, model.nodes[model.producer[name]])
    }


def _filled(look: Lookup, node: Node) -> float:
    return largest_magnitude(fill_value(node.proto)) if is_limit(look, node.outputs[0]) else 0.0


def _largest_of(look: Lookup, name: str) -> float:
    constant = look.model.initializers[name]
    if constant.dtype != "float" or constant.overridable or not is_limit(look, name):
        return 0.0
    return max(map(largest_magnitude, chunks(constant)), default=0.0)
