"""A process that ends when its parent does, however that ends. Imports nothing that takes time: it is called first."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with(parent: int) -> None:
    """On Linux have the kernel kill this process when the parent (its process number) dies, as it may have already."""
    signal_at_death_of_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def signal_at_death_of_parent(number: int) -> None:
    """On Linux have the kernel send this process a signal when the thread that started it ends."""
    if sys.platform != "linux":
        return
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
