"""Formatted numbers, sources and reasons, and the templates that they fill: shared by terminal, page and README.txt."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from mptune.engines.environment import Environment
from mptune.finding import Finding
from mptune.graph.plan import REDUCED, PrecisionPlan
from mptune.json_form import encode_float
from mptune.printable import printable
from mptune.targets.target import EXPECTED_FACTOR
from mptune.tuning.dominance import faster_beyond_noise
from mptune.tuning.evaluation import ORIGIN_FP16, ORIGIN_FP32, Evaluation
from mptune.tuning.explanation import Kept
from mptune.tuning.front import Front, fp16_name, front_rows
from mptune.tuning.texts import compared, error_cell, format_error, format_interval, format_speedup, latency_text

if TYPE_CHECKING:
    import jinja2

    from mptune.tuning.confirmation import Confirmation

TEMPLATES = Path(__file__).parent / "templates"
TF32_SIZE = "TF32 rounds the inputs of products to 11 bits, as FP16 does"  # the same words wherever it is said
KEPT_BECAUSE = "kept in FP32 because"  # above the FP32 groups of a plan with their reasons, in every view
_MOST_OF_A_CODE = 3  # findings of one code that are shown one by one; the others are counted
_LONGEST_SENTENCE = 700  # characters of a sentence in a text or on the page: names in it may be of any length


def fill_template(name: str, **values: object) -> str:
    """A file under ``templates``, filled.

    What it shows is printable, on one line and no longer than a sentence, and escaped in HTML, but for what the
    template marks as safe.
    """
    return _templates().get_template(name).render(values)


@cache
def _templates() -> jinja2.Environment:
    import jinja2  # slow to import, and only written files need it
    from markupsafe import Markup, escape

    def shown(value: object) -> object:
        return value if isinstance(value, Markup) else cut_middle(printable(value), _LONGEST_SENTENCE)

    def prose(text: str) -> Markup:
        """A sentence; what stands in it in backticks is code."""
        parts = (escape(part) for part in cut_middle(printable(text), _LONGEST_SENTENCE).split("`"))
        return Markup("").join(
            Markup("<code>{}</code>").format(part) if k % 2 else part for k, part in enumerate(parts)
        )

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=lambda name: name is not None and name.endswith(".html"),
        undefined=jinja2.StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["prose"] = prose
    return environment


def speedup_text(evaluation: Evaluation, fp32: Evaluation) -> str:
    """The speedup against all-FP32, and whether it is none beyond noise, such as ``1.01x, not significant``."""
    text = format_speedup(evaluation.speedup)
    is_apart = faster_beyond_noise(evaluation, fp32) or faster_beyond_noise(fp32, evaluation)
    is_measured = evaluation.latency.source == "measured"
    return f"{text}, not significant" if is_measured and not is_apart and evaluation.plan != fp32.plan else text


def origin_name(evaluation: Evaluation) -> str:
    """Who proposed a plan; the baselines by their names."""
    if evaluation.origin == ORIGIN_FP32:
        return "all-FP32"
    return fp16_name(evaluation.plan) if evaluation.origin == ORIGIN_FP16 else evaluation.origin.label


def format_duration(seconds: float) -> str:
    """Seconds as ``45 s``, ``3 min 20 s`` or ``2 h 5 min``."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    parts = [(minutes, "min"), (rest, "s")] if minutes < 60 else [(minutes // 60, "h"), (minutes % 60, "min")]
    return " ".join(f"{count} {unit}" for count, unit in parts if count) or "0 s"


def short_path(path: Path) -> str:
    """The path relative to the working directory where it lies below it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def shell_path(path: Path) -> str:
    """``short_path`` for a command that is copied into a shell."""
    return shlex.quote(short_path(path))


def short_number(value: float | None) -> float | str | None:
    """Six significant digits, enough for any figure that is shown; as in JSON files where it is not finite."""
    return None if value is None else encode_float(float(f"{value:.6g}"))


def cut_middle(text: str, width: int) -> str:
    """A text with its middle left out where it is too long: names differ at their ends."""
    if len(text) <= width:
        return text
    head = width // 3 if width >= 30 else 0
    return f"{text[:head]}...{text[len(text) - max(0, width - 3 - head) :]}"


def explain_kept(group: Kept) -> str:
    """One FP32 group with its name and why it is FP32."""
    return f"{group.worth.group} {group.worth.name}: {group.because}"


def neighbour_lines(front: Front) -> list[tuple[str, str]]:
    """The plans beside the chosen one: what each is better in, and its id with what it gives instead."""
    return [
        (role, f"{evaluation.plan.fingerprint}: {compared(evaluation, front.chosen)}")
        for role, evaluation in front.neighbours
        if front.chosen is not None
    ]


def breaking_findings(front: Front) -> list[Finding]:
    """The findings about values that FP16 cannot hold; those about BF16 alone where a plan has it."""
    has_bf16 = any(row.evaluation.plan.bf16_groups for row in front_rows(front))
    shown = (f for f in front.findings if f.is_breaking and f.is_about_model)
    return [finding for finding in shown if has_bf16 or not finding.is_of_bf16_alone]


def breaking_precision(front: Front) -> str:
    """What ``breaking_findings`` are about, FP16 or BF16; where there are none, the plans' first reduced precision."""
    if findings := breaking_findings(front):
        return "BF16" if all(finding.is_of_bf16_alone for finding in findings) else "FP16"
    return reduced_names(row.evaluation.plan for row in front_rows(front)).partition(" ")[0]


def unpinned_text(front: Front) -> str:
    """What follows the places that break: what all groups in FP16 give; empty where none is pinned."""
    error = None if front.unpinned is None else format_error(front.unpinned[1])
    return "" if error is None else f"; error with all groups in FP16: {error}, emulated"


def describe_engine(front: Front) -> str:
    """The toolchain and its device: "on" a device that measured, "for" one that is predicted."""
    if front.device in front.engine:
        return front.engine
    return f"{front.engine} {'on' if front.fp32.latency.source == 'measured' else 'for'} {front.device}"


def latency_source(front: Front) -> str:
    """The line of a report that says whether latencies are measured or predicted, and on which device."""
    rows = front_rows(front)
    sources = {row.evaluation.latency.source for row in rows}
    if sources == {"measured"}:
        remeasured = sum(row.evaluation.remeasured for row in rows if row.on_front)
        again = f"; {remeasured} of {len(front.points)} points re-measured in fresh processes" if remeasured else ""
        return f"measured on {front.device}{again}"
    return (
        f"PREDICTED for {front.target}: nothing was timed on that device (87 % of published latencies lie within a"
        f" factor of {EXPECTED_FACTOR:g} of such predictions)"
    )


def reduced_names(plans: Iterable[PrecisionPlan]) -> str:
    """The precisions beside FP32 that plans have, such as FP16 and BF16; FP16 where they have none."""
    used = {precision for plan in plans for precision in plan.reduced_counts}
    return " and ".join(precision.name for precision in REDUCED if precision in used) or "FP16"


def error_source(front: Front) -> str:
    """Whether the errors are measured or emulated, and their metric."""
    evaluations = [row.evaluation for row in front_rows(front)]
    sources = {evaluation.error_source for evaluation in evaluations}
    if sources == {"measured"}:
        return f"{front.metric}, measured on the outputs of the target's own engine"
    if sources == {"emulated"}:
        reduced = reduced_names(evaluation.plan for evaluation in evaluations)
        return f"{front.metric}, emulated (FP32 graph with explicit {reduced} roundings)"
    return f"{front.metric}, measured or emulated (~) as marked"


def unique(texts: Iterable[str]) -> tuple[str, ...]:
    """The texts without repetitions, in their order."""
    return tuple(dict.fromkeys(texts))


def front_warnings(front: Front, elsewhere: Collection[str] = ()) -> tuple[str, ...]:
    """The findings and the warnings of a front that a person must see, one line each.

    A finding of severity ``info`` about groups stands in the explanation of these groups, not here; findings about the
    model with the codes ``elsewhere`` are shown in another place.
    """
    shown = [
        finding
        for finding in front.findings
        if not (finding.is_about_model and (finding.code in elsewhere or finding.severity == "info"))
    ]
    return unique((*finding_lines(shown, lambda finding: finding.message), *front.warnings))


def finding_lines(findings: Iterable[Finding], line: Callable[[Finding], str]) -> Iterator[str]:
    """One line a finding; of each code the first few, then how many more there are."""
    by_code: dict[str, list[str]] = {}
    for finding in findings:
        by_code.setdefault(finding.code, []).append(line(finding))
    for code, lines in by_code.items():
        yield from lines[:_MOST_OF_A_CODE]
        if len(lines) > _MOST_OF_A_CODE:
            yield f"{len(lines) - _MOST_OF_A_CODE} more findings {code!r} are in front.json"


def environment_facts(environment: Environment) -> list[tuple[str, str]]:
    """The machine as (name, value) lines: system, CPU, GPUs or the Jetson, then the version of every package."""
    facts = [("system", environment.os), ("CPU", f"{environment.cpu}, {environment.cpu_count} cores")]
    if environment.jetson is not None:
        return [*facts, *environment.jetson.facts(), *sorted(environment.versions.items())]
    for gpu in environment.gpus:
        parts = [gpu.name]
        if gpu.memory_mb is not None:
            parts.append(f"{gpu.memory_mb / 1024:.0f} GiB")
        if gpu.driver:
            parts.append(f"driver {gpu.driver}")
        if gpu.sm_clock_mhz is not None and gpu.max_sm_clock_mhz is not None:
            parts.append(f"{gpu.sm_clock_mhz:.0f} of {gpu.max_sm_clock_mhz:.0f} MHz")
        if gpu.power_limit_w is not None:
            parts.append(f"limit {gpu.power_limit_w:.0f} W")
        facts.append((f"GPU {gpu.index}", ", ".join(parts)))
    return [*facts, *([] if environment.gpus else [("GPU", "none")]), *sorted(environment.versions.items())]


def confirmation_rows(confirmation: Confirmation) -> list[dict[str, str]]:
    """Each plan with its figures in the search and as measured, and what became of it on the device, in a word."""
    front, rows = confirmation.front, []
    for plan in confirmation.plans:
        before, now = plan.searched, plan.measured
        is_chosen = front.chosen is not None and front.chosen.plan == before.plan
        is_on_front = any(point.plan == before.plan for point in front.points)
        row = {
            "plan": before.plan.fingerprint,
            "ms": latency_text(before),
            "measured ms": "-" if now is None else latency_text(now),
            "95 %": "" if now is None else format_interval(now),
            "speedup": format_speedup(before.speedup),
            "measured speedup": "-" if now is None else format_speedup(now.speedup),
            "error": error_cell(before),
            "measured error": "-" if now is None or now.held_out is None else error_cell(now),
            "became": "failed" if now is None else "chosen" if is_chosen else "front" if is_on_front else "",
            "origin": before.origin.label,
        }
        rows.append(row)
    return rows


def verdicts(confirmation: Confirmation) -> list[str]:
    """Whether the search's rankings held: a line for the latencies and one for the errors."""
    searched, lines = confirmation.searched, []
    for what, agreement, source in (
        ("latency", confirmation.latency, searched.latency_source),
        ("error", confirmation.error, searched.error_source),
    ):
        tau = "not defined" if agreement.kendall_tau is None else f"{agreement.kendall_tau:.2f}"
        lines.append(
            f"{what}: Kendall's tau {tau} over {agreement.plans} plans; {agreement.agreeing} of {agreement.pairs} pairs"
            f" that differ beyond noise are in the same order: the {source.replace('measured', 'earlier')} ranking"
            f" {agreement.verdict}"
        )
    return lines
