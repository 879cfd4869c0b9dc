"""An exception as a message: one line on what is wrong, one on what to do, and the exit code."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

from mptune.errors import EXIT_USAGE, MptuneError
from mptune.files import disk_error, is_disk_full

EXIT_ERROR = 1


@dataclass(frozen=True)
class Complaint:
    """The message for an exception."""

    message: str
    hint: str
    exit_code: int = EXIT_ERROR


_OUTPUT_LOST = Complaint(
    "disk full: the output, or a temporary file, cannot be written", "free some space, then run it again"
)


def is_usage(error: BaseException) -> bool:
    """Whether Typer itself found the command line wrong (its exception classes moved between versions)."""
    return hasattr(error, "format_message") and getattr(error, "exit_code", None) == EXIT_USAGE


def explain(error: BaseException) -> Complaint:
    """The message for any exception."""
    if isinstance(error, MptuneError):
        return Complaint(error.message, error.hint, error.exit_code)
    if is_usage(error):
        return _usage(error)
    if isinstance(error, OSError) and is_disk_full(error):
        # What is written to a run directory fails with its path (``full_disk_as_error``).
        return explain(disk_error(error, Path(error.filename))) if error.filename else _OUTPUT_LOST
    if isinstance(error, PermissionError):
        return Complaint(f"not permitted: {error.filename}", "check who owns it, or give another path")
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return Complaint(f"a path is too long for this system: {error.filename}", "give a shorter one")
    words = " ".join(str(error).split())
    return Complaint(
        f"unexpected {type(error).__name__}{': ' if words else ''}{words}",
        "this is a bug in mptune: run again with --debug for the traceback, and report it",
    )


def _usage(error: BaseException) -> Complaint:
    """A command line that Typer refuses."""
    context = getattr(error, "ctx", None)
    command = "mptune" if context is None else str(context.command_path)
    message = str(error.format_message()).strip().rstrip(".")  # type: ignore[attr-defined]
    hint = f"`{command} --help` shows what is expected, with an example"
    return Complaint(message[:1].lower() + message[1:], hint, EXIT_USAGE)
