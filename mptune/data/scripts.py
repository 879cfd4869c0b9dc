"""Scripts of the user's, for metrics and data: each mptune process runs them in one other process, on copies.

They share no threads and no GPU memory with what is timed, and what a script does to its process or its arguments
stays there. Only a script that the caller named is run. The process starts at the first call and ends with
``end_scripts``, or when its parent does.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import linecache
import math
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mptune.data.arrays import arrays_of, copied_samples
from mptune.data.metrics.calling import METRIC_TIMEOUT_S, MetricFailedError, called_number, takes_whole_set
from mptune.errors import DataError
from mptune.processes.child import WorkerState, describe
from mptune.processes.failure import Failure, FailureKind
from mptune.processes.parent import Worker

_LAST_LINES = 3
_SIGNATURE = "def metric(outputs, reference): ... return a number, lower is better; both map output names to arrays"
_LOADER = "it is called without arguments and gives one dictionary of arrays per sample"
_worker: Worker | None = None


@dataclass(frozen=True)
class _Script:
    """A function of a script, as it was when it was loaded."""

    path: Path
    shown: Path
    """As the user gave it."""
    function: str
    sha256: str

    def load(self, state: WorkerState, hint: str) -> Any:
        """The function; in the scripts' process. ``hint`` is shown where it has none of this name, if given."""
        try:
            module: ModuleType = state.cached(f"script {self.path}", self.sha256, self._execute)
        except BaseException as error:  # the user's code may raise anything
            raise _not_loaded(self, describe(error)[1]) from error
        function = getattr(module, self.function, None)
        if not callable(function):
            names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
            close = difflib.get_close_matches(self.function, names, 1) or names[:1]
            hint = hint or (f"did you mean {close[0]!r}?" if close else _SIGNATURE)
            raise DataError(f"{self.shown} has no function {self.function!r}", hint)
        return function

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


@dataclass(frozen=True)
class _MetricJob:
    """Call a metric; without arguments see whether it takes the whole set."""

    script: _Script
    arguments: tuple[Any, ...] | None = None

    def run(self, state: WorkerState) -> Any:
        function = self.script.load(state, "")
        return takes_whole_set(function) if self.arguments is None else called_number(function, self.arguments)


@dataclass(frozen=True)
class _LoadJob:
    """Call a loader; its samples."""

    script: _Script

    def run(self, state: WorkerState) -> Any:
        function = self.script.load(state, f"name it: --data {self.script.shown.name}:FUNCTION; {_LOADER}")
        where = f"{self.script.shown}:{self.script.function}"
        try:
            content = function()
            feeds = (content,) if isinstance(content, Mapping) else copied_samples(content)
        except BaseException as error:  # the user's code may raise anything
            raise DataError(f"{where} failed: {describe(error)[1]}", _LOADER) from error
        odd = next((feed for feed in feeds if not isinstance(feed, Mapping)), None)
        if odd is not None or not feeds:
            what = "nothing" if not feeds else f"a {type(odd).__name__}"
            raise DataError(f"{where} gives {what}, not dictionaries of arrays", _LOADER)
        return arrays_of(feeds, ())


class MetricScript:
    """A metric of a script. Its function runs in the scripts' process; called here like the function itself."""

    def __init__(self, path: Path, function: str, timeout_s: float = METRIC_TIMEOUT_S) -> None:
        """Load the script. A call may take ``timeout_s``."""
        self._script = _script(path, function)
        self._timeout_s = timeout_s
        try:
            self.takes_whole_set = bool(_call(_MetricJob(self._script), METRIC_TIMEOUT_S))
        except MetricFailedError as error:
            raise _not_loaded(self._script, str(error)) from error

    def __call__(self, *arguments: Any) -> float:
        """The function's value; MetricFailedError where there is none."""
        return float(_call(_MetricJob(self._script, arguments), self._timeout_s))


def run_loader(path: Path, function: str) -> tuple[Mapping[str, Any], ...]:
    """What a loader script gives: one dictionary of arrays per sample."""
    if not path.is_file():
        raise DataError(f"no such file: {path}", "check the path given to --data")
    try:
        return tuple(_call(_LoadJob(_script(path, function)), math.inf))
    except MetricFailedError as error:
        raise DataError(f"{path}:{function} failed: {error}", _LOADER) from error
    finally:
        end_scripts()  # with all that the loader has imported and read


def end_scripts() -> None:
    """End the scripts' process, if there is one; a later call starts a new one."""
    if _worker is not None:
        _worker.restart()


def _script(path: Path, function: str) -> _Script:
    return _Script(path.resolve(), path, function, hashlib.sha256(path.read_bytes()).hexdigest())


def _not_loaded(script: _Script, why: str) -> DataError:
    hint = f"see that `python {script.path.name}` runs in the environment of mptune"
    return DataError(f"{script.shown} failed to load: {why}", hint)


def _call(job: _MetricJob | _LoadJob, timeout_s: float) -> Any:
    """Run a job in the scripts' process. Where that gives no answer, MetricFailedError says why.

    It names the line at which the script stood, where the process showed it, and what was printed last.
    """
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
    path = str(job.script.path)
    frame = re.search(rf'File "{re.escape(path)}", line (\d+)', text)
    place = f" ({path}:{frame[1]}: {linecache.getline(path, int(frame[1])).strip()})" if frame else ""
    if result.kind is FailureKind.TIMEOUT:
        raise MetricFailedError(f"it ran longer than {timeout_s:g} s{place}")
    printed = text.partition("Fatal Python error: ")[0].splitlines()
    lines = [line.strip() for line in printed if line.strip()][-_LAST_LINES:]
    output = f"; its last output: {' | '.join(lines)}" if lines else ""
    raise MetricFailedError(f"its process ended: {result.message}{place}{output}")
