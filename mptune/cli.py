"""The command line: parse, call ``mptune.api``, print. Decides the exit code.

The exit codes stand in the help. Data go to stdout, progress, warnings and errors to stderr. Heavy packages are
imported inside the commands, so that ``mptune --help`` takes milliseconds.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from mptune._version import __version__
from mptune.commands import listing, models, searching
from mptune.commands.common import complain, ending_signals_as_interrupts, guarded, interrupted, reader_left
from mptune.commands.options import SearchCommand
from mptune.errors import EXIT_ERROR, EXIT_NOT_MET, EXIT_USAGE, MptuneError, one_line
from mptune.files import DISK_FULL_HINT, is_disk_full
from mptune.settings import option_name
from mptune.tuning.record import waits_told_to

__all__ = ["app", "main"]

app = typer.Typer(
    rich_markup_mode=None, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; the console script's entry point."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug = "--debug" in options or os.environ.get("MPTUNE_DEBUG", "0") not in ("", "0")
    # A global option that people write at the end, after a command has failed, stands before the command.
    words = sorted(options, key=lambda word: word != "--debug") + arguments[len(options) :]
    # A stream that was closed before the start (``2>&-``) is None in Python.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal without Unicode shows a question mark, not an error
            stream.reconfigure(errors="replace")
    try:
        with ending_signals_as_interrupts(), waits_told_to(complain):
            code = app(words or ["--help"], prog_name="mptune", standalone_mode=False, obj=arguments)
            sys.stdout.flush()
    except BrokenPipeError:
        return reader_left()
    except (KeyboardInterrupt, typer.Abort):
        return interrupted("")
    except Exception as error:
        message, hint, code = explain(error)
        if debug and not _is_usage(error):
            shown = traceback.format_exception(error)
            sys.stderr.write("".join(shown[:-1] if isinstance(error, MptuneError) else shown))  # its text comes below
        complain(f"{'' if code == EXIT_NOT_MET else 'error: '}{message}", hint)
    return code if isinstance(code, int) else 0


def _is_usage(error: BaseException) -> bool:
    """Whether Typer itself found the command line wrong (its exception classes moved between versions)."""
    return hasattr(error, "format_message") and getattr(error, "exit_code", None) == EXIT_USAGE


def explain(error: BaseException) -> tuple[str, str, int]:
    """An exception as one line on what is wrong, one on what to do, and the exit code."""
    if isinstance(error, MptuneError):
        name = f"{option_name(error.setting)} " if error.setting else ""
        return f"{name}{error.text}", error.hint, error.exit_code
    if _is_usage(error):
        context = getattr(error, "ctx", None)
        command = "mptune" if context is None else context.command_path
        return error.format_message(), f"`{command} --help` shows what is expected", EXIT_USAGE  # type: ignore[attr-defined]
    if is_disk_full(error):
        # What is written to a run directory fails with its path (``full_disk_as_error``).
        path = getattr(error, "filename", None)
        text = f"disk full: cannot write {path or 'the output, or a temporary file'}"
        return text, DISK_FULL_HINT if path else "free some space, then run it again", EXIT_ERROR
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG):
        hint = "check its name and its permissions, or give another path"
        return f"{error.filename}: {error.strerror}", hint, EXIT_ERROR
    text = f"unexpected {type(error).__name__}: {one_line(error)}".removesuffix(": ")
    return text, "this is a bug in mptune: run again with --debug for the traceback, and report it", EXIT_ERROR


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"mptune {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error (or set MPTUNE_DEBUG=1).")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Find which layers of an ONNX model can run in FP16, by measuring latency and error.

    \b
    Example:
      mptune search model.onnx --data samples.npz --max-error 1e-2
      mptune report model.mptune
      mptune pick model.mptune --max-error 1e-3

    Exit codes: 0 done, 1 error, 2 usage, 3 done but no plan meets the limits (compare, check: beyond tolerance), 4
    stopped by a finding of severity error, 130 interrupted.
    """


app.command(cls=SearchCommand)(guarded(searching.search))
for _command in (
    searching.worker,
    searching.report,
    searching.pick,
    searching.confirm,
    searching.export,
    models.inspect,
    models.apply,
    models.compare,
    models.check,
    listing.targets,
    listing.spaces,
    listing.doctor,
    searching.demo,
):
    app.command()(guarded(_command))
