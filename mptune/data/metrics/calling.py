"""A metric's function is called: what it raises or returns that is no number is one error that quotes its line."""

from __future__ import annotations

import itertools
import linecache
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mptune.data.metrics.guarded import MetricTimeoutError, guarded_call
from mptune.errors import DataError


def call_metric(
    metric: str,
    function: Callable[..., Any],
    got: Mapping[str, np.ndarray],
    wanted: Mapping[str, np.ndarray],
    where: str = "",
) -> float:
    """The value of a task metric on one sample; ``where`` says which sample, for the message.

    Raises:
        DataError: the function raised, ended the process, took too long, or returned no number.
    """
    return number_of(metric, function, (got, wanted), where, "outputs, reference")


def number_of(metric: str, function: Callable[..., Any], arguments: tuple[Any, ...], where: str, names: str) -> float:
    """What a metric returns, as one number.

    Args:
        metric: its name, for messages.
        function: a user's, or a built-in one.
        arguments: that it is called with.
        where: which sample these are of, for messages.
        names: of the arguments.

    Raises:
        DataError: the function raised, ended the process, took too long, or returned no number.
    """
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
