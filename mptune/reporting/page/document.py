"""The data of the page as JSON: short keys and columns, since a page of 2,000 plans is to stay small."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mptune._version import __version__
from mptune.data.metrics.paired import error_interval
from mptune.data.run_outputs import RunOutputs
from mptune.engines.base import Failure
from mptune.engines.environment import Environment
from mptune.finding import FP16_CODES
from mptune.graph.grouping.groups import LayerGroup
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.json_form import encode_float
from mptune.printable import counts_text, printable
from mptune.reporting.recipe import is_on_cpu
from mptune.reporting.text import (
    breaking_precision,
    describe_engine,
    environment_facts,
    error_source,
    latency_source,
    unique,
)
from mptune.tuning.evaluation import Evaluation, Origin
from mptune.tuning.explanation import GroupWorth
from mptune.tuning.front import Front, because
from mptune.tuning.fronts.limits import is_larger_in_search, metric_values
from mptune.tuning.fronts.progress import Progress
from mptune.tuning.fronts.texts import (
    compared,
    format_interval,
    format_speedup,
    latency_text,
    memory_details,
    memory_text,
    metric_cell,
)

if TYPE_CHECKING:
    from mptune.tuning.confirmation import Confirmation


@dataclass(frozen=True)
class PageContent:
    """Everything that report.html is made of.

    Evaluations are of every plan of the search, groups in the model's order. Without an environment its section is
    omitted; a search's own page has no confirmation.
    """

    front: Front
    evaluations: Sequence[Evaluation]
    groups: Sequence[LayerGroup]
    environment: Environment | None = None
    progress: Progress = field(default_factory=Progress)
    confirmation: Confirmation | None = None
    outputs: RunOutputs | None = None


def recommended(front: Front) -> list[tuple[Evaluation, list[str]]]:
    """The chosen plan, its neighbours and both baselines with what each is, the fastest first."""
    named = [
        (front.chosen, "chosen"),
        (front.fp32, "all-FP32"),
        (front.fp16, front.fp16_name),
        *((beside.evaluation, beside.role) for beside in front.neighbours),
    ]
    rows: dict[str, tuple[Evaluation, list[str]]] = {}
    for evaluation, role in named:
        if evaluation is not None:
            rows.setdefault(evaluation.plan.fingerprint, (evaluation, []))[1].append(role)
    return sorted(rows.values(), key=lambda row: row[0].latency.median_ms)


_MOST_WHY = 1_500_000
"""Characters of reasons with figures; further plans have their reasons without."""

_MOST_FAILURES = 100
"""So many failures are listed; the page says how many more there are."""

_LONGEST_LINE = 400
"""Characters of a failure's message, and of a line of its log."""


def page_document(content: PageContent) -> dict[str, Any]:
    """The data of the page. Texts from outside are printable; numbers that are not finite are texts, as in JSON files.

    The precision of a plan is a text with a letter per layer group (h FP16, f FP32), in the order of the model.
    """
    front = content.front
    plans = _plans(front, content.evaluations)
    place = {evaluation.plan: index for index, evaluation in enumerate(plans)}
    columns = [_plan(evaluation, content) for evaluation in plans]
    document = {
        "version": __version__,
        "model": {"name": front.model_path.name},
        "target": front.target,
        "engine": describe_engine(front),
        "metric": front.metric,
        "metrics": list(front.metrics),
        "latency_is": front.fp32.latency.source,
        "error_is": _error_source(front),
        "sources": [
            f"Latency: {latency_source(front)}.",
            *([] if is_on_cpu(front) else ["Speedups are against all-FP32 in true FP32, without TF32."]),
            f"Error: {error_source(front)}.",
        ],
        "chosen": None if front.chosen is None else place[front.chosen.plan],
        "chosen_reason": front.chosen_reason,
        "unmet": front.unmet,
        "fp32": place[front.fp32.plan],
        "fp16": None if front.fp16 is None else place[front.fp16.plan],
        "fp16_name": front.fp16_name,
        "breaks": f"What breaks in {breaking_precision(front)}, and why",
        "front": [place[point.plan] for point in front.points],
        "recommended": [{"plan": place[e.plan], "roles": roles} for e, roles in recommended(front)],
        "neighbours": [{"plan": place[beside.evaluation.plan], "role": beside.role} for beside in front.neighbours],
        "evaluations": front.evaluations,
        "failures": front.failures,
        "hypervolume": encode_float(front.hypervolume),
        "groups": _groups(content),
        "plan_fields": list(columns[0]),
        "plans": [list(column.values()) for column in columns],
        "reasons": _reasons(content, place),
        "findings": [{**finding.to_json(), "is_fp16": finding.code in FP16_CODES} for finding in front.findings],
        "warnings": list(unique((*front.warnings, *(front.chosen.warnings if front.chosen else ())))),
        "outputs": None if content.outputs is None or not content.outputs.plans else _outputs(content.outputs),
        "statistics": _statistics(content, place),
        "progress": _progress(content),
        "failed": [_failure(*failed) for failed in content.progress.failures[:_MOST_FAILURES]],
        "confirmation": None,
        "facts": _facts(content),
        "run": shlex.quote(front.run_dir.absolute().name),  # of a command that is pasted into a shell
    }
    shown: dict[str, Any] = _printable(document)
    return shown


def _plans(front: Front, evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Every plan once; the front's own evaluations, which may be confirmed, stand for those of the search."""
    shown = (front.fp32, front.fp16, front.chosen, *front.points)
    by_plan = {evaluation.plan: evaluation for evaluation in (*evaluations, *filter(None, shown))}
    return sorted(by_plan.values(), key=lambda evaluation: evaluation.number)


def _plan(evaluation: Evaluation, content: PageContent) -> dict[str, Any]:
    latency, part = evaluation.latency, evaluation.part
    low, high = latency.ci95_ms
    interval = error_interval(evaluation.counted, evaluation.metric)
    precision, chosen = evaluation.plan.precision, content.front.chosen
    metrics = content.front.metrics.values()
    again = ["re-measured"] * evaluation.remeasured + ["confirmed"] * evaluation.confirmed
    return {
        "plan": evaluation.plan.fingerprint,
        "number": evaluation.number,
        "ms": _short(latency.median_ms),
        "low": _short(low),
        "high": _short(high),
        "interval": format_interval(evaluation).replace("+-", "\N{PLUS-MINUS SIGN}"),
        "ms_text": latency_text(evaluation),
        "speedup": _short(evaluation.speedup),
        "speedup_text": format_speedup(evaluation.speedup),
        "search": _short(evaluation.error_value),
        "held_out": _short(evaluation.held_out_value),
        "ci95": None if interval is None else [_short(bound) for bound in interval],
        "finite": int(evaluation.is_finite),
        "bits": "".join([_letter(precision.get(group.id)) for group in content.groups]),
        "origin": evaluation.origin.label,
        "memory": memory_text(evaluation),
        "memory_parts": memory_details(evaluation),
        "sources": ", ".join([latency.source, evaluation.error_source, *again]),
        "part": "" if part is None else str(part),
        "warnings": list(evaluation.warnings),
        "against": "" if chosen is None or evaluation.plan == chosen.plan else compared(evaluation, chosen),
        "because": because(content.front, evaluation),
        "search_larger": int(is_larger_in_search(evaluation)),
        "metrics": [[*map(_short, metric_values(evaluation, m)), metric_cell(evaluation, m)] for m in metrics],
    }


def _failure(plan: PrecisionPlan, origin: Origin, failure: Failure) -> dict[str, Any]:
    log = failure.log_path
    return {
        "plan": plan.fingerprint,
        "origin": origin.label,
        "stage": failure.stage.value,
        "kind": failure.kind.value,
        "message": failure.message[:_LONGEST_LINE],
        "log": None if log is None else log.name,
        "line": "" if log is None else _first_line(log),
    }


def _first_line(path: Path) -> str:
    """The first line of a log that says something; empty where the log is gone or says nothing."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            return next((line.strip() for line in lines if line.strip()), "")[:_LONGEST_LINE]
    except OSError:
        return ""


def _letter(precision: Precision | None) -> str:
    # By identity: a dictionary of enumeration members costs a hash in Python for each of a million cells.
    if precision is Precision.FP16:
        return "h"
    return "f" if precision in (None, Precision.FP32) else "b"


def _groups(content: PageContent) -> list[dict[str, Any]]:
    worths = {worth.group: worth for worth in content.front.explanation.groups}
    rows = []
    for group in content.groups:
        worth = worths.get(group.id) or GroupWorth(group.id, group.name, group.kind)
        rows.append(
            {
                "id": group.id,
                "name": group.name,
                "kind": group.kind,
                "ops": counts_text(group.ops),
                "nodes": len(group.nodes),
                "pinned": worth.pinned or group.pinned,
                "error": _short(worth.one_group_error),
                "gain": _short(worth.gain_ms),
                "casts": _short(worth.casts_ms),
            }
        )
    return rows


def _reasons(content: PageContent, place: Mapping[Any, int]) -> dict[str, Any]:
    """Plan -> [group, reason in a word, the reason] of each FP32 group; texts stand in tables once."""
    column = {group.id: index for index, group in enumerate(content.groups)}
    index_of = {plan.fingerprint: index for plan, index in place.items()}
    words: dict[str, int] = {}
    texts = {"": 0}
    room, plans = _MOST_WHY, {}
    explanation = content.front.explanation
    chosen = content.front.chosen
    first = [] if chosen is None else [chosen.plan.fingerprint]
    for fingerprint in unique((*first, *explanation.kept)):
        kept = [group for group in explanation.of(fingerprint) if group.worth.group in column]
        size = sum(len(group.because) for group in kept)
        room -= size
        if fingerprint in index_of and fingerprint != content.front.fp32.plan.fingerprint:
            plans[index_of[fingerprint]] = [
                [
                    column[group.worth.group],
                    words.setdefault(group.word, len(words)),
                    texts.setdefault(group.because if room >= 0 else "", len(texts)),
                ]
                for group in kept
            ]
    return {"words": list(words), "texts": list(texts), "plans": plans}


def _statistics(content: PageContent, place: Mapping[Any, int]) -> dict[str, Any]:
    """Plan -> the statistics of every output, over the held-out samples where there are any; front and baselines."""
    front = content.front
    shown = {e.plan: e for e in (*front.points, front.fp32, front.fp16, front.chosen) if e is not None}
    names: dict[str, None] = {}
    plans = {}
    for plan, evaluation in shown.items():
        summary = (evaluation.held_out or evaluation.error).summary()
        names |= dict.fromkeys(name for statistics in summary.values() for name in statistics)
        plans[place[plan]] = [[output, {k: _short(v) for k, v in by.items()}] for output, by in summary.items()]
    return {"names": list(names), "plans": plans}


def _outputs(outputs: RunOutputs) -> dict[str, Any]:
    return {**outputs.to_json(), "samples": [outputs.sample(number) for number in range(outputs.count)]}


def _progress(content: PageContent) -> dict[str, Any]:
    progress = content.progress
    return {
        "hypervolume": [_short(value) for value in progress.hypervolume],
        "reference_error": _short(progress.reference_error),
        "trials": progress.trials,
        "trials_s": round(progress.trials_s, 2),
        "builds_s": round(progress.builds_s, 2),
        "span_s": round(progress.span_s, 2),
    }


def _facts(content: PageContent) -> list[tuple[str, str]]:
    front = content.front
    facts = [
        ("model", str(front.model_path)),
        ("sha256", front.model_sha256),
        ("target", front.target),
        ("engine", front.engine),
        ("device", front.device),
        ("metric", front.metric),
    ]
    return facts if content.environment is None else facts + environment_facts(content.environment)


def _error_source(front: Front) -> str:
    sources = {e.error_source for e in (*front.points, front.fp32, front.fp16) if e is not None}
    return sources.pop() if len(sources) == 1 else "measured and emulated"


def _short(value: float | None) -> float | str | None:
    """Six significant digits: enough for any figure of the page."""
    return None if value is None else encode_float(float(f"{value:.6g}"))


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(item) for item in value]
    return value
