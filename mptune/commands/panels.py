"""Options of a command in panels of its help, by what they are about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typer.core import TyperCommand

OTHER = "Options"
"""The panel of the options that no panel lists."""


def with_panels(panels: Mapping[str, tuple[str, ...]]) -> type[TyperCommand]:
    """A command whose help shows its options in these panels."""

    class PanelCommand(TyperCommand):
        """Typer draws panels with rich alone; this is their plain form."""

        def format_options(self, ctx: Any, formatter: Any) -> None:
            records = {}
            arguments = []
            for param in self.get_params(ctx):
                record = param.get_help_record(ctx)
                if record is not None and param.param_type_name == "argument":
                    arguments.append(record)
                elif record is not None:
                    records[next(name for name in param.opts if name.startswith("--"))] = record
            if arguments:
                with formatter.section("Arguments"):
                    formatter.write_dl(arguments)
            placed = {name for names in panels.values() for name in names}
            rest = tuple(name for name in records if name not in placed)
            for heading, names in (*panels.items(), (OTHER, rest)):
                with formatter.section(heading):
                    formatter.write_dl([records[name] for name in names if name in records])

    return PanelCommand
