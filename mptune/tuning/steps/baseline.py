"""The checks before the search: is the FP32 baseline sound? If not, precision is not the problem, and mptune says so.

Thresholds are relative L2. FP32 on two engines differs by 1e-7 to 1e-5, TF32 by about 5e-4 (DESIGN.md, fact 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import Failure, ReferenceReport, Toolchain
from mptune.engines.jobs.ranges import TensorRange
from mptune.errors import BaselineError
from mptune.finding import CODES, Finding, FindingOrigin, OutputColumns, Where
from mptune.graph.loading.model import Model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.tuning.failures import did_not_run
from mptune.tuning.space import SearchSpace

REPEAT_WARNING = 1e-5
REPEAT_LIMIT = 1e-2
"""Two runs on the same sample that differ by more: the model is not deterministic, and errors mean nothing."""

ROWS_WARNING = 1e-4
ROWS_LIMIT = 1e-2
"""Rows of one batch that hold the same input but not the same output: the batch axis mixes them."""

FP32_WARNING = 1e-4
FP32_LIMIT = 1e-3
FP32_LIMIT_TF32 = 1e-2
"""All-FP32 engine against the reference; TF32 in the engine, where it was asked for, is granted ten times as much."""

OPTIMISATION_LIMIT = 1e-3
OPTIMISATION_LIMIT_QUANTISED = 3e-2
"""ONNX Runtime with and without graph optimisations: FP32 sums in another order differ by far less. Quantised
activations come out one step apart here and there, which is rounding, too; a step is about 1 % of what they hold."""

_QUANTISES = frozenset({"QuantizeLinear", "DynamicQuantizeLinear"})

_NOT_PRECISION = "precision is not the problem"


def check_reference(report: ReferenceReport | Failure) -> tuple[str, ...]:
    """Check what taking the reference showed.

    Returns:
        Warnings, one line each.

    Raises:
        BaselineError: the untouched model does not run in FP32, its outputs are not finite or all zero, two runs
            disagree, or identical rows of a batch come out different.
    """
    if isinstance(report, Failure):
        raise did_not_run("the untouched model does not run in FP32", report)
    bad = {name: int(facts["non_finite"]) for name, facts in report.outputs.items() if facts["non_finite"]}
    if bad:
        name, count = next(iter(bad.items()))
        raise BaselineError(
            f"the reference is not finite: output {name!r} holds {count} NaN or Inf in FP32; {_NOT_PRECISION}",
            "check the preprocessing of the calibration data and the model's export; "
            "if these are masks, cut that output off the model",
        )
    empty = [name for name, facts in report.outputs.items() if facts.get("size", 1.0) == 0]
    if empty and len(empty) == len(report.outputs):
        raise BaselineError(
            f"the reference is empty in every output on every sample: nothing was selected; {_NOT_PRECISION}",
            "give calibration data in which the model finds something, or export it with a lower threshold",
        )
    zero = [name for name, facts in report.outputs.items() if facts["zero_fraction"] >= 1.0]
    if zero and len(zero) == len(report.outputs):
        raise BaselineError(
            f"the reference is all zero in every output; {_NOT_PRECISION}",
            "check that the calibration data are what the model expects (scale, layout, channel order)",
        )
    warnings = [
        f"output {name!r} of the reference is all zero, so its error says nothing: give data that make it speak"
        for name in zero
    ]
    warnings += [
        f"output {name!r} of the reference is empty on every sample, so its error says nothing: give data in which the"
        " model finds something"
        for name in empty
    ]
    warnings += _check_repeats(report.repeat_error)
    warnings += _check_rows(report)
    return (*report.warnings, *warnings)


def _check_repeats(error: float) -> list[str]:
    if not error <= REPEAT_LIMIT:
        raise BaselineError(
            f"two FP32 runs on the same sample differ by {error:.1e}: the model is not deterministic; {_NOT_PRECISION}",
            "export the model in evaluation mode (no dropout, no RandomNormal, a fixed seed)",
        )
    if error > REPEAT_WARNING:
        return [f"two FP32 runs on the same sample differ by {error:.1e}: errors below that are noise"]
    return []


def _check_rows(report: ReferenceReport) -> list[str]:
    warnings = []
    for error, what, cure in (
        (
            report.identical_rows_error,
            "identical rows of a batch give different outputs",
            "look for a broadcast over the batch axis, or tune with --batch 1",
        ),
        (
            report.batch_size_error,
            "a row gives another output alone than in a larger batch",
            "look for a reshape or broadcast that was exported for a fixed batch, or tune with --batch 1",
        ),
    ):
        if error is None or error <= ROWS_WARNING:
            continue
        if not error <= ROWS_LIMIT:
            raise BaselineError(f"{what} in FP32 (relative L2 {error:.1e}); {_NOT_PRECISION}", cure)
        warnings.append(f"{what} in FP32 (relative L2 {error:.1e}): {cure}")
    return warnings


def optimisation_findings(
    errors: Mapping[str, float], model: Model, origin: FindingOrigin, sample: int = 0
) -> tuple[Finding, ...]:
    """The finding that graph optimisations change the reference beyond rounding; none where they do not.

    Args:
        errors: output -> relative L2 between optimised and not (``ReferenceReport.optimisation_error``).
        model: the model.
        origin: what looked.
        sample: index in the data of the sample that was compared.
    """
    is_quantised = any(node.op_type in _QUANTISES for node in model.nodes)
    limit = OPTIMISATION_LIMIT_QUANTISED if is_quantised else OPTIMISATION_LIMIT
    large = {name: error for name, error in errors.items() if not error <= limit}
    if not large:
        return ()
    worst = max(large, key=lambda name: large[name])
    more = f" ({len(large) - 1} other outputs too)" if len(large) > 1 else ""
    code = "reference-depends-on-optimisation"
    return (
        Finding(
            code=code,
            severity=CODES[code].severity,
            origin=origin,
            where=Where(outputs=tuple(OutputColumns(name) for name in large), samples=(sample,)),
            evidence={"relative_l2": large[worst], "limit": limit, "output": worst},
            text=f"with and without graph optimisations, ONNX Runtime's FP32 results differ by {large[worst]:.1e} "
            f"(relative L2, rounding is below {limit:.0e}) at output {worst!r}{more}: every error is taken against the "
            "optimised results",
            cure="see which result is right (SessionOptions.graph_optimization_level); of a quantised model, give the "
            "one from before its quantisation",
        ),
    )


def check_ranges(ranges: Mapping[str, TensorRange]) -> tuple[str, ...]:
    """Check that every tensor of the untouched model is finite in FP32.

    Args:
        ranges: tensor -> what it held on the samples.

    Returns:
        Warnings, one line each.
    """
    counts = {tensor: seen.non_finite for tensor, seen in ranges.items() if seen.non_finite}
    if not counts:
        return ()
    tensor, count = next(iter(counts.items()))
    more = f" and {len(counts) - 1} others" if len(counts) > 1 else ""
    return (
        f"tensor {tensor!r}{more} holds NaN or Inf in FP32 already ({count} values): look for masks of -inf or a"
        " division by zero",
    )


def check_objective(error: OutputError, metric: str, definition: str = "") -> None:
    """Check that the objective of the all-FP32 plan, whose outputs are finite, is a finite number.

    Args:
        error: of the all-FP32 plan.
        metric: the objective.
        definition: where it is defined, in brackets (``definition_of``).

    Raises:
        BaselineError: it is not: the metric is wrong, and no plan can have a better one.
    """
    value = error.value(metric)
    if error.non_finite == 0 and not math.isfinite(value):
        raise BaselineError(
            f"the metric {metric} is {value} for all-FP32, whose outputs are finite{definition}; {_NOT_PRECISION}",
            "see that the metric returns a finite number for the model's outputs on every sample",
        )


def try_objective(toolchain: Toolchain, space: SearchSpace, metric: str, definition: str = "") -> None:
    """Take a user's metric once before anything is spent: of all-FP32 and of one group in FP16, by emulation.

    One of them alone may be without a value: a metric may have none where outputs equal the reference.

    Raises:
        BaselineError: it is a finite number for neither, although their outputs are finite.
    """
    fp32 = PrecisionPlan.uniform(space.model_sha256, [group.id for group in space.groups], Precision.FP32)
    errors = toolchain.emulate([fp32, fp32.replace({space.free[0]: Precision.FP16})])
    if isinstance(errors, Failure):
        return  # What emulates the groups one by one says so.
    if all(not math.isfinite(error.value(metric)) for error in errors):
        check_objective(errors[0], metric, definition)


def check_baseline(error: OutputError, *, tf32: bool) -> tuple[str, ...]:
    """Check that the engine of the all-FP32 plan agrees with the reference.

    Args:
        error: of the all-FP32 plan.
        tf32: the FP32 groups may use TF32.

    Returns:
        Warnings, one line each.

    Raises:
        BaselineError: they disagree.
    """
    if error.non_finite:
        raise BaselineError(
            f"the all-FP32 engine gives {error.non_finite} NaN or Inf where the reference has none; {_NOT_PRECISION}",
            "the engine itself is wrong: try another --engine, or another version of it",
        )
    # A row at a threshold may come and go with the order of a sum: pairs show whether the engine computes the same.
    value, limit = error.of_pairs.value("relative_l2"), FP32_LIMIT_TF32 if tf32 else FP32_LIMIT
    if not value <= limit:
        shown = f"{value:.1e}" if math.isfinite(value) else str(value)
        raise BaselineError(
            f"the all-FP32 engine is off by {shown} against the reference (limit {limit:.0e}); {_NOT_PRECISION}",
            "look for TF32, missing synchronisation, a broken broadcast, or outputs that jump (TopK, NMS, ArgMax); "
            "try another --engine",
        )
    warnings = []
    if error.unmatched_rows:
        count = f"{error.unmatched_rows} rows" if error.unmatched_rows > 1 else "1 row"
        warnings.append(
            f"the all-FP32 engine and the reference differ in {count} that only one of them has: rows at a threshold"
            " come and go with FP32 rounding already"
        )
    if value > FP32_WARNING and not tf32:
        warnings.append(
            f"the all-FP32 engine is off by {value:.1e} against the reference: that much is not FP16's doing; "
            "look for TF32 in the engine"
        )
    return tuple(warnings)
