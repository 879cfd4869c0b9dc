"""Decomposed norms (LayerNorm, RMSNorm, instance, group and L2 norm), found from their square root.

Split in two precisions they keep ONNX Runtime's LayerNormFusion from loading the model, and the squares inside leave
FP16's range from 256 on. Ba et al., arXiv 1607.06450; Zhang and Sennrich, arXiv 1910.07467; Ulyanov et al.,
arXiv 1607.08022.
"""

from __future__ import annotations

from dataclasses import dataclass

from mptune.graph.grouping.lookup import Lookup
from mptune.graph.loading.model import Node

_VIEWS = frozenset({"Reshape", "Transpose", "Unsqueeze", "Squeeze", "Flatten", "Expand"})
_GUARDS = frozenset({"Add", "Max", "Clip"})
_MEANS = frozenset({"ReduceMean", "ReduceSum", "GlobalAveragePool"})
_WITHOUT_AFFINE = frozenset({"InstanceNormalization", "MeanVarianceNormalization", "LpNormalization"})
"""Operators that exporters use for norms whose scale and shift follow as nodes of their own."""
_MAX_VIEWS = 3


@dataclass(frozen=True)
class Norm:
    """A decomposed norm.

    Attributes:
        squares: the value that holds the squares (or their sum): what overflows first; "" for a norm operator.
    """

    name: str
    nodes: frozenset[int]
    squares: str = ""


def find_norm(look: Lookup, root: Node) -> Norm | None:
    """The norm whose square root (or L2 reduction, or norm operator without scale) is ``root``."""
    if root.op_type in _WITHOUT_AFFINE:
        tail = affine_tail(look, root)
        return Norm(f"{root.op_type} with its scale and shift", frozenset({root.index} | tail)) if tail else None
    if not look.varying(root):
        return None
    if root.op_type == "ReduceL2":
        return _put_together(look, root, {root.index}, [root.inputs[0]], "L2 norm written out", root.outputs[0])
    if not _is_root(look, root):
        return None
    inside, value = _guarded(look, root)
    return _from_mean_of_squares(look, root, inside, value) or _from_two_means(look, root, inside, value)


def _is_root(look: Lookup, node: Node) -> bool:
    if node.op_type == "Sqrt":
        return True
    return node.op_type == "Pow" and look.number(node.inputs[1]) in (0.5, -0.5)


def _guarded(look: Lookup, root: Node) -> tuple[set[int], str]:
    """Step from the root back over eps and a division by the count: the nodes passed, and the value before them."""
    inside, value = {root.index}, root.inputs[0]
    for wanted in (_GUARDS, frozenset({"Div", "Mul"}), _VIEWS):
        node = look.producer(value)
        if node is not None and node.op_type in wanted and len(look.varying(node)) == 1 and len(node.inputs) > 1:
            inside.add(node.index)
            value = look.varying(node)[0]
    return inside, value


def _squared(look: Lookup, node: Node | None) -> str:
    """What a node squares; "" where it does not."""
    if node is None:
        return ""
    if node.op_type == "Mul" and look.root(node.inputs[0]) == look.root(node.inputs[1]):
        return look.root(node.inputs[0])
    if node.op_type == "Pow" and look.number(node.inputs[1]) == 2.0:
        return look.root(node.inputs[0])
    return ""


def _mean_of_squares(look: Lookup, value: str) -> tuple[set[int], str, str] | None:
    """The nodes of a mean (or sum) of squares, what is squared, and the value that holds the squares."""
    mean = look.producer(value)
    if mean is None:
        return None
    if mean.op_type == "ReduceSumSquare":
        return {mean.index}, look.root(mean.inputs[0]), mean.outputs[0]
    square = look.producer(mean.inputs[0]) if mean.op_type in _MEANS else None
    squared = _squared(look, square)
    if square is None or not squared:
        return None
    return {mean.index, square.index}, squared, square.outputs[0]


def _from_mean_of_squares(look: Lookup, root: Node, inside: set[int], value: str) -> Norm | None:
    mean_of_squares = _mean_of_squares(look, value)
    if mean_of_squares is None:
        return None
    nodes, centred, squares = mean_of_squares
    inside, family, name = inside | nodes, [centred], "RMSNorm written out"
    subtract = look.producer(centred)
    if subtract is not None and subtract.op_type == "Sub":
        source = look.root(subtract.inputs[0])
        mean = _mean_of(look, subtract.inputs[1], source)
        if mean is not None:
            inside |= mean | {subtract.index}
            family += [source, look.root(subtract.inputs[1])]
            name = "LayerNorm written out"
            # TensorFlow centres a second time for the numerator.
            again = [r for r in look.readers(subtract.inputs[1]) if r.op_type == "Sub" and r is not subtract]
            for node in again:
                if look.root(node.inputs[0]) == source:
                    inside.add(node.index)
                    family.append(node.outputs[0])
    return _put_together(look, root, inside, family, name, squares)


def _from_two_means(look: Lookup, root: Node, inside: set[int], value: str) -> Norm | None:
    """Variance as mean of squares minus squared mean."""
    difference = look.producer(value)
    if difference is None or difference.op_type != "Sub":
        return None
    mean_of_squares = _mean_of_squares(look, difference.inputs[0])
    square = look.producer(difference.inputs[1])
    mean = _squared(look, square)
    if mean_of_squares is None or square is None or not mean:
        return None
    nodes, source, squares = mean_of_squares
    means = _mean_of(look, mean, source)
    if means is None:
        return None
    inside = inside | nodes | means | {difference.index, square.index}
    family = [source, mean]
    for node in look.readers(mean):
        if node.op_type == "Sub" and look.root(node.inputs[0]) == source:
            inside.add(node.index)
            family.append(node.outputs[0])
    return _put_together(look, root, inside, family, "LayerNorm written out", squares)


def _mean_of(look: Lookup, tensor: str, source: str) -> set[int] | None:
    """The nodes that make ``tensor`` the mean of ``source``; None where it is not."""
    node = look.producer(tensor)
    passed: set[int] = set()
    if node is not None and node.op_type in ("Div", "Mul") and len(look.varying(node)) == 1:
        passed.add(node.index)
        node = look.producer(look.varying(node)[0])
    if node is None or node.op_type not in _MEANS or look.root(node.inputs[0]) != source:
        return None
    return passed | {node.index}


def _put_together(
    look: Lookup, root: Node, inside: set[int], family: list[str], name: str, squares: str
) -> Norm | None:
    """Add the division by the root, the scale and the shift; None where nothing is divided.

    Args:
        root: computes the denominator.
        family: the value that is normalised, under each of its forms: as it is, centred, its mean.
        squares: see ``Norm``.
    """
    inside = set(inside)
    denominators, normalised = {root.outputs[0]}, set[str]()
    pending = look.readers(root.outputs[0])
    while pending:
        node = pending.pop()
        if node.index in inside or not node.outputs:
            continue
        state = _state(look, node, denominators, normalised, family)
        if state is None:
            continue
        inside.add(node.index)
        (denominators if state == "denominator" else normalised).add(node.outputs[0])
        pending += look.readers(node.outputs[0])
    if not normalised:
        return None
    for tensor in sorted(normalised):
        maker = look.producer(tensor)
        if maker is not None and not any(r.index in inside for r in look.readers(tensor)):
            inside |= affine_tail(look, maker)
    return Norm(name, frozenset(inside), squares)


def _state(look: Lookup, node: Node, denominators: set[str], normalised: set[str], family: list[str]) -> str | None:
    """What a reader computes from the denominator: another denominator, the normalised value, or None for neither."""
    operands = [look.root(i) for i in node.inputs if i]
    kinds = [
        "static" if look.is_static(t) else "out" if t in normalised else "den" if t in denominators
        else "x" if t in family else "?"
        for t in operands
    ]  # fmt: skip
    if "?" in kinds:
        # The shape input of an Expand is computed too, and has no precision.
        kinds = [k for k, t in zip(kinds, operands, strict=True) if k != "?" or look.model.info(t).is_float32]
        if "?" in kinds or node.op_type not in _VIEWS:
            return None
    if "out" in kinds:
        closes = node.op_type in ("Add", "Sub") and ("static" not in kinds or kinds[0] == "static")
        return "normalised" if closes and "x" not in kinds and "den" not in kinds else None
    if "den" not in kinds:
        return None
    if "x" in kinds:
        return "normalised" if node.op_type in ("Div", "Mul") else None
    allowed = {"Reciprocal", "Div", "Mul", "Neg", "Pow", *_GUARDS, *_VIEWS}
    return "denominator" if node.op_type in allowed else None


def affine_tail(look: Lookup, node: Node) -> set[int]:
    """The constant scale and shift after a norm, with the views on the way to them."""
    inside: set[int] = set()
    passed: set[int] = set()
    wanted = ["Mul", "Add"]
    at = node
    while wanted:
        reader = look.only_reader(at)
        if reader is None or reader.index in inside:
            break
        if reader.op_type in _VIEWS and len(passed) < _MAX_VIEWS and look.root(reader.inputs[0]) == at.outputs[0]:
            passed.add(reader.index)
        elif reader.op_type in wanted and look.is_static(look.other(reader, at.outputs[0])):
            inside |= passed | {reader.index}
            passed = set()
            wanted = wanted[wanted.index(reader.op_type) + 1 :]
        else:
            break
        at = reader
    return inside
