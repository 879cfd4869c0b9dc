"""``mptune inspect`` on the terminal: the model, its groups, its operators and its hazards, as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mptune.finding import Finding, by_severity
from mptune.findings.engine import NOTHING
from mptune.findings.wording import SEVERITIES
from mptune.graph.plan import Precision
from mptune.printable import counts_text, cut
from mptune.reporting.terminal.console import (
    SEVERITY_STYLES,
    make_console,
    plain_table,
    print_fact,
    print_text,
    room_beside,
)
from mptune.reporting.text import cut_front

if TYPE_CHECKING:
    from mptune.graph.hazards.hazard import Hazard
    from mptune.graph.loading.tensors import TensorInfo
    from mptune.inspection.record import Inspection
    from mptune.targets.memory import MemoryNeed

WIDE = 96
"""Minimum columns for the operators of each group."""

_MOST_PLACES = 6
_REASONS = 3
"""Why groups cannot be BF16: so many are shown."""
_OF_CONSTANTS = frozenset({"overflow", "vanishing-epsilon", "int64-range"})


def print_inspection(inspection: Inspection, stream: TextIO | None = None) -> None:
    """Print the inspection of a model; to stdout by default."""
    console = make_console(stream)
    for finding in inspection.findings:
        if finding.code == NOTHING:
            print_text(console, f"warning: {finding.message}", "yellow")
    for name, value in _facts(inspection):
        print_fact(console, name, value)
    _section(console, "groups")
    width = console.width
    if not console.is_terminal:  # nobody looks at it: names stay whole, to be copied
        console.width += max((len(item.group.name) for item in inspection.groups), default=0)
    console.print(_groups(inspection, width, whole_names=not console.is_terminal))
    console.width = width
    _pins(console, inspection)
    _section(console, "operators")
    console.print(_operators(inspection))
    _hazards(console, inspection)
    for text in inspection.warnings:
        print_text(console, f"warning: {text}", "yellow")


def quantity(value: float, unit: str) -> str:
    """A number with three digits and a decimal prefix, such as ``1.23 GFLOP``."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:
            digits = value / size
            return f"{digits:.{2 if digits < 9.995 else 1 if digits < 99.95 else 0}f} {prefix}{unit}"
    return f"{value:.0f} {unit}"


def _section(console: Console, title: str) -> None:
    console.print()
    console.print(Text(title, style="bold"))


def _facts(inspection: Inspection) -> list[tuple[str, str]]:
    model = inspection.model
    groups = inspection.groups
    pinned = sum(g.pin is not None for g in groups)
    patterns = len({g.group.pattern for g in groups})
    traffic = [
        sum(getattr(g.cost, name) for g in groups) + getattr(inspection.rest, name)
        for name in ("fp32_bytes", "fp16_bytes")
    ]
    return [
        ("model", f"{model.path} (sha256 {model.sha256[:12]}), {len(model.nodes)} nodes"),
        ("weights", f"{quantity(inspection.parameters, '').strip()} values, {quantity(inspection.weight_bytes, 'B')}"),
        ("inputs", ", ".join(_value(info) for info in model.inputs)),
        ("outputs", ", ".join(_value(info) for info in model.outputs)),
        (
            "groups",
            f"{len(groups)} at {inspection.granularity} granularity, {patterns} different;"
            f" {len(groups) - pinned} free, {pinned} pinned (space {inspection.space})",
        ),
        (
            "plans",
            _plans(len(groups) - pinned, sum(g.pin is not None and g.pin.precision is Precision.FP32 for g in groups)),
        ),
        *([("BF16", _bf16(inspection))] if any(item.only_bf16 for item in groups) else []),
        (
            "compute",
            f"{quantity(inspection.flops, 'FLOP')} and {quantity(traffic[0], 'B')} of traffic in FP32"
            f" ({quantity(traffic[1], 'B')} in FP16)",
        ),
        ("memory", _memory(inspection.memory)),
        ("shapes", _shapes(inspection)),
    ]


def _plans(free: int, fp32: int) -> str:
    """How many plans there are, and what their ends are called."""
    fp16 = f"all-FP16 but {fp32} pinned" if fp32 else "all-FP16"
    return (
        f"2^{free} between all-FP32 and {fp16}" if free else f"none to search: {fp32} of the groups are pinned to FP32"
    )


def _bf16(inspection: Inspection) -> str:
    """Which groups could be BF16, and why the others cannot; engines may lack kernels beside."""
    groups = inspection.groups
    beyond = sum(g.only_bf16 for g in groups)
    text = f"{sum(g.no_bf16 is None for g in groups)} of {len(groups)} groups could be BF16"
    if beyond:
        text += f", {beyond} of them pinned to FP32 because of FP16 (--precisions fp32,fp16,bf16)"
    reasons = Counter(g.no_bf16 for g in groups if g.no_bf16 is not None).most_common()
    shown = [f"{count} not: {reason}" for reason, count in reasons[:_REASONS]]
    others = sum(count for _, count in reasons[_REASONS:])
    return "; ".join([text, *shown, *([f"{others} not for other reasons"] if others else [])])


def _memory(need: MemoryNeed) -> str:
    """Weights and the largest sum of live activations, in both precisions."""
    return "; ".join(
        f"{quantity(need.total(precision), 'B')} in {precision.upper()} ({quantity(weights, 'B')} of weights, "
        f"{quantity(activations, 'B')} of values at {peak or 'the inputs'})"
        for precision, weights, activations, peak in (
            (Precision.FP32, need.fp32_weights, need.fp32_activations, need.fp32_peak),
            (Precision.FP16, need.fp16_weights, need.fp16_activations, need.fp16_peak),
        )
    )


def _value(info: TensorInfo) -> str:
    shape = (
        "?" if info.shape is None else " x ".join("?" if dim is None else str(dim) for dim in info.shape) or "scalar"
    )
    return f"{info.name} {info.dtype} {shape}"


def _shapes(inspection: Inspection) -> str:
    unknown = f"; {inspection.unknown_shapes} values of unknown shape count little" if inspection.unknown_shapes else ""
    if inspection.observed is not None:
        few = inspection.samples < inspection.available
        rest = f": the first of {inspection.available}; --strict runs all" if few else ""
        return f"observed on {inspection.samples} samples of {inspection.observed}{rest}{unknown}"
    if inspection.assumed:
        sizes = ", ".join(f"{name} = {size}" for name, size in inspection.assumed.items())
        return f"ASSUMED: {sizes} (--batch sets the batch, --data shows real ones){unknown}"
    return f"fixed in the model{unknown}"


def _groups(inspection: Inspection, width: int, *, whole_names: bool) -> Table:
    """One row a group; operators, and names unless they stay whole, are cut to what the other columns leave."""
    total = inspection.flops or 1.0
    fixed = [
        (
            item.group.id,
            item.group.kind,
            quantity(item.cost.flops, ""),
            f"{item.cost.flops / total:.1%}",
            quantity(item.cost.fp32_bytes, "B"),
            f"x{item.repeats}" if item.repeats > 1 else "",
            "free" if item.pin is None else f"{str(item.pin.precision).upper()} pinned",
        )
        for item in inspection.groups
    ]
    heads = ("id", "kind", "FLOP", "share", "bytes", "same", "precision")
    left = max(room_beside(width, heads, fixed), 20)
    longest = max((len(item.group.name) for item in inspection.groups), default=0)
    for_name = min(longest, left - 2 if width < WIDE else max(16, left - 2 - 14))
    for_ops = left - for_name - 4 if width >= WIDE else 0
    for_name = longest if whole_names else for_name
    named = ("id", "name", "kind", *(["operators"] if for_ops > 0 else []))
    table = plain_table((*named, *heads[2:]), heads[2:-1], "dim")
    for item, (id_, kind, *figures, precision) in zip(inspection.groups, fixed, strict=True):
        ops = [Text(cut(counts_text(item.group.ops), for_ops))] if for_ops > 0 else []
        style = "" if item.pin is None else "yellow"
        table.add_row(id_, Text(cut_front(item.group.name, for_name)), kind, *ops, *figures, Text(precision, style))
    return table


def _pins(console: Console, inspection: Inspection) -> None:
    """Why groups are pinned, groups of the same reason together."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for item in inspection.groups:
        if item.pin is not None:
            reasons.setdefault((str(item.pin.precision).upper(), item.pin.reason), []).append(item.group.id)
    if reasons:
        _section(console, "pinned")
    for (precision, reason), ids in reasons.items():
        print_text(console, Text.assemble((f"{precision} ", "yellow"), _places(ids), f": {reason}"))


def _operators(inspection: Inspection) -> Table:
    figures = ("nodes", "in groups", "FLOP", "share")
    table = plain_table(("operator", *figures), figures, "dim")
    if any(operator.fixed for operator in inspection.operators):
        table.add_column("the others have no precision, because", overflow="fold")
    total = inspection.flops or 1.0
    for operator in inspection.operators:
        table.add_row(
            Text(operator.name),
            str(operator.count),
            str(operator.grouped),
            quantity(operator.flops, "") if operator.grouped else "-",
            f"{operator.flops / total:.1%}" if operator.grouped else "-",
            *([Text(operator.fixed)] if len(table.columns) > 5 else []),
        )
    return table


def _hazards(console: Console, inspection: Inspection) -> None:
    """What is wrong with the model as a whole, then one entry for each reason and cure, with all the places of it."""
    about = [finding for finding in by_severity(inspection.about) if finding.code != NOTHING]
    severities = [*(finding.severity for finding in about), *(hazard.severity for hazard in inspection.hazards)]
    counts = {severity: severities.count(severity) for severity in SEVERITIES}
    summary = ", ".join(f"{count} {severity}{'s' if count > 1 else ''}" for severity, count in counts.items() if count)
    _section(console, f"hazards: {summary.replace('infos', 'info') or 'none found'}")
    if inspection.observed is None:
        console.print(Text("values were not observed: give --data", style="dim"), soft_wrap=not console.is_terminal)
    merged: dict[tuple[str, str, str, str], list[str]] = {}
    for finding in about:
        merged.setdefault((finding.severity, finding.code, finding.text, finding.cure), []).append(_about(finding))
    for hazard in inspection.hazards:
        key = (hazard.severity, hazard.code, hazard.reason, hazard.cure)
        merged.setdefault(key, []).append(_where(hazard))
    for (severity, kind, reason, cure), places in merged.items():
        head = Text.assemble((severity, SEVERITY_STYLES[severity]), f" {kind}: {_places(places)}")
        print_text(console, head)
        print_text(console, reason, indent=2)
        print_text(console, f"-> {cure}", "dim", 2)


def _about(finding: Finding) -> str:
    """The value that a finding is about, or the model."""
    names = finding.where.first_names()
    return str(next((names[kind] for kind in ("tensor", "output", "input") if kind in names), "the model"))


def _where(hazard: Hazard) -> str:
    """Group and node, and which of the values that the node reads where that is not plain."""
    place = hazard.place
    parts = [place.group, place.node, place.tensor if hazard.code in _OF_CONSTANTS or not place.node else None]
    return " ".join(part for part in parts if part)


def _places(places: Sequence[str]) -> str:
    unique = list(dict.fromkeys(places))
    more = f" and {len(unique) - _MOST_PLACES} more" if len(unique) > _MOST_PLACES else ""
    return ", ".join(unique[:_MOST_PLACES]) + more
