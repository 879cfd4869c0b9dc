"""The tree of errors. Each error says what is wrong in one line, and in its hint what to do.

::

    MptuneError
    |-- SettingsError (exit code 2), ModelError, DataError, PlanError, SpaceError, TargetError
    |-- RunError
    |   `-- EndedEarlyError (exit code 3)
    `-- BaselineError (4 with its findings)

A candidate that fails to build or to run is not an error but a value: ``mptune.engines.base.Failure``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mptune.finding import Finding

__all__ = [
    "BaselineError", "DataError", "EndedEarlyError", "ModelError", "MptuneError", "PlanError", "RunError",
    "SettingsError", "SpaceError", "TargetError",
]  # fmt: skip

EXIT_ERROR, EXIT_USAGE = 1, 2
EXIT_NOT_MET = 3  # nothing is wrong, but no plan meets the limits, or there was no time to write one
EXIT_STOPPED = 4  # a finding of severity ``error`` stopped the search, or ``inspect --strict`` has one


class MptuneError(Exception):
    """An error that a person can act on.

    Attributes:
        text: what is wrong, one line, no trailing full stop. With a ``setting`` it goes on from the setting's name.
        hint: what to do about it, one line; empty if there is nothing to do.
        setting: the argument of a Python function that is wrong; the command line names the option in its place.
    """

    exit_code: int = EXIT_ERROR

    def __init__(self, text: str, hint: str = "", *, setting: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.hint = hint
        self.setting = setting

    @property
    def message(self) -> str:
        """What is wrong, one line, no trailing full stop."""
        return f"{self.setting}= {self.text}" if self.setting else self.text

    def __str__(self) -> str:
        """Message and hint, as a traceback ends with them; ``message`` is for a text that it becomes part of."""
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


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

    def __init__(self, text: str, hint: str = "", findings: Sequence[Finding] = ()) -> None:
        super().__init__(text, hint)
        self.findings = tuple(findings)
        if any(finding.severity == "error" for finding in self.findings):
            self.exit_code = EXIT_STOPPED


def one_line(error: BaseException) -> str:
    """What an exception says, without line breaks; of what pydantic found in a file, where the first problem is."""
    if callable(problems := getattr(error, "errors", None)):
        first = problems()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        return f"{where}: {first['msg'].removeprefix('Value error, ')}"
    return " ".join(str(error).split())
