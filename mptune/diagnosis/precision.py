"""A difference that FP16 or BF16 makes: the groups that make it, and the plan that removes it."""

from __future__ import annotations

import glob
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mptune.data.archive import save_samples
from mptune.diagnosis.rows import Explanation, explain
from mptune.diagnosis.sides import HEADROOM, Limit, Side, Sides, arrays_of, figure_of
from mptune.engines.base import Failure
from mptune.engines.failures import did_not_run
from mptune.engines.toolchains.emulation import Emulation
from mptune.finding import BREAKING_CODES, Finding, Where
from mptune.findings.wording import listed
from mptune.graph.hazards.hazard import Hazard
from mptune.graph.plan import REDUCED, Precision, PrecisionPlan

_NAMED = 5  # groups that a text names
_MOST_KEPT = 40  # groups that a command names
_MARGIN = 0.8  # share of the limit that the plan is made for
_TRIES = 8
_NOT_FINITE = 1e6  # stands for an error that is not finite
_LEFT_OF_ROWS = 0.5  # share of the difference between two sets of rows, up to which another set explains one of them
_SAME_PLACES = 0.9
_OFF = 0.01  # a value is off by more of its output's standard deviation than this
_FEW_OFF = 0.5  # share of the values that changed decisions make wrong at most


def precision(outputs: Sequence[Side]) -> list[Finding]:
    """``precision``, of all outputs that are beyond their limits through FP16 or BF16."""
    beyond = [side for side in outputs if not side.is_within and not side.sides.is_other_model]
    causes = {side.name: cause for side in beyond if (cause := _cause(side)) is not None}
    blamed = [side for side in beyond if side.name in causes]
    if not blamed:
        return []
    sides, runner = blamed[0].sides, blamed[0].sides.runner
    worst = max(blamed, key=lambda side: side.excess)
    cause = causes[worst.name]

    # Whose groups make it: the candidate's, or the precision throughout where they are not known.
    reduced = Precision.BF16 if "bf16" in {each.cause for each in causes.values()} else Precision.FP16
    is_known = sides.plan.bf16_groups if reduced is Precision.BF16 else sides.plan.reduced_groups
    plan = sides.plan if is_known else runner.throughout(reduced)
    shares, cured, left = _cured(blamed, plan)
    named = cured if left is not None else list(shares)

    groups = {group.id: group for group in runner.grouped.groups}
    evidence = {"left_share": cause.left, "fp16_groups": len(plan.fp16_groups), "bf16_groups": len(plan.bf16_groups)}
    options = ["--fp16-all"] if plan.fp16_groups else ["--bf16-all"]
    if left is not None:
        evidence |= {"kept_groups": len(cured), "error_with_kept": left.judged}
        in_bf16 = [group for group in plan.bf16_groups if group not in cured] if plan.fp16_groups else []
        options += [f"--keep-bf16 {glob.escape(group)}" for group in in_bf16[:_MOST_KEPT]]
        options += [f"--keep-fp32 {glob.escape(group)}" for group in cured[:_MOST_KEPT]]
    nodes = tuple(groups[group].nodes[0] for group in named[:_NAMED])
    where = Where(nodes, tuple(named[:_MOST_KEPT]), outputs=tuple(side.where for side in blamed))
    words = {
        "limit_value": worst.limit.value,
        "precisions": " and ".join(p.name for p in REDUCED if plan.groups_in(p)),
        "named": listed([f"{groups[g].name} ({g}, {100 * shares[g]:.0f} %)" for g in named], _NAMED),
        "seen": "" if plan.bf16_groups else worst_hazard(sides, named[:_NAMED]),
        "left": "" if left is None else left.limit.sentence(left.judged),
        "option": "--tolerance" if sides.max_error is None else "--max-error",  # compare has one, check the other
        "command": f"mptune apply {runner.model.path} {' '.join(options)} -o OUT.onnx",
    }
    return [worst.finding("precision", {**worst.evidence, **evidence}, where, **words)]


def _cause(side: Side) -> Explanation | None:
    """What shows that FP16 or BF16 makes a difference: its pattern, its rows, its overflow, or its size."""
    if side.rounding is not None:
        return side.rounding
    sides, runner = side.sides, side.sides.runner
    emulated = runner.emulated(sides.plan)
    if sides.is_row_set(side.name) and 0 < side.error < math.inf:
        (again,) = (each for each in sides.judged(sides.candidate, emulated) if each.name == side.name)
        if again.error <= _LEFT_OF_ROWS * side.error:
            return Explanation("fp16", again.error / side.error, 1.0)
    runs = (sides.reference, sides.candidate, emulated, runner.emulated(runner.throughout(Precision.FP16)))
    arrays = [np.concatenate([np.ravel(array) for array in arrays_of(run, side.name)]) for run in runs]
    if any(array.size != arrays[0].size or array.dtype.kind not in "fiub" for array in arrays) or not arrays[0].size:
        return None
    wanted, got, planned, fp16 = (array.astype(np.float64) for array in arrays)
    if _are_lost_alike(wanted, got, planned):
        return Explanation("fp16", 0.0, 1.0)
    # Where decisions change, most values stay right, in the candidate as in FP16 throughout, and the error has one
    # size. What a deployment does otherwise, such as to its inputs, moves all of them.
    if not 0 < side.judged <= HEADROOM * side.fp16.judged < math.inf:
        return _step_by_step(side)
    spread = float(np.std(wanted[np.isfinite(wanted)])) if np.isfinite(wanted).any() else 0.0
    off, off_fp16 = (float(np.mean(~(np.abs(each - wanted) <= _OFF * spread))) for each in (got, fp16))
    is_alike = 0 < off_fp16 <= _FEW_OFF and off <= HEADROOM * off_fp16
    return Explanation("fp16", 1.0, side.fp16.judged / side.judged) if is_alike else _step_by_step(side)


def _stepped(side: Side) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """The sample that differs most, wanted and got, and of FP16 whose sums are rounded term by term where that runs."""
    k = side.worst_sample[1]
    steps, wanted = side.sides.runner.step_by_step(side.sides.plan, k).get(side.name), side.wanted[k]
    return None if steps is None or steps.shape != wanted.shape else (wanted, side.got[k], steps)


def _step_by_step(side: Side) -> Explanation | None:
    """FP16 whose sums are rounded term by term; only where a hazard is there."""
    if not worst_hazard(side.sides) or (arrays := _stepped(side)) is None:
        return None
    wanted, got, steps = (np.asarray(array, np.float64) for array in arrays)
    return explain(got - wanted, [("fp16", steps - wanted)])


def _are_lost_alike(wanted: np.ndarray, got: np.ndarray, changed: np.ndarray) -> bool:
    """Whether values are NaN or Inf in the same places."""
    lost, lost_changed = (np.isfinite(wanted) & ~np.isfinite(each) for each in (got, changed))
    return bool(lost.any() and (lost & lost_changed).sum() >= _SAME_PLACES * max(lost.sum(), lost_changed.sum()))


def held_sum(side: Side) -> Finding | None:
    """``long-sum``: values are NaN or Inf, as they are where a sum beyond FP16's range is held in FP16."""
    sums = _sums_beyond(side.sides.runner.hazards)
    if not sums or (arrays := _stepped(side)) is None or not _are_lost_alike(*arrays):
        return None
    first, groups = sums[0], list(dict.fromkeys(hazard.place.group for hazard in sums if hazard.place.group))
    keep = " ".join(f"--keep-fp32 {glob.escape(group)}" for group in groups)
    command = f"mptune apply {side.sides.runner.model.path} --fp16-all {keep} -o OUT.onnx"
    where = Where((str(first.place.node),), tuple(groups), (first.place.tensor,), (side.where,))
    words: dict[str, Any] = {**first.all_words, "kind": "held", "command": command}
    return Finding.from_code("long-sum", "compare", where, first.evidence, **words)


def _sums_beyond(hazards: Sequence[Hazard]) -> list[Hazard]:
    return [h for h in hazards if float(h.evidence.get("sum", 0)) > Precision.FP16.largest]


def _cured(blamed: Sequence[Side], plan: PrecisionPlan) -> tuple[dict[str, float], list[str], Side | None]:
    """The groups of less than FP32, and those of them that have to be FP32 to keep all limits, emulated.

    Returns each group's share of the squared error, of the output where that is largest, the largest first; what has to
    be FP32, the same way; and the output that is nearest to its limit then, None where nothing keeps all limits.
    """
    runner, groups = blamed[0].sides.runner, plan.reduced_groups
    base = runner.grouped.uniform(Precision.FP32)
    plans = [base.replace({group: plan.precision[group]}) for group in groups]
    runner.begin(f"emulating {len(plans)} groups, each alone")
    save_samples(runner.context.reference("search"), runner.exact)
    used = {str(precision) for each in plans for precision in each.precision.values()}
    context = runner.context.with_settings(precisions=tuple(sorted(used)))  # a switch that nobody turns costs time
    emulation = Emulation(context, runner.grouped, "cpu", runner.worker, runner.observed.shapes)
    # On the first samples where more would take long.
    errors = emulation.errors(plans, part=emulation.samples.parts[0])
    if isinstance(errors, Failure):
        raise did_not_run(f"{runner.name} cannot be emulated", replace(errors, log_path=None))
    shares = dict.fromkeys(groups, 0.0)
    for side in blamed:
        squares = [min(figure_of(error, side.name, Limit(0.0)), _NOT_FINITE) ** 2 for error in errors]
        total = sum(squares) or 1.0
        shares = {group: max(shares[group], square / total) for group, square in zip(groups, squares, strict=True)}
    ranked = sorted(shares, key=lambda group: -shares[group])
    shares = {group: shares[group] for group in ranked}

    # One-group errors add in squares, but nearly: as many as should leave most of the limit come first.
    wanted = min(side.limit.value / side.judged if math.isfinite(side.judged) else 1e-3 for side in blamed)
    left = np.cumsum([shares[group] for group in reversed(ranked)])[::-1]
    count = min(int((np.sqrt(left / max(left[0], 1e-30)) > _MARGIN * wanted).sum()), len(ranked) - 1)
    names = {side.name for side in blamed}
    for _ in range(_TRIES):
        outputs = runner.emulated(plan.replace(dict.fromkeys(ranked[:count], Precision.FP32)))
        again = [side for side in blamed[0].sides.judged(outputs, runner.exact) if side.name in names]
        if all(side.is_within for side in again):
            return shares, ranked[:count], max(again, key=lambda side: side.excess)
        count += max(1, (len(ranked) - count) // 3)
        if count >= len(ranked):
            break
    return shares, [], None


def worst_hazard(sides: Sides, groups: Collection[str] | None = None) -> str:
    """What breaks in these groups, certain ones first; in all, also sums, which no emulation shows; or ""."""
    breaking = [h for h in sides.runner.hazards if h.code in BREAKING_CODES and h.severity != "info" and not h.is_note]
    breaking = [h for h in breaking if h.precision is not Precision.BF16]  # FP16 may hold what BF16 does not
    # An epsilon that vanishes, a warning, is why a reciprocal overflows.
    breaking.sort(key=lambda h: h.severity != "error" and h.code != "vanishing-epsilon")
    sums = _sums_beyond(sides.runner.hazards)
    hazards = [*breaking, *sums] if groups is None else [h for h in breaking if h.place.group in groups]
    if not hazards:
        return ""
    worst = hazards[0]
    nodes = (h.place.node for h in hazards if (h.code, h.place.tensor) == (worst.code, worst.place.tensor))
    return f"{worst.code} at {next(filter(None, nodes), worst.place.tensor)} ({worst.place.group}): {worst.reason}"
