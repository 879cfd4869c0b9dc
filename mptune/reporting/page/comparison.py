"""A comparison as one self-contained HTML page, without a script, beside the same as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PureWindowsPath
from string import Template

from mptune._version import __version__
from mptune.diagnosis.comparison import Comparison
from mptune.files import write_text, writing
from mptune.finding import Finding, OutputColumns
from mptune.printable import printable_html as escape
from mptune.reporting.page.html import allowed
from mptune.resources import read_template

JSON_NAME, PAGE_NAME = "comparison.json", "comparison.html"

_MOST_NAMES = 12
"""So many names of one kind are listed in a finding; the page says how many more there are."""

FIGURES = {
    "judged": "error",
    "limit": "limit",
    "judged_fp16": "FP16 throughout, emulated",
    "largest_difference": "largest difference",
}
"""Statistic -> what the page calls it; all but the last are in the unit of the limit."""


def write_comparison(comparison: Comparison, folder: Path) -> None:
    """Write ``comparison.json`` and ``comparison.html``, each whole or not at all; what is there is replaced."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / JSON_NAME, json.dumps(comparison.to_json(), indent=2, allow_nan=False) + "\n")
    write_text(folder / PAGE_NAME, render_comparison(comparison))


def render_comparison(comparison: Comparison) -> str:
    """The page as text. Names and texts are escaped; a content security policy forbids every request and script."""
    style = read_template("page/page.css")
    head = read_template("page/page.html").partition("<body>")[0]
    names = (comparison.candidate, comparison.reference)
    candidate, reference = (escape(PureWindowsPath(name).name) for name in names)  # without the folders of any system
    verdict = escape(comparison.verdict)
    pill = "measured" if comparison.agrees else "predicted"  # the classes of green and amber
    parts = [
        Template(head).substitute(
            policy=f"default-src 'none'; img-src data:; style-src {allowed(style)}",
            title=f"{verdict}: {candidate} - mptune compare",
            style=style,
        ),
        "<body>",
        '<main id="page">',
        f"<h1>{candidate} against {reference}</h1>",
        f'<p class="subtitle"><span class="pill {pill}">{verdict}</span></p>',
        *_sides(comparison),
        *_findings(comparison),
        *_outputs(comparison),
        *_warnings(comparison.warnings),
        "</main>",
        "</body>",
        "</html>",
    ]
    return "\n".join(parts) + "\n"


def _sides(comparison: Comparison) -> Iterable[str]:
    facts = (
        ("reference", comparison.reference),
        ("candidate", comparison.candidate),
        ("samples", str(comparison.samples)),
        ("mptune", __version__),
    )
    yield '<section id="sides"><h2>What was compared</h2><dl class="facts">'
    yield from (f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    yield "</dl></section>"


def _findings(comparison: Comparison) -> Iterable[str]:
    yield '<section id="findings"><h2>What makes the difference</h2><ul class="findings">'
    for finding in comparison.findings:
        yield from _finding(finding)
    yield "</ul>"
    if not comparison.findings:
        yield "<p>No code fits it: what is seen of it stands under the warnings.</p>"
    yield "</section>"


def _finding(finding: Finding) -> Iterable[str]:
    severity = escape(finding.severity)
    yield f'<li><p class="finding-head"><code class="code {severity}">{escape(finding.code)}</code>'
    yield f'<span class="severity">{severity}</span></p>'
    yield f'<p class="finding-text">{_prose(finding.text)}.</p>'
    where = finding.where
    kinds: tuple[tuple[str, Sequence[object]], ...] = (
        ("node", where.nodes),
        ("group", where.groups),
        ("value", where.tensors),
        ("output", where.outputs),
        ("input", where.inputs),
        ("sample", where.samples),
    )
    facts = [(word if len(names) == 1 else f"{word}s", _listed(names)) for word, names in kinds if names]
    evidence = (f"{name.replace('_', ' ')} {_figure(value)}" for name, value in finding.evidence.items())
    facts += [("evidence", escape(", ".join(evidence)))] if finding.evidence else []
    if facts:
        yield '<dl class="places">'
        yield from (f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
        yield "</dl>"
    if finding.cure:
        yield f'<p class="cure"><span>Do: </span>{_prose(finding.cure)}.</p>'
    yield "</li>"


def _listed(names: Sequence[object]) -> str:
    """Names, escaped, and how many more there are."""
    shown = ", ".join(f"<code>{escape(name)}</code>" for name in names[:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def _outputs(comparison: Comparison) -> Iterable[str]:
    yield '<section id="outputs"><h2>Outputs</h2>'
    yield '<p class="note">An error is the root mean square difference of a sample, divided by the standard deviation'
    yield "of the output over all samples, and the mean over the samples; <code>abs:</code> marks the largest absolute"
    yield "difference, where the tolerance is of that. Both are of the columns that are named, where any are.</p>"
    yield from _table(figures_of(comparison).values(), judged_figures(comparison))
    names = list(dict.fromkeys(k for by in comparison.outputs.values() for k in by if k not in FIGURES))
    rows = [[output, *(_figure(by.get(k, "")) for k in names)] for output, by in comparison.outputs.items()]
    yield "<details><summary>All figures</summary>"
    yield from _table([name.replace("_", " ") for name in names], rows)
    yield "</details></section>"


def figures_of(comparison: Comparison) -> dict[str, str]:
    """Those of ``FIGURES`` that a comparison has."""
    return {key: title for key, title in FIGURES.items() if all(key in by for by in comparison.outputs.values())}


def judged_figures(comparison: Comparison) -> list[list[str]]:
    """Of each output the part that is worst against its limit, and a cell for each of ``figures_of``."""
    rows = []
    for name, statistics in comparison.outputs.items():
        limit = comparison.limits[name]
        *judged, largest = (statistics[key] for key in figures_of(comparison))
        rows.append([str(OutputColumns(name, limit.columns)), *map(limit.text, judged), f"{largest:.3g}"])
    return rows


def _table(titles: Iterable[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    yield '<div class="scroll"><table class="statistics"><thead><tr><th scope="col">output</th>'
    yield from (f'<th scope="col" class="number">{escape(title)}</th>' for title in titles)
    yield "</tr></thead><tbody>"
    for output, *figures in rows:
        yield f'<tr><th scope="row"><code>{escape(output)}</code></th>'
        yield from (f'<td class="number">{escape(figure)}</td>' for figure in figures)
        yield "</tr>"
    yield "</tbody></table></div>"


def _prose(text: str) -> str:
    """A sentence, escaped, with what stands in backticks as code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", escape(text))


def _figure(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _warnings(warnings: Sequence[str]) -> Iterable[str]:
    if warnings:
        yield '<section id="warnings"><h2>Before you rely on the figures</h2><ul class="plain">'
        yield from (f"<li>{_prose(text)}</li>" for text in warnings)
        yield "</ul></section>"
