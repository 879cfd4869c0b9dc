"""TensorRT and TensorRT-RTX: the module, the versions that are supported, and the log.

Both have the same Python API, so the files of this folder are for both. In them ``trt`` is always the
module, and ``builder``, ``config``, ``network``, ``parser``, ``profile``, ``runtime``, ``engine``, ``context`` and so
on are always its objects: a test checks every attribute of these names against the packages and recorded lists.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from mptune.engines.base import EngineError, FailureKind

Kind = Literal["tensorrt", "tensorrt-rtx"]

MODULES: Mapping[Kind, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}

INSTALL: Mapping[Kind, str] = {
    "tensorrt": "pip install tensorrt 'cuda-bindings<13'; on a Jetson JetPack brings it (sudo apt install"
    " python3-libnvinfer, and a virtual environment with --system-site-packages)",
    "tensorrt-rtx": "pip install tensorrt-rtx 'cuda-bindings<13'",
}

AHEAD_OF_TIME: Mapping[tuple[int, int], str] = {
    (7, 5): "SM75",
    (8, 0): "SM80",
    (8, 6): "SM86",
    (8, 9): "SM89",
    (12, 0): "SM120",
    (12, 1): "SM121",
}
"""Compute capabilities that TensorRT-RTX builds for, by their names in ``ComputeCapability`` (TensorRT-RTX 1.7)."""

RTX_CAPABILITIES = frozenset({(8, 6), (8, 9), (12, 0), (12, 1)})
"""Compute capabilities of the GPUs that TensorRT-RTX is chosen for.

It runs on 7.5 as well, but compiles no FP32 matrix product for it ("Turing (SM75): FP32 GEMM is not supported", 1.7.1),
so that the all-FP32 plan has no engine; 8.0 is built for, but not run on.
"""

_FIRST_VERSION = (10, 0)
_FULLY_TYPED = (10, 12)
_FIRST_RTX = (1, 7)
_LAST_KNOWN_MAJOR = 11


@dataclass(frozen=True)
class Library:
    """TensorRT or TensorRT-RTX, imported.

    Attributes:
        version: such as ``10.3.0``.
    """

    kind: Kind
    trt: Any
    version: str
    warnings: tuple[str, ...] = ()

    @property
    def is_rtx(self) -> bool:
        """Whether this is TensorRT-RTX."""
        return self.kind == "tensorrt-rtx"


def is_installed(kind: Kind) -> bool:
    """Whether the package is there; its libraries may still be missing."""
    try:
        return importlib.util.find_spec(MODULES[kind]) is not None
    except (ImportError, ValueError):
        return False


def load_library(kind: Kind) -> Library:
    """Import the module, check its version and register NVIDIA's plugins. Only in a worker: it loads native code.

    Without its plugins TensorRT neither parses nor loads what they compute: RoiAlign, ScatterElements with a reduction
    (onnx-tensorrt's onnxOpImporters.cpp), EfficientNMS_TRT.

    Raises:
        EngineError: the package is missing, a library that it needs is missing, or its version is not supported.
    """
    try:
        trt = importlib.import_module(MODULES[kind])
    except ModuleNotFoundError as error:
        raise EngineError(FailureKind.UNSUPPORTED, _missing(kind, error)) from error
    except (ImportError, OSError, RuntimeError) as error:
        message = f"{kind} is installed, but a library that it needs does not load: {_first_line(error)}"
        raise EngineError(FailureKind.UNSUPPORTED, message) from error
    version = str(getattr(trt, "__version__", ""))
    warnings = check_version(kind, version)
    if not _register_plugins(trt):
        warnings += (
            f"{kind} could not register its plugins: models with RoiAlign and the like fail; install it again",
        )
    return Library(kind, trt, version, warnings)


def check_version(kind: Kind, version: str) -> tuple[str, ...]:
    """Check that a version is supported.

    Raises:
        EngineError: it is not.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise EngineError(FailureKind.UNSUPPORTED, f"{kind} reports its version as {version!r}: install it again")
    number = int(match[1]), int(match[2])
    if kind == "tensorrt-rtx":
        if number < _FIRST_RTX:
            message = f"TensorRT-RTX {version} is too old, mptune needs 1.7: pip install --upgrade tensorrt-rtx"
            raise EngineError(FailureKind.UNSUPPORTED, message)
        return ()
    if number < _FIRST_VERSION:
        raise EngineError(
            FailureKind.UNSUPPORTED,
            f"TensorRT {version} has no strongly typed networks, mptune needs 10.0 or later (JetPack 5.1 brings 8.5,"
            " JetPack 6.0 brings 8.6): on a Jetson update to JetPack 6.1 (TensorRT 10.3) or later",
        )
    if number < _FULLY_TYPED:
        return (
            f"TensorRT {version}: strongly typed networks are fully available from 10.12 on, by NVIDIA's release notes:"
            " look out for warnings about layers that run in another type than asked for",
        )
    if number[0] > _LAST_KNOWN_MAJOR:
        return (f"TensorRT {version} is newer than any that this mptune was written for: upgrade mptune",)
    return ()


def open_log(trt: Any) -> Any:
    """The process' logger for TensorRT, emptied.

    Messages go to standard error, which is the job's log; errors and warnings are also kept. There is one logger:
    TensorRT ignores any other while a builder or runtime exists that was made with the first.
    """
    log = _log(trt)
    log.errors.clear()
    log.warnings.clear()
    return log


@cache
def _log(trt: Any) -> Any:
    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []
            self.warnings: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                self.errors.append(message)
            elif severity == trt.ILogger.WARNING:
                self.warnings.append(message)
            # There are millions of verbose lines: each would cross from C++ to Python for nothing.
            if severity <= trt.ILogger.INFO:
                sys.stderr.write(f"[TensorRT {severity.name}] {message}\n")

    return Log()


@cache
def _register_plugins(trt: Any) -> bool:
    """Register NVIDIA's plugins, once per process and before the first builder or runtime (NvInferPlugin.h)."""
    with collector_paused():
        return bool(trt.init_libnvinfer_plugins(_log(trt), ""))


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector while TensorRT runs.

    TensorRT logs and reports progress while it holds locks. A collection that starts in such a callback may free other
    objects of TensorRT (those of a failed build are in the traceback's cycle), whose destructors need the same locks: a
    deadlock.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _missing(kind: Kind, error: ModuleNotFoundError) -> str:
    name = (error.name or "").split(".")[0]
    if name == MODULES[kind]:
        return f"{kind} is not installed"
    return f"{kind} is installed, but its part {error.name!r} is not"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
