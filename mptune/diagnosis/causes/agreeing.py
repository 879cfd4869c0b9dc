"""What a rounding leaves within an output's limit: agreement, also a doubtful one; and TF32 on either side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
    which = cause.cause.removeprefix("tf32-")
    name = side.sides.reference_name if which == "reference" else side.sides.candidate_name
    cure = "compute the reference with TF32 off" if which == "reference" else "switch TF32 off where this matters"
    cure += ": use_tf32=0 for ONNX Runtime's CUDA provider, clear_flag(BuilderFlag.TF32) for TensorRT"
    cure += ", or NVIDIA_TF32_OVERRIDE=0 in the environment"
    return finding(
        cause.cause,
        (OutputColumns(side.name),),
        side.evidence | {"left_share": cause.left, "size_ratio": cause.size},
        f"output {side.name!r}: TF32 in the {which} ({name}) makes the difference of {side.error:.3g}: emulated, it has"
        f" {cause.size:.2f} times its size, and {100 * cause.left:.2g} % of the difference is left without it",
        cure,
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
        findings.append(_doubtful(side) if is_suspect else _agreeing(side))
    return findings


def _agreeing(side: Side) -> Finding:
    size_text = "equals the reference" if side.error == 0 else f"has {side.limit.sentence(side.judged)}"
    exact = side.error <= FP32_ROUNDING
    what = "what FP32 rounding gives" if exact else "the size of FP16 rounding"
    if not exact and side.error > HEADROOM * side.emulated:
        what = "within the tolerance given, and more than FP16 rounding gives"
    beside = f"FP16 throughout, emulated, gives {side.judged_fp16:.3g}"
    text = f"output {str(side.where)!r} {size_text}" + (f": {what}" if side.error else "") + f" ({beside})"
    return finding("agrees", (side.where,), side.evidence, text, "")


def _doubtful(side: Side) -> Finding:
    """``agrees`` as a warning: the difference has the size of FP16's, and no rounding gives it."""
    what = what_is_there(side.got, side.wanted)
    text = (
        f"output {str(side.where)!r} has {side.limit.sentence(side.judged)}: as large as FP16 rounding, but not FP16"
        f" rounding (FP16 throughout, emulated, gives {side.judged_fp16:.3g}, in other values){what and f'; {what}'}"
    )
    cure = "compare how the samples are prepared on both sides, and whether the engine was built of this model"
    return replace(_agreeing(side), severity="warning", text=text, cure=cure)
