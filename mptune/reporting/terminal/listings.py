"""Lists on the terminal: targets, one target's figures, search spaces, what this machine can do, and its self-test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from rich.markup import escape
from rich.text import Text

from mptune.reporting.terminal.console import make_console, plain_table, print_fact, print_text
from mptune.reporting.text import environment_facts

if TYPE_CHECKING:
    from mptune.engines.backends.backend import BackendStatus
    from mptune.engines.environment import Environment
    from mptune.selftest import SelfTest
    from mptune.targets.target import Target
    from mptune.tuning.space import NamedSpace


_FIGURES_WIDTH = 45
"""Columns that the figures take in the table of targets."""

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


def print_targets(targets: Sequence[Target], stream: TextIO | None = None) -> None:
    """Print the profiles as a table; to stdout by default."""
    console = make_console(stream)
    figures = ("SM", "FP16", "FP32", "GB/s", "GB")
    # A name is copied, so it is never cut: titles stand beside names where both fit whole.
    names_width, titles_width = (
        max(len(getattr(target, attribute)) for target in targets) for attribute in ("name", "title")
    )
    titles = console.width >= names_width + titles_width + _FIGURES_WIDTH
    table = plain_table(("name", *(["title"] if titles else []), "CC", *figures), figures)
    for target in targets:
        capability = target.compute_capability
        table.add_row(
            escape(target.name),
            *([escape(target.title)] if titles else []),
            "-" if capability is None else f"{capability[0]}.{capability[1]}",
            *(
                _figure(target, name)
                for name in ("sm_count", "fp16_tflops", "fp32_tflops", "bandwidth_gbps", "memory_gb")
            ),
        )
    console.print(table)
    console.print()
    for line in (
        "FP16 and FP32 in dense TFLOP/s. \N{DAGGER} from memory, \N{DOUBLE DAGGER} inferred, else from NVIDIA's pages.",
        "Every figure's source, power modes and notes: mptune targets NAME",
        "A profile of your own: --target FILE.toml",
    ):
        print_text(console, line)


def _figure(target: Target, name: str) -> str:
    """A figure with the mark of its source where that is weak; the marks line up in a column of their own."""
    value = getattr(target, name)
    source = target.sources.get(name, "")
    mark = next((mark for mark in "\N{DAGGER}\N{DOUBLE DAGGER}" if mark in source), " ")
    return "- " if value is None else f"{value:g}{mark}"


def print_target(target: Target, stream: TextIO | None = None) -> None:
    """Print one profile; to stdout by default."""
    console = make_console(stream)
    console.print(Text.assemble((target.name, "bold"), f"  {target.title}"), soft_wrap=True)
    if target.note:
        print_text(console, target.note)
    console.print()
    table = plain_table(("figure", "value", "unit", "source"), ("value",))
    table.columns[-1].no_wrap = False
    for name, title, unit in _FIGURES:
        value = getattr(target, name)
        if value:
            table.add_row(title, escape(_shown(name, value)), unit, escape(target.sources[name]))
    console.print(table)
    console.print()
    print_text(
        console,
        "\N{DAGGER} from memory, \N{DOUBLE DAGGER} inferred. Power modes cap clocks: the caps are read on the device.",
    )


def _shown(name: str, value: object) -> str:
    if isinstance(value, tuple):
        return ("." if name == "compute_capability" else ", ").join(map(str, value))
    return f"{value:g}"


def print_spaces(spaces: Sequence[NamedSpace], stream: TextIO | None = None) -> None:
    """Print the search spaces with what they pin and try first; to stdout by default."""
    console = make_console(stream)
    for space in spaces:
        file = space.file
        print_text(console, Text.assemble((space.name, "bold"), f"  {file.description}"))
        facts = [f"groups: {file.granularity}"]
        facts += [f"pin {name}: {', '.join(pins)}" for name in ("fp32", "fp16") if (pins := file.pin.get(name))]
        facts += [f"seed {seed.name}: {', '.join(seed.fp32)} in FP32, the rest in FP16" for seed in file.seed]
        for fact in facts:
            print_text(console, fact, indent=4)
    console.print()
    console.print("A space of your own: --space FILE.toml")


def print_doctor(environment: Environment, toolchains: Sequence[BackendStatus], stream: TextIO | None = None) -> None:
    """Print what this machine has, which toolchains work, and how to install those that do not."""
    console = make_console(stream)
    for name, value in environment_facts(environment):
        print_fact(console, name, value, 16)
    console.print()
    for status in toolchains:
        word, style = ("ready", "green") if status.available else ("missing", "yellow")
        state = Text.assemble(f"{status.name:<24}", (f"{word:<8}", style))
        if console.is_terminal and status.reason:
            console.print(state)
            print_text(console, status.reason, indent=4)
        else:
            console.print(state + Text(f"  {status.reason}" if status.reason else ""), soft_wrap=True)
        if status.install and not status.available:
            print_text(console, f"install: {status.install}", indent=4)
    for text in environment.warnings:
        print_text(console, f"warning: {text}", "yellow")


_STATUS_STYLES = {"holds": "green", "does not hold": "bold red", "cannot be checked here": "yellow"}


def print_selftest(result: SelfTest, stream: TextIO | None = None) -> None:
    """Print a line for each check of the self-test; to stdout by default."""
    console = make_console(stream)
    console.print()
    for check in result.checks:
        limit = "" if check.figure is None else f" (limit {check.limit})"
        parts = (f"{check.engine:<17}{check.name:<13}", (check.status, _STATUS_STYLES[check.status]))
        console.print(Text.assemble(*parts, f": {check.text}{limit}"), soft_wrap=True)
    failed = sum(check.status == "does not hold" for check in result.checks)
    verdict = "every check that can be taken here holds"
    if not result.holds:
        verdict = f"{failed} of {len(result.checks)} checks do not hold" if failed else "nothing could be checked"
    console.print()
    console.print(Text(f"self-test: {verdict}, after {result.seconds:.0f} s"), soft_wrap=True)
    if not result.holds:
        console.print(Text("report it with the output of: mptune doctor --selftest --json"), soft_wrap=True)
