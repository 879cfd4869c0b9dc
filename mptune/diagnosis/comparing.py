"""How a verdict comes about: both sides, each output's error and limit, then the causes in order (``CAUSES``).

``differs`` where an output is beyond its limit, or has a cause that is no rounding.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mptune.data.metrics.accuracy import FOREIGN, MANY_FOREIGN
from mptune.data.samples import CalibrationSet
from mptune.diagnosis.engines import EngineRunner
from mptune.diagnosis.order import find_stale, other_form, other_order, stale_finding, stale_rows
from mptune.diagnosis.precision import held_sum, precision, worst_hazard
from mptune.diagnosis.preprocessing import other_feed
from mptune.diagnosis.rows import FP32_ROUNDING, Layout, read_recording
from mptune.diagnosis.runner import Outputs, Runner
from mptune.diagnosis.sides import HEADROOM, Limit, Side, Sides, figure_of
from mptune.finding import Finding, OutputColumns, Where, by_severity
from mptune.graph.plan import Precision
from mptune.json_form import encode
from mptune.settings import Tolerance

COMPARISON_FORMAT = 1
_STORED_SHARE = 0.9  # of the values: another engine's FP32 rounding moves a few of them to a neighbour in FP16

Verdict = Literal["agrees", "differs"]


@dataclass(frozen=True)
class Comparison:
    """What ``compare`` or ``check`` found, output by output.

    Attributes:
        verdict: ``differs`` where an output is beyond its limit, or has a cause that is no rounding.
        findings: what the difference is, the most severe first.
        outputs: output name -> statistic -> value over all samples. ``error`` is the root mean square difference of a
            sample, divided by the output's standard deviation over all samples, the mean over the samples; of an output
            whose number of rows depends on values, of its rows as pairs, divided by the root mean square.
            ``emulated_fp16`` is the same of the model with FP16 wherever FP16 can be right. ``judged`` is what
            ``limit`` limits: that error, or the largest absolute difference where the tolerance is of that;
            ``judged_fp16`` as before. ``check`` has no figures of FP16 where it explains nothing.
        reference: what the left side is called.
        candidate: what the right side is called.
        samples: how many.
        warnings: that have no code, one line each.
        limits: output name -> the limit of its part that is worst against its own; ``error`` and ``judged`` are of it.
        extracted: what ``extract`` wrote, in a line.
    """

    verdict: Verdict
    findings: tuple[Finding, ...]
    outputs: Mapping[str, Mapping[str, float]]
    reference: str
    candidate: str
    samples: int
    warnings: tuple[str, ...] = ()
    limits: Mapping[str, Limit] = field(default_factory=dict)
    extracted: str = ""

    @property
    def agrees(self) -> bool:
        """Whether the verdict is ``agrees``."""
        return self.verdict == "agrees"

    def to_json(self) -> dict[str, Any]:
        """What ``mptune compare --json`` prints; numbers that are not finite are texts."""
        document: dict[str, Any] = encode({"format": COMPARISON_FORMAT, **vars(self)})
        return document


def make_sides(
    runner: Runner,
    other: Runner | EngineRunner | None,
    batch: int,
    *,
    recorded: Path | None,
    recorded_reference: Path | None,
    ignore: Collection[str],
    tolerances: Sequence[Tolerance],
    max_error: float | None,
) -> Sides:
    """Run what has to run and read what was recorded."""
    exact, exact_name = runner.exact, f"{runner.name} in FP32"
    compared = [output.name for output in runner.model.outputs if output.name not in ignore]
    layouts = {name: Layout.of_arrays([sample[name] for sample in exact], runner.samples) for name in compared}

    def side_of(recording: Path | None) -> tuple[Outputs, str]:
        return (exact, exact_name) if recording is None else (read_recording(recording, layouts), str(recording))

    (reference, reference_name), (candidate, candidate_name) = side_of(recorded_reference), side_of(recorded)
    origin = "same" if recorded is None else "recorded"
    if recorded is None and other is not None:
        origin, candidate, candidate_name = "engine", other.exact, other.name
        if isinstance(other, Runner):
            origin, candidate = "model", named(runner, other, candidate)
    batch = max([batch, *(each.shapes[0][0] for each in layouts.values() if each.shapes[0] and not each.stacked)])
    two_runs, plan = (reference, candidate, reference_name, candidate_name), runner.throughout(Precision.FP16)
    return Sides(runner, *two_runs, layouts, batch, plan, origin, tolerances, max_error)


def named(runner: Runner, other: Runner, outputs: Outputs) -> Outputs:
    """Outputs of another model under the names of a model's own: by name, else by position."""
    names, theirs = ([output.name for output in each.model.outputs] for each in (runner, other))
    pairs = dict(zip(names, names if set(names) <= set(theirs) else theirs, strict=True))
    return tuple({name: sample[its] for name, its in pairs.items()} for sample in outputs)


def tf32(side: Side) -> Finding | None:
    """``tf32-reference`` and ``tf32-candidate``, also of outputs within their limits."""
    cause = side.rounding
    names = {"tf32-reference": side.sides.reference_name, "tf32-candidate": side.sides.candidate_name}
    if cause is None or cause.cause not in names:
        return None
    evidence = {**side.evidence, "left_share": cause.left, "size_ratio": cause.size}
    return side.finding(cause.cause, evidence, name=names[cause.cause])


def not_computed(side: Side) -> Finding | None:
    """``not-computed``, of recorded outputs: zero, or of equal rows, as neither the reference nor FP16 makes them."""
    sides = side.sides
    if sides.origin != "recorded" or side.compared is None:
        return None
    got, wanted = side.rows(sides.candidate), side.rows(sides.reference)
    # Rows of one label each are equal by chance, and the second of two may be the first's result.
    ways: list[tuple[str, bool, Callable[[np.ndarray], Any]]] = [
        ("zero", not side.is_within, lambda rows: not rows.any()),
        ("equal rows", len(got) > 2 and wanted.dtype.kind == "f", lambda rows: (rows == rows[:1]).all()),
    ]
    for kind, is_asked, is_so in ways:
        if is_asked and is_so(got) and not is_so(wanted) and not is_so(side.rows(sides.runner.emulated(sides.plan))):
            return side.finding("not-computed", {"error": side.error, "rows": len(got)}, kind=kind)
    return None


def stored_as_fp16(side: Side) -> Finding | None:
    """``precision``, of outputs beyond their limits that hold the reference's values, rounded to FP16."""
    if side.is_within or side.compared is None or side.sides.is_other_model:
        return None
    if side.stored_share is None or side.stored_share < _STORED_SHARE:
        return None
    return side.finding("precision", {**side.evidence, "rounded_share": side.stored_share}, kind="stored")


def agreement(side: Side) -> Finding | None:
    """``agrees``, of outputs within their limits."""
    is_fp32 = side.error <= FP32_ROUNDING
    # What other models differ in makes more than FP32 rounding, and is no rounding.
    if not side.is_within or (side.sides.is_other_model and not is_fp32):
        return None
    size = "fp32" if is_fp32 else "fp16" if side.error <= HEADROOM * side.fp16.error else "within tolerance"
    where = Where(outputs=(side.where,))
    kind = "equal" if side.error == 0 else size
    return side.finding("agrees", side.evidence, where, kind=kind, is_stored=side.stored_share is not None)


Findings = Sequence[Finding]
Cause = Callable[[Sequence[Side]], Findings]
"""Outputs without a cause yet -> findings, whose ``where.outputs`` are the outputs that they explain."""


def _each(cause: Callable[[Side], Finding | None]) -> Cause:
    return lambda outputs: [finding for side in outputs if (finding := cause(side)) is not None]


CAUSES: tuple[Cause, ...] = (
    *map(_each, (not_computed, other_order, other_form, stale_rows, tf32, stored_as_fp16)),
    precision,
    _each(held_sum),
    other_feed,
    _each(agreement),
)
STRUCTURAL = {"stale-rows", "torn-rows", "not-computed", "outputs-permuted", "data-do-not-fit"}
STRUCTURAL |= {"attribute-differs", "not-deterministic"}
"""Causes that are no rounding: with one of them the verdict is always ``differs``."""


def compare_sides(
    sides: Sides, data: CalibrationSet, structural: Findings, more: Findings, drawn: Findings, warnings: Sequence[str]
) -> Comparison:
    """Judge every output and name what makes its difference.

    ``structural`` is what two models differ in, ``more`` is of repetitions and of the trace. Where outputs differ and
    nodes are ``drawn``, which draw random numbers, no rounding is made out behind them.
    """
    if any(side.error > FP32_ROUNDING for side in sides.outputs):
        structural = [*drawn, *structural]
    if structural:
        sides = replace(sides, is_other_model=True)
    findings, unexplained = list[Finding](), sides.outputs
    for cause in CAUSES:
        findings += (causes := cause(unexplained))
        explained = {output.name for each in causes for output in each.where.outputs}
        unexplained = [side for side in unexplained if side.name not in explained]
    findings = sorted([*structural, *more, *findings], key=lambda each: each.code == "first-difference")
    text = "the difference is unexplained: no rounding, row order or change of inputs that was tried reproduces it"
    if sides.origin == "recorded":
        text += "; with the model that the engine was built of as CANDIDATE, --trace names where it begins"
    beyond = [side for side in unexplained if not side.is_within and not sides.is_other_model]
    texts = [*warnings, *(f"output {side.name!r}: {text}" for side in beyond)]
    lost = any(not np.isfinite(array).all() for side in beyond for array in side.got if array.dtype.kind == "f")
    if lost and (hazard := worst_hazard(sides)):
        texts.append(f"FP16 may be why values are NaN or Inf: {hazard}")
    comparison = check_sides(sides, data, findings, texts)
    fp16 = {side.name: {"emulated_fp16": side.fp16.error, "judged_fp16": side.fp16.judged} for side in sides.outputs}
    return replace(comparison, outputs={name: {**by, **fp16[name]} for name, by in comparison.outputs.items()})


def check_sides(sides: Sides, data: CalibrationSet, findings: Findings = (), texts: Sequence[str] = ()) -> Comparison:
    """Judge every output against its limit, by the two runs alone: nothing is emulated."""
    warnings = [*data.warnings, *(f"{f.code}: {f.message}" for f in data.findings)]
    outputs = {}
    for side in sides.outputs:
        largest = figure_of(side.errors, side.name, Limit(0.0, is_absolute=True))
        figures = {"error": side.error, "limit": side.limit.value, "judged": side.judged, "largest_difference": largest}
        outputs[side.name] = {**side.errors.summary()[side.name], **figures}
        count = sum(int((~np.isfinite(array)).sum()) for array in side.wanted if array.dtype.kind == "f")
        if count:
            text = f"output {side.name!r} of the reference holds {count} NaN or Inf, which are not compared"
            warnings.insert(0, f"{text}; `mptune inspect MODEL --data PATH` names the node")
        if not side.is_within and side.judged <= side.limit.value:
            text = "output {!r}: sample {} has an error of {:.3g}, more than five times the limit of {:.3g}"
            warnings.insert(0, text.format(str(side.where), *side.worst_sample[::-1], side.limit.value))
    agrees = all(side.is_within for side in sides.outputs) and STRUCTURAL.isdisjoint(f.code for f in findings)
    # In which outputs TopK selected other rows than in the reference, beyond their tolerance.
    share, outputs_of_others = sides.outputs[0].errors.foreign_selections
    most = min((tolerance.limit for tolerance in sides.tolerances if tolerance.output == FOREIGN), default=math.inf)
    if share > min(MANY_FOREIGN, most):
        agrees = agrees and share <= most
        evidence = {"foreign_rows": share, **({"limit": most} if share > most else {})}
        about: dict[str, Any] = {"kind": "foreign", "side": sides.candidate_name, "share": share}
        about["names"] = ", ".join(map(repr, outputs_of_others))
        where = Where(outputs=tuple(map(OutputColumns, outputs_of_others)))
        findings = (*findings, Finding.from_code("rows-selected", "compare", where, evidence, **about))
    names, limits = (sides.reference_name, sides.candidate_name), {side.name: side.limit for side in sides.outputs}
    verdict: Verdict = "agrees" if agrees else "differs"
    texts = (*texts, *warnings)
    return Comparison(verdict, by_severity(findings), outputs, *names, len(sides.reference), texts, limits)


def repetition_findings(sides: Sides, runner: Runner | EngineRunner, repeat: int, *, stress: bool) -> list[Finding]:
    """What runs are that differ from isolated ones: stale or torn rows, or other values; none within FP32 rounding.

    ``runner`` is of the candidate where that is a model or an engine, else of the model.
    """
    threads = max(2, min(8, os.cpu_count() or 2))
    ways = [(repeat, 1, "one after another")] if repeat > 1 else []
    ways += [(max(repeat, 4), threads, f"in {threads} threads at once")] if stress else []
    for times, at_once, how in ways:
        error, worst = runner.repeated(times, at_once)
        if error <= FP32_ROUNDING or worst is None:
            continue
        isolated = runner.exact
        again = replace(sides, reference=isolated, candidate=worst)
        for side in again.outputs if all(name in isolated[0] for name in sides.layouts) else ():
            # Both ran in the same precision: what a row has of another run it has exactly.
            rows = side.compared
            stale = None if rows is None else find_stale(replace(rows, half=rows.exact), sides.batch)
            if stale is not None:
                return [stale_finding(side, stale)]
        where = Where(outputs=tuple(OutputColumns(name) for name in isolated[0]))
        evidence: dict[str, int | float | str] = {"relative_l2": error, "runs": times, "mode": how}
        return [Finding.from_code("not-deterministic", "compare", where, evidence, kind="runs", runner=runner.name)]
    return []
