"""Outputs that are not finite because the candidate's constants are: beyond FP16's range, a tool made them infinite.

mptune holds such a constant as the largest finite value (``mptune.graph.writing.weights.round_values``). A plain
conversion, such as torch's ``half()``, rounds a mask of -1e9 to -inf, and 0 times that, or a row of it alone, is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

from mptune.diagnosis.causes.explained import finding
from mptune.diagnosis.causes.half import are_mostly_same, fp16_explanation
from mptune.diagnosis.runner import Runner
from mptune.diagnosis.sides import Side
from mptune.finding import Finding
from mptune.graph.hazards.hazard import Hazard
from mptune.graph.plan import LARGEST, Precision, PrecisionPlan

_NAMED_CONSTANTS = 3


def infinite_constants(outputs: Sequence[Side]) -> list[Finding]:
    """``mask`` or ``overflow``, of all outputs that are not finite because constants are."""
    blamed_sides = [(side, *blamed) for side in outputs if (blamed := _constants_of(side)) is not None]
    if not blamed_sides:
        return []
    hazards = tuple(dict.fromkeys(hazard for _, _, of_one in blamed_sides for hazard in of_one))
    return [_infinite_finding([side for side, _, _ in blamed_sides], blamed_sides[0][1], hazards)]


def _constants_of(side: Side) -> tuple[Precision, tuple[Hazard, ...]] | None:
    """A precision and the constants that, rounded to infinity, make values NaN or Inf at mostly the candidate's places.

    None where the candidate is finite, or where these values are not finite with the constants limited, either.
    """
    runner = side.sides.runner
    lost = side.lost(side.sides.candidate)
    if lost is None or not lost.any() or fp16_explanation(side) is not None:
        return None
    for plan in dict.fromkeys((side.sides.plan, runner.all_fp16, runner.whole_fp16, runner.all_bf16)):
        hazards = _beyond(runner, plan)
        if not hazards or not are_mostly_same(lost, side.lost(runner.unlimited(plan))):
            continue
        limited = side.lost(runner.emulated(plan))
        if limited is None or (lost & limited).any():
            continue
        base = runner.grouped.uniform(Precision.FP32)
        blamed = set()
        for group in {hazard.group or "" for hazard in hazards}:
            alone = side.lost(runner.unlimited(base.replace({group: plan.precision[group]})))
            if alone is not None and (lost & alone).any():
                blamed.add(group)
        named = tuple(hazard for hazard in hazards if hazard.group in blamed) or hazards
        return plan.precision[named[0].group or ""], named
    return None


def _infinite_finding(sides: Sequence[Side], precision: Precision, hazards: tuple[Hazard, ...]) -> Finding:
    first = sides[0]
    is_mask = all(hazard.severity == "info" for hazard in hazards)
    largest = LARGEST[precision]
    lost = first.lost(first.sides.candidate)
    count = 0 if lost is None else int(lost.sum())
    places = list(dict.fromkeys(f"{h.tensor} ({h.value:.4g}) at {h.node} ({h.group})" for h in hazards))
    more = f" and {len(places) - _NAMED_CONSTANTS} more" if len(places) > _NAMED_CONSTANTS else ""
    text = (
        f"output {str(first.where)!r} holds {count} NaN or Inf: emulated, {precision.name} gives them where "
        f"constants beyond its {largest:.6g} become infinite, and none where they are held as {largest:.6g}: "
        f"{', '.join(places[:_NAMED_CONSTANTS])}{more}"
    )
    cure = (
        f"let mptune write the model, which limits them: mptune apply {first.sides.runner.model.path}"
        f" --{precision}-all -o OUT.onnx; or export with {'-1e4 as the mask' if is_mask else 'smaller constants'}"
    )
    evidence = first.evidence | {
        "not_finite": count,
        "absmax": max(hazard.value for hazard in hazards),
        f"{precision}_max": largest,
    }
    return finding(
        "mask" if is_mask else "overflow",
        tuple(side.where for side in sides),
        evidence,
        text,
        cure,
        groups=tuple(dict.fromkeys(h.group for h in hazards if h.group)),
        nodes=tuple(dict.fromkeys(h.node for h in hazards if h.node)),
        tensors=tuple(dict.fromkeys(h.tensor for h in hazards)),
    )


def _beyond(runner: Runner, plan: PrecisionPlan) -> tuple[Hazard, ...]:
    """The constants that a plan has in a precision that does not hold them."""
    reduced = set(plan.reduced_groups)
    return tuple(
        hazard
        for hazard in runner.constant_hazards
        if "held_as" in hazard.evidence
        and hazard.group in reduced
        and hazard.value > LARGEST[plan.precision[hazard.group]]
    )
