"""Weights that are stored in INT8 or less, for products whose activations are not quantised.

From operator set 19 on, DequantizeLinear takes its scale in FP16 and gives FP16: a product in FP16 then needs no Cast
between the two. Seen with TensorRT-RTX 1.7: the layer DEQUANTIZE gives HALF, and the layer CAST behind it is gone.
"""

from __future__ import annotations

import numpy as np

from mptune.graph.grouping.op_kinds import DATA_MOVEMENT
from mptune.graph.loading.model import Model, Node
from mptune.graph.plan import LARGEST, Precision

_FIRST_OPSET = 19
_FP16_NORMAL = 2.0**-14
_PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose"})


def dequantises_weights(model: Model, node: Node) -> bool:
    """Whether a node dequantises a constant for products of activations that are not quantised, and may do so in FP16.

    Its scales must be normal numbers of FP16: smaller ones lose digits, and vanish.
    """
    if node.op_type != "DequantizeLinear" or not node.is_standard or model.opset < _FIRST_OPSET:
        return False
    weight, scale = (model.initializers.get(name) for name in node.inputs[:2])
    if weight is None or scale is None or weight.overridable or scale.overridable or scale.dtype != "float":
        return False
    if any(attribute.name == "output_dtype" and attribute.i for attribute in node.proto.attribute):
        return False
    (out,) = node.outputs
    readers = [model.nodes[index] for index in model.consumers.get(out, ())]
    if not readers or out in {output.name for output in model.outputs}:
        return False
    if not all(_multiplies(model, reader, out) for reader in readers):
        return False
    values = np.abs(scale.numpy())
    return bool(values.size and values.min() >= _FP16_NORMAL and values.max() <= LARGEST[Precision.FP16])


def _multiplies(model: Model, node: Node, weight: str) -> bool:
    """Whether a node is a product of a weight with something that is not dequantised."""
    if node.op_type not in _PRODUCTS or not node.is_standard or weight not in node.inputs[:2]:
        return False
    others = [name for name in node.inputs[:2] if name != weight]
    return len(others) == 1 and not _is_dequantised(model, others[0])


def _is_dequantised(model: Model, tensor: str) -> bool:
    """Whether a value comes out of DequantizeLinear, maybe through views."""
    while tensor in model.producer:
        node = model.nodes[model.producer[tensor]]
        if node.op_type == "DequantizeLinear":
            return True
        if node.op_type not in DATA_MOVEMENT or not node.inputs:
            return False
        tensor = node.inputs[0]
    return False
