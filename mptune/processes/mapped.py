"""Values with large arrays between processes: the arrays go through a file that the reader maps copy-on-write."""

from __future__ import annotations

import mmap
import pickle
from pathlib import Path
from typing import Any

_ALIGNMENT = 64


def write_mapped(path: Path, value: Any) -> tuple[bytes, tuple[int, ...]]:
    """Write the arrays of a picklable value; what ``read_mapped`` needs beside the file is returned."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    sizes = []
    with path.open("wb") as file:
        for buffer in buffers:
            raw = buffer.raw()
            sizes.append(raw.nbytes)
            file.write(raw)
            file.write(bytes(-raw.nbytes % _ALIGNMENT))
        file.write(b"\0")  # an empty file cannot be mapped
    return head, tuple(sizes)


def read_mapped(path: Path, head: bytes, sizes: tuple[int, ...]) -> Any:
    """The value, with arrays of its own: private copies of the file's pages. The file is deleted."""
    with path.open("rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    path.unlink()
    start, buffers = 0, []
    for size in sizes:
        buffers.append(view[start : start + size])
        start += size + -size % _ALIGNMENT
    return pickle.loads(head, buffers=buffers)
