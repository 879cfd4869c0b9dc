"""Models and machines on the terminal: an inspection, a comparison, targets, spaces, the doctor, an engine's layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from rich.console import Console

from mptune.finding import OutputColumns, by_severity
from mptune.findings import engine, wording
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
from mptune.reporting.text import environment_facts, unique

if TYPE_CHECKING:
    from mptune.diagnosis.comparing import Comparison
    from mptune.engines import backend, environment
    from mptune.engines.tensorrt.layers import EngineLayers
    from mptune.inspection import Inspection
    from mptune.selftest import SelfTest
    from mptune.targets.target import Target
    from mptune.tuning.space import NamedSpace

_MOST_PLACES = 6
_MOST_REASONS = 3  # why groups cannot be BF16
_STATISTICS = {
    "judged": "error",
    "limit": "limit",
    "judged_fp16": "all-FP16 with pins, emulated",
}  # in the limit's unit
_OF_CONSTANTS = frozenset({"overflow", "vanishing-epsilon", "int64-range"})
_FIGURES = (
    ("compute_capability", "compute capability", ""),
    ("sm_count", "multiprocessors", ""),
    ("gpu_mhz", "GPU clock", "MHz"),
    ("fp16_tflops", "FP16, dense", "TFLOP/s"),
    ("bf16_tflops", "BF16, dense", "TFLOP/s"),
    ("fp32_tflops", "FP32, no TF32", "TFLOP/s"),
    ("tf32_tflops", "TF32, dense", "TFLOP/s"),
    ("bandwidth_gbps", "bandwidth", "GB/s"),
    ("memory_mhz", "memory clock", "MHz"),
    ("memory_gb", "memory", "GB"),
    ("l2_mb", "L2 cache", "MB"),
    ("launch_us", "kernel launch", "us"),
    ("power_modes", "power modes", ""),
)


def print_inspection(inspection: Inspection, stream: TextIO | None = None) -> None:
    """Print the inspection of a model; to stdout by default."""
    console, total = make_console(stream), inspection.flops or 1.0
    for finding in inspection.findings:
        if finding.code == engine.NOTHING:
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
    if inspection.refined:
        _print_title(console, "refined")
    for text in inspection.refined:
        print_text(console, text)

    _print_title(console, "operators")
    operators = [
        (
            operator.name,
            str(operator.nodes),
            str(operator.with_precision),
            quantity(operator.flops, "") if operator.with_precision else "-",
            f"{operator.flops / total:.1%}" if operator.with_precision else "-",
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
        if finding.code != engine.NOTHING:
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
    counts = {word: sum(len(places) for key, places in merged.items() if key[0] == word) for word in wording.SEVERITIES}
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
    shown = [key for key in _STATISTICS if all(key in by for by in comparison.outputs.values())]
    rows = []
    for name, statistics in comparison.outputs.items():
        limit = comparison.limits[name]
        part = str(OutputColumns(name, limit.columns))  # the part that is worst against its limit
        judged = [limit.text(statistics[key]) for key in shown]
        rows.append((part, *judged, f"{statistics['largest_difference']:.3g}"))
    titles = (*(_STATISTICS[key] for key in shown), "largest difference")
    print_table(console, ("output", *titles), rows, right=titles, fold="output")
    for text in comparison.warnings:
        print_text(console, f"warning: {text}", "yellow")
    if comparison.extracted:
        print_text(console, f"extracted: {comparison.extracted}")


def print_targets(targets: Sequence[Target], stream: TextIO | None = None) -> None:
    """Print the profiles as a table; to stdout by default."""
    console = make_console(stream)
    columns = {
        "SM": "sm_count",
        "FP16": "fp16_tflops",
        "FP32": "fp32_tflops",
        "GB/s": "bandwidth_gbps",
        "GB": "memory_gb",
    }
    rows = []
    for target in targets:
        figures = []
        for name in columns.values():
            # The marks of weak sources line up in a column of their own.
            value, source = getattr(target, name), target.sources.get(name, "")
            mark = next((mark for mark in "\N{DAGGER}\N{DOUBLE DAGGER}" if mark in source), " ")
            figures.append("- " if value is None else f"{value:g}{mark}")
        capability = "-" if target.compute_capability is None else ".".join(map(str, target.compute_capability))
        rows.append((target.name, target.title, capability, *figures))
    heads = ("name", "title", "CC", *columns)
    print_table(console, heads, rows, right=tuple(columns), optional=("title",), header_style="bold")
    console.print()
    for line in (
        "FP16 and FP32 in dense TFLOP/s. \N{DAGGER} from memory, \N{DOUBLE DAGGER} inferred, else from NVIDIA's pages.",
        "Every figure's source, power modes and notes: mptune targets NAME",
        "A profile of your own: --target FILE.toml",
    ):
        print_text(console, line)


def print_target(target: Target, stream: TextIO | None = None) -> None:
    """Print one profile; to stdout by default."""
    console = make_console(stream)
    print_text(console, styled((target.name, "bold"), f"  {target.title}"))
    if target.note:
        print_text(console, target.note)
    console.print()
    rows = []
    for name, title, unit in _FIGURES:
        value = getattr(target, name)
        if isinstance(value, tuple):
            text = ("." if name == "compute_capability" else ", ").join(map(str, value))
        else:
            text = "" if value is None else f"{value:g}"
        if value:
            rows.append((title, text, unit, target.sources[name]))
    print_table(
        console, ("figure", "value", "unit", "source"), rows, right=("value",), fold="source", header_style="bold"
    )
    console.print()
    note = (
        "\N{DAGGER} from memory, \N{DOUBLE DAGGER} inferred. Power modes cap clocks: the caps are read on the device."
    )
    print_text(console, note)


def print_spaces(spaces: Sequence[NamedSpace], stream: TextIO | None = None) -> None:
    """Print the search spaces with what they pin and try first; to stdout by default."""
    console = make_console(stream)
    for space in spaces:
        file = space.file
        print_text(console, styled((space.name, "bold"), f"  {file.description}"))
        facts = [f"groups: {file.granularity}"]
        facts += [f"pin {name}: {', '.join(pins)}" for name in ("fp32", "fp16") if (pins := file.pin.get(name))]
        facts += [f"seed {seed.name}: {', '.join(seed.fp32)} in FP32, the rest in FP16" for seed in file.seed]
        for fact in facts:
            print_text(console, fact, indent=4)
    console.print()
    console.print("A space of your own: --space FILE.toml")


def print_doctor(
    machine: environment.Environment, toolchains: Sequence[backend.BackendStatus], stream: TextIO | None = None
) -> None:
    """Print what this machine has, which toolchains work, and how to install those that do not."""
    console = make_console(stream)
    print_facts(console, environment_facts(machine), 16)
    console.print()
    for status in toolchains:
        word, style = ("ready", "green") if status.available else ("missing", "yellow")
        print_text(console, styled(f"{status.name:<24}", (f"{word:<8}", style), f"  {status.reason}"))
        if status.install and not status.available:
            print_text(console, f"install: {status.install}", indent=4)
    for text in machine.warnings:
        print_text(console, f"warning: {text}", "yellow")


_STATUS_STYLES = {"holds": "green", "does not hold": "bold red", "cannot be checked here": "yellow"}


def print_selftest(result: SelfTest, stream: TextIO | None = None) -> None:
    """Print a line for each check of the self-test; to stdout by default."""
    console = make_console(stream)
    console.print()
    for check in result.checks:
        limit = "" if check.figure is None else f" (limit {check.limit})"
        status = (check.status, _STATUS_STYLES[check.status])
        print_text(console, styled(f"{check.engine:<17}{check.name:<13}", status, f": {check.text}{limit}"))
    failed = sum(check.status == "does not hold" for check in result.checks)
    verdict = "every check that can run here passed"
    if not result.holds:
        verdict = f"{failed} of {len(result.checks)} checks failed" if failed else "nothing could be checked"
    console.print()
    print_text(console, f"self-test: {verdict}, after {result.seconds:.0f} s")
    if not result.holds:
        print_text(console, "report it with the output of: mptune doctor --selftest --json")


def print_layers(engine: EngineLayers, stream: TextIO | None = None) -> None:
    """Print the layers in the engine's order; one that computes no node of the model has its name there."""
    console = make_console(stream)
    total_ms = sum(layer.ms for layer in engine.layers)
    print_text(console, f"plan {engine.plan}: {len(engine.layers)} layers of its engine", "bold")
    rows = []
    for layer in engine.layers:
        share = f"{layer.ms / total_ms:.1%}" if total_ms > 0 else "-"
        types = " ".join(precision.name for precision in layer.types) or "-"
        rows.append((f"{layer.ms:.4f}", share, types, ", ".join(layer.nodes) or f"{layer.name} (added by the engine)"))
    print_table(console, ("ms", "share", "writes", "nodes"), rows, right=("ms", "share"), fold="nodes")
    print_text(
        console, "times are from the engine's own profiler, which adds overhead; --json has TensorRT's layer names"
    )
