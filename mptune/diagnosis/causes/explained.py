"""Findings for what a rounding makes: TF32 on either side, and agreement; and how a finding of a comparison is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mptune.diagnosis.limits import HEADROOM
from mptune.diagnosis.patterns.roundings import Explanation
from mptune.diagnosis.patterns.scaled import FP32_ROUNDING
from mptune.diagnosis.sides import Side
from mptune.finding import CODES, Finding, OutputColumns, Where


def finding(
    code: str,
    outputs: tuple[OutputColumns, ...],
    evidence: dict[str, int | float | str],
    text: str,
    cure: str,
    *,
    samples: tuple[int, ...] = (),
    nodes: tuple[str, ...] = (),
    groups: tuple[str, ...] = (),
    tensors: tuple[str, ...] = (),
) -> Finding:
    """A finding of a comparison, with its code's severity."""
    where = Where(nodes=nodes, groups=groups, tensors=tensors, outputs=outputs, samples=samples)
    return Finding(code, CODES[code].severity, "compare", where, evidence, text, cure)


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


def agreement(side: Side) -> Finding:
    """``agrees``, for an output within its limit."""
    known = "equals the reference" if side.error == 0 else f"has {side.limit.sentence(side.judged)}"
    exact = side.error <= FP32_ROUNDING
    what = "what FP32 rounding gives" if exact else "the size of FP16 rounding"
    if not exact and side.error > HEADROOM * side.emulated:
        what = "within the tolerance given, and more than FP16 rounding gives"
    beside = f"FP16 throughout, emulated, gives {side.judged_fp16:.3g}"
    text = f"output {str(side.where)!r} {known}" + (f": {what}" if side.error else "") + f" ({beside})"
    return finding("agrees", (side.where,), side.evidence, text, "")


def doubtful_agreement(side: Side, what: str) -> Finding:
    """``agrees`` as a warning: the difference has the size of FP16's, and no rounding gives it."""
    text = (
        f"output {str(side.where)!r} has {side.limit.sentence(side.judged)}: as large as FP16 rounding, but not FP16"
        f" rounding (FP16 throughout, emulated, gives {side.judged_fp16:.3g}, in other values){what and f'; {what}'}"
    )
    cure = "compare how the samples are prepared on both sides, and whether the engine was built of this model"
    return replace(agreement(side), severity="warning", text=text, cure=cure)
