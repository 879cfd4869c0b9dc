"""TensorRT and TensorRT-RTX: the module, the supported versions, the plugins, and the one logger of the process."""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from mptune.engines.base import EngineError, FailureKind
from mptune.engines.cuda import runtime as cuda
from mptune.targets.detect import Gpu, cuda_series

Kind = Literal["tensorrt", "tensorrt-rtx"]
MODULES: Mapping[Kind, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}

_BUILT_FOR = ((7, 5), (8, 0), (8, 6), (8, 9), (12, 0), (12, 1))
AHEAD_OF_TIME: Mapping[tuple[int, int], str] = {(major, minor): f"SM{major}{minor}" for major, minor in _BUILT_FOR}
"""Compute capabilities that TensorRT-RTX builds for, by their names in ``ComputeCapability`` (TensorRT-RTX 1.7)."""
RTX_CAPABILITIES = frozenset({(8, 6), (8, 9), (12, 0), (12, 1)})
"""Compute capabilities of the GPUs that TensorRT-RTX is chosen for.

It runs on 7.5 as well, but compiles no FP32 matrix product for it ("Turing (SM75): FP32 GEMM is not supported", 1.7.1),
so that the all-FP32 plan has no engine; 8.0 is built for, but not run on.
"""


@dataclass(frozen=True)
class Library:
    """TensorRT or TensorRT-RTX, imported."""

    kind: Kind
    trt: Any
    version: str
    warnings: tuple[str, ...] = ()

    @property
    def is_rtx(self) -> bool:
        return self.kind == "tensorrt-rtx"


def install_line(kind: Kind, gpus: Sequence[Gpu] = ()) -> str:
    """How to install a library for the driver here; ``pip install tensorrt`` brings CUDA 13, whatever the driver."""
    if kind == "tensorrt" and gpus and gpus[0].is_jetson:
        return (
            "JetPack brings it: sudo apt install python3-libnvinfer, and a virtual environment with"
            " --system-site-packages"
        )
    series = cuda_series(gpus)
    try:
        metadata.version("cuda-bindings")
    except metadata.PackageNotFoundError:
        return f"pip install {kind}-cu{series}{cuda.INSTALL[series].removeprefix('pip install')}"
    return f"pip install {kind}-cu{series}"


def is_installed(kind: Kind) -> bool:
    """Whether the package is there; its libraries may still be missing."""
    with suppress(ImportError, ValueError):
        return importlib.util.find_spec(MODULES[kind]) is not None
    return False


def load_library(kind: Kind, plugins: Sequence[Path] = ()) -> Library:
    """Import the module, check its version, and load NVIDIA's plugins and the user's. In workers only: native code.

    Without its plugins TensorRT neither parses nor loads what they compute: RoiAlign, ScatterElements with a reduction
    (onnx-tensorrt's onnxOpImporters.cpp), EfficientNMS_TRT.
    """
    try:
        trt = importlib.import_module(MODULES[kind])
    except (ImportError, OSError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == MODULES[kind]
        message = f"{kind} is not installed" if is_missing else f"{kind} is installed, but does not load: {reason}"
        raise EngineError(FailureKind.UNSUPPORTED, message) from error
    version = str(getattr(trt, "__version__", ""))
    warnings = check_version(kind, version)
    for plugin in (None, *plugins):
        _load_plugin(trt, plugin)
    return Library(kind, trt, version, warnings)


def check_version(kind: Kind, version: str) -> tuple[str, ...]:
    """Raise ``EngineError`` for a version that is not supported; warnings about one that is."""
    match = re.match(r"(\d+)\.(\d+)", version)
    number = (int(match[1]), int(match[2])) if match else (0, 0)
    problem = warning = ""
    if match is None:
        problem = f"{kind} reports its version as {version!r}: install it again"
    elif kind == "tensorrt-rtx" and number < (1, 7):
        problem = f"TensorRT-RTX {version} is too old, mptune needs 1.7: pip install --upgrade tensorrt-rtx"
    elif kind == "tensorrt" and number < (10, 0):
        problem = (
            f"TensorRT {version} has no strongly typed networks, mptune measures with 10.0 or later: on a Jetson update"
            " to JetPack 6.1 (TensorRT 10.3) or later, or export a plan for version 8: `mptune export RUN --for"
            " tensorrt-8`"
        )
    elif kind == "tensorrt" and number < (10, 12):
        warning = (
            f"TensorRT {version}: strongly typed networks are fully available from 10.12 on, by NVIDIA's release notes:"
            " update it where you can"
        )
    elif kind == "tensorrt" and number >= (12, 0):
        warning = f"TensorRT {version} is newer than any that this mptune was written for: upgrade mptune"
    if problem:
        raise EngineError(FailureKind.UNSUPPORTED, problem)
    return (warning,) if warning else ()


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


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector: run in a callback of TensorRT, it may free its objects, which deadlocks."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@cache
def _load_plugin(trt: Any, path: Path | None) -> None:
    """Load a library of plugins, NVIDIA's own for None; once per process, before the first builder or runtime."""
    with collector_paused():
        if path is None:
            trt.init_libnvinfer_plugins(_log(trt), "")
            return
        try:
            ctypes.CDLL(str(path))
        except OSError as error:
            raise EngineError(FailureKind.UNSUPPORTED, f"the plugin {path} does not load: {error}") from error
        if exports_creators(path):
            registry = trt.get_plugin_registry()
            registry.load_library(str(path))  # None where they have registered themselves


def exports_creators(path: Path) -> bool:
    """Whether ``IPluginRegistry.load_library`` (trtexec's --dynamicPlugins) can ask a library for its plugins.

    Others register theirs when they are loaded (--staticPlugins). The names: NVIDIA/TensorRT, plugin/vc/vfcCommon.h.
    """
    content = path.read_bytes() if path.is_file() else b""  # an ELF file has the names of its symbols as texts
    return any(b"\0%b\0" % name in content for name in (b"getCreators", b"getPluginCreators"))
