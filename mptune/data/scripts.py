"""Which metric a name means, and scripts of the user's: each mptune process runs them in one other process, on copies.

They share no threads and no GPU memory with what is timed, and what a script does to its process or its arguments
stays there. Only a script that the caller named is run. The process starts at the first call and ends with
``end_scripts``, or when its parent does.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from mptune.data.arrays import arrays_of, copied_samples
from mptune.data.metrics import table
from mptune.data.metrics.table import Metric, MetricFailedError
from mptune.errors import DataError, SettingsError
from mptune.processes.child import Failure, FailureKind, WorkerState, describe
from mptune.processes.parent import Worker

_SIGNATURE = "write def metric(outputs, reference): ...; both map output names to arrays, and it returns one number"
_LOADER = "it is called without arguments and gives one dictionary of arrays per sample"
_worker: Worker | None = None


@dataclass(frozen=True)
class _ScriptJob:
    """Call a function of a script, as it was when it was loaded, in the scripts' process."""

    path: Path
    shown: Path  # as the user gave it
    function: str
    sha256: str
    arguments: tuple[Any, ...] | None = None  # of a metric; None asks whether it takes the whole set
    is_loader: bool = False

    def run(self, state: WorkerState) -> Any:
        try:
            module: ModuleType = state.cached(f"script {self.path}", self.sha256, self._execute)
        except BaseException as error:  # the user's code may raise anything
            raise self.not_loaded(describe(error)[1]) from error
        function = getattr(module, self.function, None)
        if not callable(function):
            hint = f"name it: --data {self.shown.name}:FUNCTION; {_LOADER}" if self.is_loader else _SIGNATURE
            raise DataError(f"{self.shown} has no function {self.function!r}", hint)
        if self.arguments is not None:
            return table.called_number(function, self.arguments)
        if not self.is_loader:
            return table.takes_whole_set(function)
        where = f"{self.shown}:{self.function}"
        try:
            content = function()
            feeds = (content,) if isinstance(content, Mapping) else copied_samples(content)
        except BaseException as error:  # the user's code may raise anything
            raise DataError(f"{where} failed: {describe(error)[1]}", _LOADER) from error
        if not feeds or not all(isinstance(feed, Mapping) for feed in feeds):
            raise DataError(f"{where} gives no dictionaries of arrays", _LOADER)
        return arrays_of(feeds, ())

    def _execute(self) -> ModuleType:
        """The script as a module of its own. It can import its neighbours, which shadow no installed module."""
        spec = importlib.util.spec_from_file_location(f"mptune_script_{self.path.stem}", self.path)
        assert spec is not None, "its name ends in .py"
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module.__name__] = module  # dataclasses and pickle look a class's module up there
        if str(self.path.parent) not in sys.path:
            sys.path.append(str(self.path.parent))
        spec.loader.exec_module(module)
        return module

    def not_loaded(self, why: str) -> DataError:
        """The error where the script itself fails."""
        hint = f"check that `python {self.path.name}` runs in the environment of mptune"
        return DataError(f"{self.shown} failed to load: {why}", hint)


def resolve_metric(
    spec: str, function: Any = None, *, has_labels: bool = False, timeout_s: float = table.METRIC_TIMEOUT_S
) -> Metric:
    """The metric that ``--metric`` names: a row of ``METRICS``, ``script.py:function``, or ``callable:NAME``.

    A script is loaded, with the user's rights; ``timeout_s`` is for one call of its function.
    """
    if spec.startswith(table.CALLABLE):
        if not callable(function):
            name = spec.removeprefix(table.CALLABLE)
            text = f"the metric {name!r} is a Python function, which a run directory does not hold"
            raise SettingsError(text, "give the function itself to mptune.search or mptune.confirm: metric=FUNCTION")
        return Metric(spec, "set" if table.takes_whole_set(function) else "sample", function)
    row = table.METRICS.get(spec)
    if row is not None:
        if row.kind == "element" and row.larger_is_better:
            hint = "use relative_l2, which ranks a sample alike (sqnr_db = -20 log10(relative_l2)); both are reported"
            raise SettingsError(f"{spec} cannot be the objective: it is higher for better plans", hint)
        return replace(row, kind="set") if has_labels and row.is_set_with_labels else row
    if ":" not in spec and not spec.endswith(".py"):
        raise table.unknown_metric(spec, table.METRICS)
    undirected, path = table.undirected(spec), table.script_of(spec)
    name = undirected.rpartition(":")[2]
    if path is None or not name.isidentifier():
        raise DataError(f"metric {spec!r} names no function", "write it as script.py:function")
    if not path.is_file():
        raise DataError(f"no such file: {path} (of metric {spec!r})", "give the path of a Python file")
    job = _job(path, name)
    try:
        takes_whole_set = _call(job, table.METRIC_TIMEOUT_S)
    except MetricFailedError as error:
        raise job.not_loaded(str(error)) from error

    def call(*arguments: Any) -> float:
        return float(_call(replace(job, arguments=arguments), timeout_s))

    return Metric(spec, "set" if takes_whole_set else "sample", call, larger_is_better=undirected != spec)


def law_metric(spec: str, function: Any = None, *, has_labels: bool = False) -> str:
    """The statistic that adds in squares and orders plans as a metric does: itself, or ``relative_l2``.

    A metric over the whole set does not add in squares, and is the same for most plans of one FP16 group. That it grows
    with relative L2 is enough for the sampler: plans that are non-dominated stay so under a monotone function of the
    error. The metric itself is taken of every plan that is evaluated, and the front is made of those values.
    """
    metric = resolve_metric(spec, function, has_labels=has_labels)
    return "relative_l2" if metric.kind == "set" or metric.larger_is_better else spec


def run_loader(path: Path, function: str) -> tuple[Mapping[str, Any], ...]:
    """What a loader script gives: one dictionary of arrays per sample."""
    if not path.is_file():
        raise DataError(f"no such file: {path}", "check the path given to --data")
    try:
        return tuple(_call(replace(_job(path, function), is_loader=True), math.inf))
    except MetricFailedError as error:
        raise DataError(f"{path}:{function} failed: {error}", _LOADER) from error
    finally:
        end_scripts()  # with all that the loader has imported and read


def end_scripts() -> None:
    """End the scripts' process, if there is one; a later call starts a new one."""
    if _worker is not None:
        _worker.restart()


def _job(path: Path, function: str) -> _ScriptJob:
    return _ScriptJob(path.resolve(), path, function, hashlib.sha256(path.read_bytes()).hexdigest())


def _call(job: _ScriptJob, timeout_s: float) -> Any:
    """Run a job in the scripts' process. Where that gives no answer, MetricFailedError says why."""
    global _worker
    if _worker is None:
        _worker = Worker(Path(tempfile.gettempdir()) / f"mptune-scripts-{secrets.token_hex(8)}")
    result: Any = _worker.call(job, timeout_s)
    if not isinstance(result, Failure):
        return result
    text = ""
    if result.log_path is not None:
        text = result.log_path.read_text(encoding="utf-8", errors="replace")
        shutil.rmtree(result.log_path.parent)
    if result.kind in (FailureKind.WORKER, FailureKind.ERROR, FailureKind.DISK_FULL):
        raise MetricFailedError(result.message)
    # Python's fault handler prints first the line at which the script stood.
    line = next((line.strip() for line in text.splitlines() if str(job.path) in line), "")
    is_late = result.kind is FailureKind.TIMEOUT
    what = f"it ran longer than {timeout_s:g} s" if is_late else f"its process ended: {result.message}"
    raise MetricFailedError(f"{what}{f' ({line})' if line else ''}")
