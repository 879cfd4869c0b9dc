"""The options of ``mptune search``, made from the settings that declare them, their panels, and how texts are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from mptune.data.metrics.table import METRICS
from mptune.settings import ERROR, RUN, SearchSettings, options_of, read_error

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?:(?P<unit>[KMGT])(?P<binary>i?)B?|B)?", re.IGNORECASE)
_DURATION = re.compile(r"(?:(?P<h>\d+(?:\.\d+)?)h)?(?:(?P<m>\d+(?:\.\d+)?)m)?(?:(?P<s>\d+(?:\.\d+)?)s?)?")


def parse_duration(text: str) -> float:
    """The seconds of ``8h``, ``90m``, ``1h30m``, ``30s`` or plain seconds."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or not any(match.groups()):
        raise typer.BadParameter(f"{text!r} is not a duration; write 8h, 90m, 1h30m, 30s or plain seconds")
    hours, minutes, seconds = (float(match[unit] or 0) for unit in "hms")
    return hours * 3600 + minutes * 60 + seconds


def parse_gpus(text: str) -> tuple[int, ...]:
    """Read GPU numbers such as ``0,1``."""
    numbers = [part.strip() for part in text.split(",")]
    if not all(number.isdecimal() for number in numbers):
        raise typer.BadParameter(f"{text!r} is not understood; write numbers with commas between them, such as 0,1")
    return tuple(int(number) for number in numbers)


def parse_size(text: str) -> int:
    """The bytes of ``20GiB``, ``500MB`` or plain bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size; write 20GiB, 500MB or plain bytes")
    power = 0 if match["unit"] is None else 1 + "KMGT".index(match["unit"].upper())
    return int(float(match["number"]) * (1024 if match["binary"] else 1000) ** power)


def parse_mebibytes(text: str) -> int:
    """The same in MiB."""
    return parse_size(text) // 2**20


def parse_engine(name: str) -> str:
    """Check the name of a backend; other packages may bring some, so that all are looked up for a name alone."""
    if name != "auto":
        from mptune.engines.backends.registry import backend_names

        names = ("auto", *backend_names())
        if name not in names:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(map(repr, names))}")
    return name


MetricOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME|script.py:function[:max]",
        help=f"The error to minimise: {', '.join(METRICS)}; or a function of your own."
        " Repeatable: the first is optimised, the others are reported."
        "  [default: worst_part]",
    ),
]

_MOST_USED = {
    "--data PATH": "calibration samples: .npz, .npy, or a folder",
    "--max-error X": "fastest plan with at most this error, such as 1e-2 or 1%",
    "--max-latency-ms X": "most exact plan within this latency",
    "--budget N": "number of plans to evaluate  [default: 50]",
    "--timeout 8h": "start no new plan after this time (8h, 90m, 30s)",
    "--target NAME": "device to tune for; `mptune targets` lists the names",
    "--metric NAME": "error to minimise  [default: worst_part]",
    "--out DIR": "run directory  [default: the model's name + .mptune]",
    "--explain": "also show what breaks in FP16, and why groups stay FP32",
    "--quiet": "show the answer alone",
}
"""What ``--help`` shows, on one screen of 80x24; ``--help-all`` has every option, by group."""

_HELP_ALL = "mptune.help_all"


def _show_all_options(context: typer.Context, is_given: bool) -> None:
    if is_given:
        context.meta[_HELP_ALL] = True
        print(context.get_help())
        raise typer.Exit


HelpAllOption = Annotated[
    bool, typer.Option("--help-all", is_eager=True, callback=_show_all_options, help="Show all options.")
]

OTHER = "Options"
"""The panel of the options that no panel lists."""


def with_panels(panels: Mapping[str, tuple[str, ...]]) -> type[TyperCommand]:
    """A command whose help shows its options in these panels."""

    class PanelCommand(TyperCommand):
        """Typer draws panels with rich alone; this is their plain form."""

        def format_options(self, ctx: Any, formatter: Any) -> None:
            if not ctx.meta.get(_HELP_ALL):
                with formatter.section("Common options"):
                    formatter.write_dl(list(_MOST_USED.items()))
                formatter.write_text(f"`{ctx.command_path} --help-all` shows every option.")
                return
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


_OPTIONS = options_of(SearchSettings())
_PARSERS: dict[str, Callable[[str], Any]] = {
    "engine": parse_engine,
    "max_error": read_error,
    "gpus": parse_gpus,
    "timeout_s": parse_duration,
    "max_disk_bytes": parse_size,
    "max_memory_bytes": parse_size,
    "workspace_mb": parse_mebibytes,
}
"""Setting -> what reads its text, where that is not of the setting's type."""


def option_of(setting: str) -> Any:
    """The option of a setting."""
    option = _OPTIONS[setting]
    return typer.Option(option.name, metavar=option.metavar, help=option.help, parser=_PARSERS.get(setting))


def panels() -> dict[str, tuple[str, ...]]:
    """Headings of ``mptune search --help``, with their options."""
    names: dict[str, tuple[str, ...]] = {}
    for option in _OPTIONS.values():
        names[option.panel] = (*names.get(option.panel, ("--metric",) if option.panel == ERROR else ()), option.name)
    return names | {RUN: (*names[RUN], "--explain", "--open", "--quiet", "--json", "--help-all")}


PluginOption = Annotated[list[Path] | None, option_of("plugins")]
OpsetOption = Annotated[int | None, option_of("opset")]
BatchOption = Annotated[int, option_of("batch")]
EngineOption = Annotated[str, option_of("engine")]
ToleranceOption = Annotated[list[str] | None, option_of("tolerance")]
IgnoreOption = Annotated[list[str] | None, option_of("ignore")]
LimitOption = Annotated[list[str] | None, option_of("limits")]
MaxErrorOption = Annotated[float | None, option_of("max_error")]
MaxLatencyOption = Annotated[float | None, option_of("max_latency_ms")]
MaxMemoryOption = Annotated[int | None, option_of("max_memory_bytes")]
KneeOption = Annotated[bool, option_of("knee")]
TimeoutOption = Annotated[float | None, option_of("timeout_s")]
MaxDiskOption = Annotated[int | None, option_of("max_disk_bytes")]
