"""Task metrics: errors in the terms of what the model is for. Built-in ones, and a user's own script.

All are ``function(outputs, reference) -> float`` for one sample (``mptune.data.metrics.accuracy.TaskMetric``).
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mptune.data.metrics.accuracy import METRICS, TaskMetric, unknown_metric
from mptune.data.metrics.calling import CodeDefinition, definition_of, definition_of_function
from mptune.data.metrics.sets.fields import flow_axis
from mptune.data.metrics.sets.whole_set import BUILT_IN_SETS, SetMetric, own_value, takes_whole_set
from mptune.data.metrics.trusted_scripts import script_of, undirected
from mptune.errors import DataError, SettingsError

_SIGNATURE = "def metric(outputs, reference): ... return a number, lower is better; both map output names to arrays"


CALLABLE = "callable:"
"""Before the name of a metric that a Python program gave as a function. A run directory holds the name alone."""


def callable_name(function: TaskMetric) -> str:
    """The name of a metric that is given as a function: ``callable:`` and the function's own name."""
    name = getattr(function, "__name__", type(function).__name__)
    return CALLABLE + ("lambda" if name == "<lambda>" else name)


def resolve_metric(spec: str, function: TaskMetric | None = None) -> tuple[str, Mapping[str, TaskMetric]]:
    """Find the objective that ``--metric`` names.

    Args:
        spec: a name in ``METRICS``, ``script.py:function``, or ``callable:NAME`` for ``function``.
        function: computes a metric ``callable:NAME``.

    Returns:
        The statistic's name, for ``OutputError.value``, and what ``compare_outputs`` needs as ``extra`` to take it.

    Raises:
        SettingsError: no such metric, one that is higher for better plans, or a function's that was not given.
        DataError: the script cannot be loaded.
    """
    if spec.startswith(CALLABLE):
        if function is None:
            name = spec.removeprefix(CALLABLE)
            raise SettingsError(
                f"the metric {name!r} is a Python function, which a run directory does not hold",
                f"give the function itself in Python: metric={name} in mptune.search or mptune.confirm",
            )
        return spec, {} if takes_whole_set(function) else {spec: function}
    if spec in _BUILT_IN:
        return spec, {spec: _BUILT_IN[spec]}
    if spec in BUILT_IN_SETS:
        return spec, {}
    if spec in METRICS:
        if not METRICS[spec].higher_is_worse:
            raise SettingsError(
                f"{spec} cannot be the objective: it is higher for better plans",
                "use relative_l2, which ranks a sample alike (sqnr_db = -20 log10(relative_l2)); both are reported",
            )
        return spec, {}
    if ":" in spec or spec.endswith(".py"):
        return spec, _of_samples(spec, load_metric(spec))
    raise unknown_metric(spec, [*METRICS, *BUILT_IN_SETS])


def _of_samples(spec: str, function: TaskMetric) -> Mapping[str, TaskMetric]:
    """What a script's function is on each sample; nothing where it takes the whole set."""
    if takes_whole_set(function):
        return {}
    if undirected(spec) == spec:
        return {spec: function}

    def lost(outputs: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> float:
        return float(function(reference, reference)) - float(function(outputs, reference))

    return {spec: lost, own_value(spec): function}


def resolve_set_metric(spec: str, function: Any = None, *, has_labels: bool = False) -> SetMetric | None:
    """The metric over the whole set that ``--metric`` names; None where it is one of single samples.

    Args:
        spec: as ``resolve_metric`` takes it.
        function: computes ``callable:NAME``, where that takes the whole set.
        has_labels: ``endpoint_error`` is a metric of single samples without them.

    Raises:
        DataError: the script cannot be loaded.
    """
    if spec.startswith(CALLABLE):
        return None if function is None else SetMetric(spec, function)
    if spec in BUILT_IN_SETS:
        return BUILT_IN_SETS[spec] if has_labels or spec not in METRICS else None
    if spec in METRICS:
        return None
    loaded: Any = load_metric(spec)
    return SetMetric(spec, loaded, undirected(spec) != spec) if takes_whole_set(loaded) else None


def law_metric(spec: str, function: Any = None, *, has_labels: bool = False) -> str:
    """The statistic that adds in squares and orders plans as a metric does: itself, or ``relative_l2``.

    A metric over the whole set does not add in squares, and is the same for most plans of one FP16 group. That it grows
    with relative L2 is enough for the sampler: plans that are non-dominated stay so under a monotone function of the
    error. The metric itself is taken of every plan that is evaluated, and the front is made of those values.
    """
    own = function if function is not None and takes_whole_set(function) else None
    is_set = resolve_set_metric(spec, own, has_labels=has_labels) is not None
    return "relative_l2" if is_set or undirected(spec) != spec else spec


def is_own(spec: str) -> bool:
    """Whether a metric is the user's own: a script's, or a function."""
    return spec not in METRICS and spec not in _BUILT_IN and spec not in BUILT_IN_SETS


def definition_of_metric(spec: str, function: TaskMetric | None = None) -> str:
    """Where the user's metric is defined: `` (file:line: its text)``; empty where that is not known.

    A script is read, not run.
    """
    if function is not None:
        return definition_of(function)
    file, _, name = undirected(spec).rpartition(":")
    if not is_own(spec) or not file:
        return ""
    try:
        text = Path(file).read_text(encoding="utf-8")
        nodes = (node for node in ast.walk(ast.parse(text)) if getattr(node, "name", None) == name)
        line = next(node.lineno for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef))
    except (OSError, ValueError, SyntaxError, StopIteration):
        return f" ({file})"
    return f" ({file}:{line}: {text.splitlines()[line - 1].strip()})"


def definition_of_code(spec: str, function: TaskMetric | None = None) -> CodeDefinition | None:
    """Which script or function a metric of the user's is; None for others, and where there is no such file.

    Of a script its content counts, not its path, nor what it imports.
    """
    script = script_of(spec)
    if script is not None:
        return CodeDefinition("a script", hashlib.sha256(script.read_bytes()).hexdigest()) if script.is_file() else None
    is_given = function is not None and spec.startswith(CALLABLE)
    return definition_of_function(function) if is_given and function is not None else None


def load_metric(spec: str) -> TaskMetric:
    """Load a metric from a Python file, given as ``script.py:function``. The script runs with the user's rights.

    Raises:
        DataError: no such file or function, or the script fails to run.
    """
    file, _, name = undirected(spec).rpartition(":")
    if not file or not name.isidentifier():
        raise DataError(f"metric {spec!r} names no function", "write it as script.py:function")
    path = Path(file)
    if not path.is_file():
        raise DataError(f"no such file: {path} (of metric {spec!r})", "give the path of a Python file, then :function")
    if path.suffix != ".py":
        raise DataError(f"{path} is not a Python file (of metric {spec!r})", "its name should end in .py")
    module = run_script(path)
    function = getattr(module, name, None)
    if function is None:
        functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        close = difflib.get_close_matches(name, functions, 1) or functions[:1]
        raise DataError(f"{path} has no function {name!r}", f"did you mean {close[0]!r}?" if close else _SIGNATURE)
    if not callable(function):
        raise DataError(f"{name!r} in {path} is not a function", _SIGNATURE)
    loaded: TaskMetric = function
    return loaded


def run_script(path: Path) -> ModuleType:
    """Execute a script as a module of its own; it can import its neighbours, as when Python runs it.

    Raises:
        DataError: it cannot be loaded, or fails.
    """
    spec = importlib.util.spec_from_file_location(f"mptune_metric_{path.stem}", path.resolve())
    if spec is None or spec.loader is None:
        raise DataError(f"{path} cannot be loaded as Python", "its name should end in .py")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    sys.modules[module.__name__] = module  # dataclasses and pickle look a class's module up there
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        line = str(error).splitlines()[0] if str(error) else ""
        hint = f"see that `python {path.name}` runs in the environment of mptune"
        raise DataError(f"{path} failed to load: {type(error).__name__}: {line}", hint) from error
    finally:
        sys.path.remove(folder)
    return module


def top1_disagreement(outputs: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> float:
    """Share of rows whose largest class differs, the largest over the outputs that look like class scores.

    Class scores are floating outputs of shape (rows, classes) with 2 classes or more. A row with NaN or Inf differs.

    Raises:
        DataError: no output looks like class scores.
    """
    shares = []
    for name, wanted in reference.items():
        if wanted.dtype.kind == "f" and wanted.ndim == 2 and wanted.shape[0] and wanted.shape[1] > 1:
            got = _same_shape(name, outputs, wanted)
            differ = (got.argmax(axis=1) != wanted.argmax(axis=1)) | ~np.isfinite(got).all(axis=1)
            shares.append(float(differ.mean()))
    if not shares:
        raise DataError(
            "top1_disagreement found no output of shape (rows, classes)",
            "use relative_l2, or your own script.py:function",
        )
    return max(shares)


def endpoint_error(outputs: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> float:
    """Mean Euclidean distance between flow vectors, the largest over the outputs that look like optical flow.

    Optical flow is a floating output of shape (N, 2, H, W) or (N, H, W, 2), in pixels. Pixels at which the reference
    is not finite are left out. The measure is that of Baker et al., A Database and Evaluation Methodology for Optical
    Flow, 2011.

    Raises:
        DataError: no output looks like optical flow.
    """
    means = []
    for name, wanted in reference.items():
        axis = flow_axis(wanted)
        if axis is not None:
            got = np.moveaxis(_same_shape(name, outputs, wanted), axis, 1)
            wanted = np.moveaxis(wanted, axis, 1)
            valid = np.isfinite(wanted).all(axis=1)
            with np.errstate(invalid="ignore", over="ignore"):
                difference = got.astype(np.float64) - wanted
                distance = np.hypot(difference[:, 0], difference[:, 1])[valid]
            means.append(float(distance.mean()) if distance.size else 0.0)
    if not means:
        raise DataError(
            "endpoint_error found no output of shape (N, 2, H, W) or (N, H, W, 2)",
            "use relative_l2, or your own script.py:function",
        )
    return float(np.max(means))


def _same_shape(name: str, outputs: Mapping[str, np.ndarray], wanted: np.ndarray) -> np.ndarray:
    if name not in outputs or outputs[name].shape != wanted.shape:
        raise DataError(f"output {name!r} is missing or of another shape", f"the reference has shape {wanted.shape}")
    return outputs[name]


_BUILT_IN: Mapping[str, TaskMetric] = {"top1_disagreement": top1_disagreement, "endpoint_error": endpoint_error}
