"""TensorRT and TensorRT-RTX: the module, the supported versions, the log and what it says of a failure."""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from mptune.engines.base import EngineError, FailureKind
from mptune.engines.cuda import runtime as cuda
from mptune.engines.ort.session import classify as classify_cuda
from mptune.targets.detect import Gpu, cuda_series

_ALIGNMENT = 256
"""NvInferRuntime.h, setTensorAddress: "The pointer must have at least 256-byte alignment"."""


def empty_on_host(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """A contiguous array with an aligned address that is not null, even where it has no elements."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    aligned: np.ndarray = np.ndarray(shape, dtype, buffer=raw, offset=-raw.ctypes.data % _ALIGNMENT)
    return aligned


def copied_to_host(array: np.ndarray) -> np.ndarray:
    """A copy of an array at such an address."""
    place = empty_on_host(array.shape, array.dtype)
    place[...] = array
    return place


Kind = Literal["tensorrt", "tensorrt-rtx"]
MODULES: Mapping[Kind, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}

_ON_A_JETSON = (
    "JetPack brings it: sudo apt install python3-libnvinfer, and a virtual environment with --system-site-packages"
)


def install_line(kind: Kind, gpus: Sequence[Gpu] = ()) -> str:
    """How to install a library for the driver here; cuda-python that is installed already is left as it is.

    ``pip install tensorrt`` brings CUDA 13, whatever the driver.
    """
    if kind == "tensorrt" and gpus and gpus[0].is_jetson:
        return _ON_A_JETSON
    series = cuda_series(gpus)
    try:
        metadata.version("cuda-bindings")
    except metadata.PackageNotFoundError:
        return f"pip install {kind}-cu{series}{cuda.INSTALL[series].removeprefix('pip install')}"
    return f"pip install {kind}-cu{series}"


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
    """TensorRT or TensorRT-RTX, imported."""

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


def load_library(kind: Kind, plugins: Sequence[Path] = ()) -> Library:
    """Import the module, check its version, and load NVIDIA's plugins and the user's. In workers only: native code.

    Without its plugins TensorRT neither parses nor loads what they compute: RoiAlign, ScatterElements with a reduction
    (onnx-tensorrt's onnxOpImporters.cpp), EfficientNMS_TRT.
    """
    try:
        trt = importlib.import_module(MODULES[kind])
    except ModuleNotFoundError as error:
        raise EngineError(FailureKind.UNSUPPORTED, _missing(kind, error)) from error
    except (ImportError, OSError, RuntimeError) as error:
        words = (str(error).strip() or type(error).__name__).splitlines()[0]
        message = f"{kind} is installed, but a library that it needs does not load: {words}"
        raise EngineError(FailureKind.UNSUPPORTED, message) from error
    version = str(getattr(trt, "__version__", ""))
    warnings = check_version(kind, version)
    if not _register_plugins(trt):
        warnings += (
            f"{kind} could not register its plugins: models with RoiAlign and the like fail; install it again",
        )
    for path in plugins:
        _load_plugin(trt, path)
    return Library(kind, trt, version, warnings)


def check_version(kind: Kind, version: str) -> tuple[str, ...]:
    """Check that a version is supported."""
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
        export = ", or export a plan for it: `mptune export RUN --for tensorrt-8`" if number[0] == 8 else ""
        raise EngineError(
            FailureKind.UNSUPPORTED,
            f"TensorRT {version} has no strongly typed networks, mptune measures with 10.0 or later: on a Jetson update"
            f" to JetPack 6.1 (TensorRT 10.3) or later{export}",
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


@cache
def _load_plugin(trt: Any, path: Path) -> None:
    """Load a library of plugins, once per process; its creators register themselves, or are asked for."""
    with collector_paused():
        try:
            ctypes.CDLL(str(path))
        except OSError as error:
            raise EngineError(FailureKind.UNSUPPORTED, f"the plugin {path} does not load: {error}") from error
        if exports_creators(path):
            registry = trt.get_plugin_registry()
            registry.load_library(str(path))  # None where they have registered themselves


def exports_creators(path: Path) -> bool:
    """Whether ``IPluginRegistry.load_library`` (trtexec's --dynamicPlugins) can ask a library for its plugins.

    Others register theirs when they are loaded (--staticPlugins). The names are those of NVIDIA/TensorRT,
    plugin/vc/vfcCommon.h. False where the file cannot be read.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return False
    # An ELF file has the names of its symbols as texts.
    return any(b"\0%b\0" % name in content for name in (b"getCreators", b"getPluginCreators"))


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector while TensorRT runs.

    A collection in a callback of TensorRT may free other objects of TensorRT, whose destructors need the locks that it
    holds: a deadlock.
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


# "IBuilder::buildSerializedNetwork: Error Code 4: API Usage Error (words In function at /src/file.cpp:12)" and
# "[optimizer.cpp::computeCosts::3869] Error Code 10: Internal Error (words)", some with "10: " before.
_ERROR = re.compile(
    r"^(?:\d+: )?(?:\[[^\]]*\] |[\w:]+: )?Error Code \d+: (?P<category>[\w ]+?) \((?P<body>.*)\)$", re.DOTALL
)

_PLACE = re.compile(r"[\s.]*\bIn \w+ at \S+?:\d+\b|\[\w+\.(?:cpp|hpp|h):\d+: \w+\] ")
_NUMBER = re.compile(r"^\d+: ")
_SOURCE = re.compile(r"^\S+\.(?:cpp|hpp|h):\d+: ")

_ASSERTION = re.compile(
    r'^(?:Assertion failed: )?[^"]*?&& "(?P<quoted>[^"]*)"|^Assertion failed: .+?: (?P<after>[A-Z].*)$'
    r"|^Assertion .+? failed\. (?P<reason>.+)$",
    re.DOTALL,
)

_SERIALIZATION = re.compile(r"^Serialization assertion .*? failed\.(?=\S)")
_DULL = frozenset({"", "no further information"})
_GENERAL = frozenset({"Internal Error", "API Usage Error"})

_OUT_OF_MEMORY = re.compile(
    r"outofmemory|out of memory|cudaerrormemoryallocation|bad_alloc|failed_allocation|mem_alloc_failed"
    r"|insufficient memory|could not be allocated|memory allocation failed|exceeded mem budget"
)

_SHORT_OF_MEMORY = re.compile(r"insuff?i?cient memory|device memory is insufficient|could not be allocated")
_CANCELLED = re.compile(r"buildcanceled|build canceled")

_NO_TACTIC = re.compile(
    r"could not find any implementation|no runners that implement|no implementation of|no tactics to implement"
    r"|error during tactic selection|no valid tactic|no implementation obeys"
)

_UNSUPPORTED = re.compile(
    r"plugin not found|could not find plugin|unsupported_node|unsupported_graph|unsupported operator"
    r"|no importer registered|is not supported|not supported by|does not support|incompatible device"
    r"|compute capabilit|target gpu sm|cannot compile for target"
)

# Logged where there is no device; it accompanies other errors when building ahead of time.
_OLD_DRIVER = re.compile(r"cudaError 35\b|CUDA initialization failure with error: 35\b")
_NO_DEVICE = re.compile(r"cudaError 100\b|CUDA initialization failure")
T = TypeVar("T")

_BY_PRIORITY = (
    FailureKind.OUT_OF_MEMORY,
    FailureKind.TIMEOUT,
    FailureKind.UNSUPPORTED,
    FailureKind.NO_TACTIC,
    FailureKind.CRASH,
    FailureKind.DISK_FULL,
    FailureKind.INVALID_MODEL,
    FailureKind.ERROR,
    FailureKind.DRIVER,
    FailureKind.DEVICE_LOST,
)


@dataclass(frozen=True)
class ParserComplaint:
    """One error of the ONNX parser."""

    code: str
    words: str
    node: str = ""
    operator: str = ""

    @property
    def kind(self) -> FailureKind:
        """``UNSUPPORTED`` for an unknown operator, attribute or type, else what the code says."""
        if self.operator and (self.code.startswith("UNSUPPORTED") or "Plugin not found" in self.words):
            return FailureKind.UNSUPPORTED
        if self.code.startswith("UNSUPPORTED") and "data" in self.words and "type" in self.words:
            return FailureKind.UNSUPPORTED
        return FailureKind.OUT_OF_MEMORY if self.code == "MEM_ALLOC_FAILED" else FailureKind.PARSER

    @property
    def line(self) -> str:
        """One line, with the node."""
        lines = [clean(line) for line in self.words.splitlines()]
        informative = [line for line in lines if line and not line.startswith("Invalid Node - ")]
        message = informative[0] if informative else clean(self.words)
        if message in ("false", ""):
            message = "TensorRT's parser does not support it"
        node = f" node {self.node!r}" if self.node else ""
        where = f"{self.operator}{node}: " if self.operator else ""
        return where + message


def made(make: Callable[[], T], log: Any) -> T:
    """Call one of TensorRT's constructors, which give a null pointer where they fail: Python sees a TypeError."""
    try:
        return make()
    except (TypeError, RuntimeError) as error:
        raise build_failure(log.errors, log.warnings, str(error)) from error


def build_failure(errors: Sequence[str], warnings: Sequence[str] = (), otherwise: str = "") -> EngineError:
    """The error for a build, a load or an execution that TensorRT failed; too little memory is a warning only."""
    kinds = [classify(text) for text in errors]
    for kind in _BY_PRIORITY:
        if kind not in kinds:
            continue
        message = clean(errors[kinds.index(kind)])
        if kind is FailureKind.NO_TACTIC and any(_SHORT_OF_MEMORY.search(text.lower()) for text in warnings):
            return EngineError(
                FailureKind.OUT_OF_MEMORY, f"{message}; tactics were skipped because of too little memory"
            )
        return EngineError(kind, message)
    return EngineError(FailureKind.ERROR, otherwise or "TensorRT failed without a message")


def skipped_tactics(warnings: Sequence[str]) -> tuple[str, ...]:
    """The warning for an engine that was built although tactics were skipped for want of memory.

    TensorRT logs two warnings for a tactic, of which the second says that it is skipped.
    """
    short = [text.lower() for text in warnings if _SHORT_OF_MEMORY.search(text.lower())]
    count = sum("skipping tactic" in text for text in short) or len(short)
    if not count:
        return ()
    tactics = "1 tactic" if count == 1 else f"{count} tactics"
    return (
        f"TensorRT skipped {tactics} for want of memory, so that another build may choose other kernels: close other"
        " programs, or set --workspace below what is always free",
    )


def parser_failure(complaints: Sequence[ParserComplaint], errors: Sequence[str] = ()) -> EngineError:
    """The error for a model that TensorRT's parser rejects; the first about an unsupported operator counts."""
    if not complaints:
        return build_failure(errors, otherwise="TensorRT's parser rejects the model without a message")
    first = next(
        (complaint for complaint in complaints if complaint.kind is FailureKind.UNSUPPORTED and complaint.operator),
        complaints[0],
    )
    file = next((text for text in errors if "Failed to open file" in text), None)
    if file is not None and first.kind is FailureKind.PARSER:
        return EngineError(FailureKind.PARSER, clean(file))
    return EngineError(first.kind, first.line)


def classify(text: str) -> FailureKind:
    """Kind of failure by the text of one logged error."""
    lower = text.lower()
    if _OUT_OF_MEMORY.search(lower):
        return FailureKind.OUT_OF_MEMORY
    if _CANCELLED.search(lower):
        return FailureKind.TIMEOUT
    if _NO_TACTIC.search(lower):
        return FailureKind.NO_TACTIC
    if _OLD_DRIVER.search(text):
        return FailureKind.DRIVER
    if _NO_DEVICE.search(text):
        return FailureKind.DEVICE_LOST
    if _UNSUPPORTED.search(lower):
        return FailureKind.UNSUPPORTED
    return classify_cuda(text)


def clean(text: str) -> str:
    """The informative part of a logged error: without function, error number, source file and line."""
    text = text.strip()
    match = _ERROR.match(text)
    category = ""
    if match:
        category, text = match["category"], match["body"]
    assertion = _ASSERTION.match(text)
    if assertion:
        text = assertion["quoted"] or assertion["after"] or assertion["reason"]
    for rest in (_PLACE, _NUMBER, _SOURCE, _SERIALIZATION):
        text = rest.sub("", text)
    text = " ".join(text.split())
    if text in _DULL:
        return category or text
    return text if not category or category in _GENERAL else f"{category}: {text}"
