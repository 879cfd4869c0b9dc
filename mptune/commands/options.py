"""The options that settings declare, their panels in the help, and how their texts are read."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from mptune import settings
from mptune.data.metrics.table import METRICS

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?:(?P<unit>[KMGT])(?P<binary>i?)B?|B)?", re.IGNORECASE)
_DURATION = re.compile(r"(?:(?P<h>\d+(?:\.\d+)?)h)?(?:(?P<m>\d+(?:\.\d+)?)m)?(?:(?P<s>\d+(?:\.\d+)?)s?)?")

Command = TypeVar("Command", bound=Callable[..., None])


def parse_duration(text: str) -> float:
    """The seconds of ``8h``, ``90m``, ``1h30m``, ``30s`` or plain seconds."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or not any(match.groups()):
        raise typer.BadParameter(f"{text!r} is not a duration; write 8h, 90m, 1h30m, 30s or plain seconds")
    hours, minutes, seconds = (float(match[unit] or 0) for unit in "hms")
    return hours * 3600 + minutes * 60 + seconds


def parse_size(text: str) -> int:
    """The bytes of ``20GiB``, ``500MB`` or plain bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size; write 20GiB, 500MB or plain bytes")
    power = 0 if match["unit"] is None else 1 + "KMGT".index(match["unit"].upper())
    return int(float(match["number"]) * (1024 if match["binary"] else 1000) ** power)


def _parse_gpus(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text, re.ASCII):
        raise typer.BadParameter(f"{text!r} is not understood; write numbers with commas between them, such as 0,1")
    return tuple(map(int, text.split(",")))


def _parse_engine(name: str) -> str:
    if name != "auto":
        from mptune.engines.environment import backend_entries  # late: other packages may bring more

        names = ("auto", *backend_entries())
        if name not in names:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(map(repr, names))}")
    return name


_DECLARED = settings.declarations(settings.SearchSettings)
_OWNERS = (settings.SearchSettings, settings.DataSettings, settings.TensorRtSettings)
_TYPES = {name: kind for owner in _OWNERS for name, kind in get_type_hints(owner).items()}
_PARSERS: dict[str, Callable[[str], Any]] = {
    "engine": _parse_engine,
    "max_error": settings.read_error,
    "gpus": _parse_gpus,
    "timeout_s": parse_duration,
    "max_disk_bytes": parse_size,
    "max_memory_bytes": parse_size,
    "workspace_mb": lambda text: parse_size(text) // 2**20,
}
"""Setting -> what reads its text, where that is not of the setting's type."""

SEARCH_OPTIONS = tuple(name for name, each in _DECLARED.items() if each.panel != settings.PYTHON)
"""The settings that ``mptune search`` has an option for."""


def with_settings(*names: str) -> Callable[[Command], Command]:
    """Give a command the options of these settings in place of its ``**settings``, in which it gets their values."""

    def decorated(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        parameters = [
            *(each for each in own if each.default is each.empty),
            *map(_parameter, names),
            *(each.replace(kind=each.KEYWORD_ONLY) for each in own if each.default is not each.empty),
        ]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return command

    return decorated


def _parameter(name: str) -> inspect.Parameter:
    """The option of a setting, as a parameter of a command."""
    declared, kind, default = _DECLARED[name], _TYPES[name], _DECLARED[name].default
    text, parser = declared.help, _PARSERS.get(name)
    if name == "metric":
        kind, default, text = list[str] | None, None, text.replace("a named metric", ", ".join(METRICS))
    elif name == "budget":  # not given, it is that of the run
        kind, default = int | None, None
    elif name == "precisions":
        kind, default = str, ",".join(default)
    elif parser is not None:
        kind, default = Any, default or None
    elif get_origin(kind) is tuple:  # given once for each
        kind, default = list[Path] | None if kind == tuple[Path, ...] else list[str] | None, None
    elif settings.InMemory in get_args(kind):
        kind = Path | None
    names = [settings.option_name(name), *(["-o"] if name == "out" else [])]
    shown = typer.Option(*names, metavar=declared.metavar, help=text, parser=parser)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, shown])


_MOST_USED = {
    "--data PATH": "calibration samples: .npz, .npy, or a folder",
    "--max-error X": "fastest plan with at most this error, such as 1e-2 or 1%",
    "--max-latency-ms X": "most exact plan within this latency",
    "--budget N": "number of plans to evaluate  [default: 50, or the run's]",
    "--timeout 8h": "start no new plan after this time (8h, 90m, 30s)",
    "--target NAME": "device to tune for; `mptune targets` lists the names",
    "--metric NAME": "error to minimise  [default: worst_part]",
    "-o, --out DIR": "run directory  [default: the model's name + .mptune]",
    "--explain": "also show what breaks in FP16, and why groups stay FP32",
    "--quiet": "show the answer alone",
}
"""What ``mptune search --help`` shows, on one screen of 80x24; ``--help-all`` has every option, by group."""

_HELP_ALL = "mptune.help_all"


def _show_all_options(context: typer.Context, is_given: bool) -> None:
    if is_given:
        context.meta[_HELP_ALL] = True
        print(context.get_help())
        raise typer.Exit


HelpAllOption = Annotated[
    bool, typer.Option("--help-all", is_eager=True, callback=_show_all_options, help="Show all options.")
]


class SearchCommand(TyperCommand):
    """``mptune search``: its help shows the most used options, or all of them in their panels.

    Typer draws panels with rich alone; this is their plain form.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options of the help."""
        if not ctx.meta.get(_HELP_ALL):
            with formatter.section("Common options"):
                formatter.write_dl(list(_MOST_USED.items()))
            formatter.write_text(f"`{ctx.command_path} --help-all` shows every option.")
            return
        panels = {name: _DECLARED[name].panel for name in SEARCH_OPTIONS} | {"model": "Arguments", "help": "Options"}
        for heading in dict.fromkeys(("Arguments", *panels.values(), "Options")):
            params = [each for each in self.get_params(ctx) if panels.get(each.name, settings.RUN) == heading]
            with formatter.section(heading):
                formatter.write_dl([text for each in params if (text := each.get_help_record(ctx)) is not None])
