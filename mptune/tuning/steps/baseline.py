"""The checks before the search: is the FP32 baseline sound? If not, precision is not the problem, and mptune says so.

Thresholds are relative L2. FP32 on two engines differs by 1e-7 to 1e-5, TF32 by about 5e-4 (a ViT on an H200).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mptune.data.metrics.accuracy import ALL_OUTPUTS, OutputError
from mptune.engines.base import Failure, ReferenceReport
from mptune.engines.failures import did_not_run
from mptune.errors import BaselineError
from mptune.finding import Finding, FindingOrigin, OutputColumns, Where, by_severity
from mptune.findings.wording import Severity
from mptune.graph.hazards.observed_values import TensorRange
from mptune.graph.loading.model import Model
from mptune.graph.ops import QUANTISING
from mptune.settings import SearchSettings
from mptune.tuning.fronts.limits import check_columns
from mptune.tuning.reasons.reference import reference_findings

FP32_WARNING = 1e-4
FP32_LIMIT = 1e-3
FP32_LIMIT_TF32 = 1e-2
"""All-FP32 engine against the reference; TF32 in the engine, where it was asked for, is granted ten times as much."""

OPTIMISATION_LIMIT = 1e-3
OPTIMISATION_LIMIT_QUANTISED = 3e-2
"""ONNX Runtime with and without graph optimisations: FP32 sums in another order differ by far less. Quantised
activations come out one step apart here and there, which is rounding, too; a step is about 1 % of what they hold."""

ENGINE_CODE = "engine-differs"

_NOT_PRECISION = "precision is not the problem"


def check_reference(
    report: ReferenceReport | Failure,
    origin: FindingOrigin = "search",
    indices: Sequence[int] = (),
    *,
    skip: bool = False,
    model: Model | None = None,
) -> tuple[Finding, ...]:
    """Check what taking the reference showed."""
    if isinstance(report, Failure):
        raise did_not_run("the untouched model does not run in FP32", report, model)
    findings = by_severity(reference_findings(report, origin, indices))
    if not skip:
        stop_at_errors(findings)
    return findings


def stop_at_errors(findings: Sequence[Finding]) -> None:
    """Stop where no plan repairs what is wrong."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if not errors:
        return
    more = f" ({len(errors) - 1} more such findings)" if len(errors) > 1 else ""
    cure = errors[0].cure
    skip = "--skip-checks searches all the same"
    raise BaselineError(
        f"{errors[0].text}; {_NOT_PRECISION}{more}", f"{cure}; {skip}" if cure else skip, by_severity(findings)
    )


def optimisation_findings(
    errors: Mapping[str, float], model: Model, origin: FindingOrigin, sample: int = 0, earlier: Sequence[Finding] = ()
) -> tuple[Finding, ...]:
    """The finding that graph optimisations change the reference beyond rounding; none where they do not.

    Two runs of a model that draws random numbers differ whatever is optimised: that has a finding of its own.
    """
    if any(finding.code == "not-deterministic" for finding in earlier):
        return ()
    is_quantised = any(node.op_type in QUANTISING - {"DequantizeLinear"} for node in model.nodes)
    limit = OPTIMISATION_LIMIT_QUANTISED if is_quantised else OPTIMISATION_LIMIT
    large = {name: error for name, error in errors.items() if not error <= limit}
    if not large:
        return ()
    worst = max(large, key=lambda name: large[name])
    return (
        Finding.of(
            "reference-depends-on-optimisation",
            origin,
            Where(outputs=tuple(OutputColumns(name) for name in large), samples=(sample,)),
            {"relative_l2": large[worst], "limit": limit, "output": worst},
            others=len(large) - 1,
        ),
    )


def check_ranges(ranges: Mapping[str, TensorRange]) -> tuple[str, ...]:
    """Check that every tensor of the untouched model is finite in FP32."""
    counts = {tensor: values.non_finite for tensor, values in ranges.items() if values.non_finite}
    if not counts:
        return ()
    tensor, count = next(iter(counts.items()))
    more = f" and {len(counts) - 1} others" if len(counts) > 1 else ""
    return (
        f"tensor {tensor!r}{more} holds NaN or Inf in FP32 already ({count} values): look for masks of -inf or a"
        " division by zero",
    )


def check_first_evaluation(error: OutputError, settings: SearchSettings) -> tuple[Finding, ...]:
    """What is checked of the all-FP32 plan before any other is evaluated: engine, objective, tolerances."""
    findings = check_baseline(error, tf32=settings.tf32, skip=settings.skip_checks)
    value = error.value(settings.metric)
    if error.non_finite == 0 and not math.isfinite(value):
        raise BaselineError(
            f"the metric {settings.metric} is {value} for all-FP32, whose outputs are finite; {_NOT_PRECISION}",
            "see that the metric returns a finite number for the model's outputs on every sample",
        )
    check_columns(settings.tolerance, error)
    return findings


def check_baseline(
    error: OutputError, *, tf32: bool, origin: FindingOrigin = "search", skip: bool = False
) -> tuple[Finding, ...]:
    """Check that the engine of the all-FP32 plan agrees with the reference."""
    findings = _engine_findings(error, origin, tf32=tf32)
    if not skip:
        stop_at_errors(findings)
    return findings


def held_out_baseline(
    error: OutputError | None, *, tf32: bool, origin: FindingOrigin = "search"
) -> tuple[Finding, ...]:
    """As ``check_baseline`` on the held-out samples, which stops nothing any more; nothing where they were not met."""
    every = () if error is None else _engine_findings(error, origin, tf32=tf32, held_out=True)
    return tuple(finding for finding in every if finding.code == ENGINE_CODE)


def _engine_findings(
    error: OutputError, origin: FindingOrigin, *, tf32: bool, held_out: bool = False
) -> tuple[Finding, ...]:
    # A row at a threshold may come and go with the order of a sum: pairs show whether the engine computes the same.
    pairs = error.of_pairs
    value, limit = pairs.value("relative_l2"), FP32_LIMIT_TF32 if tf32 else FP32_LIMIT
    kind, outputs, evidence = "", [], {"relative_l2": value, "limit": limit}
    if error.non_finite:
        kind, evidence = "not finite", {"non_finite": error.non_finite}
        outputs = [name for name, values in error.per_output.items() if any(values.get("non_finite", ()))]
    elif not value <= limit:
        kind = "far"
    elif value > FP32_WARNING and not tf32:
        kind, evidence = "near", {"relative_l2": value, "limit": FP32_WARNING}
    findings = []
    if error.unmatched_rows and kind in ("", "near"):
        rows = {"rows": error.unmatched_rows}
        findings.append(Finding.of("value-dependent-shape", origin, Where(), rows, kind="unmatched"))
    if kind:

        def worst(name: str) -> float:
            largest = max(pairs.per_output[name].get("relative_l2", (0.0,)), default=0.0)
            return largest if math.isfinite(largest) else math.inf

        outputs = outputs or [max((name for name in pairs.per_output if name != ALL_OUTPUTS), key=worst, default="")]
        names: dict[str, object] = {"held_out": held_out}
        if kind != "not finite":
            names["shown"] = f"{value:.1e}" if math.isfinite(value) else str(value)
        severity: Severity | None = "warning" if held_out else None
        where = Where(outputs=tuple(map(OutputColumns, outputs)))
        findings.append(Finding.of(ENGINE_CODE, origin, where, evidence, kind=kind, severity=severity, **names))
    return tuple(findings)
