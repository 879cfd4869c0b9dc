"""Compare two sides, output by output, and name the cause of each difference."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from mptune.data.calibration import CalibrationSet
from mptune.data.metrics.accuracy import compare_outputs
from mptune.data.metrics.row_sets import find_row_sets
from mptune.diagnosis.causes.explained import STRUCTURAL, rounding_cause, rounding_finding, structural_finding
from mptune.diagnosis.causes.half import precision_finding
from mptune.diagnosis.causes.infinite import (
    InfiniteConstants,
    are_mostly_same,
    infinite_constants,
    infinite_finding,
    lost_places,
)
from mptune.diagnosis.causes.preprocessing import other_preparation
from mptune.diagnosis.comparison import Comparison
from mptune.diagnosis.engine.running import EngineRunner
from mptune.diagnosis.limits import HEADROOM
from mptune.diagnosis.patterns.places import what_is_there, where_it_lies
from mptune.diagnosis.patterns.roundings import Explanation
from mptune.diagnosis.patterns.scaled import FP32_ROUNDING
from mptune.diagnosis.rows import Layout, read_recording
from mptune.diagnosis.runner import Outputs, Runner
from mptune.diagnosis.sides import Origin, Side, Sides
from mptune.finding import Finding, by_severity
from mptune.graph.loading.value_dependent import shape_facts
from mptune.settings import Tolerance

_LEFT_OF_ROWS = 0.5
"""Share of the difference between two sets of rows, up to which another set explains one of them."""
_OFF = 0.01
"""A value is off by more of its output's standard deviation than this."""
_FEW_OFF = 0.5
"""Share of the values that changed decisions make wrong at most."""


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
    """Run what has to run and read what was recorded.

    Args:
        runner: of the model.
        other: of the candidate, where that is a model or an engine.
        batch: rows per sample of a dynamic batch.
        recorded: file of the candidate's outputs.
        recorded_reference: file of the reference's.
        ignore: outputs that are not compared.
        tolerances: output -> those that name it or columns of it.
        max_error: limit of the others.

    Raises:
        DataError: a recording does not fit the data.
        BaselineError: a model does not run on them.
    """
    exact = runner.exact
    names = [output.name for output in runner.model.outputs if output.name not in ignore]
    layouts = {name: Layout.of([sample[name] for sample in exact], runner.samples) for name in names}
    reference, candidate = exact, exact
    reference_name = candidate_name = f"{runner.name} in FP32"
    moved: Mapping[str, tuple[int, ...]] = {}
    taken: Mapping[str, str] = {}
    plan = runner.all_fp16
    if recorded_reference is not None:
        reference = read_recording(recorded_reference, layouts, "--reference-outputs").outputs
        reference_name = str(recorded_reference)
    if recorded is not None:
        recording = read_recording(recorded, layouts, "--outputs")
        candidate, moved, taken = recording.outputs, recording.moved, recording.taken
        candidate_name = str(recorded)
    elif other is not None:
        candidate = other.exact if isinstance(other, EngineRunner) else _renamed(other.exact, runner, other)
        candidate_name = other.name
    rows = max((layout.rows_per_sample for layout in layouts.values()), default=1)
    return Sides(
        runner,
        reference,
        candidate,
        reference_name,
        candidate_name,
        layouts,
        max(rows, batch),
        plan,
        "recorded" if recorded is not None else _origin(other),
        moved,
        taken,
        tolerances,
        max_error,
    )


def _origin(other: Runner | EngineRunner | None) -> Origin:
    if other is None:
        return "same"
    return "engine" if isinstance(other, EngineRunner) else "model"


def _renamed(outputs: Outputs, runner: Runner, other: Runner) -> Outputs:
    """A candidate's outputs under the model's names: by name, else by position where there are as many."""
    ours, theirs = [o.name for o in runner.model.outputs], [o.name for o in other.model.outputs]
    if set(ours) <= set(theirs):
        return outputs
    by_position = dict(zip(ours, theirs, strict=True))
    return tuple({name: sample[by_position[name]] for name in ours} for sample in outputs)


def compare_sides(
    sides: Sides,
    data: CalibrationSet,
    structural: Sequence[Finding] = (),
    more: Sequence[Finding] = (),
    drawn: Sequence[Finding] = (),
) -> Comparison:
    """Judge every output and name what makes its difference.

    Args:
        sides: both sides.
        data: the samples.
        structural: what two models differ in, where two are compared and their outputs differ.
        more: findings of repetitions and of the trace.
        drawn: of nodes that draw random numbers: where outputs differ, no rounding is made out behind them.
    """
    outputs = [sides.output(name) for name in sides.layouts]
    if any(side.error > FP32_ROUNDING for side in outputs):
        structural = [*drawn, *structural]
    findings: list[Finding] = [*structural, *more]
    beyond: list[Side] = []
    causes: dict[str, Explanation] = {}
    infinite: dict[str, InfiniteConstants] = {}
    places: list[str] = []
    unexplained: list[Side] = []
    alike: dict[str, Side] = {}
    for side in outputs:
        found = structural_finding(side)
        if found is None:
            cause = rounding_cause(side)
            found = rounding_finding(side, cause)
            if found is None and cause is not None and not structural:
                causes[side.name] = cause
                beyond.append(side)
            elif found is None and not structural and (rows := _fp16_takes_rows(side)) is not None:
                causes[side.name] = rows
                beyond.append(side)
            elif found is None and _fp16_overflows(side):
                causes[side.name] = Explanation("fp16", 0.0, 1.0)
                beyond.append(side)
            elif found is None and (constants := infinite_constants(side)) is not None:
                infinite[side.name] = constants
            elif found is None and not structural and _is_as_far_off_as_fp16(side):
                alike[side.name] = side
            elif structural and found is not None and found.code == "agrees" and side.error > FP32_ROUNDING:
                found = None  # what the models differ in makes it, not a rounding
        if found is not None:
            findings.append(found)
        elif not structural and not side.is_within and side.name not in {*causes, *infinite, *alike}:
            unexplained.append(side)
    if (unexplained or alike) and sides.origin in ("recorded", "engine"):
        prepared = other_preparation(sides, [*unexplained, *alike.values()])
        if prepared is not None:
            findings.append(prepared)
            unexplained.clear()
            alike.clear()
    for side in alike.values():
        if what_is_there(side.got, side.wanted):
            unexplained.append(side)
        else:
            causes[side.name] = Explanation("fp16", 1.0, side.judged_fp16 / side.judged)
            beyond.append(side)
    for side in unexplained:
        said = [place for look in (where_it_lies, what_is_there) if (place := look(side.got, side.wanted))]
        said += [_of_the_size_of_fp16(side)] if _has_the_size_of_fp16(side) else []
        places += [f"output {side.name!r}: {'; '.join(said)}"] if said else []
    places += [text for side in outputs if (text := _not_finite(side))]
    if infinite:
        findings.append(infinite_finding(infinite, [side for side in outputs if side.name in infinite]))
    if beyond:
        findings.append(precision_finding(beyond, causes))
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
        (*places, *warnings),
        {side.name: side.limit for side in outputs},
    )


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


def _fp16_overflows(side: Side) -> bool:
    """Whether the output and the all-FP16 emulation have values that are not finite at mostly the same places."""
    lost = lost_places(side, side.sides.candidate)
    return lost is not None and are_mostly_same(lost, lost_places(side, side.sides.runner.emulated(side.sides.plan)))


def _has_the_size_of_fp16(side: Side) -> bool:
    """Whether FP16 throughout gives as large an error beyond the limit, in other values."""
    return 0 < side.judged <= HEADROOM * side.judged_fp16 and math.isfinite(side.judged_fp16)


def _of_the_size_of_fp16(side: Side) -> str:
    return (
        f"FP16 throughout, emulated, gives an error of that size, too ({side.judged_fp16:.3g}), in other values, so"
        " whether FP16 makes the difference is not shown; `mptune inspect MODEL --data PATH` names what FP16 breaks"
    )


def _is_as_far_off_as_fp16(side: Side) -> bool:
    """Whether the error has the size that it has in FP16 throughout, and as few values are off: decisions do that.

    Where decisions change, most values stay right, in the candidate as in FP16. What a deployment does otherwise, such
    as to its inputs, moves all of them.
    """
    if not _has_the_size_of_fp16(side):
        return False
    try:
        got = side.rows(side.sides.candidate)
        emulated = side.rows(side.sides.runner.emulated(side.sides.runner.all_fp16))
        wanted = side.rows(side.sides.reference)
    except ValueError:
        return False
    if not got.shape == emulated.shape == wanted.shape or not wanted.size:
        return False
    exact = wanted.astype(np.float64)
    most = _OFF * float(np.std(exact[np.isfinite(exact)])) if np.isfinite(exact).any() else 0.0
    ours, fp16 = (float(np.mean(~(np.abs(each - exact) <= most))) for each in (got, emulated))
    return 0 < fp16 <= _FEW_OFF and ours <= HEADROOM * fp16


def _fp16_takes_rows(side: Side) -> Explanation | None:
    """FP16, where an output is compared as a set of rows and the emulation has nearly the candidate's rows."""
    sides = side.sides
    if not sides.has_row_set(side.name) or not 0 < side.error < math.inf:
        return None
    left = sides.worst(side.name, sides.candidate, sides.runner.emulated(sides.plan)).error / side.error
    return Explanation("fp16", left, 1.0) if left <= _LEFT_OF_ROWS else None


def _statistics(sides: Sides, outputs: Sequence[Side]) -> dict[str, dict[str, float]]:
    def only(samples: Outputs) -> list[dict[str, np.ndarray]]:
        return [{name: np.asarray(sample[name]) for name in sides.layouts} for sample in samples]

    dependent = [output for output in shape_facts(sides.runner.model).outputs if output.name in sides.layouts]
    wanted = only(sides.reference)
    found = compare_outputs(
        only(sides.candidate), wanted, None, find_row_sets(dependent, wanted), any_shape=True
    ).summary()
    return {
        side.name: {
            **found[side.name],
            "error": side.error,
            "limit": side.limit.value,
            "emulated_fp16": side.emulated,
            "judged": side.judged,
            "judged_fp16": side.judged_fp16,
            "largest_difference": side.largest,
        }
        for side in outputs
    }
