"""What a rounding leaves within an output's limit: agreement; and TF32 on either side."""

from __future__ import annotations

from collections.abc import Sequence

from mptune.diagnosis.comparison import finding
from mptune.diagnosis.limits import HEADROOM
from mptune.diagnosis.patterns.roundings import FP32_ROUNDING, Explanation
from mptune.diagnosis.sides import Side
from mptune.finding import Finding, OutputColumns


def tf32(outputs: Sequence[Side]) -> list[Finding]:
    """``tf32-reference`` and ``tf32-candidate``, also of outputs within their limits."""
    causes = [(side, side.rounding) for side in outputs]
    return [_tf32_finding(side, cause) for side, cause in causes if cause is not None and cause.is_tf32]


def _tf32_finding(side: Side, cause: Explanation) -> Finding:
    sides = side.sides
    return finding(
        cause.cause,
        "",
        (OutputColumns(side.name),),
        side.evidence | {"left_share": cause.left, "size_ratio": cause.size},
        name=sides.reference_name if cause.cause == "tf32-reference" else sides.candidate_name,
    )


def agreement(outputs: Sequence[Side]) -> list[Finding]:
    """``agrees``, of outputs within their limits."""
    return [
        finding(
            "agrees",
            _size_of(side),
            (side.where,),
            side.evidence,
            place=str(side.where),
            error_shown=side.limit.sentence(side.judged),
            judged_fp16=side.judged_fp16,
        )
        for side in outputs
        # What other models differ in makes more than FP32 rounding, and is no rounding.
        if side.is_within and (side.error <= FP32_ROUNDING or not side.sides.is_other_model)
    ]


def _size_of(side: Side) -> str:
    """What a difference within its limit is as large as."""
    if side.error == 0:
        return "equal"
    if side.error <= FP32_ROUNDING:
        return "fp32"
    return "within tolerance" if side.error > HEADROOM * side.emulated else "fp16"
