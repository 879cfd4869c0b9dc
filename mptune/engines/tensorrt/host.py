"""Memory on the host at addresses that TensorRT takes: those of inputs and outputs that are shapes."""

from __future__ import annotations

from typing import Any

import numpy as np

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
