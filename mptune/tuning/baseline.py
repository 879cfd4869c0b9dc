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
from mptune.finding import Evidence, Finding, FindingOrigin, OutputColumns, Where, by_severity
from mptune.graph.loading.model import Model
from mptune.graph.ops import QUANTISING
from mptune.settings import SearchSettings
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.output_findings import reference_findings, with_suspects

FP32_WARNING = 1e-4
FP32_LIMIT = 1e-3
FP32_LIMIT_TF32 = 1e-2
"""All-FP32 engine against the reference; TF32 in the engine, where it was asked for, is granted ten times as much."""

OPTIMISATION_LIMIT = 1e-3
OPTIMISATION_LIMIT_QUANTISED = 3e-2
"""ONNX Runtime with and without graph optimisations: FP32 sums in another order differ by far less. Quantised
activations come out one step apart here and there, which is rounding, too; a step is about 1 % of what they hold."""

ENGINE_CODE = "engine-differs"


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
        raise did_not_run("the original model does not run in FP32", report, model)
    findings = by_severity(reference_findings(report, origin, indices))
    if not skip:
        stop_at_errors(findings)
    return findings


def stop_at_errors(findings: Sequence[Finding]) -> None:
    """Stop where no plan repairs what is wrong."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        more = f" ({len(errors) - 1} more such findings)" if len(errors) > 1 else ""
        hints = [hint for hint in (errors[0].cure, "--skip-checks searches all the same") if hint]
        text = f"{errors[0].text}; precision is not the problem{more}"
        raise BaselineError(text, "; ".join(hints), by_severity(findings))


def optimisation_findings(
    errors: Mapping[str, float], model: Model, origin: FindingOrigin, sample: int = 0, earlier: Sequence[Finding] = ()
) -> tuple[Finding, ...]:
    """The finding that graph optimisations change the reference beyond rounding; none where they do not.

    Two runs of a model that draws random numbers differ whatever is optimised: that has a finding of its own.
    """
    is_quantised = any(node.op_type in QUANTISING - {"DequantizeLinear"} for node in model.nodes)
    limit = OPTIMISATION_LIMIT_QUANTISED if is_quantised else OPTIMISATION_LIMIT
    large = {name: error for name, error in errors.items() if not error <= limit}
    if not large or any(finding.code == "not-deterministic" for finding in earlier):
        return ()
    worst = max(large, key=lambda name: large[name])
    where = Where(outputs=tuple(map(OutputColumns, large)), samples=(sample,))
    evidence: Evidence = {"relative_l2": large[worst], "limit": limit, "output": worst}
    return (Finding.from_code("reference-depends-on-optimisation", origin, where, evidence, others=len(large) - 1),)


def checked_findings(
    findings: Sequence[Finding], fp32: Evaluation, settings: SearchSettings, origin: FindingOrigin
) -> tuple[Finding, ...]:
    """The findings of a run, with what the all-FP32 engine shows against the reference; errors stop (BaselineError)."""
    differing = engine_findings(fp32.error, origin, tf32=settings.tf32)
    if not settings.skip_checks:
        stop_at_errors(differing)
    return with_suspects((*(finding for finding in findings if finding.code != ENGINE_CODE), *differing))


def engine_findings(
    error: OutputError, origin: FindingOrigin, *, tf32: bool, held_out: bool = False
) -> tuple[Finding, ...]:
    """How the engine of the all-FP32 plan differs from the reference, on the held-out samples as a warning."""
    # A row at a threshold may come and go with the order of a sum: pairs show whether the engine computes the same.
    pairs = error.of_pairs
    value, limit = pairs.value("relative_l2"), FP32_LIMIT_TF32 if tf32 else FP32_LIMIT
    kind, evidence = "", {"relative_l2": value, "limit": limit}
    if error.non_finite:
        kind, evidence = "not finite", {"non_finite": error.non_finite}
    elif not value <= limit:
        kind = "far"
    elif value > FP32_WARNING and not tf32:
        kind, evidence["limit"] = "near", FP32_WARNING
    findings = []
    if error.unmatched_rows and kind in ("", "near") and not held_out:
        rows = {"rows": error.unmatched_rows}
        findings.append(Finding.from_code("value-dependent-shape", origin, Where(), rows, kind="unmatched"))
    if kind:
        outputs = [name for name, values in error.per_output.items() if any(values.get("non_finite", ()))]
        if not outputs:
            largest = {n: max(v.get("relative_l2", (0.0,)), default=0.0) for n, v in pairs.per_output.items()}
            largest.pop(ALL_OUTPUTS, None)
            outputs = [max(largest, key=lambda n: largest[n] if math.isfinite(largest[n]) else math.inf, default="")]
        shown = f"{value:.1e}" if math.isfinite(value) else str(value)
        names = {"held_out": held_out} if kind == "not finite" else {"held_out": held_out, "shown": shown}
        where, severity = Where(outputs=tuple(map(OutputColumns, outputs))), "warning" if held_out else None
        findings.append(Finding.from_code(ENGINE_CODE, origin, where, evidence, kind=kind, severity=severity, **names))  # type: ignore[arg-type]
    return tuple(findings)
