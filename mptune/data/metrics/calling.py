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

from mptune.errors import DataError, MptuneError
from mptune.processes.forked import child_ends_here

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


def limit_s() -> float:
    """What one call may take here, seconds."""
    return _limit_s.get()


class MetricFailedError(Exception):
    """A metric gave no number. The text says why, without the metric's name."""


@contextlib.contextmanager
def guarded_call() -> Iterator[None]:
    """Let the code of a user run: its exceptions pass, and ``MetricTimeoutError`` is raised in the line that runs.

    The limit needs SIGALRM and the main thread; elsewhere the worker's own deadline holds.
    """
    timeout_s = _limit_s.get()

    def expire(signum: int, frame: FrameType | None) -> NoReturn:
        raise MetricTimeoutError(f"it ran longer than {timeout_s:g} s")

    with child_ends_here():
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


def end_limit() -> None:
    """End the limit of the call that runs: what it calls next has a limit of its own."""
    if hasattr(signal, "SIGALRM") and threading.current_thread() is threading.main_thread():
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def number_of(metric: str, function: Callable[..., Any], arguments: Sequence[Any], where: str = "") -> float:
    """What a metric returns, as one number; ``where`` says on which sample, for the message."""
    try:
        return called_number(function, arguments)
    except MetricFailedError as error:
        names = "outputs, reference" if len(arguments) == 2 else "outputs, references, inputs, labels"
        called = f"it is called as function({names}) with arrays by name, and returns one number"
        raise DataError(f"metric {metric} failed{where}: {error}", called) from error


def called_number(function: Callable[..., Any], arguments: Sequence[Any]) -> float:
    """What a function returns, as one number; MetricFailedError where it raises, or returns something else."""
    try:
        with guarded_call():
            value: Any = function(*arguments)
    except (MptuneError, MetricFailedError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the user's code may raise anything
        raise MetricFailedError(what_failed(error, function)) from error
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except OverflowError as error:
        raise MetricFailedError(f"it returned a number beyond float64{definition_of(function)}") from error
    except (TypeError, ValueError) as error:
        shown = f"{value!r:.60}".replace("\n", " ")
        raise MetricFailedError(f"it returned {shown}, which is not one number{definition_of(function)}") from error


def what_failed(error: BaseException, function: Callable[..., Any]) -> str:
    """What a function raised, in one line, with the line of its file."""
    kind = "" if isinstance(error, MetricTimeoutError) else f"{type(error).__name__}: "
    text = f"{kind}{error}".replace("\n", " ").removesuffix(": ")
    return f"{text}{_line_of(error, function)}"


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


def takes_whole_set(function: Callable[..., Any]) -> bool:
    """Whether a function asks for ``(outputs, references, inputs, labels)``: four arguments that must be given."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) >= 4 and len([p for p in positional if p.default is p.empty]) >= 3


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
