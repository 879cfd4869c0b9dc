"""Calling a user's metric: what it raises or returns that is no number is one clear error."""

from __future__ import annotations

import inspect
import itertools
import linecache
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from mptune.errors import DataError, MptuneError

METRIC_TIMEOUT_S = 300.0
"""One call of a script's metric may take this long by default, seconds."""


class MetricFailedError(MptuneError):
    """A metric gave no number. The text says why, without the metric's name."""


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
        value: Any = function(*arguments)
    except (MptuneError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the user's code may raise anything
        text = f"{type(error).__name__}: {error}".replace("\n", " ").removesuffix(": ")
        # The line of the metric's own file at which it came up.
        file = getattr(getattr(function, "__code__", None), "co_filename", "")
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        place = f" ({file}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""
        raise MetricFailedError(f"{text}{place}") from error
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except OverflowError as error:
        raise MetricFailedError(f"it returned a number beyond float64{definition_of(function)}") from error
    except (TypeError, ValueError) as error:
        shown = f"{value!r:.60}".replace("\n", " ")
        raise MetricFailedError(f"it returned {shown}, which is not one number{definition_of(function)}") from error


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
