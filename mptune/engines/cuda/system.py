# ruff: noqa: N802, N815 (the names are CUDA's)
"""CUDA's runtime of the system (``libcudart.so``) by ctypes, with the names of ``cuda.bindings.runtime``.

For a Jetson whose driver refuses cuda-python: JetPack brings this library with its driver. Signatures:
``cuda_runtime_api.h`` of CUDA 11.4 to 13.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Mapping
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_FOLDERS = ("usr/local/cuda/lib64", "usr/local/cuda/targets/*/lib", "usr/lib/*-linux-gnu")

CALLS: Mapping[str, tuple[Any, ...]] = {
    "cudaDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cudaDeviceSynchronize": (),
    "cudaDriverGetVersion": (POINTER(c_int),),
    "cudaEventCreate": (POINTER(c_void_p),),
    "cudaEventDestroy": (c_void_p,),
    "cudaEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "cudaEventRecord": (c_void_p, c_void_p),
    "cudaFree": (c_void_p,),
    "cudaGetDeviceCount": (POINTER(c_int),),
    "cudaGetLastError": (),
    "cudaGraphDestroy": (c_void_p,),
    "cudaGraphExecDestroy": (c_void_p,),
    "cudaGraphInstantiate": (POINTER(c_void_p), c_void_p, c_ulonglong),
    "cudaGraphLaunch": (c_void_p, c_void_p),
    "cudaMalloc": (POINTER(c_void_p), c_size_t),
    "cudaMemcpyAsync": (c_void_p, c_void_p, c_size_t, c_int, c_void_p),
    "cudaSetDevice": (c_int,),
    "cudaStreamBeginCapture": (c_void_p, c_int),
    "cudaStreamCreateWithFlags": (POINTER(c_void_p), c_uint),
    "cudaStreamDestroy": (c_void_p,),
    "cudaStreamEndCapture": (c_void_p, POINTER(c_void_p)),
    "cudaStreamSynchronize": (c_void_p,),
}
"""Name -> types of the arguments; a pointer is what the call writes through, which Python gets as a result."""
SYMBOLS = {"cudaGraphInstantiate": "cudaGraphInstantiateWithFlags"}
"""The signature of cudaGraphInstantiate itself changed with CUDA 12; that of this symbol is the same in all."""


class Code(int):
    """A ``cudaError_t`` with its name."""

    name: str


class SystemRuntime:
    """The calls of ``cuda.bindings.runtime`` on a loaded ``libcudart``: the first item of each result is the error."""

    cudaDeviceAttr = SimpleNamespace(cudaDevAttrMultiProcessorCount=16)
    cudaStreamNonBlocking = 1
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)

    def __init__(self, library: Any) -> None:
        self._library = library
        for function in (library.cudaGetErrorName, library.cudaGetErrorString):
            function.restype, function.argtypes = c_char_p, (c_int,)
        for name, types in CALLS.items():
            function = getattr(library, SYMBOLS.get(name, name))
            function.restype, function.argtypes = c_int, types
            setattr(self, name, partial(self._call, function, types))

    def cudaGetErrorString(self, code: int) -> tuple[Code, bytes]:
        return Code(0), self._library.cudaGetErrorString(int(code)) or b""

    def _call(self, function: Any, types: tuple[Any, ...], *given: Any) -> tuple[Any, ...]:
        values = iter(given)
        written: Any = next((kind._type_() for kind in types if hasattr(kind, "contents")), None)  # by the one pointer
        code = Code(function(*(byref(written) if hasattr(kind, "contents") else next(values) for kind in types)))
        name = "cudaSuccess" if code == 0 else (self._library.cudaGetErrorName(code) or b"").decode(errors="replace")
        code.name = name or f"error {int(code)}"
        return (code,) if written is None else (code, written.value)


def system_libraries(root: Path = Path("/")) -> list[str]:
    """Names and paths under which the system may have the library, the newest version first."""

    def version(path: Path) -> tuple[int, ...]:
        return tuple(int(part) for part in path.name.partition(".so.")[2].split(".") if part.isdigit())

    paths = {path.resolve() for pattern in _FOLDERS for path in root.glob(f"{pattern}/libcudart.so.*")}
    name = ctypes.util.find_library("cudart")
    return [*map(str, sorted(paths, key=version, reverse=True)), *([] if name is None else [name])]


def load_system_runtime(root: Path = Path("/")) -> Any:
    """The first of the system's libraries that finds a device; None where none does."""
    for name in system_libraries(root):
        try:
            runtime: Any = SystemRuntime(ctypes.CDLL(name))
            code, count = runtime.cudaGetDeviceCount()
        except (OSError, AttributeError):
            continue
        if code == 0 and count > 0:
            return runtime
    return None
