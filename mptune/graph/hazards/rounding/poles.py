"""Operands that FP16 or BF16 brings to where a function is infinite or not defined: zero, or below it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mptune.graph.hazards.hazard import Hazard, kept_out, largest
from mptune.graph.hazards.probes import ProbeRecord
from mptune.graph.hazards.seen import Seen
from mptune.graph.loading.model import Node

_AT_POLE: Mapping[str, tuple[str, str]] = {
    "Log": ("zero or negative", "Log is -Inf or NaN"),
    "Sqrt": ("negative", "Sqrt is NaN"),
    "Pow": ("zero or negative", "Pow is Inf or NaN"),
    "Div": ("zero", "the division gives Inf or NaN"),
    "Reciprocal": ("zero", "Reciprocal is Inf"),
}


def pole_hazards(seen: Seen, record: ProbeRecord, node: Node, group: str) -> list[Hazard]:
    """Operands that FP16 or BF16 brings to zero or below it, where FP32 does not, and what then gives Inf or NaN."""
    values, lost, vanished = (sum(record.scalars[name]) for name in ("values", "lost", "vanished"))
    if not lost or not math.isfinite(lost):
        return []
    smallest, name = min(record.scalars["smallest"]), record.precision.name
    operand = node.inputs[1] if node.op_type == "Div" else node.inputs[0]
    there, result = _AT_POLE[node.op_type]
    count = f"{lost:.0f} of {values:.0f} values of {operand!r} (down to {smallest:.2g})"
    if 2 * vanished >= lost:
        why, code = f"{count} are too small for {name} and become zero, and there {result}", "vanishing-epsilon"
        cure = f"{kept_out(record.precision)}, or keep the values from zero in the model, as by a limit of 1e-4"
    else:
        why = f"rounding to {name} before a difference makes {count} {there}, and there {result}"
        code, cure = "cancellation", f"{kept_out(record.precision)}, with what computes its operand"
    evidence: dict[str, int | float | str] = {"lost": int(lost), "values": int(values), "smallest": smallest}
    samples = (seen.sample(largest(record.scalars["lost"])),)
    return [
        Hazard(
            "warning",
            "pole",
            group,
            node.name,
            operand,
            lost,
            why,
            cure,
            code,
            evidence,
            samples,
            record.precision,
        )
    ]
