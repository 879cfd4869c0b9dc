"""report.html: the front as one self-contained page, with data, style and script inside, nothing from elsewhere.

A template writes what stands still; the script draws, from the data, what follows the selection, with text nodes only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mptune._version import __version__
from mptune.data.metrics.paired import error_interval
from mptune.data.run_outputs import RunOutputs
from mptune.engines.environment import Environment
from mptune.files import write_text
from mptune.finding import FP16_CODES, Finding
from mptune.graph.grouping.groups import LayerGroup
from mptune.graph.plan import Precision
from mptune.printable import counts_text, printable
from mptune.reporting.recipe import is_on_cpu
from mptune.reporting.text import (
    TEMPLATES,
    breaking_precision,
    confirmation_rows,
    cut_middle,
    describe_engine,
    environment_facts,
    error_source,
    fill_template,
    format_duration,
    latency_source,
    reduced_names,
    short_number,
    unique,
    verdicts,
)
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.explanation import GroupWorth
from mptune.tuning.front import Front, because
from mptune.tuning.fronts.limits import is_larger_in_search, metric_values
from mptune.tuning.fronts.progress import Progress
from mptune.tuning.fronts.texts import (
    compared,
    error_cell,
    error_text,
    format_interval,
    latency_text,
    memory_details,
    memory_text,
    metric_cell,
    speedup_of,
)

if TYPE_CHECKING:
    from mptune.tuning.confirmation import Confirmation

SCRIPTS = ("base", "chart", "selection", "network", "tables", "outputs")
"""The parts of the page's script, in the order in which they are put together."""

_MOST_FAILURES = 100
"""Failures that are listed; the page says how many there are."""

_LETTERS = {Precision.FP32: "f", Precision.FP16: "h"}


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


def write_report(content: PageContent, path: Path) -> None:
    """Write the page, whole or not at all."""
    write_text(path, render(content))


def render(content: PageContent) -> str:
    """The page as text. A content security policy forbids every request, and every script and style but its own."""
    front, data = content.front, page_document(content)
    style = (TEMPLATES / "page/page.css").read_text(encoding="utf-8")
    parts = [(TEMPLATES / f"page/{name}.js").read_text(encoding="utf-8") for name in SCRIPTS]
    script = '(() => {\n"use strict";\n' + "".join(parts) + "})();\n"
    style_hash, script_hash = (
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in (style, script)
    )
    place = {fingerprint: index for index, (fingerprint, *_) in enumerate(data["plans"])}
    plans = (*front.points, front.fp32, front.fp16, front.chosen)
    sources = {evaluation.error_source for evaluation in plans if evaluation is not None}
    findings = {"errors": [f for f in front.findings if f.severity == "error"]}
    others = [f for f in front.findings if f.severity != "error"]
    findings["numbers"] = [f for f in others if f.code in FP16_CODES]
    findings["loud"] = [f for f in others if f.code not in FP16_CODES and f.severity == "warning"]
    findings["quiet"] = [f for f in others if f.code not in FP16_CODES and f.severity != "warning"]
    values = content.progress.hypervolume
    failures = [
        (plan, origin.label, f"{failure.stage.value}: {failure.kind.value}", failure, _first_line(failure.log_path))
        for plan, origin, failure in content.progress.failures[:_MOST_FAILURES]
    ]
    facts: list[tuple[str, object]] = [("model", front.model_path), ("sha256", front.model_sha256)]
    facts += [("target", front.target), ("engine", front.engine), ("device", front.device), ("metric", front.metric)]
    return fill_template(
        "page/page.html",
        version=__version__,
        policy=f"default-src 'none'; img-src data:; style-src {style_hash}; script-src {script_hash}",
        style=style,
        script=script,
        data=embedded_json(data),
        run=data["run"],
        front=front,
        engine=describe_engine(front),
        latency_is=front.fp32.latency.source,
        error_is=sources.pop() if len(sources) == 1 else "measured and emulated",
        sources=[f"Latency: {latency_source(front)}.", f"Error: {error_source(front)}."]
        + ([] if is_on_cpu(front) else ["Speedups are against all-FP32 in true FP32, without TF32."]),
        reduced=reduced_names(row.plan for row in plans if row is not None).replace(" and ", " or "),
        groups=content.groups,
        recommended=[
            (evaluation, roles, place[evaluation.plan.fingerprint] if evaluation is not front.tf32 else None)
            for evaluation, roles in recommended(front)
        ],
        ms=latency_text,
        speedup=lambda evaluation: speedup_of(evaluation, front.fp32),
        error=error_text,
        error_cell=error_cell,
        compared=lambda evaluation: compared(evaluation, front.chosen) if front.chosen else "",
        places=lambda finding: _places(finding, front.chosen),
        has_held_out=any(evaluation.held_out is not None for evaluation in plans if evaluation is not None),
        breaking=breaking_precision(front),
        pinned=sum(group["pinned"] is not None for group in data["groups"]),
        findings=findings,
        warnings=unique((*front.warnings, *(front.chosen.warnings if front.chosen else ()))),
        confirmation=content.confirmation,
        verdicts=[] if content.confirmation is None else verdicts(content.confirmation),
        confirmed=[] if content.confirmation is None else confirmation_rows(content.confirmation),
        grown=next((k for k, value in enumerate(values, 1) if value >= 0.95 * values[-1] > 0), 0),
        progress=content.progress,
        duration=format_duration,
        failures=failures,
        facts=facts + ([] if content.environment is None else environment_facts(content.environment)),
    )


def recommended(front: Front) -> list[tuple[Evaluation, list[str]]]:
    """The chosen plan, its neighbours and the baselines with what each is, the fastest first."""
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
    if front.tf32 is not None:  # the plan of all-FP32
        rows["tf32"] = front.tf32, ["all-FP32 in TF32"]
    return sorted(rows.values(), key=lambda row: row[0].latency.median_ms)


def page_document(content: PageContent) -> dict[str, Any]:
    """The data of the page's script: columns, since a page of 2,000 plans is to stay small.

    Texts from outside are printable; numbers that are not finite are texts, as in JSON files. The precision of a plan
    is a text with a letter per layer group (f FP32, h FP16, b another), in the order of the model.
    """
    front, explanation = content.front, content.front.explanation
    shown = [e for e in (front.fp32, front.fp16, front.chosen, *front.points) if e is not None]
    # The front's own evaluations, which may be confirmed, stand for those of the search.
    plans = sorted({e.plan: e for e in (*content.evaluations, *shown)}.values(), key=lambda e: e.number)
    place = {evaluation.plan.fingerprint: index for index, evaluation in enumerate(plans)}
    rows = [_plan(evaluation, content) for evaluation in plans]

    worths, groups = {worth.group: worth for worth in explanation.groups}, []
    for group in content.groups:
        worth = worths.get(group.id) or GroupWorth(group.id, group.name, group.kind)
        row: dict[str, Any] = {"id": group.id, "name": group.name, "kind": group.kind, "ops": counts_text(group.ops)}
        row["pinned"] = worth.pinned or group.pinned
        row["error"], row["gain"] = short_number(worth.one_group_error), short_number(worth.gain_ms)
        groups.append({**row, "casts": short_number(worth.casts_ms)})

    # Plan -> [group, reason] of each FP32 group; a reason stands in the table of texts once.
    column = {group.id: index for index, group in enumerate(content.groups)}
    texts: dict[str, int] = {}
    reasons = {
        place[fingerprint]: [
            [column[group.worth.group], texts.setdefault(group.because, len(texts))]
            for group in kept
            if group.worth.group in column
        ]
        for fingerprint, kept in explanation.kept.items()
        if fingerprint in place and fingerprint != front.fp32.plan.fingerprint
    }
    # Plan -> the statistics of every output, over the held-out samples where there are any.
    statistics = {
        place[e.plan.fingerprint]: [
            [output, {name: short_number(value) for name, value in by.items()}]
            for output, by in (e.held_out or e.error).summary().items()
        ]
        for e in shown
    }
    outputs = None
    if content.outputs is not None and content.outputs.plans:
        samples = [content.outputs.sample(number) for number in range(content.outputs.count)]
        outputs = {**content.outputs.to_json(), "samples": samples}
    document = {
        "target": front.target,
        "metric": front.metric,
        "metrics": list(front.metrics),
        "latency_is": front.fp32.latency.source,
        "run": shlex.quote(front.run_dir.absolute().name),  # of a command that is pasted into a shell
        "chosen": None if front.chosen is None else place[front.chosen.plan.fingerprint],
        "fp32": place[front.fp32.plan.fingerprint],
        "fp16": None if front.fp16 is None else place[front.fp16.plan.fingerprint],
        "fp16_name": front.fp16_name,
        "tf32": None if front.tf32 is None else list(_plan(front.tf32, content).values()),
        "front": [place[point.plan.fingerprint] for point in front.points],
        "neighbours": [{"plan": place[n.evaluation.plan.fingerprint], "role": n.role} for n in front.neighbours],
        "groups": groups,
        "plan_fields": list(rows[0]),
        "plans": [list(row.values()) for row in rows],
        "reasons": {"texts": list(texts), "plans": reasons},
        "statistics": statistics,
        "outputs": outputs,
    }
    printed: dict[str, Any] = _printable(document)
    return printed


def _plan(evaluation: Evaluation, content: PageContent) -> dict[str, Any]:
    front, latency, precision = content.front, evaluation.latency, evaluation.plan.precision
    interval = error_interval(evaluation.counted, evaluation.metric)
    again = ["re-measured"] * evaluation.remeasured + ["confirmed"] * evaluation.confirmed
    is_chosen = front.chosen is None or evaluation.plan == front.chosen.plan
    return {
        "plan": evaluation.plan.fingerprint,
        "ms": short_number(latency.median_ms),
        "low": short_number(latency.ci95_ms[0]),
        "high": short_number(latency.ci95_ms[1]),
        "interval": format_interval(evaluation),
        "ms_text": latency_text(evaluation),
        "speedup": short_number(evaluation.speedup),
        "speedup_text": speedup_of(evaluation, front.fp32),
        "search": short_number(evaluation.error_value),
        "held_out": short_number(evaluation.held_out_value),
        "ci95": None if interval is None else [short_number(bound) for bound in interval],
        "finite": evaluation.is_finite,
        "bits": "".join([_LETTERS.get(precision.get(group.id, Precision.FP32), "b") for group in content.groups]),
        "origin": evaluation.origin.label,
        "memory": memory_text(evaluation),
        "memory_parts": memory_details(evaluation),
        "sources": ", ".join([latency.source, evaluation.error_source, *again]),
        "part": "" if evaluation.part is None else str(evaluation.part),
        "warnings": list(evaluation.warnings),
        "against": "" if is_chosen or front.chosen is None else compared(evaluation, front.chosen),
        "because": because(front, evaluation),
        "search_larger": is_larger_in_search(evaluation),
        "metrics": [
            [*map(short_number, metric_values(evaluation, metric)), metric_cell(evaluation, metric)]
            for metric in front.metrics.values()
        ],
    }


def embedded_json(document: Any) -> str:
    """JSON that may stand in a script element: no character of it can end the element or begin a comment."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _places(finding: Finding, chosen: Evaluation | None) -> list[tuple[str, str]]:
    """Where a finding is, a few names of each kind, with what the chosen plan does to its groups; and its evidence."""
    where = finding.where
    groups = list(where.groups)
    if chosen is not None:
        precision = chosen.plan.precision
        groups = [f"{g} {precision.get(g, Precision.FP32).name} in the chosen plan" for g in groups]
    kinds: dict[str, Sequence[object]] = {
        "node": where.nodes,
        "value": where.tensors,
        "output": where.outputs,
        "input": where.inputs,
        "sample": where.samples,
        "group": groups,
    }
    facts = []
    for kind, names in kinds.items():
        more = f" and {len(names) - 6} more" if len(names) > 6 else ""
        text = ", ".join(cut_middle(printable(name), 90) for name in names[:6])
        facts += [(kind + "s" * (len(names) > 1), text + more)] if names else []
    numbers = [(name.replace("_", " "), value) for name, value in finding.evidence.items()]
    evidence = [f"{name} {value:.4g}" for name, value in numbers if isinstance(value, int | float)]
    evidence += [f"{name} {value}" for name, value in numbers if value in ("nan", "inf", "-inf")]
    return [*facts, ("evidence", ", ".join(evidence))] if evidence else facts


def _first_line(log: Path | None) -> str:
    """The first line of a log that says something; empty where the log is gone or says nothing."""
    try:
        with (log or Path()).open(encoding="utf-8", errors="replace") as lines:
            return next((line.strip() for line in lines if line.strip()), "")
    except OSError:
        return ""


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable(key): _printable(item) for key, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list | tuple) else value
