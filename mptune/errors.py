"""The tree of errors. Each error says what is wrong in one line, and in its hint what to do.

::

    MptuneError
    |-- SettingsError    a setting is out of range, or two contradict each other   (exit code 2)
    |-- ModelError       the ONNX file cannot be read, typed or tuned
    |-- DataError        the calibration data do not fit the model
    |-- PlanError        a plan does not fit the model
    |-- SpaceError       a search-space file is unknown or invalid
    |-- TargetError      a target or toolchain is unknown, invalid or not available here
    |-- RunError         the run directory: another model's, in use, not writable, disk full
    |   `-- EndedEarlyError   --timeout or --max-disk ended it before there was a front    (exit code 3)
    `-- BaselineError    the FP32 baseline is broken already: precision is not the problem    (4 with its findings)

A candidate that fails to build or to run is not an error but a value: ``mptune.engines.base.Failure``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mptune.finding import Finding

EXIT_USAGE = 2

EXIT_NOT_MET = 3
"""Exit code where nothing is wrong, but no plan meets the limits, or there was no time to write one."""

EXIT_STOPPED = 4
"""Exit code of a search that a finding of severity ``error`` stopped, and of ``inspect --strict`` that has one."""

ARGUMENTS = {
    "timeout": "timeout_s",
    "max-disk": "max_disk_bytes",
    "max-memory": "max_memory_bytes",
    "workspace": "workspace_mb",
    "limit": "limits",
    "plugin": "plugins",
    "wait": "wait_s",
    "for": "for_",
    **{
        name: name.replace("-", "_")
        for name in (
            *("budget", "data", "out", "target", "space", "engine", "precisions", "opset", "batch", "shapes"),
            *("max-error", "max-latency-ms", "metric", "labels", "tolerance", "ignore", "feedback", "steps"),
            *("storage", "gpus", "gpu", "seed", "fresh", "tf32", "sampler", "skip-checks"),
            *("keep-fp32", "keep-bf16", "force", "knee", "plan"),
            *("outputs", "reference-outputs", "trace", "repeat", "stress", "explain", "against"),
        )
    },
}
"""Option, without its dashes -> argument of the Python functions, and field of the settings."""

_FLAGS = frozenset({"fresh", "tf32", "force", "knee", "skip-checks", "trace", "stress", "explain"})

_VALUE = r"[A-Z]{2,}\b|X\b|\d[\w.]*|fp32,[\w,]+|cpu\b|tensorrt-rtx\b|tensorrt\b|\w+:\S+"
_OPTION = re.compile(rf"--({'|'.join(ARGUMENTS)})(?![\w-])(?:[ =]({_VALUE}))?")
_COMMAND = re.compile(r"(`mptune [^`]*`)")

_options_spoken: ContextVar[bool] = ContextVar("options_spoken", default=False)


@contextlib.contextmanager
def speak_of_options() -> Iterator[None]:
    """Have errors name options of the command line (``--budget``) meanwhile, not Python arguments (``budget=``)."""
    token = _options_spoken.set(True)
    try:
        yield
    finally:
        _options_spoken.reset(token)


def _for_caller(text: str) -> str:
    """A text that names options, in the words of whoever called: commands in backticks stay as they are."""
    if _options_spoken.get():
        return text
    parts = _COMMAND.split(text)
    parts[::2] = [re.sub(r"(?<!\S)-o\b", "out=", _OPTION.sub(_argument, part)) for part in parts[::2]]
    return "".join(parts)


def _argument(match: re.Match[str]) -> str:
    option, value = match.groups()
    return f"{ARGUMENTS[option]}={value or ('True' if option in _FLAGS else '')}"


class MptuneError(Exception):
    """An error that a person can act on.

    Texts in the code name options of the command line; to a Python program they name the arguments of its functions.
    """

    exit_code: int = 1
    """Of the process that it ends."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self._message = message
        self._hint = hint

    @property
    def message(self) -> str:
        """What is wrong, one line, no trailing full stop."""
        return _for_caller(self._message)

    @property
    def hint(self) -> str:
        """What to do about it, one line; empty if there is nothing to do."""
        return _for_caller(self._hint)

    def __str__(self) -> str:
        """Both, as a traceback ends with them; ``message`` is for a text that it becomes part of."""
        return f"{self.message}\nhint: {self.hint}" if self._hint else self.message

    def __reduce__(self) -> tuple[type[MptuneError], tuple[object, ...]]:
        """Pickle with both fields: errors cross the worker's pipe."""
        return type(self), (self._message, self._hint)


class SettingsError(MptuneError):
    """A setting is out of range, or two settings contradict each other."""

    exit_code = EXIT_USAGE


class ModelError(MptuneError):
    """The ONNX file cannot be read, typed or tuned."""


class DataError(MptuneError):
    """The calibration data do not fit the model."""


class PlanError(MptuneError):
    """A plan does not fit the model."""


class SpaceError(MptuneError):
    """A search-space file is unknown or invalid."""


class TargetError(MptuneError):
    """A target or toolchain is unknown, invalid or not available here."""


class RunError(MptuneError):
    """The run directory belongs to another model, is in use, cannot be written, or the disk is full."""


class EndedEarlyError(RunError):
    """A limit of the call ended it before all-FP32 was measured: nothing is wrong, but there is no front yet."""

    exit_code = EXIT_NOT_MET


class BaselineError(MptuneError):
    """The FP32 baseline itself is broken: no precision plan repairs that.

    Attributes:
        findings: what is wrong, where and by which numbers; empty where the model does not run at all. With a finding
            of severity ``error`` the exit code is 4.
    """

    def __init__(self, message: str, hint: str = "", findings: Sequence[Finding] = ()) -> None:
        super().__init__(message, hint)
        self.findings = tuple(findings)
        if any(finding.severity == "error" for finding in self.findings):
            self.exit_code = EXIT_STOPPED

    def __reduce__(self) -> tuple[type[MptuneError], tuple[object, ...]]:
        return type(self), (self._message, self._hint, self.findings)
