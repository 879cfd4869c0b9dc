"""Calling a user's metric: within a time limit, and without letting it end the process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any, NoReturn

METRIC_TIMEOUT_S = 300.0
"""One call of a metric may take this long by default, seconds."""

_limit_s: ContextVar[float] = ContextVar("metric timeout", default=METRIC_TIMEOUT_S)


class MetricTimeoutError(BaseException):
    """The metric ran longer than it may. No Exception: a metric's own ``except Exception`` must not hold it."""


@contextlib.contextmanager
def metric_limit(timeout_s: float) -> Iterator[None]:
    """Within the block one call of a metric may take this many seconds."""
    token = _limit_s.set(timeout_s)
    try:
        yield
    finally:
        _limit_s.reset(token)


@contextlib.contextmanager
def guarded_call() -> Iterator[None]:
    """Let the code of a user run: its exceptions pass, and ``os._exit`` raises SystemExit.

    At the end of the time ``MetricTimeoutError`` is raised in the line that runs. That needs SIGALRM and the main
    thread; elsewhere the worker's own deadline holds.
    """
    timeout_s, plain_exit = _limit_s.get(), os._exit

    def refuse(status: int = 0) -> NoReturn:
        raise SystemExit(status)

    def expire(signum: int, frame: FrameType | None) -> NoReturn:
        raise MetricTimeoutError(f"it ran longer than {timeout_s:g} s")

    limited = hasattr(signal, "SIGALRM") and threading.current_thread() is threading.main_thread()
    handler: Any = signal.signal(signal.SIGALRM, expire) if limited else None
    started, left_s = time.monotonic(), 0.0
    os._exit = refuse
    try:
        if limited:
            left_s, _ = signal.setitimer(signal.ITIMER_REAL, timeout_s)
        yield
    finally:
        os._exit = plain_exit
        if limited:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, handler)
            if left_s:  # of the caller's own timer
                signal.setitimer(signal.ITIMER_REAL, max(left_s - (time.monotonic() - started), 1e-3))
