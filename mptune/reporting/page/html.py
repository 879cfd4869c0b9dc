"""The front as one self-contained HTML page, without scripts, fonts or images from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template

from mptune._version import __version__
from mptune.engines.environment import Environment
from mptune.files import write_text
from mptune.graph.grouping.groups import LayerGroup
from mptune.printable import printable_html as escape
from mptune.reporting.page.precision_map import describe_ops, precision_map
from mptune.reporting.page.scatter import scatter
from mptune.reporting.text import (
    Row,
    describe_engine,
    environment_facts,
    error_source,
    format_error,
    format_interval,
    format_ms,
    format_speedup,
    front_rows,
    front_warnings,
    group_counts,
    latency_source,
    memory_details,
    memory_text,
    read_template,
    reason_counts,
    reasons_of,
    unique,
)
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.front import Front


def write_report(
    front: Front,
    evaluations: Sequence[Evaluation],
    groups: Sequence[LayerGroup],
    path: Path,
    environment: Environment | None = None,
    extra: str = "",
) -> None:
    """Write the page, whole or not at all.

    Args:
        front: the front and the choice.
        evaluations: every plan of the search, drawn in a faint colour.
        groups: the layer groups of the model, in its order.
        path: where to write; its parent must exist.
        environment: the machine that measured; None omits the section.
        extra: HTML of sections that follow the table.

    Raises:
        RunError: the file cannot be written.
    """
    write_text(path, render(front, evaluations, groups, environment, extra))


def render(
    front: Front,
    evaluations: Sequence[Evaluation],
    groups: Sequence[LayerGroup],
    environment: Environment | None = None,
    extra: str = "",
) -> str:
    """The page as text. Everything that comes from outside is escaped; ``extra`` is HTML already."""
    rows = front_rows(front)
    return Template(read_template("report.html")).substitute(
        title=escape(f"{front.model_path.name} on {front.target} - mptune"),
        model=escape(front.model_path.name),
        subtitle=_subtitle(front),
        cards=_cards(front),
        scatter=scatter(front, evaluations),
        table=_table(front, rows),
        extra=extra,
        sources=f"<p>Latency: {escape(latency_source(front))}.</p><p>Error: {escape(error_source(front))}.</p>",
        map=precision_map(front, groups),
        groups=_groups(front, groups),
        reasons=_reasons(front, rows, groups),
        outputs=_outputs(front),
        warnings=_warnings(front),
        facts=_facts(front, environment),
        version=escape(__version__),
    )


def _subtitle(front: Front) -> str:
    source = front.fp32.latency.source
    errors = {row.evaluation.error_source for row in front_rows(front)}
    error = errors.pop() if len(errors) == 1 else "measured and emulated"
    return (
        f"<span>{escape(front.target)}</span><span>{escape(describe_engine(front))}</span>"
        f'<span class="pill {source}">latency {source}</span>'
        f'<span class="pill {"measured" if error == "measured" else "predicted"}">error {error}</span>'
    )


def _cards(front: Front) -> str:
    chosen = front.chosen
    if chosen is None:
        return _card("Chosen plan", "none", front.chosen_reason)
    plan = chosen.plan
    held_out = chosen.held_out_value
    error_note = f"{front.metric}, {chosen.error_source}"
    if held_out is not None:
        error_note = f"{front.metric} on held-out samples; {format_error(chosen.error_value)} in the search"
    return "".join(
        (
            _card("Speedup over all-FP32", format_speedup(chosen.speedup), front.chosen_reason),
            _card(
                f"Latency, {chosen.latency.source}",
                f"{format_ms(chosen.latency.median_ms)} ms",
                f"all-FP32 {format_ms(front.fp32.latency.median_ms)}"
                + (f", all-FP16 {format_ms(front.fp16.latency.median_ms)}" if front.fp16 else ""),
            ),
            _card("Error", format_error(chosen.judged_error), error_note),
            _card(
                "Groups in FP16",
                f"{len(plan.fp16_groups)} of {len(plan.precision)}",
                f"{front.evaluations} plans evaluated, {front.failures} failed",
            ),
        )
    )


def _card(name: str, value: str, note: str) -> str:
    return (
        f'<div class="card"><div class="name">{escape(name)}</div><div class="value">{escape(value)}</div>'
        f'<div class="note">{escape(note)}</div></div>'
    )


def _table(front: Front, rows: Iterable[Row]) -> str:
    return "\n".join(_table_row(front, row) for row in rows)


def _because(front: Front, evaluation: Evaluation) -> str:
    """The number of FP32 groups per reason, as text; empty for the all-FP32 baseline."""
    if evaluation.plan == front.fp32.plan:
        return "the baseline"
    return reason_counts(front.explanation.of(evaluation.plan.fingerprint))


def _table_row(front: Front, row: Row) -> str:
    evaluation = row.evaluation
    style = "is-chosen" if row.is_chosen else "" if row.on_front else "is-off"
    chosen = '<span class="tag">chosen</span> ' if row.is_chosen else ""
    low, high = evaluation.latency.ci95_ms
    interval = format_interval(evaluation).replace("+-", "\N{PLUS-MINUS SIGN}")
    cells = (
        f"<td><code>{evaluation.plan.fingerprint}</code></td>",
        f'<td class="number" title="{format_ms(low)} to {format_ms(high)} ms">{format_ms(evaluation.latency.median_ms)}'
        f" <small>{interval}</small></td>",
        f'<td class="number">{format_speedup(evaluation.speedup)}</td>',
        f'<td class="number">{format_error(evaluation.error_value)}</td>',
        f'<td class="number">{format_error(evaluation.held_out_value)}</td>',
        f'<td class="number">{group_counts(evaluation.plan)}</td>',
        f'<td class="number" title="{escape(memory_details(evaluation))}">{escape(memory_text(evaluation))}</td>',
        f"<td>{escape(_because(front, evaluation))}</td>",
        f"<td>{chosen}{escape(row.note)}</td>",
        f'<td class="source">{escape(evaluation.latency.source)}, {escape(evaluation.error_source)}</td>',
        f"<td>{'yes' if evaluation.confirmed else 'no'}</td>",
    )
    return f'<tr class="{style}">{"".join(cells)}</tr>'


def _groups(front: Front, groups: Sequence[LayerGroup]) -> str:
    if front.chosen is None:
        return ""
    worths = {worth.group: worth for worth in front.explanation.groups}
    whys = {kept.group: kept.why for kept in front.explanation.of(front.chosen.plan.fingerprint)}
    lines = []
    for group in groups:
        precision = str(front.chosen.plan.precision.get(group.id, "fp32"))
        style = "pinned" if group.pinned is not None else precision
        why = whys.get(group.id) or (group.pinned if group.pinned is not None else "")
        worth = worths.get(group.id)
        gain = None if worth is None else worth.gain_ms
        lines.append(
            f"<tr><td><code>{escape(group.id)}</code></td><td>{escape(group.name)}</td><td>{escape(group.kind)}</td>"
            f"<td>{escape(describe_ops(group))}</td>"
            f'<td class="number">{format_error(None if worth is None else worth.one_group_error)}</td>'
            f'<td class="number">{"-" if gain is None else f"{gain:.2g}"}</td>'
            f'<td><span class="dot {style}"></span>{precision.upper()} <small>{escape(why)}</small></td></tr>'
        )
    return "\n".join(lines)


def _reasons(front: Front, rows: Iterable[Row], groups: Sequence[LayerGroup]) -> str:
    """Which groups stay FP32 in each plan, by reason."""
    ids = [group.id for group in groups]
    lines = []
    for row in rows:
        kept = front.explanation.of(row.evaluation.plan.fingerprint)
        if row.evaluation.plan == front.fp32.plan or not kept:
            continue
        listed = "<br>".join(f"{escape(word)}: {escape(held)}" for word, held in reasons_of(kept, ids))
        lines.append(
            f"<tr><td><code>{row.evaluation.plan.fingerprint}</code></td>"
            f'<td class="number">{format_ms(row.evaluation.latency.median_ms)}</td>'
            f'<td class="number">{format_error(row.evaluation.judged_error)}</td><td>{listed}</td></tr>'
        )
    return "\n".join(lines)


def _outputs(front: Front) -> str:
    """The statistics of every output of the chosen plan; held-out where there are."""
    if front.chosen is None:
        return ""
    summary = (front.chosen.held_out or front.chosen.error).summary()
    names = unique(name for statistics in summary.values() for name in statistics)
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr><td><code>{escape(output)}</code></td>"
        + "".join(
            f'<td class="number">{format_error(statistics[name]) if name in statistics else "-"}</td>' for name in names
        )
        + "</tr>"
        for output, statistics in summary.items()
    )
    return f"<thead><tr><th>output</th>{head}</tr></thead><tbody>{body}</tbody>"


def _warnings(front: Front) -> str:
    texts = unique((*front_warnings(front), *(front.chosen.warnings if front.chosen else ())))
    if not front.limits_met:
        texts = (f"limits not met: {front.chosen_reason}", *texts)
    if not texts:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<section class="warnings"><h2>Warnings</h2><ul>{items}</ul></section>'


def _facts(front: Front, environment: Environment | None) -> str:
    facts = [
        ("model", str(front.model_path)),
        ("sha256", front.model_sha256),
        ("target", front.target),
        ("engine", front.engine),
        ("device", front.device),
        ("metric", front.metric),
        ("hypervolume", f"{front.hypervolume:.4f}"),
    ]
    if environment is not None:
        facts += environment_facts(environment)
    return "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
