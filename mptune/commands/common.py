"""Shared by the commands: printing, exit codes, and common arguments.

Data go to stdout, progress, warnings and errors to stderr.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypeVar

import typer

from mptune.errors import EXIT_NOT_MET, SettingsError
from mptune.printable import printable

if TYPE_CHECKING:
    from mptune.reporting.terminal.progress import TerminalListener
    from mptune.tuning.front import Front

EXIT_INTERRUPTED = 130

Command = TypeVar("Command", bound=Callable[..., None])


def guarded(command: Command) -> Command:
    """Take what Typer would turn into other exit codes than ours before it sees it."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except BrokenPipeError:
            raise typer.Exit(reader_left()) from None
        except KeyboardInterrupt:
            raise typer.Exit(interrupted("")) from None

    return wrapper  # type: ignore[return-value]


def reader_left() -> int:
    """The reader of our output has closed it (``mptune report RUN | head``): this is no error."""
    _give_up(sys.stdout)
    return 0


def _give_up(stream: TextIO) -> None:
    """Let what is still buffered for a stream go nowhere: at its exit, Python would fail to write it."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


@contextlib.contextmanager
def ending_signals_as_interrupts() -> Iterator[None]:
    """Let SIGTERM and SIGHUP do what Ctrl-C does, but for one that is ignored already (``nohup``).

    Only the first of them counts, so that the clean-up that it starts comes to its end.
    """
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGHUP) if is_main else ()
    handled = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]

    def interrupt(number: int, frame: object) -> None:
        for other in handled:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in handled:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def interrupted(resume: str) -> int:
    """Print that the command was interrupted and how to resume; returns the exit code."""
    complain("interrupted", resume and f"to continue, run: {resume}")
    return EXIT_INTERRUPTED


@contextlib.contextmanager
def resumable(
    context: typer.Context, max_error: float | None = None, max_latency_ms: float | None = None, *, quiet: bool = False
) -> Iterator[TerminalListener]:
    """Show the progress of what goes on in the block; say how to go on where it is interrupted."""
    try:
        from mptune.reporting.terminal.progress import TerminalListener

        with TerminalListener(None, max_error, max_latency_ms, quiet=quiet) as listener:
            yield listener
    except KeyboardInterrupt:
        raise typer.Exit(interrupted(_resume_command(context))) from None


def _resume_command(context: typer.Context) -> str:
    """The command as it was given, without ``--fresh``, which would start over, and URLs that may hold a secret."""
    shown = ["mptune"]
    for word in context.find_root().obj or sys.argv[1:]:
        url = word.removeprefix("--storage=")
        is_secret = "://" in url and ("?" in url or not url.startswith("sqlite:///"))
        if word != "--fresh":
            shown.append(f'{word.removesuffix(url)}"$MPTUNE_STORAGE"' if is_secret else shlex.quote(word))
    return " ".join(shown)


def complain(message: str, hint: str = "") -> None:
    """One line on stderr that says what is wrong, and one that says what to do."""
    try:
        print(printable(message), file=sys.stderr)
        if hint:
            print(f"hint: {printable(hint)}", file=sys.stderr)
        sys.stderr.flush()
    except (OSError, ValueError):  # nobody reads it any more
        _give_up(sys.stderr)


def warn(text: str) -> None:
    """One line of warning on stderr."""
    complain(f"warning: {text}")


def print_json(document: Any) -> None:
    """JSON on stdout."""
    # Non-finite numbers are strings already; one that is not would be invalid JSON, so it is refused here.
    print(json.dumps(document, indent=2, allow_nan=False))


def print_path(path: Path) -> None:
    """A path on stdout."""
    print(printable(path))


def finish(
    front: Front,
    as_json: bool,
    *,
    every: bool = False,
    explained: bool = False,
    opened: bool = False,
    quiet: bool = False,
    warned: Collection[str] = (),
) -> None:
    """Print the front, with ``every`` row, or the answer alone; leave with 3 where no plan meets the limits asked for.

    ``explained`` prints the reasons first and where the time went last, ``opened`` opens the page. Warnings in
    ``warned`` stand on stderr already.
    """
    if opened:
        open_page(front.run_dir)
    if as_json:
        print_json(front.to_json())
    else:
        from mptune.reporting.terminal.console import make_console
        from mptune.reporting.terminal.front import print_answer, print_explanation, print_front, print_seconds

        if explained:
            print_explanation(front)
        if quiet:
            print_answer(make_console(), front)
        else:
            print_front(front, every=every, warned=warned)
        if explained:
            print_seconds()
    leave_unmet(front, as_json=as_json)


def open_page(run: Path) -> None:
    """Open a run's page in a browser; without a display, a line says so."""
    import webbrowser

    page = (run / "report.html").resolve()
    has_display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if not (has_display and webbrowser.open(page.as_uri())):
        complain(f"no browser can be opened here: the page is {page}")


def leave_unmet(front: Front, *, as_json: bool) -> None:
    """Leave with 3 where no plan meets the limits asked for."""
    if not front.limits_met:
        if as_json:
            warn(str(front.unmet))
        raise typer.Exit(EXIT_NOT_MET)


def print_csv(records: Sequence[Mapping[str, object]]) -> None:
    """A header and a line for each record on stdout; what is not known is empty."""
    writer = csv.DictWriter(sys.stdout, list(records[0]), lineterminator="\n")
    writer.writeheader()
    for record in records:
        writer.writerow({name: printable(value) if isinstance(value, str) else value for name, value in record.items()})


def at_most_one(given: dict[str, Any]) -> None:
    """Refuse more than one of these options."""
    names = [name for name, value in given.items() if value is not None and value is not False]
    if len(names) > 1:
        raise SettingsError(f"{names[0]} and {names[1]} exclude each other", "give one of them")


def argument(metavar: str, help_text: str) -> Any:
    """An argument that may be left away."""
    return typer.Argument(None, metavar=metavar, help=help_text, show_default=False)


def flag(name: str, help_text: str) -> Any:
    """An option that is on where it is given."""
    return typer.Option(False, name, help=help_text)


def option(metavar: str, help_text: str, default: Any = None) -> Any:
    """An option with the parameter's name and a value."""
    return typer.Option(default, metavar=metavar, help=help_text)


ModelArgument = Annotated[Path, typer.Argument(metavar="MODEL", help="The ONNX model, FP32.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The run directory of a search.")]
STORAGE = option("URL", "Optuna storage, if the run is kept in a database. Default: $MPTUNE_STORAGE.")
RECORDED_METRIC = option(
    "script.py:function", "The metric script of the run: a script that only RUN names is not run. Repeatable."
)
JSON = flag("--json", "Print JSON on stdout.")
OPEN_HELP = "Open report.html in a browser, where there is a display."
OPEN = flag("--open", OPEN_HELP)
