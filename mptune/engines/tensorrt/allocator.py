"""Memory for outputs whose shapes depend on values."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from mptune.engines.cuda import runtime as cuda


@cache
def allocator_class(trt: Any) -> Any:
    """The class of ``IOutputAllocator`` that keeps an output in a buffer of its own."""

    class Allocator(trt.IOutputAllocator):  # type: ignore[misc]
        """Memory for one output whose shape depends on values; it grows and never shrinks."""

        def __init__(self) -> None:
            super().__init__()
            self._buffer: cuda.DeviceBuffer | None = None
            self._shape: tuple[int, ...] = ()

        def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
            if self._buffer is None or self._buffer.nbytes < size:
                self.close()
                self._buffer = cuda.DeviceBuffer((size,), np.dtype(np.uint8))  # cudaMalloc aligns to 256 bytes.
            return self._buffer.address or 0

        def reallocate_output_async(self, tensor_name: str, memory: int, size: int, alignment: int, stream: int) -> int:
            return self.reallocate_output(tensor_name, memory, size, alignment)

        def notify_shape(self, tensor_name: str, shape: Any) -> None:
            self._shape = tuple(shape)

        def download(self, stream: cuda.Stream, dtype: np.dtype[Any]) -> np.ndarray:
            if self._buffer is None:
                return np.empty(self._shape, dtype)
            size = int(np.prod(self._shape, dtype=np.int64)) * dtype.itemsize
            return self._buffer.download(stream)[:size].view(dtype).reshape(self._shape)

        def close(self) -> None:
            if self._buffer is not None:
                self._buffer.close()
                self._buffer = None

    return Allocator
