"""``mptune inspect`` and ``mptune compare`` on the terminal: a model as tables, and what makes two models differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from rich.console import Console

from mptune.finding import OutputColumns, by_severity
from mptune.findings.engine import NOTHING
from mptune.findings.wording import SEVERITIES
from mptune.graph.plan import Precision
from mptune.printable import counts_text
from mptune.reporting.terminal.console import (
    SEVERITY_STYLES,
    make_console,
    print_facts,
    print_table,
    print_text,
    styled,
)
from mptune.reporting.text import unique

if TYPE_CHECKING:
    from mptune.diagnosis.comparing import Comparison
    from mptune.inspection.record import Inspection

_MOST_PLACES = 6
_MOST_REASONS = 3
"""Why groups cannot be BF16."""
_FIGURES = {"judged": "error", "limit": "limit", "judged_fp16": "FP16 throughout, emulated"}
"""Statistic in the unit of the limit -> its title."""

_OF_CONSTANTS = frozenset({"overflow", "vanishing-epsilon", "int64-range"})


def print_inspection(inspection: Inspection, stream: TextIO | None = None) -> None:
    """Print the inspection of a model; to stdout by default."""
    console, total = make_console(stream), inspection.flops or 1.0
    for finding in inspection.findings:
        if finding.code == NOTHING:
            print_text(console, f"warning: {finding.message}", "yellow")
    print_facts(console, _facts(inspection), 9)

    _print_title(console, "groups")
    rows = []
    for item in inspection.groups:
        group, cost = item.group, item.cost
        figures = (quantity(cost.flops, ""), f"{cost.flops / total:.1%}", quantity(cost.fp32_bytes, "B"))
        same = f"x{item.repeats}" if item.repeats > 1 else ""
        precision = "free" if item.pin is None else f"{str(item.pin.precision).upper()} pinned"
        rows.append((group.id, group.name, group.kind, counts_text(group.ops), *figures, same, precision))
    print_table(
        console,
        ("id", "name", "kind", "operators", "FLOP", "share", "bytes", "same", "precision"),
        rows,
        right=("FLOP", "share", "bytes", "same"),
        optional=("operators",),
        # Where nobody looks at it, names stay whole, to be copied.
        shorten=("name", "operators") if console.is_terminal else ("operators",),
        styles=["" if item.pin is None else "yellow" for item in inspection.groups],
    )
    pins: dict[tuple[str, str], list[str]] = {}  # groups of the same reason together
    for item in inspection.groups:
        if item.pin is not None:
            pins.setdefault((str(item.pin.precision).upper(), item.pin.reason), []).append(item.group.id)
    if pins:
        _print_title(console, "pinned")
    for (precision, reason), ids in pins.items():
        print_text(console, styled((f"{precision} ", "yellow"), f"{_places(ids)}: {reason}"))

    _print_title(console, "operators")
    operators = [
        (
            operator.name,
            str(operator.count),
            str(operator.grouped),
            quantity(operator.flops, "") if operator.grouped else "-",
            f"{operator.flops / total:.1%}" if operator.grouped else "-",
            operator.fixed,
        )
        for operator in inspection.operators
    ]
    heads = ("operator", "nodes", "in groups", "FLOP", "share", "the others have no precision, because")
    print_table(console, heads, operators, right=heads[1:-1], fold=heads[-1])
    _print_hazards(console, inspection)
    for text in inspection.warnings:
        print_text(console, f"warning: {text}", "yellow")


def quantity(value: float, unit: str) -> str:
    """A number with three digits and a decimal prefix, such as ``1.23 GFLOP``."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:
            digits = value / size
            return f"{digits:.{2 if digits < 9.995 else 1 if digits < 99.95 else 0}f} {prefix}{unit}"
    return f"{value:.0f} {unit}"


def _print_title(console: Console, title: str) -> None:
    console.print()
    print_text(console, title, "bold")


def _facts(inspection: Inspection) -> list[tuple[str, str]]:
    model, groups, need = inspection.model, inspection.groups, inspection.memory
    values = []
    for infos in (model.inputs, model.outputs):
        shapes = [i.shape and " x ".join("?" if size is None else str(size) for size in i.shape) for i in infos]
        texts = ("?" if shape is None else shape or "scalar" for shape in shapes)
        values.append(", ".join(f"{i.name} {i.dtype} {text}" for i, text in zip(infos, texts, strict=True)))
    pinned = sum(item.pin is not None for item in groups)
    fp32 = sum(item.pin is not None and item.pin.precision is Precision.FP32 for item in groups)
    plans = f"2^{len(groups) - pinned} between all-FP32 and all-FP16{f' but {fp32} pinned' if fp32 else ''}"
    if pinned == len(groups):
        plans = f"none to search: {fp32} of the groups are pinned to FP32"
    costs = [*(item.cost for item in groups), inspection.rest]
    traffic, traffic_fp16 = sum(cost.fp32_bytes for cost in costs), sum(cost.fp16_bytes for cost in costs)
    memory = [f"{quantity(need.total(p), 'B')} in {p.upper()}" for p in (Precision.FP32, Precision.FP16)]
    shapes_from = "fixed in the model"
    if inspection.observed is not None:
        shapes_from = f"observed on {inspection.samples} samples of {inspection.observed}"
        if inspection.samples < inspection.available:
            shapes_from += f": the first of {inspection.available}; --strict runs all"
    elif inspection.assumed:
        sizes = ", ".join(f"{name} = {size}" for name, size in inspection.assumed.items())
        shapes_from = f"ASSUMED: {sizes} (--batch sets the batch, --data shows real ones)"
    if inspection.unknown_shapes:
        shapes_from += f"; {inspection.unknown_shapes} values of unknown shape count little"
    facts = [
        ("model", f"{model.path} (sha256 {model.sha256[:12]}), {len(model.nodes)} nodes"),
        ("weights", f"{quantity(inspection.parameters, '').strip()} values, {quantity(inspection.weight_bytes, 'B')}"),
        ("inputs", values[0]),
        ("outputs", values[1]),
        (
            "groups",
            f"{len(groups)} at {inspection.granularity} granularity, {len({g.group.pattern for g in groups})}"
            f" different; {len(groups) - pinned} free, {pinned} pinned (space {inspection.space})",
        ),
        ("plans", plans),
    ]
    if beyond := sum(item.only_bf16 for item in groups):  # engines may lack kernels beside
        reasons = Counter(item.no_bf16 for item in groups if item.no_bf16 is not None).most_common(_MOST_REASONS)
        text = f"{sum(item.no_bf16 is None for item in groups)} of {len(groups)} groups could be BF16, {beyond} of them"
        text += " pinned to FP32 because of FP16 (--precisions fp32,fp16,bf16)"
        facts.append(("BF16", "; ".join([text, *(f"{count} not: {reason}" for reason, count in reasons)])))
    return [
        *facts,
        (
            "compute",
            f"{quantity(inspection.flops, 'FLOP')} and {quantity(traffic, 'B')} of traffic in FP32"
            f" ({quantity(traffic_fp16, 'B')} in FP16)",
        ),
        ("memory", f"{' and '.join(memory)}: weights and the values that are alive at once"),
        ("shapes", shapes_from),
    ]


def _print_hazards(console: Console, inspection: Inspection) -> None:
    """What is wrong with the model as a whole, then one entry for each reason and cure, with all the places of it."""
    merged: dict[tuple[str, str, str, str], list[str]] = {}
    for finding in by_severity(inspection.about):
        if finding.code != NOTHING:
            names = finding.where.first_names()
            place = next((names[kind] for kind in ("tensor", "output", "input") if kind in names), "the model")
            key = (finding.severity, finding.code, finding.text, finding.cure)
            merged.setdefault(key, []).append(str(place))
    for hazard in inspection.hazards:
        at = hazard.place
        # Which of the values that the node reads, where that is not plain.
        parts = [at.group, at.node, at.tensor if hazard.code in _OF_CONSTANTS or not at.node else None]
        key = (hazard.severity, hazard.code, hazard.reason, hazard.cure)
        merged.setdefault(key, []).append(" ".join(part for part in parts if part))
    counts = {word: sum(len(places) for key, places in merged.items() if key[0] == word) for word in SEVERITIES}
    summary = ", ".join(f"{n} {word}{'s' * (n > 1 and word != 'info')}" for word, n in counts.items() if n)
    _print_title(console, f"hazards: {summary or 'none found'}")
    if inspection.observed is None:
        print_text(console, "values were not observed: give --data", "dim")
    for (severity, code, reason, cure), places in merged.items():
        print_text(console, styled((severity, SEVERITY_STYLES[severity]), f" {code}: {_places(places)}"))
        print_text(console, reason, indent=2)
        print_text(console, f"-> {cure}", "dim", 2)


def _places(places: Sequence[str]) -> str:
    every = unique(places)
    more = f" and {len(every) - _MOST_PLACES} more" if len(every) > _MOST_PLACES else ""
    return ", ".join(every[:_MOST_PLACES]) + more


def print_comparison(comparison: Comparison, stream: TextIO | None = None) -> None:
    """Print a comparison; to stdout by default."""
    console = make_console(stream)
    style = "green" if comparison.agrees else "bold red"
    console.print(styled(("verdict    ", "dim"), (comparison.verdict, style)))
    print_facts(console, [(name, getattr(comparison, name)) for name in ("reference", "candidate", "samples")])
    console.print()
    for finding in comparison.findings:
        heading = (f"{finding.severity}: {finding.code}  ", SEVERITY_STYLES[finding.severity])
        print_text(console, styled(heading, finding.text))
        if finding.cure:
            print_text(console, finding.cure, indent=2)
    if comparison.findings:
        console.print()
    shown = [key for key in _FIGURES if all(key in by for by in comparison.outputs.values())]
    rows = []
    for name, statistics in comparison.outputs.items():
        limit = comparison.limits[name]
        part = str(OutputColumns(name, limit.columns))  # the part that is worst against its limit
        judged = [limit.text(statistics[key]) for key in shown]
        rows.append((part, *judged, f"{statistics['largest_difference']:.3g}"))
    titles = (*(_FIGURES[key] for key in shown), "largest difference")
    print_table(console, ("output", *titles), rows, right=titles, fold="output")
    for text in comparison.warnings:
        print_text(console, f"warning: {text}", "yellow")
