"""Where a Cast to FP32 must not stand right before a recurrent layer: TensorRT-RTX refuses that.

TensorRT's parser makes a loop of LSTM, GRU and RNN. TensorRT-RTX 1.7.1 moves a Cast to FP32 before a forward layer into
that loop, past the slice that takes one step, and then finds the shapes wrong: "Mismatched number of elements in
reshape op". The smallest network is FP16 input, Cast, LSTM with more than one step. It does so from FP16 and BF16, for
every compute capability, hidden size and batch, wherever the Cast stands among the Reshapes and Transposes between, and
with given lengths and initial states; it does not where the layer runs in reverse or in both directions, nor for Scan,
Loop, initial states and a Cast from FP32.

Any computation between the two helps. ``x - 0`` is one that changes no value: ``x + 0`` changes the sign of -0, and
Clip without bounds makes infinities finite in ONNX Runtime.
"""

from __future__ import annotations

import onnx

from mptune.graph.casting.value_types import Resolution, ValueTypes
from mptune.graph.grouping.lookup import attribute
from mptune.graph.grouping.op_kinds import DATA_MOVEMENT, RECURRENT
from mptune.graph.loading.model import Model, Node
from mptune.graph.plan import Precision

_MOVES = DATA_MOVEMENT - {"Cast"} | {"Concat", "Gather", "MaxPool", "Pad"}
"""Operators that TensorRT-RTX moves a Cast past where they change nothing."""


def needs_barrier(types: ValueTypes, node: Node, resolution: Resolution) -> bool:
    """Whether a plan puts a Cast to FP32, and nothing that computes, before the input of a forward recurrent layer."""
    if node.op_type not in RECURRENT or not node.is_standard or not _is_forward(node):
        return False
    if resolution.node_precisions[node.index] is not Precision.FP32:
        return False
    value = node.inputs[0]
    while resolution.computed_in(value) is Precision.FP32:
        moved = _moved(types.model, value)
        if moved is None:
            return False
        value = moved
    return True


def add_barrier(graph: onnx.GraphProto, value: str, name: str, zero: str) -> str:
    """Append ``value - 0`` as a new node and result ``name``; all barriers of a graph share the constant ``zero``."""
    if all(constant.name != zero for constant in graph.initializer):
        graph.initializer.add(name=zero, data_type=onnx.TensorProto.FLOAT, float_data=[0.0])
    graph.node.add(op_type="Sub", name=name, input=[value, zero], output=[name])
    return name


def _is_forward(node: Node) -> bool:
    return attribute(node, "direction") in (None, b"forward")


def _moved(model: Model, value: str) -> str | None:
    """What a value is only another arrangement of; None where it is computed, or given."""
    index = model.producer.get(value)
    node = None if index is None else model.nodes[index]
    return node.inputs[0] if node is not None and node.is_standard and node.op_type in _MOVES else None
