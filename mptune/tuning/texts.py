"""Figures in words: latencies, errors, memory, how plans differ, and why one was chosen."""

from __future__ import annotations

import math

from mptune.choice import Choice, ChoiceLimits
from mptune.data.metrics.accuracy import is_compared_by_ratio
from mptune.data.metrics.parts import ADD_IN_SQUARES
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.printable import cut
from mptune.tuning.dominance import LEAST_EXACTER, faster_beyond_noise, shared_errors
from mptune.tuning.evaluation import Evaluation

_FP32_ROUNDING = 1e-6  # a ratio to a smaller error says nothing


def format_ms(value: float) -> str:
    """Milliseconds without the unit, to the microsecond, finer under 0.1 ms and coarser from 100 ms on."""
    if not math.isfinite(value):
        return "-"
    return f"{value:.{5 if value < 0.1 else 3 if value < 100 else 1}f}"


def latency_text(evaluation: Evaluation) -> str:
    """The median in milliseconds."""
    return format_ms(evaluation.latency.median_ms)


def format_interval(evaluation: Evaluation) -> str:
    """Half the width of the 95 % interval of a measured median, in percent; empty for a predicted one."""
    (low, high), median_ms = evaluation.latency.ci95_ms, evaluation.latency.median_ms
    is_known = evaluation.latency.source == "measured" and math.isfinite(high - low) and median_ms > 0
    return f"+-{50 * (high - low) / median_ms:.1f}%" if is_known else ""


def format_speedup(value: float) -> str:
    """A ratio of latencies, such as ``2.31x``."""
    return f"{value:.2f}x" if math.isfinite(value) else "-"


def format_error(value: float | None) -> str:
    """An error to two significant digits; ``-`` where it was not taken."""
    if value is None or value == 0:
        return "-" if value is None else "0"
    if not math.isfinite(value):
        return "not finite"
    return f"{value:.1e}" if abs(value) < 0.1 or abs(value) >= 1000 else f"{value:.3g}"


def error_text(evaluation: Evaluation) -> str:
    """The error that is shown; where that of the search samples is larger beyond noise, both."""
    shown = format_error(evaluation.judged_error)
    if not evaluation.is_larger_in_search:
        return shown
    return f"{shown} on held-out samples, {format_error(evaluation.error_value)} on the search samples"


def error_cell(evaluation: Evaluation) -> str:
    """The same for tables: the error of the search samples in brackets."""
    brackets = f" ({format_error(evaluation.error_value)})" * evaluation.is_larger_in_search
    return format_error(evaluation.judged_error) + brackets


def metric_cell(evaluation: Evaluation, metric: str) -> str:
    """A metric's own value on the held-out samples, in brackets that on the search samples where it is another."""
    searched, held_out = ("-" if value is None else f"{value:.4g}" for value in evaluation.values_of(metric))
    return searched if evaluation.held_out is None or held_out == searched else f"{held_out} ({searched})"


def part_text(evaluation: Evaluation, width: int = 24) -> str:
    """The output, or the columns of it, whose error is the plan's; empty where the metric sees all at once."""
    return "" if evaluation.part is None else cut(str(evaluation.part), width)


def group_counts(plan: PrecisionPlan) -> str:
    """FP16 groups / FP32 groups; with BF16 groups FP16+BF16/FP32, likewise with others."""
    others = (count for precision, count in plan.reduced_counts.items() if precision is not Precision.FP16)
    return f"{'+'.join(map(str, (len(plan.fp16_groups), *others)))}/{len(plan.fp32_groups)}"


def format_bytes(value: int | None) -> str:
    """Bytes in MB (10^6) or GB; ``-`` where they are not known."""
    if value is None:
        return "-"
    return f"{value / 1e9:.3g} GB" if value >= 1e9 else f"{value / 1e6:.3g} MB"


def memory_text(evaluation: Evaluation) -> str:
    """What a plan's engine takes; ``~`` before it where the context is predicted."""
    memory = evaluation.memory
    return "-" if memory is None else "~" * (memory.source == "predicted") + format_bytes(memory.total_bytes)


def memory_details(evaluation: Evaluation) -> str:
    """The parts of ``memory_text``, with their source."""
    memory = evaluation.memory
    if memory is None:
        return "not known"
    parts = (f"{name} {format_bytes(getattr(memory, f'{name}_bytes'))}" for name in ("engine", "context", "weight"))
    return f"{', '.join(parts)} ({memory.source})"


def two_digits(value: float) -> str:
    """A number rounded to two digits, without an exponent where it is short."""
    return f"{float(f'{value:.2g}'):g}"


def compared(evaluation: Evaluation, chosen: Evaluation) -> str:
    """What a plan gives instead of the chosen one, such as ``0.31 ms less (12 %), error 48 times larger``."""
    latency = "the same latency" + (" within noise" if evaluation.latency.source == "measured" else "")
    if faster_beyond_noise(evaluation, chosen) or faster_beyond_noise(chosen, evaluation):
        delta_ms = evaluation.latency.median_ms - chosen.latency.median_ms
        share = abs(delta_ms) / chosen.latency.median_ms if chosen.latency.median_ms > 0 else math.inf
        latency = f"{format_ms(abs(delta_ms))} ms {'less' if delta_ms < 0 else 'more'} ({two_digits(100 * share)} %)"
    before, after = shared_errors(chosen, evaluation)
    low, high = sorted((before, after))
    if not evaluation.is_finite:
        error = "outputs not finite"
    elif before == after:
        error = "the same error"
    elif not is_compared_by_ratio(evaluation.metric) or low < _FP32_ROUNDING:
        error = f"error from {format_error(before)} to {format_error(after)}"
    elif high < LEAST_EXACTER * low:
        error = "the same error within 10 %"
    else:
        error = f"error {two_digits(high / low)} times {'larger' if before < after else 'smaller'}"
    return f"{latency}, {error}"


def choice_limits(limits: ChoiceLimits, metric: str, default_error: float | None = None) -> str:
    """Limits with "with" or "no plan has" before them; a default limit is named as one, and what sets another."""
    parts = [*limits.tolerance]
    if limits.max_error is not None and default_error is None:
        parts.append(f"error <= {limits.max_error:g}")
    if limits.max_latency_ms is not None:
        parts.append(f"latency <= {limits.max_latency_ms:g} ms")
    if limits.max_memory_bytes is not None:
        parts.append(f"memory <= {format_bytes(limits.max_memory_bytes)}")
    parts += limits.limits
    if default_error is not None:
        amount = f"{100 * default_error:g} %" if metric in ADD_IN_SQUARES else f"{default_error:g}"
        parts.append(f"an error within {amount} (default; --max-error sets another)")
    return " and ".join(parts)


def choice_text(choice: Choice, metric: str, fp32: PrecisionPlan) -> str:
    """How a choice was made, and by which limits; ``fp32`` is the plan of all-FP32."""
    limits = choice_limits(choice.given_limits, metric, choice.default_error)
    within = f" with {limits}" if limits else ""
    if choice.kind == "plan":
        text = "picked by its id"
    elif choice.kind == "knee":
        how = "" if choice.knee else f"; {cut(metric)} has no default limit: --max-error sets one"
        text = f"the knee of the plans{within}{how}"
    elif choice.unmet is not None and choice.nearest == choice.chosen:
        text = f"the nearest: no plan has {limits}"
    elif choice.is_most_exact:
        text = f"the most exact{within}"
    elif choice.is_tf32_better:
        text = f"all-FP32: the faster plans{within} are slower and less exact than TF32"
    elif choice.chosen == fp32.fingerprint:
        text = f"all-FP32: FP16 gains nothing here{within}"
    else:
        passed_over = "" if choice.passed_over is None else f"; {choice.passed_over} is as fast, but less exact"
        text = f"the fastest{within}{passed_over}"
    return text


def unmet_text(choice: Choice, metric: str, nearest: Evaluation | None) -> str:
    """Which limits no plan meets, with the nearest plan, one line; empty where they are met."""
    if choice.unmet is None:
        return ""
    text = f"no plan has {choice_limits(choice.unmet, metric)}"
    if nearest is not None:
        text += f"; the nearest is {choice.nearest} ({latency_text(nearest)} ms, error {error_text(nearest)})"
    if choice.chosen is not None:
        text += f"; chosen/ {'holds it' if choice.chosen == choice.nearest else f'still holds {choice.chosen}'}"
    return text
