"""The command line: parse, call ``mptune.api``, print. The only file that decides the exit code.

Exit codes: 0 done, 1 error, 2 usage, 3 done but no plan meets the limits, 130 interrupted. Data go to stdout,
progress, warnings and errors to stderr. Whatever is heavy is imported inside the commands: ``mptune --help`` stays
a matter of milliseconds.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from mptune import __version__
from mptune.errors import PlanError, RunError, SettingsError
from mptune.report.complaints import explain, is_usage
from mptune.settings import DataSettings, SearchSettings

if TYPE_CHECKING:
    from mptune.search.front import Front

EXIT_LIMITS_NOT_MET = 3
EXIT_INTERRUPTED = 130

_SEARCH = SearchSettings()
_DATA = DataSettings()
_DURATION = re.compile(r"(?:(?P<h>\d+(?:\.\d+)?)h)?(?:(?P<m>\d+(?:\.\d+)?)m)?(?:(?P<s>\d+(?:\.\d+)?)s?)?")

Command = TypeVar("Command", bound=Callable[..., None])

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


class Engine(str, Enum):
    """The toolchain families that ``--engine`` takes."""

    AUTO = "auto"
    TENSORRT = "tensorrt"
    TENSORRT_RTX = "tensorrt-rtx"
    ONNXRUNTIME = "onnxruntime"


@dataclass
class Invocation:
    """What holds for one run of the program, whatever the command.

    Attributes:
        arguments: the command line as given, without the program's name.
        debug: show tracebacks.
    """

    arguments: list[str]
    debug: bool = False


def parse_duration(text: str) -> float:
    """Read ``8h``, ``90m``, ``1h30m``, ``30s`` or plain seconds.

    Returns:
        Seconds.

    Raises:
        SettingsError: the text is no duration.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None or not any(match.groups()):
        raise SettingsError(f"--timeout {text} is not a duration", "write 8h, 90m, 1h30m, 30s or plain seconds")
    hours, minutes, seconds = (float(match[unit] or 0) for unit in "hms")
    return hours * 3600 + minutes * 60 + seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; the console script's entry point.

    Args:
        argv: arguments without the program's name; those of the process by default.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    invocation = Invocation(
        arguments, debug="--debug" in options or os.environ.get("MPTUNE_DEBUG", "0") not in ("", "0")
    )
    if "--debug" in options:  # a global option that people write at the end, after a command has failed
        arguments = ["--debug", *(a for a in options if a != "--debug"), *arguments[len(options) :]]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal without Unicode shows a question mark, not an error
            stream.reconfigure(errors="replace")
    try:
        code = app(arguments, prog_name="mptune", standalone_mode=False, obj=invocation)
        sys.stdout.flush()
    except BrokenPipeError:
        return _reader_left()
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted("")
    except Exception as error:
        if invocation.debug and not is_usage(error):
            traceback.print_exception(error)
        complaint = explain(error)
        _complain(f"error: {complaint.message}", complaint.hint)
        return complaint.exit_code
    return code if isinstance(code, int) else 0


def _guarded(command: Command) -> Command:
    """Take what Typer would turn into other exit codes than ours before it sees it."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except BrokenPipeError:
            raise typer.Exit(_reader_left()) from None
        except KeyboardInterrupt:
            raise typer.Exit(_interrupted("")) from None

    return wrapper  # type: ignore[return-value]


def _reader_left() -> int:
    """Whoever read our output has seen enough (``mptune report RUN | head``): that is no error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _interrupted(resume: str) -> int:
    _complain("interrupted", resume and f"to go on, run: {resume}")
    return EXIT_INTERRUPTED


def _complain(message: str, hint: str = "") -> None:
    print(message, file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)


def _print_json(document: Any) -> None:
    # Non-finite numbers are strings already; one that is not would be invalid JSON, so it is refused here.
    print(json.dumps(document, indent=2, allow_nan=False))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"mptune {__version__}")
        raise typer.Exit


def _finish(front: Front, as_json: bool) -> None:
    """Print the front and leave with 3 where no plan meets the limits asked for."""
    if as_json:
        _print_json(front.to_json())
    else:
        from mptune.report.terminal import print_front

        print_front(front)
    if not front.limits_met:
        if as_json:
            _complain(f"warning: {front.chosen_reason}")
        raise typer.Exit(EXIT_LIMITS_NOT_MET)


ModelArgument = Annotated[Path, typer.Argument(metavar="MODEL", help="The ONNX model, FP32.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The run directory of a search.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
MaxErrorOption = Annotated[
    float | None, typer.Option(metavar="X", help="Choose the fastest plan that errs at most this much.")
]
MaxLatencyOption = Annotated[
    float | None,
    typer.Option(metavar="X", help="Choose the most exact plan that takes at most this many milliseconds."),
]


@app.callback()
def options(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error (or set MPTUNE_DEBUG=1).")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Find which layer groups of an ONNX model can run in FP16: latency against error, measured together.

    \b
    Example:
      mptune search model.onnx --data samples.npz --max-error 1e-2
      mptune report model.mptune
      mptune pick model.mptune --max-error 1e-3
    """
    context.ensure_object(dict)


@app.command()
@_guarded
def search(
    context: typer.Context,
    model: ModelArgument,
    budget: Annotated[int, typer.Option(metavar="N", help="Plans to evaluate, seeds included.")] = _SEARCH.budget,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Calibration samples: .npz, a folder of .npz or .npy. Default: random inputs."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run directory. Default: the model's name + .mptune, here.")
    ] = None,
    target: Annotated[
        str, typer.Option(metavar="auto|NAME|FILE", help="The device to tune for; `mptune targets` lists the names.")
    ] = _SEARCH.target,
    space: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="What may be FP16; `mptune spaces` lists the names.")
    ] = _SEARCH.space,
    engine: Annotated[Engine, typer.Option(help="Who builds and runs the candidates.")] = Engine(_SEARCH.engine),
    max_error: MaxErrorOption = None,
    max_latency_ms: MaxLatencyOption = None,
    metric: Annotated[
        str,
        typer.Option(
            metavar="NAME|script.py:function",
            help="relative_l2, max_abs, cosine_distance, ... or a function of your own.",
        ),
    ] = _SEARCH.metric,
    batch: Annotated[int, typer.Option(metavar="N", help="Rows per sample where the batch is dynamic.")] = _DATA.batch,
    timeout: Annotated[
        str | None, typer.Option(metavar="8h", help="Start no new evaluation after 8h, 90m, 30s or plain seconds.")
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Optuna storage to share. Default: a journal in the run directory."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the split, the sampler and random inputs.")] = _SEARCH.seed,
    json_: JsonOption = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over; what the run directory holds is moved aside.")
    ] = False,
    sampler: Annotated[str, typer.Option(metavar="NAME", help="Who proposes plans.")] = _SEARCH.sampler,
    tf32: Annotated[bool, typer.Option("--tf32", help="Let FP32 groups use TF32. The reference never does.")] = False,
) -> None:
    """Search: evaluate plans, keep the front, write the chosen model.

    The same command again goes on where it stopped. Ctrl-C is safe at any time.

    \b
    Example:
      mptune search model.onnx --data samples.npz
      mptune search model.onnx --data samples.npz --max-error 1e-2 --budget 100
      mptune search model.onnx --target jetson-orin-nano-8gb --out nano.mptune
    """
    settings: dict[str, Any] = {
        "budget": budget,
        "data": data,
        "out": out,
        "target": target,
        "space": space,
        "engine": engine.value,
        "max_error": max_error,
        "max_latency_ms": max_latency_ms,
        "metric": metric,
        "timeout_s": None if timeout is None else parse_duration(timeout),
        "storage": storage,
        "seed": seed,
        "fresh": fresh,
        "sampler": sampler,
        "tf32": tf32,
        "data_settings": DataSettings(batch=batch),
    }
    SearchSettings(**settings)  # a value out of range is refused before anything heavy is imported
    try:
        from mptune import api
        from mptune.report.progress import TerminalListener

        with TerminalListener(max_error=max_error, max_latency_ms=max_latency_ms) as listener:
            front = api.search(model, listener=listener, **settings)
    except KeyboardInterrupt:
        raise typer.Exit(_interrupted(_resume_command(context))) from None
    _finish(front, json_)


def _resume_command(context: typer.Context) -> str:
    """The command as it was given, but for ``--fresh``, which would start over."""
    invocation = context.find_root().obj
    given = invocation.arguments if isinstance(invocation, Invocation) else sys.argv[1:]
    return shlex.join(["mptune", *(argument for argument in given if argument != "--fresh")])


def _at_most_one(given: dict[str, Any]) -> int:
    """Count the options given.

    Raises:
        SettingsError: more than one.
    """
    names = [name for name, value in given.items() if value is not None and value is not False]
    if len(names) > 1:
        raise SettingsError(f"{names[0]} and {names[1]} exclude each other", "give one of them")
    return len(names)


@app.command()
@_guarded
def report(run: RunArgument, json_: JsonOption = False) -> None:
    """Show the front of a search, from its run directory alone.

    \b
    Example:
      mptune report model.mptune
      mptune report model.mptune --json | jq '.points[].latency.median_ms'
    """
    from mptune import api

    _finish(api.report(run), json_)


@app.command()
@_guarded
def pick(
    run: RunArgument,
    max_error: MaxErrorOption = None,
    max_latency_ms: MaxLatencyOption = None,
    knee: Annotated[bool, typer.Option("--knee", help="Choose where more speed begins to cost more error.")] = False,
    plan: Annotated[str | None, typer.Option(metavar="ID", help="Choose the plan with this id in the table.")] = None,
    json_: JsonOption = False,
) -> None:
    """Choose another point of the front and write chosen/ anew. Nothing is measured again.

    \b
    Example:
      mptune pick model.mptune --max-error 1e-3
      mptune pick model.mptune --plan 3f2a91c04b1d
    """
    limit = max_error if max_error is not None else max_latency_ms
    if _at_most_one({"a limit": limit, "--knee": knee, "--plan": plan}) == 0:
        raise SettingsError("nothing says which plan to pick", "give --max-error, --max-latency-ms, --knee or --plan")
    for name, value in (("--max-error", max_error), ("--max-latency-ms", max_latency_ms)):
        if value is not None and not value > 0:
            raise SettingsError(f"{name} is {value}", "give a number above 0")
    from mptune import api

    _finish(api.pick(run, max_error=max_error, max_latency_ms=max_latency_ms, knee=knee, plan=plan), json_)


@app.command()
@_guarded
def apply(
    model: ModelArgument,
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json, as `mptune search` writes it.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="OUT.onnx", help="Where to write the mixed model.")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output file.")] = False,
) -> None:
    """Write the mixed-precision model of a plan.

    \b
    Example:
      mptune apply model.onnx model.mptune/chosen/plan.json -o mixed.onnx
    """
    if out.is_dir():
        raise RunError(f"{out} is a directory", "give the path of a file with -o, such as mixed.onnx")
    if out.exists() and not force:
        raise RunError(f"{out} exists already", "give --force to overwrite it, or another path with -o")
    if out.exists() and any(out.samefile(source) for source in (model, plan) if source.exists()):
        raise PlanError(f"{out} is what the mixed model is made from", "give another path with -o")
    from mptune import api

    with _set_aside(out):
        written = api.apply(model, plan, out)
    print(written)


@contextmanager
def _set_aside(out: Path) -> Iterator[None]:
    """Move an output that is to be overwritten out of the way, and back where writing fails."""
    if not out.exists():
        yield
        return
    spare = out.with_name(f".{out.name}.old")
    out.replace(spare)
    try:
        yield
    except BaseException:
        spare.replace(out)
        raise
    spare.unlink()


@app.command()
@_guarded
def targets(json_: JsonOption = False) -> None:
    """List the devices that have a profile.

    The sources of the figures, power modes and notes are in the --json form.

    \b
    Example:
      mptune targets
      mptune search model.onnx --target jetson-orin-nano-8gb
    """
    from mptune.targets.target import list_targets

    found = list_targets()
    if json_:
        _print_json([asdict(target) for target in found])
        return
    from mptune.report.listings import print_targets

    print_targets(found)


@app.command()
@_guarded
def spaces(json_: JsonOption = False) -> None:
    """List the search spaces.

    A search space says which groups are pinned, and which plans are tried first.

    \b
    Example:
      mptune spaces
      mptune search model.onnx --space transformer
    """
    from mptune.search.space import list_spaces

    found = list_spaces()
    if json_:
        _print_json(
            [{"name": s.name, "path": str(s.path), "sha256": s.sha256, **s.file.model_dump(mode="json")} for s in found]
        )
        return
    from mptune.report.listings import print_spaces

    print_spaces(found)


@app.command()
@_guarded
def doctor(json_: JsonOption = False) -> None:
    """Show what this machine can do, and what is missing.

    Versions, the GPU, which toolchains are ready, and the command that installs those that are not.

    \b
    Example:
      mptune doctor
    """
    from mptune.engines.environment import describe_environment
    from mptune.engines.toolchain import list_toolchains

    environment, toolchains = describe_environment(), list_toolchains()
    if json_:
        _print_json({"environment": environment.to_json(), "toolchains": [asdict(status) for status in toolchains]})
        return
    from mptune.report.listings import print_doctor

    print_doctor(environment, toolchains)


if __name__ == "__main__":
    sys.exit(main())
