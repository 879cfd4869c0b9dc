"""An exception as a message: one line on what is wrong, one on what to do, and the exit code."""

from __future__ import annotations

import difflib
import errno
import re
import shlex
from collections.abc import Sequence
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
    """A command line that Typer refuses. What it says of a value differs from version to version: it is said anew."""
    context = getattr(error, "ctx", None)
    command = "mptune" if context is None else str(context.command_path)
    message = str(error.format_message()).strip().rstrip(".")  # type: ignore[attr-defined]
    hint = f"`{command} --help` shows what is expected, with an example"
    option = next((name for name in getattr(getattr(error, "param", None), "opts", ()) if name.startswith("--")), "")
    value = "" if context is None or not option else _value_of(option, context.find_root().obj)
    _, is_choice, listed = message.partition(" is not one of ")
    choices = re.findall(r"'([^']*)'", listed)
    if is_choice and value:
        close = difflib.get_close_matches(value.lower(), choices, 2)
        meant = f"did you mean {' or '.join(f'{option} {word}' for word in close)}? " if close else ""
        return Complaint(
            f"there is no {option[2:]} {value!r}", f"{meant}{option} takes {', '.join(choices)}", EXIT_USAGE
        )
    if message.startswith("Got unexpected extra argument"):
        path = message.rpartition(" (")[2].rstrip(")")
        options = {name for param in context.command.params for name in param.opts} if context is not None else ()
        if "--data" in options and (Path(path).suffix in (".npz", ".npy") or Path(path).is_dir()):
            return Complaint(f"unexpected argument {path}", f"did you mean --data {shlex.quote(path)}?", EXIT_USAGE)
    kind = "whole number" if "integer" in message else "number" if re.search("float|number", message) else ""
    if kind and value and "range" not in message:
        return Complaint(f"{option} {value} is not a {kind}", hint, EXIT_USAGE)
    return Complaint(message[:1].lower() + message[1:], hint, EXIT_USAGE)


def _value_of(option: str, invocation: object) -> str:
    """What a command line gives an option, the last where it is given several times; "" where that is not known."""
    arguments: Sequence[str] = getattr(invocation, "arguments", ())
    given = ""
    for argument, following in zip(arguments, (*arguments[1:], ""), strict=True):
        name, is_joined, value = argument.partition("=")
        if name == option:
            given = value if is_joined else following
    return given
