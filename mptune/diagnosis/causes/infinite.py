"""Outputs that are not finite because the candidate's constants are: beyond FP16's range, a tool made them infinite.

mptune holds such a constant as the largest finite value (``mptune.graph.writing.weights.round_values``). A plain
conversion, such as torch's ``half()``, rounds a mask of -1e9 to -inf, and 0 times that, or a row of it alone, is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mptune.diagnosis.causes.explained import finding
from mptune.diagnosis.runner import Outputs, Runner
from mptune.diagnosis.sides import Side, arrays_of
from mptune.finding import Finding
from mptune.graph.hazards.hazard import Hazard
from mptune.graph.plan import LARGEST, Precision, PrecisionPlan

_SAME_PLACES = 0.9
_NAMED = 3


@dataclass(frozen=True)
class InfiniteConstants:
    """Constants that are infinite in the candidate.

    Attributes:
        precision: that they are beyond.
        hazards: one for each place of theirs, at least one.
    """

    precision: Precision
    hazards: tuple[Hazard, ...]


def lost_places(side: Side, outputs: Outputs) -> np.ndarray | None:
    """Where outputs are NaN or Inf and the reference is finite, flat; None where they differ in shape."""
    arrays = arrays_of(outputs, side.name)
    if any(a.shape != b.shape or b.dtype.kind not in "fiub" for a, b in zip(arrays, side.wanted, strict=True)):
        return None
    lost: np.ndarray = np.concatenate(
        [(np.isfinite(b) & ~np.isfinite(a)).ravel() for a, b in zip(arrays, side.wanted, strict=True)]
    )
    return lost


def are_mostly_same(places: np.ndarray, others: np.ndarray | None) -> bool:
    """Whether nine in ten of either places are in both; not where there are none."""
    if others is None or not places.any():
        return False
    return bool((places & others).sum() >= _SAME_PLACES * max(places.sum(), others.sum()))


def infinite_constants(side: Side) -> InfiniteConstants | None:
    """The constants that, rounded to infinity, make values of an output NaN or Inf at mostly the candidate's places.

    None where the candidate is finite, or where these values are not finite with the constants limited, either.
    """
    runner = side.sides.runner
    lost = lost_places(side, side.sides.candidate)
    if lost is None or not lost.any():
        return None
    for plan in dict.fromkeys((side.sides.plan, runner.all_fp16, runner.whole_fp16, runner.all_bf16)):
        hazards = _beyond(runner, plan)
        if not hazards or not are_mostly_same(lost, lost_places(side, runner.unlimited(plan))):
            continue
        limited = lost_places(side, runner.emulated(plan))
        if limited is None or (lost & limited).any():
            continue
        base = runner.grouped.uniform(Precision.FP32)
        blamed = set()
        for group in {hazard.group or "" for hazard in hazards}:
            alone = lost_places(side, runner.unlimited(base.replace({group: plan.precision[group]})))
            if alone is not None and (lost & alone).any():
                blamed.add(group)
        found = tuple(hazard for hazard in hazards if hazard.group in blamed) or hazards
        return InfiniteConstants(plan.precision[found[0].group or ""], found)
    return None


def infinite_finding(found: Mapping[str, InfiniteConstants], sides: Sequence[Side]) -> Finding:
    """The finding for outputs that are not finite because constants are.

    Args:
        found: output -> its constants.
        sides: those outputs, at least one.
    """
    first = sides[0]
    precision = found[first.name].precision
    hazards = tuple(dict.fromkeys(hazard for one in found.values() for hazard in one.hazards))
    is_mask = all(hazard.severity == "info" for hazard in hazards)
    largest = LARGEST[precision]
    lost = lost_places(first, first.sides.candidate)
    count = 0 if lost is None else int(lost.sum())
    places = list(dict.fromkeys(f"{h.tensor} ({h.value:.4g}) at {h.node} ({h.group})" for h in hazards))
    more = f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
    text = (
        f"output {str(first.where)!r} holds {count} NaN or Inf: emulated, {precision.name} gives them where "
        f"constants beyond its {largest:.6g} become infinite, and none where they are held as {largest:.6g}: "
        f"{', '.join(places[:_NAMED])}{more}"
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
