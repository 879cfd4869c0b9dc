"""Lists on the terminal: targets, one target's figures, search spaces, and what this machine can do."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mptune.reporting.terminal.console import make_console
from mptune.reporting.text import environment_facts

if TYPE_CHECKING:
    from mptune.engines.environment import Environment
    from mptune.engines.toolchains.choose import ToolchainStatus
    from mptune.targets.target import Target
    from mptune.tuning.space import NamedSpace


WIDE = 96
"""Minimum columns for titles."""

_FIGURES = (
    ("compute_capability", "compute capability", ""),
    ("sm_count", "multiprocessors", ""),
    ("gpu_mhz", "GPU clock", "MHz"),
    ("fp16_tflops", "FP16, dense", "TFLOP/s"),
    ("bf16_tflops", "BF16, dense", "TFLOP/s"),
    ("fp32_tflops", "FP32, no TF32", "TFLOP/s"),
    ("tf32_tflops", "TF32, dense", "TFLOP/s"),
    ("bandwidth_gbps", "bandwidth", "GB/s"),
    ("memory_gb", "memory", "GB"),
    ("l2_mb", "L2 cache", "MB"),
    ("launch_us", "kernel launch", "us"),
    ("power_modes", "power modes", ""),
)


def plain_table(*columns: str, right: Sequence[str] = ()) -> Table:
    """A table without lines; the columns named in ``right`` hold numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return table


def print_targets(targets: Sequence[Target], stream: TextIO | None = None) -> None:
    """Print the profiles as a table.

    Args:
        targets: what to list.
        stream: where to print; stdout by default.
    """
    console = make_console(sys.stdout if stream is None else stream)
    figures = ("SM", "FP16", "FP32", "GB/s", "GB")
    titles = console.width >= WIDE
    table = plain_table("name", *(["title"] if titles else []), "CC", *figures, right=figures)
    for target in targets:
        capability = target.compute_capability
        table.add_row(
            escape(target.name),
            *([escape(target.title)] if titles else []),
            "-" if capability is None else f"{capability[0]}.{capability[1]}",
            _figure(target, "sm_count"),
            _figure(target, "fp16_tflops"),
            _figure(target, "fp32_tflops"),
            _figure(target, "bandwidth_gbps"),
            _figure(target, "memory_gb"),
        )
    console.print(table)
    console.print()
    for line in (
        "FP16 and FP32 in dense TFLOP/s. \N{DAGGER} from memory, \N{DOUBLE DAGGER} inferred, else from NVIDIA's pages.",
        "Every figure's source, power modes and notes: mptune targets NAME",
        "A profile of your own: --target FILE.toml",
    ):
        console.print(line, soft_wrap=not console.is_terminal)


def _figure(target: Target, name: str) -> str:
    """A figure with the mark of its source where that is weak; the marks line up in a column of their own."""
    value = getattr(target, name)
    source = target.sources.get(name, "")
    mark = next((mark for mark in "\N{DAGGER}\N{DOUBLE DAGGER}" if mark in source), " ")
    return "- " if value is None else f"{value:g}{mark}"


def print_target(target: Target, stream: TextIO | None = None) -> None:
    """Print one profile.

    Args:
        target: what to show.
        stream: where to print; stdout by default.
    """
    console = make_console(sys.stdout if stream is None else stream)
    console.print(Text.assemble((target.name, "bold"), f"  {target.title}"), soft_wrap=True)
    if target.note:
        console.print(Text(target.note), soft_wrap=not console.is_terminal)
    console.print()
    table = plain_table("figure", "value", "unit", "source", right=("value",))
    table.columns[-1].no_wrap = False
    for name, title, unit in _FIGURES:
        value = getattr(target, name)
        if value:
            table.add_row(title, escape(_shown(name, value)), unit, escape(target.sources[name]))
    console.print(table)
    console.print()
    console.print(
        "\N{DAGGER} from memory, \N{DOUBLE DAGGER} inferred. Power modes cap clocks: the caps are read on the device.",
        soft_wrap=not console.is_terminal,
    )


def _shown(name: str, value: object) -> str:
    if name == "compute_capability" and isinstance(value, tuple):
        return ".".join(str(part) for part in value)
    if isinstance(value, tuple):
        return ", ".join(str(part) for part in value)
    return f"{value:g}"


def print_spaces(spaces: Sequence[NamedSpace], stream: TextIO | None = None) -> None:
    """Print the search spaces with what they pin and try first.

    Args:
        spaces: what to list.
        stream: where to print; stdout by default.
    """
    console = make_console(sys.stdout if stream is None else stream)
    for space in spaces:
        file = space.file
        heading = Text.assemble((space.name, "bold"), f"  {file.description}")
        console.print(heading, soft_wrap=not console.is_terminal)
        facts: list[tuple[str, str]] = [("groups", file.granularity)]
        facts += [(f"pin {name}", ", ".join(found)) for name in ("fp32", "fp16") if (found := file.pin.get(name))]
        facts += [(f"seed {seed.name}", f"{', '.join(seed.fp32)} in FP32, the rest in FP16") for seed in file.seed]
        for name, value in facts:
            _print_indented(console, Text(f"{name}: {value}"), 4)
    console.print()
    console.print("A space of your own: --space FILE.toml")


def print_doctor(environment: Environment, toolchains: Sequence[ToolchainStatus], stream: TextIO | None = None) -> None:
    """Print what this machine has, which toolchains work, and how to install those that do not.

    Args:
        environment: the machine.
        toolchains: every toolchain that mptune knows.
        stream: where to print; stdout by default.
    """
    console = make_console(sys.stdout if stream is None else stream)
    for name, value in environment_facts(environment):
        console.print(Text.assemble((f"{name:<16}", "dim"), value), soft_wrap=True)
    console.print()
    for status in toolchains:
        word, style = ("ready", "green") if status.available else ("missing", "yellow")
        state = Text.assemble(f"{status.name:<24}", (f"{word:<8}", style))
        if console.is_terminal and status.reason:
            console.print(state)
            _print_indented(console, Text(status.reason), 4)
        else:
            console.print(state + Text(f"  {status.reason}" if status.reason else ""), soft_wrap=True)
        if status.install and not status.available:
            _print_indented(console, Text(f"install: {status.install}"), 4)
    for text in environment.warnings:
        console.print(Text(f"warning: {text}", style="yellow"), soft_wrap=not console.is_terminal)


def _print_indented(console: Console, text: Text, indent: int) -> None:
    """Whole lines where something reads them; wrapped at words, and indented, where a person does."""
    if console.is_terminal:
        console.print(Padding(text, (0, 0, 0, indent)))
    else:
        console.print(Text(" " * indent) + text, soft_wrap=True)
