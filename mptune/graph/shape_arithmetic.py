"""Which nodes compute shapes in floating point: such as Shape -> Cast -> Mul -> Floor -> Cast -> Resize.

They keep their type under every plan. FP16 has no odd integer above 2048, so that a size would change; and TensorRT,
which computes shapes on the host, has no FP16 there (TensorRT-RTX 1.7.1: "ShapeHostToDeviceCopy: output type must be
kINT32, kINT64, kBOOL, or kFLOAT", and for most models a message about element types that differ).
"""

from __future__ import annotations

from collections.abc import Mapping

from mptune.graph.loading.model import Model, Node
from mptune.graph.loading.once import once

REASON = "computes a shape: FP16 is not exact above 2048, and TensorRT takes no FP16 shapes"

SHAPE_INPUTS: Mapping[str, frozenset[int]] = {
    "AffineGrid": frozenset({1}),
    "BlackmanWindow": frozenset({0}),
    "CenterCropPad": frozenset({1}),
    "Col2Im": frozenset({1, 2}),
    "ConstantOfShape": frozenset({0}),
    "DFT": frozenset({1, 2}),
    "Expand": frozenset({1}),
    "HammingWindow": frozenset({0}),
    "HannWindow": frozenset({0}),
    "Loop": frozenset({0}),
    "MaxUnpool": frozenset({2}),
    "NonMaxSuppression": frozenset({2}),
    "OneHot": frozenset({1}),
    "Pad": frozenset({1, 3}),
    "Range": frozenset({0, 1, 2}),
    "Reshape": frozenset({1}),
    "Resize": frozenset({1, 2, 3}),
    "STFT": frozenset({1, 3}),
    "SequenceAt": frozenset({1}),
    "SequenceErase": frozenset({1}),
    "SequenceInsert": frozenset({2}),
    "Slice": frozenset({1, 2, 3, 4}),
    "Split": frozenset({1}),
    "SplitToSequence": frozenset({1}),
    "Squeeze": frozenset({1}),
    "Tile": frozenset({1}),
    "TopK": frozenset({1}),
    "Trilu": frozenset({1}),
    "Unsqueeze": frozenset({1}),
    "Upsample": frozenset({1}),
}
"""Inputs whose values are sizes, positions, factors or counts of a shape, by position (ONNX's operator schemas)."""

_SHAPE_OF = frozenset({"Shape", "Size"})
_INTEGERS = ("int", "uint")


@once
def shape_arithmetic(model: Model) -> frozenset[int]:
    """Indices of the nodes that compute shapes; found once per model.

    A node does where each use of its results leads to a shape input and to nothing else. It also does where it computes
    from shapes (or from integer inputs of rank 1 and less) alone, and a shape input is among its uses: such a value is
    small, and computing it in FP32 costs nothing.
    """
    as_shape: set[int] = set()
    as_data: set[int] = set()
    outputs = {info.name for info in model.outputs}
    for node in reversed(model.nodes):
        for name in node.outputs:
            if name in outputs:
                as_data.add(node.index)
            for index in model.consumers.get(name, ()) if name else ():
                shape, data = _uses(model.nodes[index], name, index in as_shape, index in as_data)
                if shape:
                    as_shape.add(node.index)
                if data:
                    as_data.add(node.index)
    from_shapes = _from_shapes(model)
    candidates = (index for index in as_shape if index not in as_data or index in from_shapes)
    # Shape and Size read values of any type, and compute integers.
    return frozenset(i for i in candidates if not (model.nodes[i].is_standard and model.nodes[i].op_type in _SHAPE_OF))


def _uses(reader: Node, name: str, shape: bool, data: bool) -> tuple[bool, bool]:
    """Whether a node uses a value for a shape, and whether for anything else, given the same of the node's results."""
    if reader.is_standard and reader.op_type in _SHAPE_OF:
        return False, False  # the shape of the value is read, not the value
    own = SHAPE_INPUTS.get(reader.op_type, frozenset()) if reader.is_standard else frozenset()
    if reader.is_standard and reader.op_type.startswith("Reduce"):
        own = frozenset({1})  # axes
    slots = {slot for slot, given in enumerate(reader.inputs) if given == name}
    captured = name in reader.captures
    as_shape, others = bool(slots & own) or captured, bool(slots - own)
    if captured:  # what the subgraph does with it is not looked at
        return True, True
    return as_shape or (others and shape), others and (data or not shape)


def _from_shapes(model: Model) -> frozenset[int]:
    """Nodes that compute from shapes and constants alone, from one shape at least."""
    small = {
        info.name
        for info in model.inputs
        if info.dtype.startswith(_INTEGERS) and info.shape is not None and len(info.shape) <= 1
    }
    indices: set[int] = set()
    constant = set(model.initializers)
    for node in model.nodes:
        if not node.is_standard or node.has_subgraph:
            continue
        given = [name for name in node.inputs if name]
        if node.op_type in _SHAPE_OF or (
            any(name in small for name in given) and all(name in small or name in constant for name in given)
        ):
            indices.add(node.index)
            small.update(name for name in node.outputs if name)
        elif given and all(name in constant for name in given):
            constant.update(name for name in node.outputs if name)
    return frozenset(indices)
