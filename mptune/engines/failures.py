"""A failure in words: the line that tables show, and the errors that end a run."""

from __future__ import annotations

import re

from mptune.engines.base import Failure, FailureKind
from mptune.errors import BaselineError, RunError
from mptune.files import DISK_FULL_HINT, RESUME_HINT
from mptune.findings.engine import GIVE_FP32
from mptune.graph.loading.model import Model
from mptune.targets.findings import holds_bf16

_MACHINE_HINTS = {
    FailureKind.DISK_FULL: DISK_FULL_HINT,
    FailureKind.DEVICE_LOST: "check that the device answers (nvidia-smi)",
    FailureKind.DRIVER: "update the NVIDIA driver (535 or later for CUDA 12, 580 for CUDA 13), or install the packages"
    " for its CUDA: `mptune doctor` names them",
    FailureKind.WORKER: "run `mptune doctor`",
}
_MODEL_HINTS = {
    **_MACHINE_HINTS,
    FailureKind.TIMEOUT: "the model is too slow for the deadline: give fewer samples or a smaller --batch",
    FailureKind.OUT_OF_MEMORY: "free memory on the device, or give a smaller --batch",
    FailureKind.UNSUPPORTED: "the toolchain lacks an operator of this model: try another --engine",
}


def describe(failure: Failure) -> str:
    """Stage, kind and message in one line."""
    return f"{failure.stage.value}, {failure.kind.value}: {failure.message}"


def machine_error(failure: Failure, tries: int, control: str = "") -> RunError:
    """The error after the last try of a job that the machine fails; ``control`` is what else shows that it does."""
    log = "" if failure.log_path is None else f" (log: {failure.log_path})"
    what = f"{failure.kind.value} ({failure.stage.value}): {failure.message}{log}{f'; {control}' if control else ''}"
    cure = _MACHINE_HINTS.get(
        failure.kind, "check the system's log (dmesg), and what else uses the machine and its device"
    )
    again = "" if RESUME_HINT in cure else f"; when that is repaired, {RESUME_HINT}"
    return RunError(f"the machine failed {tries} times in a row: {what}", f"{cure}{again}")


def did_not_run(what: str, failure: Failure, model: Model | None = None) -> BaselineError:
    """The error for an FP32 job that gave no result; the model may explain it, by BF16 in it."""
    hint = _MODEL_HINTS.get(failure.kind, "check that the model runs in ONNX Runtime alone, or try another --engine")
    if model is not None and failure.kind is FailureKind.UNSUPPORTED and holds_bf16(model):
        hint = f"the model computes in BF16 in parts, and ONNX Runtime has few BF16 kernels: {GIVE_FP32}"
    if (supported := re.search(r"max supported IR version: (\d+)", failure.message)) is not None:
        hint = f"save it with ir_version = {supported[1]}, which the installed ONNX Runtime reads, or upgrade that"
    log = "" if failure.log_path is None else f"; the log is {failure.log_path}"
    return BaselineError(f"{what} ({failure.stage.value}, {failure.kind.value}): {failure.message}", f"{hint}{log}")
