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
    |-- BaselineError    the FP32 baseline is broken already: precision is not the problem
    `-- MissingPackageError   an optional package is not installed (an ImportError, too)

A candidate that fails to build or to run is not an error but a value: ``mptune.engines.base.Failure``.
"""

from __future__ import annotations

from typing import ClassVar


class MptuneError(Exception):
    """An error that a person can act on.

    Attributes:
        message: what is wrong, one line, no trailing full stop.
        hint: what to do about it, one line; empty if there is nothing to do.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[type[MptuneError], tuple[str, str]]:
        """Pickle with both fields: errors cross the worker's pipe."""
        return type(self), (self.message, self.hint)


class SettingsError(MptuneError):
    """A setting is out of range, or two settings contradict each other."""

    exit_code = 2


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


class BaselineError(MptuneError):
    """The FP32 baseline itself is broken: no precision plan repairs that."""


class MissingPackageError(MptuneError, ImportError):
    """An optional package, which only this call needs, is not installed."""
