"""A difference that FP16 or BF16 makes: the groups that make it, and the plan that removes it."""

from __future__ import annotations

import glob
import math
from collections.abc import Mapping, Sequence

import numpy as np

from mptune.data.metrics.parts import WORST_PART, belongs_to
from mptune.diagnosis.comparison import finding
from mptune.diagnosis.limits import HEADROOM
from mptune.diagnosis.patterns.roundings import Cause, Explanation
from mptune.diagnosis.sides import Side, Sides
from mptune.finding import BREAKING_CODES, Finding, Where
from mptune.findings.wording import listed
from mptune.graph.hazards.hazard import Hazard
from mptune.graph.plan import REDUCED, Precision, PrecisionPlan

_NAMED = 5
"""Groups that a text names."""

_MOST_KEPT = 40

"""Groups that a command names."""

_MARGIN = 0.8
"""Share of the limit that the plan is made for: one-group errors add in squares only nearly."""

_TRIES = 8

_LEFT_OF_ROWS = 0.5
"""Share of the difference between two sets of rows, up to which another set explains one of them."""

_SAME_PLACES = 0.9

_OFF = 0.01
"""A value is off by more of its output's standard deviation than this."""

_FEW_OFF = 0.5
"""Share of the values that changed decisions make wrong at most."""


def precision(outputs: Sequence[Side]) -> list[Finding]:
    """``precision``, of all outputs that are beyond their limits through FP16 or BF16."""
    causes: dict[str, Explanation] = {}
    for side in outputs:
        if side.is_within:
            continue
        cause = fp16_explanation(side)
        if cause is None and not side.sides.is_other_model and _is_as_far_off_as_fp16(side):
            cause = Explanation("fp16", 1.0, side.judged_fp16 / side.judged)
        if cause is not None:
            causes[side.name] = cause
    blamed = [side for side in outputs if side.name in causes]
    return [_precision_finding(blamed, causes)] if blamed else []


def fp16_explanation(side: Side) -> Explanation | None:
    """What shows that FP16 or BF16 makes a difference: its pattern, its rows, or its overflow; None where none does."""
    sides = side.sides
    if not sides.is_other_model and side.rounding is not None:
        return side.rounding
    if not sides.is_other_model and sides.has_row_set(side.name) and 0 < side.error < math.inf:
        left = sides.worst(side.name, sides.candidate, sides.runner.emulated(sides.plan)).error / side.error
        if left <= _LEFT_OF_ROWS:
            return Explanation("fp16", left, 1.0)
    lost = side.lost(sides.candidate)
    if lost is not None and are_mostly_same(lost, side.lost(sides.runner.emulated(sides.plan))):
        return Explanation("fp16", 0.0, 1.0)
    return None


def are_mostly_same(places: np.ndarray, others: np.ndarray | None) -> bool:
    """Whether nine in ten of either places are in both; not where there are none."""
    if others is None or not places.any():
        return False
    return bool((places & others).sum() >= _SAME_PLACES * max(places.sum(), others.sum()))


def has_size_of_fp16(side: Side) -> bool:
    """Whether FP16 throughout gives as large an error beyond the limit, in other values."""
    return 0 < side.judged <= HEADROOM * side.judged_fp16 and math.isfinite(side.judged_fp16)


def _is_as_far_off_as_fp16(side: Side) -> bool:
    """Whether the error has the size that it has in FP16 throughout, and as few values are off: decisions do that.

    Where decisions change, most values stay right, in the candidate as in FP16. What a deployment does otherwise, such
    as to its inputs, moves all of them.
    """
    if not has_size_of_fp16(side):
        return False
    try:
        got = side.rows(side.sides.candidate)
        emulated = side.rows(side.sides.runner.emulated(side.sides.runner.throughout(Precision.FP16)))
        wanted = side.rows(side.sides.reference)
    except ValueError:
        return False
    if not got.shape == emulated.shape == wanted.shape or not wanted.size:
        return False
    exact = wanted.astype(np.float64)
    most = _OFF * float(np.std(exact[np.isfinite(exact)])) if np.isfinite(exact).any() else 0.0
    ours, fp16 = (float(np.mean(~(np.abs(each - exact) <= most))) for each in (got, emulated))
    return 0 < fp16 <= _FEW_OFF and ours <= HEADROOM * fp16


def _precision_finding(side: Sequence[Side], causes: Mapping[str, Explanation]) -> Finding:
    sides = side[0].sides
    runner = sides.runner
    groups = {group.id: group for group in runner.grouped.groups}
    blamed = _blamed(sides, {causes[each.name].cause for each in side})
    shares = _shares(side, blamed)
    ranked = sorted(shares, key=lambda group: -shares[group])
    plan, left = _cured(side, blamed, shares, ranked)
    called = " and ".join(p.name for p in REDUCED if blamed.groups_in(p))
    kept = [group for group in ranked if plan is not None and plan.precision[group] is Precision.FP32]
    worst = max(side, key=lambda each: each.judged / each.limit.value)
    named = kept if plan is not None else ranked
    cause = causes[worst.name]
    evidence = worst.evidence | {
        "left_share": cause.left,
        "fp16_groups": len((blamed if blamed.bf16_groups else sides.plan).fp16_groups),
        **({"bf16_groups": len(blamed.bf16_groups)} if blamed.bf16_groups else {}),
    }
    names: dict[str, object] = {}
    if plan is not None and left is not None:
        evidence |= {"kept_groups": len(kept), "error_with_kept": left.judged}
        options = ["--fp16-all" if blamed.fp16_groups else "--bf16-all"]
        if blamed.fp16_groups:
            options += [f"--keep-bf16 {glob.escape(group)}" for group in plan.bf16_groups[:_MOST_KEPT]]
        options += [f"--keep-fp32 {glob.escape(groups[group].id)}" for group in kept[:_MOST_KEPT]]
        remaining = left.limit.sentence(left.judged).partition(" ")[2]
        names = {"left": remaining, "model": runner.model.path, "options": " ".join(options)}
    return finding(
        "precision",
        ("reproduced" if cause.left < 1 else "of its size") + (", no plan" if plan is None or left is None else ""),
        tuple(each.where for each in side),
        evidence,
        Where(
            nodes=tuple(node for group in named[:_NAMED] for node in groups[group].nodes[:1]),
            groups=tuple(named[:_MOST_KEPT]),
        ),
        place=str(worst.where),
        error_shown=worst.limit.sentence(worst.judged),
        limit_value=worst.limit.value,
        precisions=called,
        judged_fp16=worst.judged_fp16,
        named=listed([f"{groups[g].name} ({g}, {100 * shares[g]:.0f} %)" for g in named], _NAMED, " and {others} more"),
        seen=_seen(sides, blamed, named),
        is_bf16=bool(blamed.bf16_groups),
        **names,
    )


def _seen(sides: Sides, blamed: PrecisionPlan, named: Sequence[str]) -> str:
    """What was seen in the groups that a text names: a value beyond FP16's range, a decision that changes."""
    if blamed.bf16_groups:
        return ""
    groups = named[:_NAMED]
    hazards = sides.runner.hazards
    breaking = [
        h
        for h in hazards
        if h.place.group in groups and h.severity != "info" and not h.is_note and h.code in BREAKING_CODES
    ]

    def rank(hazard: Hazard) -> tuple[bool, int]:
        # An epsilon that vanishes, a warning, is why a reciprocal overflows; else what is certain comes first.
        is_plain = hazard.severity == "error" or hazard.code == "vanishing-epsilon"
        return not is_plain, groups.index(hazard.place.group or "")

    breaking.sort(key=rank)
    if not breaking:
        return ""
    worst = breaking[0]
    key = worst.code, worst.place.tensor, worst.reason
    same = [h for h in hazards if (h.code, h.place.tensor, h.reason) == key]
    first = next((h for h in same if h.place.node), worst)  # of a group that computes its operand it names no node
    return f"{first.code} at {first.place.node} ({first.place.group}): {first.reason}"


def _blamed(sides: Sides, causes: set[Cause]) -> PrecisionPlan:
    """The plan whose groups make the difference: the candidate's, or the precision throughout where it is not known."""
    if "bf16" in causes:
        return sides.plan if sides.plan.bf16_groups else sides.runner.throughout(Precision.BF16)
    return sides.plan if sides.plan.reduced_groups else sides.runner.throughout(Precision.FP16)


def _shares(side: Sequence[Side], blamed: PrecisionPlan) -> dict[str, float]:
    """Group of less than FP32 -> its share of the squared error, of the output where that is largest."""
    sides = side[0].sides
    base, groups = sides.runner.grouped.uniform(Precision.FP32), blamed.reduced_groups
    errors = sides.runner.one_by_one([base.replace({group: blamed.precision[group]}) for group in groups])
    shares = dict.fromkeys(groups, 0.0)
    for each in side:
        squares = []
        for error in errors:
            statistics = error.per_output.get(each.name, {})
            means = [sum(v) / len(v) for key, v in statistics.items() if belongs_to(key, WORST_PART)]
            mean = max(means, default=0.0)
            squares.append(mean**2 if math.isfinite(mean) else 1e12)
        total = sum(squares) or 1.0
        for group, square in zip(groups, squares, strict=True):
            shares[group] = max(shares[group], square / total)
    return shares


def _cured(
    side: Sequence[Side], blamed: PrecisionPlan, shares: Mapping[str, float], ranked: Sequence[str]
) -> tuple[PrecisionPlan | None, Side | None]:
    """The plan with as few groups in FP32 as keep all limits, emulated, and what is nearest to its limit then."""
    runner = side[0].sides.runner
    base = runner.grouped.uniform(Precision.FP32).replace({group: blamed.precision[group] for group in shares})
    wanted = min(each.limit.value / each.judged if math.isfinite(each.judged) else 1e-3 for each in side)
    left, count = sum(shares.values()), 0
    total = left
    while count < len(ranked) and math.sqrt(left / total) > _MARGIN * wanted:
        left = max(left - shares[ranked[count]], 0.0)
        count += 1
    count = min(count, len(ranked) - 1)  # one-group errors add in squares only nearly: all in FP32 is no plan
    for _ in range(_TRIES):
        plan = base.replace(dict.fromkeys(ranked[:count], Precision.FP32))
        if not plan.reduced_groups:
            return None, None
        outputs = runner.emulated(plan)
        again = [each.sides.worst(each.name, outputs, runner.exact) for each in side]
        if all(each.is_within for each in again):
            return plan, max(again, key=lambda each: each.judged / each.limit.value)
        count = min(len(ranked), count + max(1, (len(ranked) - count) // 3))
    return None, None
