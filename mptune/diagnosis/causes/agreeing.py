"""What a rounding leaves within an output's limit: agreement, also a doubtful one; and TF32 on either side."""

from __future__ import annotations

from collections.abc import Sequence

from mptune.diagnosis.causes.half import is_doubtful, is_no_rounding
from mptune.diagnosis.comparison import finding
from mptune.diagnosis.limits import HEADROOM
from mptune.diagnosis.patterns.places import what_is_there
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
    """``agrees``; as a warning where no rounding gives the difference, and no other output has a cause."""
    within = [side for side in outputs if side.is_within]
    is_alone = bool(within) and len(within) == len(within[0].sides.layouts)
    findings = []
    for side in within:
        if side.sides.is_other_model and side.error > FP32_ROUNDING:
            continue  # what the models differ in makes it, not a rounding
        is_suspect = is_alone and is_doubtful(side) and is_no_rounding(side)
        findings.append(_agreeing(side, "doubtful" if is_suspect else _size_of(side)))
    return findings


def _size_of(side: Side) -> str:
    """What a difference within its limit is as large as."""
    if side.error == 0:
        return "equal"
    if side.error <= FP32_ROUNDING:
        return "fp32"
    return "within tolerance" if side.error > HEADROOM * side.emulated else "fp16"


def _agreeing(side: Side, kind: str) -> Finding:
    return finding(
        "agrees",
        kind,
        (side.where,),
        side.evidence,
        place=str(side.where),
        error_shown=side.limit.sentence(side.judged),
        judged_fp16=side.judged_fp16,
        seen=what_is_there(side.got, side.wanted) if kind == "doubtful" else "",
    )
