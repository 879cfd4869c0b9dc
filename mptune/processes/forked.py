"""Code of the user that forks."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def child_ends_here() -> Iterator[None]:
    """End a process that the code of a user forked, at the end of the block: it must not go on as mptune."""
    pid = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != pid:
            os._exit(1 if sys.exc_info()[0] else 0)
