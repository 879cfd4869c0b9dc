"""One thread for the sampler's matrices: some hundred rows are multiplied no sooner by many, which wait by spinning.

With two threads a proposal for 64 groups took 0.34 s of processor time after 100 plans and 0.68 s after 400, with one
0.06 s and 0.09 s, and no longer on the clock.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

_MAPS = Path("/proc/self/maps")

_NAMES = tuple(product(("scipy_openblas", "openblas"), ("64_", "_64", "")))
"""Beginnings and ends of the names of OpenBLAS's functions: of the wheels of NumPy and SciPy, and of others."""


_lock = threading.Lock()
_blocks = 0
"""How many blocks run now, in all threads."""
_before: list[tuple[Any, int]] = []
"""What sets the threads of each library, and how many there were before the first of the blocks."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Let every OpenBLAS of this process compute in one thread within the block.

    On Linux. Elsewhere, and with another BLAS, nothing is changed: the result is the same but for its rounding.
    """
    global _blocks
    with _lock:
        _blocks += 1
        if _blocks == 1:
            _before[:] = [(set_threads, get()) for get, set_threads in thread_functions()]
            for set_threads, _ in _before:
                set_threads(1)
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if not _blocks:
                for set_threads, count in _before:
                    set_threads(count)


def thread_functions() -> tuple[tuple[Callable[[], int], Callable[[int], object]], ...]:
    """What gives the number of threads of each OpenBLAS that is loaded, and what sets it; none where none is found."""
    return _functions_of(_libraries())


def _libraries() -> tuple[str, ...]:
    """Paths of the OpenBLAS libraries that are loaded."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ()
    paths = (line.split(maxsplit=5)[-1] for line in lines if "openblas" in line)
    return tuple(dict.fromkeys(path for path in paths if "openblas" in Path(path).name))


@functools.cache
def _functions_of(libraries: tuple[str, ...]) -> tuple[tuple[Any, Any], ...]:
    found = []
    for path in libraries:
        try:
            library = ctypes.CDLL(path)
        except OSError:  # replaced while this process runs
            continue
        for begin, end in _NAMES:
            get, set_threads = (getattr(library, f"{begin}_{verb}_num_threads{end}", None) for verb in ("get", "set"))
            if get is not None and set_threads is not None:
                found.append((get, set_threads))
                break
    return tuple(found)
