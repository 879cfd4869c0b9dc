"""How a verdict comes about: both sides, each output's error and limit, then the causes in order (``CAUSES``).

1. ``make_sides`` runs what has to run and reads what was recorded.
2. ``Sides.output`` takes the part of each output that is worst against its limit (``limits``).
3. Each of ``CAUSES`` is asked in turn about the outputs that no cause before it explains.
4. ``compare_sides`` judges: ``differs`` where an output is beyond its limit, or has a cause that is no rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from mptune.data.metrics.comparing import compare_outputs
from mptune.data.metrics.row_sets import find_row_sets
from mptune.data.samples import CalibrationSet
from mptune.diagnosis.causes.agreeing import agreement, tf32
from mptune.diagnosis.causes.half import has_size_of_fp16, precision
from mptune.diagnosis.causes.order import not_computed, other_order, stale_rows
from mptune.diagnosis.causes.preprocessing import other_feed
from mptune.diagnosis.comparison import Comparison
from mptune.diagnosis.engines import EngineRunner
from mptune.diagnosis.patterns.roundings import FP32_ROUNDING
from mptune.diagnosis.rows import Layout, read_recording
from mptune.diagnosis.runner import Outputs, Runner
from mptune.diagnosis.sides import Origin, Side, Sides
from mptune.finding import Finding, by_severity
from mptune.graph.facts import facts_of
from mptune.graph.plan import Precision
from mptune.settings import Tolerance


def make_sides(
    runner: Runner,
    other: Runner | EngineRunner | None,
    batch: int,
    *,
    recorded: Path | None,
    recorded_reference: Path | None,
    ignore: Collection[str],
    tolerances: Mapping[str, Sequence[Tolerance]],
    max_error: float | None,
) -> Sides:
    """Run what has to run and read what was recorded."""
    exact = runner.exact
    names = [output.name for output in runner.model.outputs if output.name not in ignore]
    layouts = {name: Layout.of_arrays([sample[name] for sample in exact], runner.samples) for name in names}
    reference, candidate = exact, exact
    reference_name = candidate_name = f"{runner.name} in FP32"
    origin: Origin = "same"
    inputs = [info.name for info in runner.model.inputs]
    if recorded_reference is not None:
        reference = read_recording(recorded_reference, layouts, inputs)
        reference_name = str(recorded_reference)
    if recorded is not None:
        candidate = read_recording(recorded, layouts, inputs)
        candidate_name, origin = str(recorded), "recorded"
    elif isinstance(other, EngineRunner):
        candidate, candidate_name, origin = other.exact, other.name, "engine"
    elif other is not None:
        candidate, candidate_name, origin = _renamed(other.exact, runner, other), other.name, "model"
    rows = max((layout.rows_per_sample for layout in layouts.values()), default=1)
    return Sides(
        runner,
        reference,
        candidate,
        reference_name,
        candidate_name,
        layouts,
        max(rows, batch),
        runner.throughout(Precision.FP16),
        origin,
        tolerances,
        max_error,
    )


def _renamed(outputs: Outputs, runner: Runner, other: Runner) -> Outputs:
    """A candidate's outputs under the model's names: by name, else by position where there are as many."""
    ours, theirs = [o.name for o in runner.model.outputs], [o.name for o in other.model.outputs]
    if set(ours) <= set(theirs):
        return outputs
    by_position = dict(zip(ours, theirs, strict=True))
    return tuple({name: sample[by_position[name]] for name in ours} for sample in outputs)


Cause = Callable[[Sequence[Side]], Sequence[Finding]]
"""Outputs without a cause yet -> findings, whose ``where.outputs`` are the outputs that they explain."""

CAUSES: tuple[Cause, ...] = (other_order, stale_rows, tf32, other_feed, not_computed, precision, agreement)

STRUCTURAL = frozenset(
    {"stale-rows", "torn-rows", "outputs-permuted", "attribute-differs", "not-deterministic", "data-do-not-fit"}
)
"""Causes that are no rounding: with one of them the verdict is always ``differs``."""


def check_sides(sides: Sides, data: CalibrationSet) -> Comparison:
    """Judge every output against its limit, by the two runs alone."""
    sides = replace(sides, is_gate=True)
    return _judged(sides, [sides.output(name) for name in sides.layouts], data)


def compare_sides(
    sides: Sides,
    data: CalibrationSet,
    structural: Sequence[Finding] = (),
    more: Sequence[Finding] = (),
    drawn: Sequence[Finding] = (),
) -> Comparison:
    """Judge every output and name what makes its difference.

    ``structural`` is what two models differ in, ``more`` is of repetitions and of the trace. Where outputs differ and
    nodes are ``drawn``, which draw random numbers, no rounding is made out behind them.
    """
    outputs = [sides.output(name) for name in sides.layouts]
    if any(side.error > FP32_ROUNDING for side in outputs):
        structural = [*drawn, *structural]
    if structural:
        sides = replace(sides, is_other_model=True)
        outputs = [replace(side, sides=sides) for side in outputs]
    causes, unexplained = _causes(outputs)
    findings = [*structural, *more, *causes]
    findings.sort(key=lambda each: each.code == "first-difference")  # where it begins is no cause
    return _judged(sides, outputs, data, findings, map(_without_cause, unexplained))


def _judged(
    sides: Sides,
    outputs: Sequence[Side],
    data: CalibrationSet,
    findings: Sequence[Finding] = (),
    texts: Iterable[str] = (),
) -> Comparison:
    not_compared = [text for side in outputs if (text := _not_finite(side))]
    is_within = all(side.is_within for side in outputs)
    differs = not is_within or any(f.code in STRUCTURAL and f.severity != "info" for f in findings)
    warnings = [*data.warnings, *(f"{f.code}: {f.message}" for f in data.findings)]
    return Comparison(
        "differs" if differs else "agrees",
        by_severity(findings),
        _statistics(sides, outputs),
        sides.reference_name,
        sides.candidate_name,
        len(sides.reference),
        (*texts, *not_compared, *warnings),
        {side.name: side.limit for side in outputs},
    )


def _causes(outputs: Sequence[Side]) -> tuple[list[Finding], list[Side]]:
    """What each of ``CAUSES`` finds; and the outputs beyond their limits that nothing explains."""
    findings: list[Finding] = []
    rest = list(outputs)
    for cause in CAUSES:
        named = cause(rest)
        explained = {output.name for each in named for output in each.where.outputs}
        findings += named
        rest = [side for side in rest if side.name not in explained]
    return findings, [side for side in rest if not side.is_within and not side.sides.is_other_model]


def _without_cause(side: Side) -> str:
    """What is known of an output whose difference has no known cause."""
    if has_size_of_fp16(side):
        return (
            f"output {side.name!r}: FP16 throughout, emulated, gives an error of that size, too"
            f" ({side.judged_fp16:.3g}), in other values, so whether FP16 makes the difference is not shown;"
            " `mptune inspect MODEL --data PATH` names what FP16 breaks"
        )
    text = f"output {side.name!r}: none of the roundings, stale rows, orders and inputs tried gives its difference"
    if side.sides.origin == "recorded":
        text += "; with the model that the engine was built of as CANDIDATE, --trace names where it begins"
    return text


def _not_finite(side: Side) -> str:
    """What is left out of the comparison of an output, since the reference is not finite there; "" if nothing is."""
    counts = [int((~np.isfinite(array)).sum()) if array.dtype.kind == "f" else 0 for array in side.wanted]
    if not any(counts):
        return ""
    first = next(sample for sample, count in enumerate(counts) if count)
    return (
        f"output {side.name!r} of the reference holds {sum(counts)} NaN or Inf, first in sample {first}: these values"
        " are not compared; `mptune inspect MODEL --data PATH` names the node"
    )


def _statistics(sides: Sides, outputs: Sequence[Side]) -> dict[str, dict[str, float]]:
    def only(samples: Outputs) -> list[dict[str, np.ndarray]]:
        return [{name: np.asarray(sample[name]) for name in sides.layouts} for sample in samples]

    dependent = [output for output in facts_of(sides.runner.model).dependent_outputs if output.name in sides.layouts]
    wanted = only(sides.reference)
    row_sets = find_row_sets(dependent, wanted)
    statistics = compare_outputs(only(sides.candidate), wanted, None, row_sets, any_shape=True).summary()
    return {
        side.name: {
            **statistics[side.name],
            "error": side.error,
            "limit": side.limit.value,
            "judged": side.judged,
            **({} if sides.is_gate else {"emulated_fp16": side.emulated, "judged_fp16": side.judged_fp16}),
            "largest_difference": side.largest,
        }
        for side in outputs
    }
