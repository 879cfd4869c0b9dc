"""One target profile as people read it: every figure with its unit and where it comes from."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

from rich.markup import escape
from rich.text import Text

from mptune.reporting.terminal.console import make_console
from mptune.reporting.terminal.listings import plain_table

if TYPE_CHECKING:
    from mptune.targets.target import Target

_FIGURES = (
    ("compute_capability", "compute capability", ""),
    ("sm_count", "multiprocessors", ""),
    ("gpu_mhz", "GPU clock", "MHz"),
    ("fp16_tflops", "FP16, dense", "TFLOP/s"),
    ("fp32_tflops", "FP32, no TF32", "TFLOP/s"),
    ("tf32_tflops", "TF32, dense", "TFLOP/s"),
    ("bandwidth_gbps", "bandwidth", "GB/s"),
    ("memory_gb", "memory", "GB"),
    ("l2_mb", "L2 cache", "MB"),
    ("launch_us", "kernel launch", "us"),
    ("power_modes", "power modes", ""),
)


def print_target(target: Target, stream: TextIO | None = None) -> None:
    """Print one profile.

    Args:
        target: what to show.
        stream: where to print; stdout by default.
    """
    console = make_console(sys.stdout if stream is None else stream)
    console.print(Text.assemble((target.name, "bold"), f"  {target.title}"), soft_wrap=True)
    if target.note:
        console.print(Text(target.note), soft_wrap=True)
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
        soft_wrap=True,
    )


def _shown(name: str, value: object) -> str:
    if name == "compute_capability" and isinstance(value, tuple):
        return ".".join(str(part) for part in value)
    if isinstance(value, tuple):
        return ", ".join(str(part) for part in value)
    return f"{value:g}"
