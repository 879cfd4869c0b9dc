"""What the steps of a recurrent layer cost: each waits for the one before.

The product of the input with its weights is one matrix product over all steps. What is left, the product of the state
with the recurrent weights and the gates, runs once for each step. Both directions run in the same steps: TensorRT's
ONNX parser makes one loop of them, whose iterations take a row from the front and one from the back (onnx-tensorrt,
``RNNHelpers.cpp``, ``addRNNInput``).
"""

from __future__ import annotations

from dataclasses import dataclass

from mptune.graph.grouping.lookup import attribute
from mptune.graph.grouping.op_kinds import RECURRENT
from mptune.graph.loading.model import Node


@dataclass(frozen=True)
class Recurrence:
    """The steps of one recurrent layer.

    Attributes:
        steps: how many, one after another.
        matrix_flops: of one step; a multiply-add counts 2.
        matrix_elements: elements of the product of one step: every gate of every row and direction.
        weights: elements of the recurrent weights. Every step reads them, from a cache that holds them if there is one.
    """

    steps: int
    matrix_flops: float
    matrix_elements: int
    weights: int

    @property
    def flops(self) -> float:
        """Of all steps together."""
        return self.steps * self.matrix_flops


def steps_and_rows(node: Node, shape: tuple[int, ...]) -> tuple[int, int]:
    """Time steps and rows of a recurrent layer, from the shape of its input."""
    first, second = (*shape, 1, 1)[:2]
    return (second, first) if attribute(node, "layout") == 1 else (first, second)


def recurrence_of(node: Node, shape: tuple[int, ...], weights: tuple[int, ...]) -> Recurrence:
    """The steps of an LSTM, GRU or RNN node.

    Args:
        node: the node.
        shape: of its input.
        weights: shape of its recurrent weights: directions, gates times hidden size, hidden size.
    """
    steps, rows = steps_and_rows(node, shape)
    directions, gates, hidden = (*weights, 1, 1, 1)[:3]
    elements = rows * directions * gates
    return Recurrence(steps, 2.0 * elements * hidden, elements, directions * gates * hidden)


def is_recurrent(node: Node) -> bool:
    """Whether a node is a recurrent layer of ONNX's own."""
    return node.is_standard and node.op_type in RECURRENT
