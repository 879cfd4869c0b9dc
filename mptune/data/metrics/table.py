"""The metrics: one row each, with how it is computed and how its values are judged; naming one, and calling one.

A new metric is a row here, and the function that the row names. Nothing here imports NumPy: the help lists the names.
A metric of the user's is a function of a script, ``script.py:function`` (``mptune.data.scripts``), or of the calling
program.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from mptune.errors import DataError, MptuneError, RunError, SettingsError
from mptune.files import files_sha256

if TYPE_CHECKING:
    import numpy as np

TaskMetric: TypeAlias = "Callable[[Mapping[str, np.ndarray], Mapping[str, np.ndarray]], float]"
"""``function(outputs, reference) -> float`` for one sample, arrays by output name; the lower, the better."""
TO_MAXIMISE = ":max"  # ends the name of a script's function whose value is larger for better plans
CALLABLE = "callable:"  # before the name of a function of a Python program; a run directory holds the name alone
METRIC_TIMEOUT_S = 300.0  # one call of a script's metric may take this long by default


@dataclass(frozen=True)
class Metric:
    """A metric, built in or of the user's."""

    name: str
    # A statistic of every output (``mptune.data.metrics.accuracy``), of all outputs of a sample, or of all samples.
    kind: Literal["element", "sample", "set"]
    # Or its name in ``mptune.data.metrics.whole_set``: built-in ones take ``(outputs, references, inputs, labels)``.
    function: str | Callable[..., Any] = ""
    larger_is_better: bool = False  # of a sample or set metric the error is the reference's value less the plan's
    is_summed: bool = False  # over the samples; else the mean is taken
    is_set_with_labels: bool = False  # a sample metric that becomes a set metric where labels are given
    default_limit: float | None = None  # largest error of a plan that is chosen unasked; None in an output's own unit

    def load(self) -> Callable[..., Any]:
        """The function; one that is built in knows as which metric it is called."""
        if not isinstance(self.function, str):
            return self.function
        module = importlib.import_module("mptune.data.metrics.whole_set")
        return functools.partial(getattr(module, self.function), metric=self.name)


METRICS: Mapping[str, Metric] = {  # by name, in the order of the help
    metric.name: metric
    for metric in (
        # Worst over the parts: root mean square of y - y_ref over the part's standard deviation.
        Metric("worst_part", "element", default_limit=0.01),
        # norm(y - y_ref) / norm(y_ref); 0 where both are all zero, inf where only y_ref is.
        Metric("relative_l2", "element", default_limit=0.01),
        Metric("max_abs", "element"),
        Metric("mean_abs", "element"),
        Metric("median_abs", "element"),
        Metric("p99_abs", "element"),
        # Largest abs(y - y_ref) / max(abs(y_ref), 2^-14).
        Metric("max_rel", "element"),
        # 10 log10(sum y_ref^2 / sum (y - y_ref)^2).
        Metric("sqnr_db", "element", larger_is_better=True),
        # Values that are NaN or Inf where the reference is finite.
        Metric("non_finite", "element", is_summed=True, default_limit=0.0),
        Metric("top1_disagreement", "sample", "top1_disagreement", default_limit=0.005),
        Metric("endpoint_error", "sample", "endpoint_error", is_set_with_labels=True),
        Metric("top1_accuracy", "set", "top_accuracy", larger_is_better=True, default_limit=0.005),
        Metric("top5_accuracy", "set", "top_accuracy", larger_is_better=True, default_limit=0.005),
        Metric("map", "set", "mean_average_precision", larger_is_better=True, default_limit=0.005),
        Metric("map:cxcywh", "set", "mean_average_precision", larger_is_better=True, default_limit=0.005),
        Metric("map:xyxy", "set", "mean_average_precision", larger_is_better=True, default_limit=0.005),
        Metric("miou", "set", "mean_iou", larger_is_better=True, default_limit=0.005),
    )
}
STATISTICS = tuple(name for name, metric in METRICS.items() if metric.kind == "element")  # taken of every output


def own_value(metric: str) -> str:
    """The statistic under which the own value of a metric stands, beside its error."""
    return f"{metric}:value"


def unknown_metric(metric: str, names: Iterable[str]) -> SettingsError:
    """The error for a metric that does not exist."""
    hint = f"there are {', '.join(dict.fromkeys(names))}"
    return SettingsError(f"unknown metric {metric!r}", f"{hint}; your own: script.py:function")


def undirected(metric: str) -> str:
    """``script.py:function`` of ``script.py:function:max``; any other metric as it is."""
    shorter = metric.removesuffix(TO_MAXIMISE)
    return shorter if Path(shorter.rpartition(":")[0]).suffix == ".py" else metric


def script_of(metric: str) -> Path | None:
    """The path of the script in ``script.py:function`` or ``script.py:function:max``; None for other metrics."""
    file, _, name = undirected(metric).rpartition(":")
    # By the path's own suffix, as ``resolve_metric`` takes it: "a.py/" is a.py, too.
    return Path(file) if Path(file).suffix == ".py" and name else None


def refuse_inside(metric: str, run: Path) -> None:
    """Refuse a script that lies in a run directory, also by a link in either direction."""
    script = script_of(metric)
    places = () if script is None else (script.absolute(), script.parent.resolve() / script.name, script.resolve())
    if any(place.is_relative_to(root) for place in places for root in (run.absolute(), run.resolve())):
        hint = "read it; if you trust it, copy it elsewhere and give that copy with --metric script.py:function"
        raise RunError(f"the metric's script {script} lies in the run directory {run}: it is never run", hint)


def script_sha256(metric: str) -> str | None:
    """Of the content of a metric's script, whatever its path, and whatever it imports; None where there is none."""
    script = script_of(metric)
    return files_sha256(script) if script is not None and script.is_file() else None


def callable_name(function: TaskMetric) -> str:
    """The name of a metric that is given as a function: ``callable:`` and the function's own name."""
    return CALLABLE + getattr(function, "__name__", type(function).__name__).strip("<>")  # <lambda>


def sample_functions(metric: Metric) -> Mapping[str, TaskMetric]:
    """What is taken of each sample for a metric of single samples, by the statistic's name; nothing for others."""
    if metric.kind != "sample":
        return {}
    function = metric.load()
    if metric.name in METRICS:
        return {metric.name: lambda outputs, reference: function(outputs, reference, {}, {})}
    if not metric.larger_is_better:
        return {metric.name: function}

    def lost(outputs: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> float:
        return float(function(reference, reference)) - float(function(outputs, reference))

    return {metric.name: lost, own_value(metric.name): function}


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
    code = getattr(function, "__code__", None)
    try:
        value: Any = function(*arguments)
    except (MptuneError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the user's code may raise anything
        text = f"{type(error).__name__}: {error}".replace("\n", " ").removesuffix(": ")
        # The line of the metric's own file at which it came up.
        frames = [f for f in traceback.extract_tb(error.__traceback__) if code and f.filename == code.co_filename]
        place = f" ({code.co_filename}:{frames[-1].lineno}: {frames[-1].line})" if code and frames else ""
        raise MetricFailedError(f"{text}{place}") from error
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (OverflowError, TypeError, ValueError) as error:
        place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
        shown = f"{value!r:.60}".replace("\n", " ")
        raise MetricFailedError(f"it returned {shown}, which is not one number of float64{place}") from error


def takes_whole_set(function: Callable[..., Any]) -> bool:
    """Whether a function asks for ``(outputs, references, inputs, labels)``: four arguments that must be given."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) >= 4 and len([p for p in positional if p.default is p.empty]) >= 3
