"""Calling a user's metric: within a time limit; what it raises or returns that is no number is one clear error."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import itertools
import linecache
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NoReturn

from mptune.errors import DataError

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
    """Let the code of a user run: its exceptions pass, and ``MetricTimeoutError`` is raised in the line that runs.

    The limit needs SIGALRM and the main thread; elsewhere the worker's own deadline holds.
    """
    timeout_s = _limit_s.get()

    def expire(signum: int, frame: FrameType | None) -> NoReturn:
        raise MetricTimeoutError(f"it ran longer than {timeout_s:g} s")

    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGALRM, expire)
    try:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)


def number_of(metric: str, function: Callable[..., Any], arguments: Sequence[Any], where: str = "") -> float:
    """What a metric returns, as one number; ``where`` says on which sample, for the message."""
    names = "outputs, reference" if len(arguments) == 2 else "outputs, references, inputs, labels"
    called = f"it is called as function({names}) with arrays by name, and returns one number"
    try:
        with guarded_call():
            value: Any = function(*arguments)
    except DataError:
        raise
    except (Exception, SystemExit, MetricTimeoutError) as error:  # the user's code may raise anything
        kind = "" if isinstance(error, MetricTimeoutError) else f"{type(error).__name__}: "
        text = f"{kind}{error}".replace("\n", " ")
        raise DataError(f"metric {metric} failed{where}: {text}{_line_of(error, function)}", called) from error
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError) as error:
        shown = f"{value!r:.60}".replace("\n", " ")
        what = f"it returned {shown}, which is not one number{definition_of(function)}"
        raise DataError(f"metric {metric} failed{where}: {what}", called) from error


def _line_of(error: BaseException, function: Callable[..., Any]) -> str:
    """The line of the metric's own file at which the error came up; empty where it has none."""
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""


def definition_of(function: Callable[..., Any]) -> str:
    """Where a metric is defined, file, line and its text, for messages; empty where that is not known."""
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    lines = (linecache.getline(code.co_filename, number).strip() for number in itertools.count(code.co_firstlineno))
    line = next(line for line in lines if not line.startswith("@"))
    return f" ({code.co_filename}:{code.co_firstlineno}: {line})"


@dataclass(frozen=True)
class CodeDefinition:
    """Which code a metric is, to tell it from another one of its name.

    Attributes:
        kind: of the code; hashes of two kinds cannot be compared.
        unread: names of what it reads that the hash leaves out.
    """

    kind: str
    sha256: str
    unread: tuple[str, ...] = ()


def definition_of_function(function: Callable[..., Any]) -> CodeDefinition:
    """Which code a Python function is: bytecode and constants.

    What it reads from outside is ``unread``, but for modules and what other modules define.
    """
    kind = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    if not isinstance(function, FunctionType):
        return CodeDefinition(kind, "", ("an object that is called",))
    variables = inspect.getclosurevars(function)
    unread = [
        name
        for name, value in {**variables.globals, **variables.nonlocals}.items()
        if not isinstance(value, ModuleType)
        and (not hasattr(value, "__qualname__") or value.__module__ == function.__module__)
    ]
    if function.__defaults__ or function.__kwdefaults__:
        unread.append("its defaults")
    sha256 = hashlib.sha256(repr(_described(function.__code__)).encode()).hexdigest()
    return CodeDefinition(kind, sha256, tuple(sorted(unread)))


def _described(value: object) -> object:
    """Code, or a constant in it, as values whose text is the same wherever the code is written."""
    if isinstance(value, CodeType):
        names = value.co_names, value.co_varnames, value.co_freevars
        return value.co_code, names, [_described(constant) for constant in value.co_consts]
    return sorted(map(repr, value)) if isinstance(value, frozenset) else value
