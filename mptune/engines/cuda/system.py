# ruff: noqa: N802, N815 (the names are CUDA's)
"""CUDA's runtime of the system (``libcudart.so``) by ctypes, with the names of ``cuda.bindings.runtime``.

For where cuda-python is missing or refused by the driver. A Jetson's JetPack brings this library with its driver; the
wheels of cuda-python have a runtime of their own inside. Signatures: ``cuda_runtime_api.h`` of CUDA 11.4 to 13.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Iterator, Mapping
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

_FOLDERS = ("usr/local/cuda/lib64", "usr/local/cuda/targets/*/lib", "usr/lib/*-linux-gnu")

_CALLS: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "cudaDeviceGetAttribute": (c_int, (c_int, c_int)),
    "cudaDeviceSynchronize": (None, ()),
    "cudaDriverGetVersion": (c_int, ()),
    "cudaEventCreate": (c_void_p, ()),
    "cudaEventDestroy": (None, (c_void_p,)),
    "cudaEventElapsedTime": (c_float, (c_void_p, c_void_p)),
    "cudaEventRecord": (None, (c_void_p, c_void_p)),
    "cudaEventSynchronize": (None, (c_void_p,)),
    "cudaFree": (None, (c_void_p,)),
    "cudaGetDeviceCount": (c_int, ()),
    "cudaGetLastError": (None, ()),
    "cudaGraphDestroy": (None, (c_void_p,)),
    "cudaGraphExecDestroy": (None, (c_void_p,)),
    "cudaGraphInstantiate": (c_void_p, (c_void_p, c_ulonglong)),
    "cudaGraphLaunch": (None, (c_void_p, c_void_p)),
    "cudaMalloc": (c_void_p, (c_size_t,)),
    "cudaMemcpyAsync": (None, (c_void_p, c_void_p, c_size_t, c_int, c_void_p)),
    "cudaRuntimeGetVersion": (c_int, ()),
    "cudaSetDevice": (None, (c_int,)),
    "cudaStreamBeginCapture": (None, (c_void_p, c_int)),
    "cudaStreamCreateWithFlags": (c_void_p, (c_uint,)),
    "cudaStreamDestroy": (None, (c_void_p,)),
    "cudaStreamEndCapture": (c_void_p, (c_void_p,)),
    "cudaStreamSynchronize": (None, (c_void_p,)),
}
"""Name -> type of what it writes through a pointer (None for nothing), and types of what it is given."""
_WRITES_LAST = frozenset({"cudaStreamEndCapture"})
"""The pointer to write through comes first in all other calls."""
_SYMBOLS = {"cudaGraphInstantiate": "cudaGraphInstantiateWithFlags"}
"""The signature of cudaGraphInstantiate itself changed with CUDA 12; that of this symbol is the same in all."""


class Code(int):
    """A ``cudaError_t`` with its name."""

    name: str


def system_libraries(root: Path = Path("/")) -> Iterator[str]:
    """Names and paths under which the system may have the library, the newest version first."""
    paths = [path for pattern in _FOLDERS for path in root.glob(f"{pattern}/libcudart.so.*")]
    by_version = sorted({path.resolve() for path in paths}, key=_version, reverse=True)
    yield from map(str, by_version)
    name = ctypes.util.find_library("cudart")
    if name is not None:
        yield name


def _version(path: Path) -> tuple[int, ...]:
    parts = path.name.partition(".so.")[2].split(".")
    return tuple(int(part) for part in parts if part.isdigit())


class SystemRuntime:
    """The calls of ``cuda.bindings.runtime`` that mptune makes, on a loaded ``libcudart``.

    Each returns a tuple whose first item is the error, as cuda-python's do.
    """

    cudaDeviceAttr = SimpleNamespace(cudaDevAttrMultiProcessorCount=16)
    cudaStreamNonBlocking = 1
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)

    def __init__(self, library: Any) -> None:
        """Declare the functions."""
        self._name_of = library.cudaGetErrorName
        self._words_of = library.cudaGetErrorString
        for of_error in (self._name_of, self._words_of):
            of_error.restype, of_error.argtypes = c_char_p, (c_int,)
        for name, (written, given) in _CALLS.items():
            function = getattr(library, _SYMBOLS.get(name, name))
            pointer = () if written is None else (POINTER(written),)
            function.restype = c_int
            function.argtypes = (*given, *pointer) if name in _WRITES_LAST else (*pointer, *given)
            setattr(self, name, partial(self._call, function, written, name in _WRITES_LAST))

    def cudaGetErrorString(self, code: int) -> tuple[Code, bytes]:
        """What an error means."""
        return self._code(0), self._words_of(int(code)) or b""

    def _call(self, function: Any, written: Any, last: bool, *given: Any) -> tuple[Any, ...]:
        if written is None:
            return (self._code(function(*given)),)
        place = written()
        arguments = (*given, byref(place)) if last else (byref(place), *given)
        return self._code(function(*arguments)), place.value

    def _code(self, value: int) -> Code:
        code = Code(value)
        name = "cudaSuccess" if value == 0 else (self._name_of(value) or b"").decode(errors="replace")
        code.name = name or f"error {value}"
        return code

    if TYPE_CHECKING:  # the calls of ``_CALLS``

        def __getattr__(self, name: str) -> Any: ...


def load_system_runtime(root: Path = Path("/")) -> SystemRuntime | None:
    """The first of the system's libraries that finds a device; None where none does."""
    for name in system_libraries(root):
        try:
            runtime = SystemRuntime(ctypes.CDLL(name))
            code, count = runtime.cudaGetDeviceCount()
        except (OSError, AttributeError):
            continue
        if code == 0 and count > 0:
            return runtime
    return None
