"""README.txt of the ``chosen/`` directory: what the plan is, its figures, why groups are FP32, and how to use it."""

from __future__ import annotations

from pathlib import Path

from mptune._version import __version__
from mptune.engines.environment import Environment
from mptune.graph.plan import Precision
from mptune.printable import printable
from mptune.reporting.recipe import NO_TRTEXEC, BuildRecipe, is_on_cpu
from mptune.reporting.text import (
    environment_facts,
    explain_kept,
    fill_template,
    finding_lines,
    neighbour_lines,
    origin_name,
    reduced_names,
    speedup_text,
    unique,
)
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.front import Front
from mptune.tuning.fronts.limits import is_larger_in_search, metric_values
from mptune.tuning.fronts.texts import error_text, format_error, format_ms, format_value, latency_text

_MOST_KEPT = 12
"""FP32 groups that are named."""


def readme_text(
    front: Front,
    evaluation: Evaluation,
    environment: Environment | None,
    engine: Path | None,
    recipe: BuildRecipe,
    *,
    has_check: bool,
) -> str:
    """The text of README.txt; ``has_check`` says whether samples with reference outputs lie beside it."""
    plan, latency = evaluation.plan, evaluation.latency
    reduced, is_cpu = reduced_names([plan]), is_on_cpu(front)
    (first, count), *others = plan.reduced_counts.items() or [(Precision.FP16, 0)]
    counts = [f"{count} of {len(plan.precision)} layer groups in {first.name}"]
    counts += [f"{number} in {precision.name}" for precision, number in others]
    if evaluation.error_source == "measured":
        computed_by = f"on the outputs of {'this model on that CPU' if is_cpu else 'the engine of the target'}"
    else:
        computed_by = f"by the FP32 model with explicit roundings to {reduced}"
    held_out_error = "not taken"
    if evaluation.held_out is not None:
        held_out_error = f"{format_error(evaluation.held_out_value)} (calibration samples that the search did not use)"
    if is_larger_in_search(evaluation):
        held_out_error = error_text(evaluation)
    metrics = []
    for name, metric in front.metrics.items():
        searched, held_out = map(format_value, metric_values(evaluation, metric))
        on_held_out = "" if evaluation.held_out is None else f"{held_out} on held-out samples, "
        metrics.append((name, f"{on_held_out}{searched} on the search samples"))
    kept = [explain_kept(group) for group in front.explanation.of(plan.fingerprint)]
    if len(kept) > _MOST_KEPT:
        kept[_MOST_KEPT:] = [f"and {len(kept) - _MOST_KEPT} more: mptune report RUN --explain"]
    plan_facts = {
        "original model": front.model_path,
        "sha256": front.model_sha256,
        "plan": f"{plan.fingerprint} ({origin_name(evaluation)})",
        "chosen because": front.chosen_reason,
    }
    machine = [("target", front.target), ("runtime" if is_cpu else "engine", front.engine), ("device", front.device)]
    machine += [] if environment is None else environment_facts(environment)
    return fill_template(
        "README.txt.jinja",
        version=__version__,
        front=front,
        evaluation=evaluation,
        plan=plan,
        recipe=recipe,
        engine=engine,
        has_check=has_check,
        is_cpu=is_cpu,
        counts=", ".join(counts),
        reduced=reduced,
        plan_facts=plan_facts.items(),
        ms=latency_text(evaluation),
        interval=" to ".join(map(format_ms, latency.ci95_ms)),
        p99=format_ms(latency.p99_ms),
        fp32_ms=latency_text(front.fp32),
        speedup=speedup_text(evaluation, front.fp32),
        searched_error=format_error(evaluation.error_value),
        computed_by=computed_by,
        held_out_error=held_out_error,
        metrics=metrics,
        neighbours=neighbour_lines(front),
        kept=kept,
        findings=list(finding_lines(front.findings, lambda f: f"{f.severity}: {f.code}: {f.message}")),
        machine=machine,
        warnings=unique((*front.warnings, *evaluation.warnings)),
        trtexec=printable(recipe.command(plan)),  # pasted into a shell: whole
        no_trtexec=NO_TRTEXEC,
    )
