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
from mptune.data.metrics.accuracy import error_interval
from mptune.engines.environment import Environment
from mptune.files import write_text
from mptune.finding import FP16_CODES, Finding
from mptune.graph.groups import LayerGroup
from mptune.graph.plan import Precision
from mptune.printable import counts_text, printable
from mptune.reporting import text
from mptune.tuning import texts
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.explanation import GroupWorth
from mptune.tuning.front import Front, because, is_held_out
from mptune.tuning.result import Progress

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
    outputs: Mapping[str, Any] | None = None  # ``outputs.json``


def write_report(content: PageContent, path: Path) -> None:
    """Write the page, whole or not at all."""
    write_text(path, render(content))


def render(content: PageContent) -> str:
    """The page as text. A content security policy forbids every request, and every script and style but its own."""
    front, progress, values = content.front, content.progress, content.progress.hypervolume
    data = page_document(content)
    style = (text.TEMPLATES / "page/page.css").read_text(encoding="utf-8")
    parts = [(text.TEMPLATES / f"page/{name}.js").read_text(encoding="utf-8") for name in SCRIPTS]
    script = '(() => {\n"use strict";\n' + "".join(parts) + "})();\n"
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    shown = [e for e in (*front.points, front.fp32, front.fp16, front.chosen) if e is not None]
    sources = {evaluation.error_source for evaluation in shown}
    facts: list[tuple[str, object]] = [("model", front.model_path), ("sha256", front.model_sha256)]
    facts += [("target", front.target), ("engine", front.engine), ("device", front.device), ("metric", front.metric)]
    return text.fill_template(
        "page/page.html",
        version=__version__,
        style=style,
        script=script,
        hashes=hashes,
        data=embedded_json(data),
        text=text,
        texts=texts,
        run=data["run"],
        front=front,
        groups=content.groups,
        recommended=recommended(front),
        error_is=sources.pop() if len(sources) == 1 else "measured and emulated",
        reduced=text.reduced_names(evaluation.plan for evaluation in shown).replace(" and ", " or "),
        pinned=sum(group["pinned"] is not None for group in data["groups"]),
        has_held_out=is_held_out(front),
        fp16_codes=FP16_CODES,
        places=_places,
        warnings=text.unique((*front.warnings, *(front.chosen.warnings if front.chosen else ()))),
        confirmation=content.confirmation,
        progress=progress,
        grown=next((k for k, value in enumerate(values, 1) if value >= 0.95 * values[-1] > 0), 0),
        failures=progress.failures[:_MOST_FAILURES],
        facts=facts + ([] if content.environment is None else text.environment_facts(content.environment)),
    )


def recommended(front: Front) -> list[tuple[Evaluation, list[str]]]:
    """The chosen plan, its neighbours and the baselines with what each is, the fastest first."""
    named = [
        (front.chosen, "chosen"),
        (front.fp32, "all-FP32"),
        (front.fp16, front.fp16_name),
        *((evaluation, role) for role, evaluation in front.neighbours),
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

    worths = {worth.group: worth for worth in explanation.groups}
    groups = []
    for group in content.groups:
        worth = worths.get(group.id) or GroupWorth(group.id, group.name, group.kind)
        numbers = {"error": worth.one_group_error, "gain": worth.gain_ms, "casts": worth.casts_ms}
        names = {"id": group.id, "name": group.name, "kind": group.kind, "ops": counts_text(group.ops)}
        row = {**names, **{name: text.short_number(number) for name, number in numbers.items()}}
        groups.append({**row, "pinned": worth.pinned or group.pinned})

    # Plan -> [group, reason] of each FP32 group; a reason stands in the table of texts once.
    column = {group.id: index for index, group in enumerate(content.groups)}
    texts: dict[str, int] = {}
    reasons = {
        place[fingerprint]: [
            [column[group.worth.group], texts.setdefault(group.because, len(texts))]
            for group in reasons
            if group.worth.group in column
        ]
        for fingerprint, reasons in explanation.by_plan.items()
        if fingerprint in place and fingerprint != front.fp32.plan.fingerprint
    }
    # Plan -> the statistics of every output, over the held-out samples where there are any.
    statistics = {
        place[e.plan.fingerprint]: [
            [output, {name: text.short_number(value) for name, value in by.items()}]
            for output, by in (e.held_out or e.error).summary().items()
        ]
        for e in shown
    }
    outputs = content.outputs if content.outputs and content.outputs["plans"] else None
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
        "unpinned": front.unpinned and front.unpinned[0],
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
        "ms": text.short_number(latency.median_ms),
        "low": text.short_number(latency.ci95_ms[0]),
        "high": text.short_number(latency.ci95_ms[1]),
        "interval": texts.format_interval(evaluation),
        "ms_text": texts.latency_text(evaluation),
        "speedup": text.short_number(evaluation.speedup),
        "speedup_text": texts.format_speedup(evaluation.speedup),
        "search": text.short_number(evaluation.error_value),
        "held_out": text.short_number(evaluation.held_out_value),
        "ci95": None if interval is None else [text.short_number(bound) for bound in interval],
        "finite": evaluation.is_finite,
        "bits": "".join([_LETTERS.get(precision.get(group.id, Precision.FP32), "b") for group in content.groups]),
        "origin": evaluation.origin.label,
        "memory": texts.memory_text(evaluation),
        "memory_parts": texts.memory_details(evaluation),
        "sources": ", ".join([latency.source, evaluation.error_source, *again]),
        "part": "" if evaluation.part is None else str(evaluation.part),
        "warnings": list(evaluation.warnings),
        "against": "" if is_chosen or front.chosen is None else texts.compared(evaluation, front.chosen),
        "because": because(front, evaluation),
        "search_larger": evaluation.is_larger_in_search,
        "metrics": [
            [*map(text.short_number, evaluation.values_of(metric)), texts.metric_cell(evaluation, metric)]
            for metric in front.metrics.values()
        ],
    }


def embedded_json(document: Any) -> str:
    """JSON that may stand in a script element: no character of it can end the element or begin a comment."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _places(finding: Finding, chosen: Evaluation | None) -> list[tuple[str, str]]:
    """Where a finding is, a few names of each kind, with what the chosen plan does to its groups."""
    facts = []
    for kind, names in vars(finding.where).items():
        texts = [text.cut_middle(printable(name), 90) for name in names[:6]]
        if kind == "groups" and chosen is not None:
            now = chosen.plan.precision
            texts = [f"{group} {now.get(group, Precision.FP32).name} in the chosen plan" for group in names[:6]]
        if names:
            facts.append((kind, ", ".join(texts) + (f" and {len(names) - 6} more" if len(names) > 6 else "")))
    return facts


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable(key): _printable(item) for key, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list | tuple) else value
