"""A kernel that keeps a stream busy for a moment, so that work enqueued meanwhile starts without waiting for the host.

Where a launch returns only when the engine has finished (a CUDA graph of ONNX Runtime), the stream is empty at each
launch, and the time between events contains the latency of the launch: on an H200 about 20 us, with some spread.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from mptune.engines.base import EngineError, FailureKind
from mptune.engines.cuda.runtime import Stream

DELAY_US = 200
"""Longer than a launch takes."""

_NAME = b"wait"
_PTX = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry wait(.param .u64 span_ns)
{
    .reg .pred %waiting;
    .reg .u64 %span, %begin, %now, %passed;
    ld.param.u64 %span, [span_ns];
    mov.u64 %begin, %globaltimer;
again:
    mov.u64 %now, %globaltimer;
    sub.u64 %passed, %now, %begin;
    setp.lt.u64 %waiting, %passed, %span;
    @%waiting bra again;
    ret;
}
"""


def enqueue_delay(stream: Stream, span_us: int = DELAY_US) -> None:
    """Keep a stream busy for ``span_us`` microseconds.

    Raises:
        EngineError: the kernel cannot be loaded or launched.
    """
    driver, function = _kernel()
    span = np.array([span_us * 1000], dtype=np.uint64)
    pointers = np.array([span.ctypes.data], dtype=np.uint64)
    code = driver.cuLaunchKernel(
        function, 1, 1, 1, 1, 1, 1, 0, driver.CUstream(stream.address), pointers.ctypes.data, 0
    )[0]
    _check(driver, code, "cuLaunchKernel")


@lru_cache(maxsize=1)
def _kernel() -> tuple[Any, Any]:
    """The driver's bindings and the kernel. Needs a current context, which exists wherever a stream does."""
    try:
        from cuda.bindings import driver

        code, module = driver.cuModuleLoadData(_PTX + b"\0")
    except (ImportError, RuntimeError) as error:  # RuntimeError: the driver lacks a function
        raise EngineError(FailureKind.UNSUPPORTED, f"cuda-python is not usable ({error})") from error
    _check(driver, code, "cuModuleLoadData")
    code, function = driver.cuModuleGetFunction(module, _NAME)
    _check(driver, code, "cuModuleGetFunction")
    return driver, function


def _check(driver: Any, code: Any, call: str) -> None:
    if int(code) != 0:
        raise EngineError(FailureKind.ERROR, f"{call} failed with {getattr(code, 'name', code)}")
