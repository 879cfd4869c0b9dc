"""Which metric a name means: a row of the table, a user's script (only if the caller names it), or a function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mptune.data.metrics.accuracy import TaskMetric
from mptune.data.metrics.table import METRIC_TIMEOUT_S, METRICS, Metric, own_value, takes_whole_set, unknown_metric
from mptune.errors import DataError, RunError, SettingsError
from mptune.files import files_sha256

if TYPE_CHECKING:
    from mptune.data.scripts import MetricScript

TO_MAXIMISE = ":max"  # ends the name of a script's function whose value is larger for better plans
CALLABLE = "callable:"  # before the name of a function of a Python program; a run directory holds the name alone


def undirected(metric: str) -> str:
    """``script.py:function`` of ``script.py:function:max``; any other metric as it is."""
    shorter = metric.removesuffix(TO_MAXIMISE)
    return shorter if Path(shorter.rpartition(":")[0]).suffix == ".py" else metric


def script_of(metric: str) -> Path | None:
    """The path of the script in ``script.py:function`` or ``script.py:function:max``; None for other metrics."""
    file, _, name = undirected(metric).rpartition(":")
    # By the path's own suffix, as ``load_metric`` takes it: "a.py/" is a.py, too.
    return Path(file) if Path(file).suffix == ".py" and name else None


def refuse_inside(metric: str, run: Path) -> None:
    """Refuse a script that lies in a run directory, also by a link in either direction."""
    script = script_of(metric)
    places = () if script is None else (script.absolute(), script.parent.resolve() / script.name, script.resolve())
    if any(place.is_relative_to(root) for place in places for root in (run.absolute(), run.resolve())):
        raise RunError(
            f"the metric's script {script} lies in the run directory {run}: such a script is never run",
            "read it; if you trust it, copy it elsewhere and give that copy with --metric script.py:function",
        )


def script_sha256(metric: str) -> str | None:
    """Of the content of a metric's script, whatever its path, and whatever it imports; None where there is none."""
    script = script_of(metric)
    return files_sha256(script) if script is not None and script.is_file() else None


def callable_name(function: TaskMetric) -> str:
    """The name of a metric that is given as a function: ``callable:`` and the function's own name."""
    name = getattr(function, "__name__", type(function).__name__)
    return CALLABLE + ("lambda" if name == "<lambda>" else name)


def is_own(metric: str) -> bool:
    """Whether a metric is the user's own: a script's, or a function."""
    return metric not in METRICS


def resolve_metric(
    spec: str, function: Any = None, *, has_labels: bool = False, timeout_s: float = METRIC_TIMEOUT_S
) -> Metric:
    """The metric that ``--metric`` names: a row of ``METRICS``, ``script.py:function``, or ``callable:NAME``.

    ``timeout_s`` is for one call of a script's.
    """
    if spec.startswith(CALLABLE):
        if not callable(function):
            text = (
                f"the metric {spec.removeprefix(CALLABLE)!r} is a Python function, which a run directory does not hold"
            )
            raise SettingsError(text, "give the function itself to mptune.search or mptune.confirm: metric=FUNCTION")
        return Metric(spec, "set" if takes_whole_set(function) else "sample", function)
    row = METRICS.get(spec)
    if row is not None:
        if row.kind == "element" and row.larger_is_better:
            hint = "use relative_l2, which ranks a sample alike (sqnr_db = -20 log10(relative_l2)); both are reported"
            raise SettingsError(f"{spec} cannot be the objective: it is higher for better plans", hint)
        return replace(row, kind="set") if has_labels and row.is_set_with_labels else row
    if ":" in spec or spec.endswith(".py"):
        loaded, is_larger_better = load_metric(spec, timeout_s), undirected(spec) != spec
        return Metric(spec, "set" if loaded.takes_whole_set else "sample", loaded, larger_is_better=is_larger_better)
    raise unknown_metric(spec, METRICS)


def load_metric(spec: str, timeout_s: float = METRIC_TIMEOUT_S) -> MetricScript:
    """Load a metric from a Python file, given as ``script.py:function``. The script runs with the user's rights."""
    file, _, name = undirected(spec).rpartition(":")
    path = Path(file)
    if path.suffix != ".py" or not name.isidentifier():
        raise DataError(f"metric {spec!r} names no function", "write it as script.py:function")
    if not path.is_file():
        raise DataError(f"no such file: {path} (of metric {spec!r})", "give the path of a Python file, then :function")
    from mptune.data.scripts import MetricScript  # with what runs processes: reading a run needs none of it

    return MetricScript(path, name, timeout_s)


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


def law_metric(spec: str, function: Any = None, *, has_labels: bool = False) -> str:
    """The statistic that adds in squares and orders plans as a metric does: itself, or ``relative_l2``.

    A metric over the whole set does not add in squares, and is the same for most plans of one FP16 group. That it grows
    with relative L2 is enough for the sampler: plans that are non-dominated stay so under a monotone function of the
    error. The metric itself is taken of every plan that is evaluated, and the front is made of those values.
    """
    metric = resolve_metric(spec, function, has_labels=has_labels)
    return "relative_l2" if metric.kind == "set" or metric.larger_is_better else spec
