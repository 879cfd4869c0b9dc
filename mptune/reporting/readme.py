"""README.txt of the ``chosen/`` directory: what the plan is, its figures, why groups are FP32, and how to use it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from string import Template

from mptune._version import __version__
from mptune.engines.environment import Environment
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.printable import printable
from mptune.reporting.recipe import ENGINE_FILE, NO_TRTEXEC, BuildRecipe, is_on_cpu
from mptune.reporting.text import (
    environment_facts,
    finding_lines,
    kept_lines,
    neighbour_lines,
    origin_name,
    reduced_names,
    speedup_text,
    unique,
)
from mptune.resources import read_template
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.front import Front
from mptune.tuning.fronts.limits import is_larger_in_search, metric_values
from mptune.tuning.fronts.texts import error_text, format_error, format_ms, format_value, latency_text

_LONGEST = 700
"""Characters of a line of README.txt, as of a sentence on the page."""

_EMULATION = """
check.onnx   the same plan in FP32 with roundings to {reduced}, which that error is of, and the weights of model.onnx"""

_TIMING_CACHE = """
timing.cache what TensorRT measured of its tactics here: with it build.sh chooses them as the search did"""

_MOST_KEPT = 12
"""So many FP32 groups are named in README.txt."""


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
    findings = finding_lines(front.findings, lambda f: f"{f.severity}: {f.code}: {f.message}")
    facts = {
        "version": __version__,
        "engine_file": _engine_line(engine),
        "emulation": _EMULATION.format(reduced=reduced_names([evaluation.plan]))
        if has_check and evaluation.error_source == "emulated"
        else "",
        **_plan_facts(front, evaluation),
        **_figures(front, evaluation),
        "findings": _block(f"  - {line}" for line in findings) or "  nothing",
        **_machine_facts(front, environment),
        "warnings": _block(f"  - {text}" for text in unique((*front.warnings, *evaluation.warnings))) or "  none",
        **_trtexec_facts(evaluation, recipe),
    }
    lines = read_template("README.txt.in").splitlines(keepends=True)
    marks = {"[gpu]": not is_on_cpu(front), "[cpu]": is_on_cpu(front), "[check]": has_check}
    kept = "".join(line for line in lines if marks.get(line.split(" ", 1)[0], True))
    for mark in marks:
        kept = kept.replace(f"{mark} ", "")
    return Template(kept).substitute(facts)


def _plan_facts(front: Front, evaluation: Evaluation) -> dict[str, str]:
    plan = evaluation.plan
    return {
        "model": _line(front.model_path),
        "sha256": _line(front.model_sha256),
        "plan": _line(plan.fingerprint),
        "origin": _line(origin_name(evaluation)),
        "reason": _line(front.chosen_reason),
        "counts": plan_counts(plan),
        "reduced": reduced_names([plan]),
        "neighbours": _block(f"{role:<16} {text}" for role, text in neighbour_lines(front)) or "none",
        "kept": _kept(front, evaluation),
    }


def plan_counts(plan: PrecisionPlan) -> str:
    """How many groups have each reduced precision."""
    (first, count), *others = plan.reduced_counts.items() or [(Precision.FP16, 0)]
    text = f"{count} of {len(plan.precision)} layer groups in {first.name}"
    return ", ".join([text, *(f"{number} in {precision.name}" for precision, number in others)])


def _figures(front: Front, evaluation: Evaluation) -> dict[str, str]:
    latency = evaluation.latency
    baseline = front.fp32
    interval = " to ".join(map(format_ms, latency.ci95_ms))
    computed_by = "this model on that CPU" if is_on_cpu(front) else "the engine of the target"
    return {
        "latency": f"{latency_text(evaluation)} ms (median), {latency.source.upper()}",
        "latency_detail": (
            f"95 % interval {interval} ms, p99 {format_ms(latency.p99_ms)} ms"
            if latency.source == "measured"
            else "from a roofline model of the device, not timed on it: measure on the device before you rely on it"
        ),
        "fp32_latency": f"{latency_text(baseline)} ms",
        "speedup": speedup_text(evaluation, baseline),
        "error": _line(f"{format_error(evaluation.error_value)} {front.metric}, {evaluation.error_source.upper()}"),
        "error_detail": (
            f"on the outputs of {computed_by}"
            if evaluation.error_source == "measured"
            else f"by the FP32 model with explicit roundings to {reduced_names([evaluation.plan])}"
        ),
        "held_out": _held_out(evaluation),
        "metrics": "".join(f"\n{_line(text)}" for text in _metrics(front, evaluation)),
        "remeasured": "yes, in fresh processes" if evaluation.remeasured else "no",
        "confirmed": f"yes, on {_line(front.device)}" if evaluation.confirmed else "no",
    }


def _held_out(evaluation: Evaluation) -> str:
    if evaluation.held_out is None:
        return "not taken"
    if is_larger_in_search(evaluation):
        return error_text(evaluation)
    return f"{format_error(evaluation.held_out_value)} (calibration samples that the search did not use)"


def _metrics(front: Front, evaluation: Evaluation) -> Iterator[str]:
    """A line for each metric whose own value is shown beside the error."""
    for name, metric in front.metrics.items():
        searched, held_out = map(format_value, metric_values(evaluation, metric))
        on_held_out = "" if evaluation.held_out is None else f"{held_out} on held-out samples, "
        yield f"{name:<16} {on_held_out}{searched} on the search samples"


def _machine_facts(front: Front, environment: Environment | None) -> dict[str, str]:
    machine = [] if environment is None else environment_facts(environment)
    return {
        "target": _line(front.target),
        "engine": _line(front.engine),
        "device": _line(front.device),
        "environment": _block(f"{name:<16} {value}" for name, value in machine),
    }


def _trtexec_facts(evaluation: Evaluation, recipe: BuildRecipe) -> dict[str, str]:
    return {
        "no_trtexec": NO_TRTEXEC.replace("; ", ";\n                 "),
        "trtexec_warnings": "".join(f"\n                 {_line(text)}" for text in recipe.warnings),
        "timing_cache": _TIMING_CACHE if recipe.timing_cache else "",
        "trtexec": printable(recipe.command(evaluation.plan)),  # pasted into a shell: whole
        "tf32": (
            "TF32 is TensorRT's default, and this plan was measured with it (--tf32)."
            if recipe.uses_tf32(evaluation.plan)
            else "In code: config.clear_flag(trt.BuilderFlag.TF32). TF32 is TensorRT's default, and with it the\n"
            "                 groups in FP32 round to 10 bits: the error above would not apply."
        ),
    }


def _engine_line(engine: Path | None) -> str:
    if engine is None:
        return ""
    return (
        f"\n{ENGINE_FILE} the engine that was measured; it runs only on this GPU, with this version of its library"
        "\n             (set context.nvtx_verbosity = trt.ProfilingVerbosity.NONE, as was done to time it: it was built"
        "\n             for inspection)"
    )


def _kept(front: Front, evaluation: Evaluation) -> str:
    lines = kept_lines(front, evaluation, _MOST_KEPT, "RUN")
    without = "not known" if evaluation.plan.fp32_groups else "none"
    return _block(f"  - {line}" for line in lines) or f"  {without}"


def _block(lines: Iterable[str]) -> str:
    return "\n".join(map(_line, lines))


def _line(text: object) -> str:
    """A line of README.txt, printable; names in it may be of any length."""
    line = printable(text)
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
