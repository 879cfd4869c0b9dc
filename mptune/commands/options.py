"""The options of ``mptune search``, made from the settings that declare them, their panels, and how values are read."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from mptune.data.metrics.table import METRICS
from mptune.errors import SettingsError
from mptune.settings import (
    ERROR,
    RUN,
    DataSettings,
    SearchSettings,
    ShapeRange,
    TensorRtSettings,
    Tolerance,
    options_of,
    read_error,
)

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?:(?P<unit>[KMGT])(?P<binary>i?)B?|B)?", re.IGNORECASE)
_DURATION = re.compile(r"(?:(?P<h>\d+(?:\.\d+)?)h)?(?:(?P<m>\d+(?:\.\d+)?)m)?(?:(?P<s>\d+(?:\.\d+)?)s?)?")


def parse_duration(text: str, option: str = "--timeout") -> float:
    """The seconds of ``8h``, ``90m``, ``1h30m``, ``30s`` or plain seconds."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or not any(match.groups()):
        raise SettingsError(f"{option} {text} is not a duration", "write 8h, 90m, 1h30m, 30s or plain seconds")
    hours, minutes, seconds = (float(match[unit] or 0) for unit in "hms")
    return hours * 3600 + minutes * 60 + seconds


def parse_gpus(text: str) -> tuple[int, ...]:
    """Read GPU numbers such as ``0,1``."""
    numbers = [part.strip() for part in text.split(",")]
    if not all(number.isdecimal() for number in numbers):
        raise SettingsError(f"--gpus {text} is not understood", "write numbers with commas between them, such as 0,1")
    return tuple(int(number) for number in numbers)


def parse_size(text: str, option: str = "--max-disk") -> int:
    """The bytes of ``20GiB``, ``500MB`` or plain bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise SettingsError(f"{option} {text} is not a size", "write 20GiB, 500MB or plain bytes")
    power = 0 if match["unit"] is None else 1 + "KMGT".index(match["unit"].upper())
    return int(float(match["number"]) * (1024 if match["binary"] else 1000) ** power)


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


Command = TypeVar("Command", bound=Callable[..., None])


def parse_engine(name: str) -> str:
    """Check the name of a backend; other packages may bring some, so that all are looked up for a name alone."""
    if name != "auto":
        from mptune.engines.backends.registry import backend_names

        names = ("auto", *backend_names())
        if name not in names:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(map(repr, names))}.")
    return name


_DEFAULTS = SearchSettings()
_OPTIONS = options_of(_DEFAULTS)
_FORMS: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {
    "data": (Path | None, None, lambda given: given),
    "max_error": (str | None, None, read_error),
    "shapes": (list[str] | None, None, lambda texts: tuple(map(ShapeRange.parse, texts))),
    "precisions": (str, ",".join(_DEFAULTS.precisions), lambda text: tuple(word.strip() for word in text.split(","))),
    "tolerance": (list[str] | None, None, lambda texts: tuple(map(Tolerance.parse, texts))),
    "ignore": (list[str] | None, None, tuple),
    "feedback": (list[str] | None, None, tuple),
    "limits": (list[str] | None, None, tuple),
    "plugins": (list[Path] | None, None, tuple),
    "gpus": (str | None, None, parse_gpus),
    "timeout_s": (str | None, None, parse_duration),
    "max_disk_bytes": (str | None, None, parse_size),
    "max_memory_bytes": (str | None, None, lambda text: parse_size(text, "--max-memory")),
    "workspace_mb": (str | None, None, lambda text: parse_size(text, "--workspace") // 2**20),
}
"""Setting -> its type and default at the command line, and what makes the setting of it, where these differ."""


def option_of(setting: str) -> Any:
    """The option of a setting."""
    option, _, _ = _OPTIONS[setting]
    parser = parse_engine if setting == "engine" else None
    return typer.Option(option.name, metavar=option.metavar, help=option.help, parser=parser)


def panels() -> dict[str, tuple[str, ...]]:
    """Headings of ``mptune search --help``, with their options."""
    names: dict[str, tuple[str, ...]] = {}
    for option, _, _ in _OPTIONS.values():
        names[option.panel] = (*names.get(option.panel, ("--metric",) if option.panel == ERROR else ()), option.name)
    return names | {RUN: (*names[RUN], "--explain", "--open", "--quiet", "--json", "--help-all")}


def with_settings(command: Command) -> Command:
    """A command that takes an option for each setting, as keyword arguments by the settings' names."""
    signature = inspect.signature(command, eval_str=True)
    parameters = {name: p for name, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD}
    for name, (_, kind, default) in _OPTIONS.items():
        kind, default, _ = _FORMS.get(name, (kind, default, None))
        parameters[name] = inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option_of(name)]
        )
    command.__signature__ = signature.replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]
    command.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return command


def read_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """A command's arguments as the function of the same name takes them; those that are not given are left out.

    Raises:
        SettingsError: a value is not understood, or is out of range: before anything that is slow is imported.
    """
    own = ("context", "json_")
    values = {name: value for name, value in given.items() if value is not None and value != [] and name not in own}
    read = {name: _FORMS[name][2](value) if name in _FORMS else value for name, value in values.items()}
    if "workspace_mb" in read:
        read["tensorrt"] = TensorRtSettings(workspace_mb=read.pop("workspace_mb"))
    settings = {name: value for name, value in read.items() if name in _OPTIONS and name != "batch"}
    replace(_DEFAULTS, **settings, data_settings=DataSettings(batch=read.get("batch", 1)))
    return read


PluginOption = Annotated[list[Path] | None, option_of("plugins")]
OpsetOption = Annotated[int | None, option_of("opset")]
BatchOption = Annotated[int, option_of("batch")]
EngineOption = Annotated[str, option_of("engine")]
ToleranceOption = Annotated[list[str] | None, option_of("tolerance")]
IgnoreOption = Annotated[list[str] | None, option_of("ignore")]
LimitOption = Annotated[list[str] | None, option_of("limits")]
MaxErrorOption = Annotated[str | None, option_of("max_error")]
MaxLatencyOption = Annotated[float | None, option_of("max_latency_ms")]
MaxMemoryOption = Annotated[str | None, option_of("max_memory_bytes")]
TimeoutOption = Annotated[str | None, option_of("timeout_s")]
MaxDiskOption = Annotated[str | None, option_of("max_disk_bytes")]
