"""A difference that FP16 or BF16 makes: the groups that make it, the plan that removes it, constants made infinite."""

from __future__ import annotations

import glob
import math
from collections.abc import Mapping, Sequence

import numpy as np

from mptune.data.metrics.parts import WORST_PART, belongs_to
from mptune.diagnosis.comparison import finding
from mptune.diagnosis.limits import HEADROOM
from mptune.diagnosis.patterns.places import what_is_there
from mptune.diagnosis.patterns.roundings import FP32_ROUNDING, Cause, Explanation
from mptune.diagnosis.runner import Runner
from mptune.diagnosis.sides import Side, Sides
from mptune.finding import BREAKING_CODES, Finding, Where
from mptune.findings.wording import listed
from mptune.graph.hazards.hazard import Hazard
from mptune.graph.plan import REDUCED, Precision, PrecisionPlan
from mptune.graph.writing.widened import ROUNDINGS

_NAMED = 5
"""Groups that a text names."""

_MOST_KEPT = 40

"""Groups that a command names."""

_MARGIN = 0.8
"""Share of the limit that the plan is made for: one-group errors add in squares only nearly."""

_TRIES = 8

_LEAST_SIZE = 0.25
"""Of a difference, below which a rounding is no part of it."""

_LEAST_CORRELATION = 0.3
"""A correlation with a rounding from which a difference may be another engine's: chance gives a third of it."""

_FEWEST_VALUES = 100

_WORTH_TRYING = 0.1
"""Share of FP16's error from which a difference within its limit that no rounding reproduces is looked into."""

_AS_LARGE = 0.5
"""Share of FP16's error from which a difference has its size."""

_LEFT_OF_ROWS = 0.5
"""Share of the difference between two sets of rows, up to which another set explains one of them."""

_SAME_PLACES = 0.9

_OFF = 0.01
"""A value is off by more of its output's standard deviation than this."""

_FEW_OFF = 0.5
"""Share of the values that changed decisions make wrong at most."""

_FEW, _MOST = 0.02, 0.5
"""Values that have so much of the squared difference are decisions that fall otherwise, as they do in each engine."""


def precision(outputs: Sequence[Side]) -> list[Finding]:
    """``precision``, of all outputs that are beyond their limits through FP16 or BF16.

    What could be FP16 by its size alone is, where nothing plain is seen in its place.
    """
    causes: dict[str, Explanation] = {}
    for side in outputs:
        if side.is_within:
            continue
        cause = fp16_explanation(side)
        is_alike = not side.sides.is_other_model and _is_as_far_off_as_fp16(side)
        if cause is None and is_alike and not what_is_there(side.got, side.wanted):
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


def is_doubtful(side: Side) -> bool:
    """Whether an output within its limit differs by what no rounding reproduces."""
    sides = side.sides
    if sides.origin not in ("recorded", "engine") or sides.is_other_model or sides.has_row_set(side.name):
        return False
    is_large = side.error > max(FP32_ROUNDING, _WORTH_TRYING * side.emulated)
    return side.is_within and is_large and side.rounding is None


def is_no_rounding(side: Side) -> bool:
    """Whether a difference of the size of FP16's correlates with no rounding; False where the data do not show it.

    An engine that fuses nodes, or keeps some in FP32, rounds elsewhere than the emulation: enough is alike to be seen.
    Decisions fall otherwise in each engine.
    """
    has_size = _AS_LARGE * side.emulated <= side.error <= HEADROOM * side.emulated
    if not has_size or any(array.dtype.kind != "f" for array in side.wanted):
        return False
    sides, runner = side.sides, side.sides.runner
    compared, exact = side.compared, side.rows(runner.exact)
    if compared is None or compared.got.size < _FEWEST_VALUES:
        return False
    plans = [sides.plan, runner.planned_fp16, *(runner.throughout(precision) for precision in REDUCED)]
    roundings = [runner.emulated(plan) for plan in dict.fromkeys(plans) if plan.reduced_groups]
    roundings += [made for way in ROUNDINGS if (made := runner.tf32(way)) is not None]
    difference = compared.got - compared.wanted
    size = float(np.linalg.norm(difference))
    squares = np.sort((difference**2).ravel())
    if float(squares[-int(_FEW * squares.size) :].sum()) >= _MOST * size**2:
        return False
    for rows in (side.rows(outputs) for outputs in roundings):
        if rows.shape != exact.shape or not np.isfinite(rows).all():
            continue
        made = (np.asarray(rows, np.float64) - exact) / compared.scale
        own = float(np.linalg.norm(made))
        if own >= _LEAST_SIZE * size and abs(float((difference * made).sum())) >= _LEAST_CORRELATION * own * size:
            return False
    return True


def _seen(sides: Sides, blamed: PrecisionPlan, named: Sequence[str]) -> str:
    """What was seen in the groups that a text names: a value beyond FP16's range, a decision that changes."""
    if blamed.bf16_groups:
        return ""
    groups = named[:_NAMED]
    hazards = sides.runner.hazards
    breaking = [h for h in hazards if h.group in groups and h.severity != "info" and h.code in BREAKING_CODES]

    def rank(hazard: Hazard) -> tuple[bool, int]:
        # An epsilon that vanishes, a warning, is why a reciprocal overflows; else what is certain comes first.
        is_plain = hazard.severity == "error" or hazard.code == "vanishing-epsilon"
        return not is_plain, groups.index(hazard.group or "")

    breaking.sort(key=rank)
    if not breaking:
        return ""
    worst = breaking[0]
    same = [h for h in hazards if (h.code, h.tensor, h.reason) == (worst.code, worst.tensor, worst.reason)]
    first = next((h for h in same if h.node), worst)  # of a group that computes its operand it names no node
    return f"{first.code} at {first.node} ({first.group}): {first.reason}"


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


_NAMED_CONSTANTS = 3


def infinite_constants(outputs: Sequence[Side]) -> list[Finding]:
    """``mask`` or ``overflow``, of all outputs that are not finite because constants are."""
    blamed_sides = [(side, *blamed) for side in outputs if (blamed := _constants_of(side)) is not None]
    if not blamed_sides:
        return []
    hazards = tuple(dict.fromkeys(hazard for _, _, of_side in blamed_sides for hazard in of_side))
    return [_infinite_finding([side for side, _, _ in blamed_sides], blamed_sides[0][1], hazards)]


def _constants_of(side: Side) -> tuple[Precision, tuple[Hazard, ...]] | None:
    """A precision and the constants that, rounded to infinity, make values NaN or Inf at mostly the candidate's places.

    None where the candidate is finite, or where these values are not finite with the constants limited, either.
    """
    runner = side.sides.runner
    lost = side.lost(side.sides.candidate)
    if lost is None or not lost.any() or fp16_explanation(side) is not None:
        return None
    for plan in dict.fromkeys((side.sides.plan, *map(runner.throughout, REDUCED))):
        hazards = _beyond(runner, plan)
        if not hazards or not are_mostly_same(lost, side.lost(runner.emulated(plan, limits=False))):
            continue
        limited = side.lost(runner.emulated(plan))
        if limited is None or (lost & limited).any():
            continue
        base = runner.grouped.uniform(Precision.FP32)
        blamed = set()
        for group in {hazard.group or "" for hazard in hazards}:
            only = base.replace({group: plan.precision[group]})
            alone = side.lost(runner.emulated(only, limits=False))
            if alone is not None and (lost & alone).any():
                blamed.add(group)
        named = tuple(hazard for hazard in hazards if hazard.group in blamed) or hazards
        return plan.precision[named[0].group or ""], named
    return None


def _infinite_finding(sides: Sequence[Side], precision: Precision, hazards: tuple[Hazard, ...]) -> Finding:
    first = sides[0]
    is_mask = all(hazard.severity == "info" for hazard in hazards)
    largest = precision.largest
    lost = first.lost(first.sides.candidate)
    count = 0 if lost is None else int(lost.sum())
    places = list(dict.fromkeys(f"{h.tensor} ({h.value:.4g}) at {h.node} ({h.group})" for h in hazards))
    evidence = first.evidence | {
        "not_finite": count,
        "absmax": max(hazard.value for hazard in hazards),
        f"{precision}_max": largest,
    }
    return finding(
        "mask" if is_mask else "overflow",
        "infinite",
        tuple(side.where for side in sides),
        evidence,
        Where(
            nodes=tuple(dict.fromkeys(h.node for h in hazards if h.node)),
            groups=tuple(dict.fromkeys(h.group for h in hazards if h.group)),
            tensors=tuple(dict.fromkeys(h.tensor for h in hazards)),
        ),
        place=str(first.where),
        precision=precision.name,
        largest=largest,
        constants=listed(places, _NAMED_CONSTANTS, " and {others} more"),
        model=first.sides.runner.model.path,
        option=f"--{precision}-all",
    )


def _beyond(runner: Runner, plan: PrecisionPlan) -> tuple[Hazard, ...]:
    """The constants that a plan has in a precision that does not hold them."""
    reduced = set(plan.reduced_groups)
    return tuple(
        hazard
        for hazard in runner.constant_hazards
        if "held_as" in hazard.evidence
        and hazard.group in reduced
        and hazard.value > plan.precision[hazard.group].largest
    )
