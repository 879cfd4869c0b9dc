"""The command line: parse, call ``mptune.api``, print. Decides the exit code.

The exit codes stand in the help. Data go to stdout, progress, warnings and errors to stderr. Heavy packages are
imported inside the commands, so that ``mptune --help`` takes milliseconds.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from mptune._version import __version__
from mptune.commands import comparing, demo, deploying, listing, models, searching
from mptune.commands.common import Invocation, complain, ending_signals_as_interrupts, guarded, interrupted, reader_left
from mptune.commands.options import panels, with_panels
from mptune.errors import EXIT_NOT_MET, MptuneError, speak_of_options

__all__ = ["app", "main"]

app = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; the console script's entry point."""
    # A stream that was closed before the start (``2>&-``) is None in Python.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    with speak_of_options(), ending_signals_as_interrupts():
        return _run(list(sys.argv[1:] if argv is None else argv))


def _run(arguments: list[str]) -> int:
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
        code = app(arguments or ["--help"], prog_name="mptune", standalone_mode=False, obj=invocation)
        sys.stdout.flush()
    except BrokenPipeError:
        return reader_left()
    except (KeyboardInterrupt, typer.Abort):
        return interrupted("")
    except Exception as error:
        from mptune.commands.error_text import explain, is_usage

        if invocation.debug and not is_usage(error):
            shown = traceback.format_exception(error)
            sys.stderr.write("".join(shown[:-1] if isinstance(error, MptuneError) else shown))  # its text comes below
        complaint = explain(error)
        complain(f"{'' if complaint.exit_code == EXIT_NOT_MET else 'error: '}{complaint.message}", complaint.hint)
        return complaint.exit_code
    return code if isinstance(code, int) else 0


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


app.command(cls=with_panels(panels()))(guarded(searching.search))
for _command in (
    searching.worker,
    searching.report,
    searching.pick,
    deploying.confirm,
    deploying.export,
    models.inspect,
    models.apply,
    comparing.compare,
    comparing.check,
    listing.targets,
    listing.spaces,
    listing.doctor,
    demo.demo,
):
    app.command()(guarded(_command))
