"""``mptune report --layers`` on the terminal: each layer of an engine, and the nodes that it computes."""

from __future__ import annotations

from typing import TextIO

from rich.text import Text

from mptune.engines.jobs.layer_times import EngineLayers
from mptune.reporting.terminal.console import make_console, plain_table, print_text

ADDED = "(added by the engine)"


def print_layers(engine: EngineLayers, stream: TextIO | None = None) -> None:
    """Print the layers in the engine's order; one that computes no node of the model has its name there."""
    console = make_console(stream)
    total_ms = sum(layer.ms for layer in engine.layers)
    print_text(console, f"plan {engine.plan}: {len(engine.layers)} layers of its engine", "bold")
    table = plain_table(("ms", "share", "writes", "nodes"), ("ms", "share"), "dim")
    table.columns[-1].no_wrap, table.columns[-1].overflow = False, "fold"
    for layer in engine.layers:
        share = f"{layer.ms / total_ms:.1%}" if total_ms > 0 else "-"
        nodes = ", ".join(layer.nodes) or f"{layer.name} {ADDED}"
        types = " ".join(precision.name for precision in layer.types) or "-"
        table.add_row(*map(Text, (f"{layer.ms:.4f}", share, types, nodes)))
    console.print(table)
    print_text(console, "times: the engine's own profiler, which has a cost; --json has TensorRT's names of the layers")
