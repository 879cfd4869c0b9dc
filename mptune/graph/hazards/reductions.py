"""Hazards of long sums, of whole numbers in floating point, and of data that a model was not trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from mptune.graph.casting.value_types import ValueTypes
from mptune.graph.grouping.lookup import Lookup, attribute
from mptune.graph.grouping.op_kinds import DATA_MOVEMENT
from mptune.graph.hazards.hazard import EXACT_INTEGERS, KEPT, Hazard, group_of
from mptune.graph.hazards.seen import Seen
from mptune.graph.loading.model import Node
from mptune.graph.plan import Precision
from mptune.graph.shape_arithmetic import SHAPE_INPUTS

_FAR = 5.0
"""Standard deviations: right data stay below 0.1, pixels of 0..255 instead of 0..1 give 65 and more."""

_SUMS = frozenset({"ReduceSum", "ReduceMean", "ReduceL1", "ReduceL2", "ReduceSumSquare", "GlobalAveragePool", "CumSum"})
_ONE_SIGNED = frozenset({"ReduceL1", "ReduceL2", "ReduceSumSquare"})
"""Sums of magnitudes or squares, whatever the signs of what is summed."""

_GATHERS = ("Gather", "GatherElements", "GatherND", "Scatter", "ScatterElements", "ScatterND")
_INDEX_SLOTS = {**SHAPE_INPUTS, "OneHot": frozenset({0, 1}), **dict.fromkeys(_GATHERS, frozenset({1}))}
_KEEPS_INDEX = DATA_MOVEMENT | {"Add", "Sub", "Mul", "Div", "Mod", "Min", "Max", "Clip", "Where", "Neg", "Concat"}
_CARRIES_INDEX = _KEEPS_INDEX | {"Floor", "Ceil", "Round", "Abs", "Sum", "ReduceSum", "CumSum", "Gather"} - {"Cast"}
"""Through these the value that becomes an index is computed: what they read and what they give is as large."""
_MAX_INDEX_STEPS = 256


def long_sum_hazards(types: ValueTypes, seen: Seen, *, has_bf16: bool) -> list[Hazard]:
    """Sums of so many values of one sign that a term is below half of the spacing at the sum, in FP16 or in BF16."""
    hazards = []
    name, exact = _narrowest(has_bf16)
    for node in types.model.nodes:
        group = group_of(types, node)
        if group is None or node.op_type not in _SUMS or not node.is_standard:
            continue
        terms = _terms(types, node, seen)
        value = seen.values.get(node.inputs[0])
        if terms < exact or value is None or value.lowest == value.highest == 0:
            continue
        if node.op_type not in _ONE_SIGNED and value.lowest < 0 < value.highest:
            continue
        hazards.append(
            Hazard(
                "info",
                "sum",
                group.id,
                node.name,
                node.inputs[0],
                float(terms),
                f"{node.op_type} sums {terms} values of one sign: accumulated in {name}, such a sum stops growing where"
                f" a term is below half of the spacing, for equal terms after {exact:.0f} of them",
                "none where the engine accumulates in FP32, as ONNX Runtime's reductions on the CPU and with CUDA do;"
                f" of another engine, compare its outputs before the group goes to {name}",
                "long-sum",
                {"terms": terms, "lowest": value.lowest, "highest": value.highest},
                (seen.sample(value.sample),),
            )
        )
    return hazards


def _narrowest(has_bf16: bool) -> tuple[str, float]:
    """What is called the precision of the fewest digits, and up to where it holds every whole number."""
    precision = Precision.BF16 if has_bf16 else Precision.FP16
    return str(precision).upper(), EXACT_INTEGERS[precision]


def _terms(types: ValueTypes, node: Node, seen: Seen) -> int:
    """How many values one sum has; 0 where it is not known."""
    shape = seen.shapes.get(node.inputs[0])
    if shape is None or not node.outputs or not math.prod(shape):
        return 0
    if node.op_type == "CumSum":
        axis = types.model.initializers.get(node.inputs[1])
        return 0 if axis is None else int(shape[int(axis.numpy().reshape(-1)[0])])
    out = seen.shapes.get(node.outputs[0])
    return 0 if out is None else math.prod(shape) // max(1, math.prod(out))


def index_hazards(
    types: ValueTypes, look: Lookup, ranges: Mapping[str, float], seen: Seen, *, has_bf16: bool
) -> list[Hazard]:
    """Casts to integers that become an index or a size, of values above the whole numbers that FP16 or BF16 holds.

    The groups that compute such a value are kept in FP32, back to where values are smaller or no index yet.
    """
    hazards = []
    name, exact = _narrowest(has_bf16)
    for node in types.model.nodes:
        if node.op_type != "Cast" or not node.is_standard or not types.model.info(node.inputs[0]).is_float32:
            continue
        reached = ranges.get(node.inputs[0], 0.0)
        reader = _indexes(look, node) if reached > exact else None
        if reader is None:
            continue
        value = seen.values.get(node.inputs[0])
        cure = KEPT if reached > EXACT_INTEGERS[Precision.FP16] else "the group is kept out of BF16"
        for group, source in _carriers(types, look, node.inputs[0], ranges, exact).items():
            hazards.append(
                Hazard(
                    "error",
                    "index",
                    group,
                    source.name,
                    node.inputs[0],
                    reached,
                    f"floating-point values up to {reached:.6g} become an index or a size at node {reader.name!r}:"
                    f" {name} does not hold every whole number above {exact:.0f}",
                    cure,
                    "index-in-float",
                    {"largest": reached, "exact_to": exact, "reader": reader.name},
                    () if value is None else (seen.sample(value.sample),),
                    Precision.FP16 if reached > EXACT_INTEGERS[Precision.FP16] else Precision.BF16,
                )
            )
    return hazards


def _carriers(
    types: ValueTypes, look: Lookup, index: str, ranges: Mapping[str, float], exact: float
) -> dict[str, Node]:
    """The groups that hold a value which becomes an index, or what it is computed from, each with its last node."""
    carriers: dict[str, Node] = {}
    stack, done = [index], set[str]()
    while stack and len(done) < _MAX_INDEX_STEPS:
        at = stack.pop()
        done.add(at)
        source = look.producer(at)
        if source is None or ranges.get(at, 0.0) <= exact:
            continue
        group = group_of(types, source)
        if group is not None:
            carriers.setdefault(group.id, source)
        if source.is_standard and source.op_type in _CARRIES_INDEX:
            stack += [name for name in source.inputs if name and name not in done]
    return carriers


def _indexes(look: Lookup, cast: Node) -> Node | None:
    """The node that takes the result of a Cast as an index or a size, through arithmetic on integers; None if none."""
    if "int" not in look.model.info(cast.outputs[0]).dtype:
        return None
    stack, done = list(cast.outputs), set[str]()
    while stack and len(done) < _MAX_INDEX_STEPS:
        at = stack.pop()
        done.add(at)
        for reader in look.readers(at):
            slots = _INDEX_SLOTS.get(reader.op_type, frozenset()) if reader.is_standard else frozenset()
            if any(slot < len(reader.inputs) and look.root(reader.inputs[slot]) == look.root(at) for slot in slots):
                return reader
            if reader.op_type in _KEEPS_INDEX:
                stack += [
                    out for out in reader.outputs if out and out not in done and "int" in look.model.info(out).dtype
                ]
    return None


def fit_hazards(types: ValueTypes, seen: Seen) -> list[Hazard]:
    """The first BatchNormalization whose input lies far off its running mean, in its own standard deviations.

    The median over the channels is judged: one dead channel with a variance near zero says nothing.
    """
    nodes = {node.name: node for node in types.model.nodes}
    far: list[tuple[Node, float]] = []
    for record in seen.of("batch-norm"):
        node = nodes[record.node]
        mean, variance = (types.model.initializers[i].numpy().astype(np.float64) for i in node.inputs[3:5])
        stated = attribute(node, "epsilon")
        deviation = np.sqrt(np.abs(variance) + (stated if isinstance(stated, float) else 1e-5))
        off = float(np.median(np.abs(np.asarray(record.vectors["mean"]) - mean) / deviation))
        if off > _FAR:
            far.append((node, off))
    if not far:
        return []
    first, off = far[0]
    more = f", and before {len(far) - 1} more" if len(far) > 1 else ""
    return [
        Hazard(
            "warning",
            "fit",
            None,
            first.name,
            first.inputs[0],
            off,
            f"activations before this BatchNormalization lie {off:.3g} of its standard deviations off its running mean"
            f" (median over the channels){more}: the data are not prepared as in training",
            "scale, normalise and order the channels of the inputs as in training; data as in training stay below 0.1",
            "data-do-not-fit",
            {"standard_deviations": off, "limit": _FAR, "nodes": len(far)},
        )
    ]
