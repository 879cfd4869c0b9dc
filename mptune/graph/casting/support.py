"""Which groups cannot have a precision that others can: BFLOAT16 came to ONNX's operators one by one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx

from mptune.graph.casting.value_types import ValueTypes
from mptune.graph.loading.model import Node
from mptune.graph.op_rules import NodeRule
from mptune.graph.plan import Precision
from mptune.graph.schemas import onnx_schema


@dataclass(frozen=True)
class Unsupported:
    """Groups with operators that lack a precision at the model's operator set (group id -> operators).

    All of these operators have it from operator set ``newer`` on; None where there is no such set.
    """

    precision: Precision
    opset: int
    groups: dict[str, tuple[str, ...]]
    newer: int | None

    def reason(self, ops: Iterable[str]) -> str:
        """Why groups with these operators cannot have the precision, and what to do about it."""
        name = self.precision.name
        cure = "" if self.newer is None else f"; --opset {self.newer} raises the model to one that has it"
        return f"ONNX has no {name} for {', '.join(ops)} at opset {self.opset}{cure}"


def unsupported(types: ValueTypes, precision: Precision) -> Unsupported:
    """The groups of which some nodes could be FP16, and not this precision."""
    model = types.model
    lacking = types.lacking(precision)
    groups = {types.groups[position].id: ops for position, ops in lacking.items()}
    firsts = [
        _first_opset(node, rule, precision, model.opset)
        for node, rule in zip(model.nodes, types.rules, strict=True)
        if types.group_of[node.index] in lacking and precision not in rule.precisions and rule.precisions
    ]
    opsets = [first for first in firsts if first is not None]
    newer = max(opsets) if opsets and len(opsets) == len(firsts) else None
    return Unsupported(precision, model.opset, groups, newer)


def _first_opset(node: Node, rule: NodeRule, precision: Precision, above: int) -> int | None:
    """The first operator set above one at which a node's operator admits a precision; None where there is none."""
    if not node.is_standard:
        return None
    for opset in range(above + 1, onnx.defs.onnx_opset_version() + 1):
        schema = onnx_schema(node.op_type, opset)
        if schema is None:
            continue
        formal = [*map(schema.input_type, rule.inputs), *map(schema.output_type, rule.outputs)]
        if formal and all(precision in schema.admitted(type_parameter) for type_parameter in formal):
            return opset
    return None
