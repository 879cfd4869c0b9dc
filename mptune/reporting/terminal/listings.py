"""Lists on the terminal: targets, search spaces, what this machine can do, its self-test, the layers of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from mptune.reporting.terminal.console import make_console, print_facts, print_table, print_text, styled
from mptune.reporting.text import environment_facts

if TYPE_CHECKING:
    from mptune.engines.backend import BackendStatus
    from mptune.engines.environment import Environment
    from mptune.engines.tensorrt.layers import EngineLayers
    from mptune.selftest import SelfTest
    from mptune.targets.target import Target
    from mptune.tuning.space import NamedSpace


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


def print_doctor(environment: Environment, toolchains: Sequence[BackendStatus], stream: TextIO | None = None) -> None:
    """Print what this machine has, which toolchains work, and how to install those that do not."""
    console = make_console(stream)
    print_facts(console, environment_facts(environment), 16)
    console.print()
    for status in toolchains:
        word, style = ("ready", "green") if status.available else ("missing", "yellow")
        print_text(console, styled(f"{status.name:<24}", (f"{word:<8}", style), f"  {status.reason}"))
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
        status = (check.status, _STATUS_STYLES[check.status])
        print_text(console, styled(f"{check.engine:<17}{check.name:<13}", status, f": {check.text}{limit}"))
    failed = sum(check.status == "does not hold" for check in result.checks)
    verdict = "every check that can be taken here holds"
    if not result.holds:
        verdict = f"{failed} of {len(result.checks)} checks do not hold" if failed else "nothing could be checked"
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
    print_text(console, "times: the engine's own profiler, which has a cost; --json has TensorRT's names of the layers")
