"""Weighted layers: a convolution or matrix product with its bias, batch norm and activation, which runtimes fuse."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from mptune.graph.grouping.activations import Activation
from mptune.graph.grouping.lookup import Lookup
from mptune.graph.loading.model import Node

CONVOLUTIONS = frozenset({"Conv", "ConvTranspose", "DeformConv", "FusedConv", "NhwcConv", "NhwcFusedConv"})
_WEIGHTED_PRODUCTS = frozenset({"MatMul", "Gemm", "FusedMatMul", "TransposeMatMul", "FusedGemm"})
_ACTIVATIONS = frozenset(
    {
        "Relu",
        "LeakyRelu",
        "PRelu",
        "Clip",
        "Sigmoid",
        "Tanh",
        "HardSigmoid",
        "HardSwish",
        "Elu",
        "Selu",
        "Celu",
        "Gelu",
        "FastGelu",
        "QuickGelu",
        "BiasGelu",
        "Mish",
        "Softplus",
        "Softsign",
        "ThresholdedRelu",
    }
)
_PER_CHANNEL = frozenset({"Mul", "Add", "Sub", "Div"})
_MAX_PER_CHANNEL = 4
"""The most nodes of a decomposed batch norm: minus mean, divided by deviation, scaled, shifted."""


@dataclass(frozen=True)
class Layer:
    """A weighted layer with what is fused onto it."""

    kind: str
    nodes: frozenset[int]
    name: str


def find_layer(
    look: Lookup, start: Node, claimed: Container[int], activations: Mapping[str, Activation]
) -> Layer | None:
    """The layer that begins at a convolution or product; None where nothing is fused onto it.

    ``activations`` are the decomposed ones, by the value that they are computed from.
    """
    is_conv = start.op_type in CONVOLUTIONS
    if not is_conv and (
        start.op_type not in _WEIGHTED_PRODUCTS or not any(look.is_static(i) for i in start.inputs[:2])
    ):
        return None
    inside, at, parts = {start.index}, start, dict[str, None]()
    budget = _MAX_PER_CHANNEL if is_conv else 1
    while True:
        result = at.outputs[0]
        activation = activations.get(look.root(result))
        if activation is not None and not look.is_output(result):
            if all(r.index in activation.nodes for r in look.readers(result)):
                inside |= activation.nodes
                parts["activation"] = None
            break
        reader = look.only_reader(at)
        if reader is None or reader.index in claimed:
            break
        if reader.op_type == "BatchNormalization" and look.root(reader.inputs[0]) == look.root(result):
            parts["batch norm"] = None
            budget = 0
        elif budget and _is_per_channel(look, reader, result, is_conv):
            parts["scale and shift" if is_conv and reader.op_type != "Add" else "bias"] = None
            budget -= 1
        elif reader.op_type in _ACTIVATIONS and len(look.varying(reader)) == 1:
            inside.add(reader.index)
            parts["activation"] = None
            break
        else:
            break
        inside.add(reader.index)
        at = reader
    if len(inside) == 1:
        return None
    what = "convolution" if is_conv else "matrix product"
    return Layer("conv" if is_conv else "matmul", frozenset(inside), f"{what} with its {' and '.join(parts)}")


def _is_per_channel(look: Lookup, node: Node, tensor: str, is_conv: bool) -> bool:
    other = look.other(node, tensor)
    if node.op_type not in (_PER_CHANNEL if is_conv else {"Add"}) or not other or not look.is_vector(other):
        return False
    return node.op_type in ("Add", "Mul") or look.root(node.inputs[0]) == look.root(tensor)
