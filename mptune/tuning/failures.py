"""A failure in words: the line that tables show, and the errors that end a run."""

from __future__ import annotations

from mptune.engines.base import Failure, FailureKind
from mptune.errors import BaselineError, RunError
from mptune.files import DISK_FULL_HINT, RESUME_HINT


def describe(failure: Failure) -> str:
    """Stage, kind and message in one line."""
    return f"{failure.stage.value}, {failure.kind.value}: {failure.message}"


def machine_error(failure: Failure, attempts: int) -> RunError:
    """The error after the last retry of a fault of the machine."""
    log = "" if failure.log_path is None else f" (log: {failure.log_path})"
    times = "" if attempts == 1 else f" {attempts} times in a row"
    return RunError(
        f"the machine failed{times}: {failure.kind.value} ({failure.stage.value}): {failure.message}{log}",
        f"when that is repaired, {RESUME_HINT}",
    )


def did_not_run(what: str, failure: Failure) -> BaselineError:
    """The error for an FP32 job that gave no result: ``what`` says which, the failure says why."""
    hints = {
        FailureKind.TIMEOUT: "the model is too slow for the deadline: give fewer samples or a smaller --batch",
        FailureKind.OUT_OF_MEMORY: "free memory on the device, or give a smaller --batch",
        FailureKind.DISK_FULL: DISK_FULL_HINT,
        FailureKind.DEVICE_LOST: "see that the device answers (nvidia-smi), then run it again",
        FailureKind.WORKER: "run `mptune doctor`",
        FailureKind.UNSUPPORTED: "the toolchain lacks an operator of this model: try another --engine",
    }
    hint = hints.get(failure.kind, "see that the model runs in ONNX Runtime by itself, or try another --engine")
    if failure.log_path is not None:
        hint += f"; the log is {failure.log_path}"
    return BaselineError(f"{what} ({failure.stage.value}, {failure.kind.value}): {failure.message}", hint)
