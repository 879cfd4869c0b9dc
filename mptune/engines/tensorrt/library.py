"""TensorRT and TensorRT-RTX: the module, its versions and plugins, the one logger, and what it says of a failure."""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeVar

from mptune.engines import cuda
from mptune.engines.base import EngineError, FailureKind
from mptune.engines.ort.cuda_session import PROBE_TIMEOUT_S
from mptune.engines.ort.session import classify as classify_cuda
from mptune.processes.child import WorkerState
from mptune.processes.parent import run_once
from mptune.targets.detect import Gpu, cuda_series, detect_gpus

T = TypeVar("T")
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

_KINDS = {
    FailureKind.OUT_OF_MEMORY: r"outofmemory|out of memory|cudaerrormemoryallocation|bad_alloc|failed_allocation"
    r"|mem_alloc_failed|insufficient memory|could not be allocated|memory allocation failed|exceeded mem budget",
    FailureKind.TIMEOUT: r"build ?canceled",
    FailureKind.NO_TACTIC: r"could not find any implementation|no runners that implement|no implementation of"
    r"|no tactics to implement|error during tactic selection|no valid tactic|no implementation obeys",
    # Logged where there is no device; they accompany other errors when building ahead of time.
    FailureKind.DRIVER: r"cudaError 35\b|CUDA initialization failure with error: 35\b",
    FailureKind.DEVICE_LOST: r"cudaError 100\b|CUDA initialization failure",
    FailureKind.UNSUPPORTED: r"plugin not found|could not find plugin|unsupported_node|unsupported_graph"
    r"|unsupported operator|no importer registered|is not supported|not supported by|does not support"
    r"|incompatible device|compute capabilit|target gpu sm|cannot compile for target",
}
"""The first that a logged error matches is its kind; others are classified as CUDA's."""
_RANKS = {FailureKind.OUT_OF_MEMORY: 0, FailureKind.ERROR: 2, FailureKind.DRIVER: 3, FailureKind.DEVICE_LOST: 4}
"""Of several errors that are logged, the one of the lowest rank is what failed; all other kinds have rank 1."""
_SHORT_OF_MEMORY = re.compile(
    r"insuff?i?cient memory|device memory is insufficient|could not be allocated", re.IGNORECASE
)

# "IBuilder::buildSerializedNetwork: Error Code 4: API Usage Error (words In function at /src/file.cpp:12)" and
# "[optimizer.cpp::computeCosts::3869] Error Code 10: Internal Error (words)", some with "10: " before.
_ERROR = re.compile(
    r"^(?:\d+: )?(?:\[[^\]]*\] |[\w:]+: )?Error Code \d+: (?P<category>[\w ]+?) \((?P<body>.*)\)$", re.DOTALL
)
_ASSERTION = re.compile(
    r'^(?:Assertion failed: )?[^"]*?&& "(?P<quoted>[^"]*)"|^Assertion failed: .+?: (?P<after>[A-Z].*)$'
    r"|^Assertion .+? failed\. (?P<reason>.+)$",
    re.DOTALL,
)
_PLACE = re.compile(
    r"[\s.]*\bIn \w+ at \S+?:\d+\b|\[\w+\.(?:cpp|hpp|h):\d+: \w+\] |^\d+: |^\S+\.(?:cpp|hpp|h):\d+: "
    r"|^Serialization assertion .*? failed\.(?=\S)"
)
"""Function, error number, source file and line."""
_GENERAL = frozenset({"Internal Error", "API Usage Error"})  # categories that add nothing to a message


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


def construct(make: Callable[[], T], log: Any) -> T:
    """Call one of TensorRT's constructors, which give a null pointer where they fail: Python sees a TypeError."""
    try:
        return make()
    except (TypeError, RuntimeError) as error:
        raise build_failure(log, str(error)) from error


def build_failure(log: Any, otherwise: str = "") -> EngineError:
    """The error for what TensorRT failed, from what it logged; ``otherwise`` is the message where it logged none."""
    if not log.errors:
        return EngineError(FailureKind.ERROR, otherwise or "TensorRT failed without a message")
    errors = [(classify(text), clean(text)) for text in log.errors]
    kind, message = min(errors, key=lambda error: _RANKS.get(error[0], 1))
    # Too little memory is a warning only, and the layer is then without a kernel.
    if kind is FailureKind.NO_TACTIC and any(_SHORT_OF_MEMORY.search(text) for text in log.warnings):
        return EngineError(FailureKind.OUT_OF_MEMORY, f"{message}; tactics were skipped because of too little memory")
    return EngineError(kind, message)


def skipped_tactics(warnings: Sequence[str]) -> tuple[str, ...]:
    """The warning for an engine whose build skipped tactics for want of memory."""
    if not any(_SHORT_OF_MEMORY.search(text) for text in warnings):
        return ()
    text = "TensorRT skipped tactics for want of memory, so that another build may choose other kernels: close other"
    return (f"{text} programs, or set --workspace below what is always free",)


def parser_failure(complaints: Sequence[tuple[str, str, str, str]], log: Any) -> EngineError:
    """The error for a model that TensorRT's parser rejects; a complaint is code, words, node and operator.

    The first about an operator, an attribute or a type that it does not support counts.
    """
    errors = []
    for code, words, node, operator in complaints:
        about = operator or ("data" in words and "type" in words)
        is_unsupported = (code.startswith("UNSUPPORTED") and about) or (operator and "Plugin not found" in words)
        kind = FailureKind.OUT_OF_MEMORY if code == "MEM_ALLOC_FAILED" else FailureKind.PARSER
        lines = [clean(line) for line in words.splitlines()]
        message = next((line for line in lines if line and not line.startswith("Invalid Node - ")), "")
        if message in ("false", ""):
            message = "TensorRT's parser does not support it"
        where = "" if not operator else f"{operator} node {node!r}: " if node else f"{operator}: "
        errors.append(EngineError(FailureKind.UNSUPPORTED if is_unsupported else kind, f"{where}{message}"))
    if not errors:
        return build_failure(log, "TensorRT's parser rejects the model without a message")
    return next((each for each in errors if each.kind is FailureKind.UNSUPPORTED), errors[0])


def classify(text: str) -> FailureKind:
    """Kind of failure by the text of one logged error."""
    kind = next((kind for kind, words in _KINDS.items() if re.search(words, text, re.IGNORECASE)), None)
    return kind or classify_cuda(text)


def clean(text: str) -> str:
    """The informative part of a logged error: without function, error number, source file and line."""
    text, category = text.strip(), ""
    match = _ERROR.match(text)
    if match:
        category, text = match["category"], match["body"]
    assertion = _ASSERTION.match(text)
    if assertion:
        text = assertion["quoted"] or assertion["after"] or assertion["reason"]
    text = " ".join(_PLACE.sub("", text).split())
    if text in ("", "no further information"):
        return category or text
    return text if not category or category in _GENERAL else f"{category}: {text}"


@dataclass(frozen=True)
class LibraryReport:
    """The result of ``LibraryJob``."""

    version: str
    warnings: tuple[str, ...] = ()
    cuda_obstacle: str | None = None  # why no GPU can be used, and the command that cures it, where one does


@dataclass(frozen=True)
class LibraryJob:
    """Check that a library loads, in a supported version, and makes a builder; one of TensorRT needs a GPU for it."""

    kind: Kind

    def run(self, state: WorkerState) -> LibraryReport:
        library = load_library(self.kind)
        obstacle = cuda.unavailable_reason()
        if obstacle is None or library.is_rtx:
            log = open_log(library.trt)
            try:
                construct(lambda: library.trt.Builder(log), log)
            except EngineError as error:
                if library.is_rtx:
                    raise
                cure = f": {install_line(self.kind, detect_gpus())}" if error.kind is FailureKind.DRIVER else ""
                obstacle = f"it makes no builder ({error.message}){cure}"
        return LibraryReport(library.version, library.warnings, obstacle)


@cache
def find_library(kind: Kind) -> LibraryReport | str:
    """TensorRT or TensorRT-RTX as a worker finds it, or why it cannot be used. Cached for the process."""
    if not is_installed(kind):
        return f"{kind} is not installed"
    return run_once(LibraryJob(kind), PROBE_TIMEOUT_S)
