"""A difference that FP16 or BF16 makes: the groups that make it, and the plan that removes it."""

from __future__ import annotations

import glob
import math
from collections.abc import Mapping, Sequence

import numpy as np

from mptune.data.metrics.parts import WORST_PART, belongs_to
from mptune.diagnosis.causes.explained import finding
from mptune.diagnosis.patterns.roundings import Cause, Explanation
from mptune.diagnosis.sides import Side, Sides
from mptune.finding import Finding
from mptune.graph.hazards.hazard import Hazard
from mptune.graph.plan import REDUCED, Precision, PrecisionPlan
from mptune.graph.writing.tf32 import ROUNDINGS
from mptune.tuning.reasons.group_findings import BREAKING_CODES

_NAMED = 5
"""Groups that a text names."""
_MARGIN = 0.8
"""Share of the limit that the plan is made for: one-group errors add in squares only nearly."""
_TRIES = 8
_LEAST_SIZE = 0.25
"""Of a difference, below which a rounding is no part of it."""
_LEAST_CORRELATION = 0.3
"""A correlation with a rounding from which a difference may be another engine's: chance gives a third of it."""
_FEWEST_VALUES = 100
_MOST_ALONE = 3
"""Groups whose roundings alone are looked at."""
_FEW, _MOST = 0.02, 0.5
"""Values that have so much of the squared difference are decisions that fall otherwise, as they do in each engine."""


def precision_finding(side: Sequence[Side], causes: Mapping[str, Explanation]) -> Finding:
    """The finding for outputs that are beyond tolerance through FP16 or BF16.

    Args:
        side: those outputs, at least one.
        causes: output -> what shows that the precision makes its difference.
    """
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
    names = ", ".join(f"{groups[g].name} ({g}, {100 * shares[g]:.0f} %)" for g in named[:_NAMED])
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    text = (
        f"output {str(worst.where)!r} has {worst.limit.sentence(worst.judged)}, the limit is {worst.limit.value:.3g}: "
        f"{_shown(causes[worst.name], called, worst.judged_fp16)}; most of it comes from {names}{more}"
        f"{_seen(sides, blamed, named)}"
    )
    if blamed.bf16_groups:
        text += "; BF16 keeps 8 bits where FP16 keeps 11"
    evidence = worst.evidence | {
        "left_share": causes[worst.name].left,
        "fp16_groups": len((blamed if blamed.bf16_groups else sides.plan).fp16_groups),
        **({"bf16_groups": len(blamed.bf16_groups)} if blamed.bf16_groups else {}),
    }
    if plan is None or left is None:
        cure = f"no plan with {called} groups keeps the limit: allow more with --tolerance, or stay in FP32"
    else:
        evidence |= {"kept_groups": len(kept), "error_with_kept": left.judged}
        patterns = " ".join(f"--keep-fp32 {_quoted(groups[g].id)}" for g in kept[:40])
        base = "--bf16-all" if not blamed.fp16_groups else "--fp16-all"
        if blamed.fp16_groups:
            patterns = " ".join([*(f"--keep-bf16 {_quoted(g)}" for g in plan.bf16_groups[:40]), patterns])
        count = f"{len(kept)} group{'s' * (len(kept) != 1)}"
        command = f"mptune apply {runner.model.path} {base} {patterns} -o OUT.onnx"
        cure = f"keep {count} in FP32 ({left.limit.sentence(left.judged).partition(' ')[2]}): {command}"
    return finding(
        "precision",
        tuple(each.where for each in side),
        evidence,
        text,
        cure,
        groups=tuple(named[:40]),
        nodes=tuple(node for group in named[:_NAMED] for node in groups[group].nodes[:1]),
    )


def resembles_rounding(side: Side, *, of_groups: bool = False) -> bool:
    """Whether a difference correlates with what a rounding of its size makes; True where that cannot be told.

    An engine that fuses nodes, or keeps some in FP32, rounds elsewhere than the emulation: enough is alike to be seen.

    Args:
        side: an output.
        of_groups: look at what each of the groups that make most of the error makes alone, too.
    """
    sides, runner = side.sides, side.sides.runner
    compared, exact = side.compared(), side.rows(runner.exact)
    if compared is None or compared.got.size < _FEWEST_VALUES:
        return True
    plans = [sides.plan, runner.all_fp16, runner.sound_fp16, runner.all_bf16]
    if of_groups:
        shares, base = _shares([side], runner.all_fp16), runner.grouped.uniform(Precision.FP32)
        worst = sorted(shares, key=lambda group: -shares[group])[:_MOST_ALONE]
        plans = [base.replace({group: Precision.FP16}) for group in worst]
    roundings = [runner.emulated(plan) for plan in dict.fromkeys(plans) if plan.reduced_groups]
    roundings += [made for way in (() if of_groups else ROUNDINGS) if (made := runner.tf32(way)) is not None]
    difference = compared.got - compared.wanted
    size = float(np.linalg.norm(difference))
    squares = np.sort((difference**2).ravel())
    if float(squares[-int(_FEW * squares.size) :].sum()) >= _MOST * size**2:
        return True
    for rows in (side.rows(outputs) for outputs in roundings):
        if rows.shape != exact.shape or not np.isfinite(rows).all():
            continue
        made = (np.asarray(rows, np.float64) - exact) / compared.scale
        own = float(np.linalg.norm(made))
        if own >= _LEAST_SIZE * size and abs(float((difference * made).sum())) >= _LEAST_CORRELATION * own * size:
            return True
    return False


def _shown(cause: Explanation, called: str, emulated: float) -> str:
    if cause.left < 1:
        return f"emulating {called} reproduces it ({100 * cause.left:.2g} % of the difference is left)"
    return f"{called} throughout, emulated, gives an error of that size ({emulated:.3g}), in other values"


def _seen(sides: Sides, blamed: PrecisionPlan, named: Sequence[str]) -> str:
    """What was seen in the groups that a text names: a value beyond FP16's range, a decision that changes."""
    if blamed.bf16_groups:
        return ""
    groups = named[:_NAMED]
    hazards = sides.runner.hazards
    found = [h for h in hazards if h.group in groups and h.severity != "info" and h.code in BREAKING_CODES]

    def rank(hazard: Hazard) -> tuple[bool, int]:
        # An epsilon that vanishes, a warning, is why a reciprocal overflows; else what is certain comes first.
        is_plain = hazard.severity == "error" or hazard.code == "vanishing-epsilon"
        return not is_plain, groups.index(hazard.group or "")

    found.sort(key=rank)
    if not found:
        return ""
    same = [h for h in hazards if (h.code, h.tensor, h.reason) == (found[0].code, found[0].tensor, found[0].reason)]
    first = next((h for h in same if h.node), found[0])  # of a group that computes its operand it names no node
    return f"; {first.code} at {first.node} ({first.group}): {first.reason}"


def _quoted(text: str) -> str:
    return glob.escape(text)


def _blamed(sides: Sides, causes: set[Cause]) -> PrecisionPlan:
    """The plan whose groups make the difference: the candidate's, or the precision throughout where it is not known."""
    if "bf16" in causes:
        return sides.plan if sides.plan.bf16_groups else sides.runner.all_bf16
    return sides.plan if sides.plan.reduced_groups else sides.runner.all_fp16


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
