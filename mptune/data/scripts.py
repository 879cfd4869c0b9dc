"""Scripts of the user's, for metrics and data: each mptune process runs them in one other process, on copies.

What a script does to its process, its working directory or its arguments stays there. Only a script that the caller
named is run. The process starts at the first call and ends with ``end_scripts``, or when its parent does.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib.util
import math
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mptune.data.calibration import arrays_of, copied_samples
from mptune.data.metrics.calling import (
    METRIC_TIMEOUT_S,
    MetricFailedError,
    called_number,
    end_limit,
    limit_s,
    metric_limit,
    takes_whole_set,
    what_failed,
)
from mptune.errors import DataError
from mptune.files import full_disk_as_error
from mptune.processes.child import WorkerState, describe
from mptune.processes.failure import Failure, FailureKind
from mptune.processes.forked import child_ends_here
from mptune.processes.mapped import read_mapped, write_mapped
from mptune.processes.parent import Worker

_GRACE_S = 10.0
"""Past its limit a call is interrupted; code that cannot be interrupted is killed after this."""
_LAST_LINES = 3
_SIGNATURE = "def metric(outputs, reference): ... return a number, lower is better; both map output names to arrays"
_LOADER = "it is called without arguments and gives one dictionary of arrays per sample"


@dataclass(frozen=True)
class Script:
    """A function of a script, as it was when it was loaded."""

    path: Path
    function: str
    sha256: str = ""
    """Of its file."""


class MetricScript:
    """A metric of a script. Its function runs in the scripts' process; called here like the function itself."""

    def __init__(self, path: Path, function: str) -> None:
        """Load the script."""
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        self._script = Script(path.resolve(), function, content)
        result = _process().call(_Inspect(self._script, path), METRIC_TIMEOUT_S)
        if isinstance(result, Failure):
            raise DataError(f"{path} failed to load: {_cause(result, self._script)}", _load_hint(path))
        self.takes_whole_set = result

    def __call__(self, *arguments: Any) -> float:
        """The function's value; MetricFailedError where there is none."""
        timeout_s = limit_s()
        end_limit()
        with _exchange_file() as file:
            with full_disk_as_error(file):
                head = write_mapped(file, arguments)
            value = _process().call(_Number(self._script, file, head, timeout_s), timeout_s + _GRACE_S)
        if isinstance(value, Failure):
            is_late = value.kind is FailureKind.TIMEOUT
            raise MetricFailedError(f"it ran longer than {timeout_s:g} s" if is_late else _cause(value, self._script))
        if isinstance(value, str):
            raise MetricFailedError(value)
        return value


def run_loader(path: Path, function: str) -> tuple[Mapping[str, Any], ...]:
    """What a loader script gives: one dictionary of arrays per sample."""
    if not path.is_file():
        raise DataError(f"no such file: {path}", "check the path given to --data")
    script = Script(path.resolve(), function)
    try:
        with _exchange_file() as file:
            head = _process().call(_Load(script, path, file), math.inf)
            if isinstance(head, Failure):
                raise DataError(f"{path}:{function} failed: {_cause(head, script)}", _LOADER)
            samples: tuple[Mapping[str, Any], ...] = read_mapped(file, *head)
            return samples
    finally:
        end_scripts()  # with all that the loader has imported and read


@dataclass(frozen=True)
class _Inspect:
    """Load a script, and see whether its function takes the whole set."""

    script: Script
    given: Path

    def run(self, state: WorkerState) -> bool:
        module, name = _module(self.script, self.given, state), self.script.function
        function = getattr(module, name, None)
        if not callable(function):
            functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            close = difflib.get_close_matches(name, functions, 1) or functions[:1]
            hint = f"did you mean {close[0]!r}?" if close else _SIGNATURE
            raise DataError(f"{self.given} has no function {name!r}", hint)
        return takes_whole_set(function)


@dataclass(frozen=True)
class _Number:
    """Call a metric; text says why it gave no number."""

    script: Script
    file: Path
    head: tuple[bytes, tuple[int, ...]]
    timeout_s: float

    def run(self, state: WorkerState) -> float | str:
        arguments = read_mapped(self.file, *self.head)
        function: Callable[..., Any] = getattr(_module(self.script, self.script.path, state), self.script.function)
        with metric_limit(self.timeout_s), _same_directory():
            try:
                return called_number(function, arguments)
            except MetricFailedError as error:
                return str(error)
            except KeyboardInterrupt as error:  # the script's own: Ctrl-C does not reach this process
                return what_failed(error, function)


@dataclass(frozen=True)
class _Load:
    """Call a loader and write its samples to a file."""

    script: Script
    given: Path
    file: Path

    def run(self, state: WorkerState) -> tuple[bytes, tuple[int, ...]]:
        name, where = self.script.function, f"{self.given}:{self.script.function}"
        function = getattr(_module(self.script, self.given, state), name, None)
        if not callable(function):
            hint = f"name it: --data {self.given.name}:FUNCTION; {_LOADER}"
            raise DataError(f"{self.given} has no function {name!r}", hint)
        try:
            with child_ends_here():
                content: Any = function()
                feeds = (content,) if isinstance(content, Mapping) else copied_samples(content)
        except BaseException as error:  # the user's code may raise anything
            raise DataError(f"{where} failed: {describe(error)[1]}", _LOADER) from error
        odd = next((feed for feed in feeds if not isinstance(feed, Mapping)), None)
        if odd is not None or not feeds:
            what = "nothing" if not feeds else f"a {type(odd).__name__}"
            raise DataError(f"{where} gives {what}, not dictionaries of arrays", _LOADER)
        with full_disk_as_error(self.file):
            return write_mapped(self.file, arrays_of(feeds, ()))


def _module(script: Script, given: Path, state: WorkerState) -> ModuleType:
    """The loaded script; in its process."""
    try:
        with child_ends_here():
            return state.cached(f"script {script.path}", script.sha256, lambda: _execute(script.path))
    except BaseException as error:  # the user's code may raise anything
        raise DataError(f"{given} failed to load: {describe(error)[1]}", _load_hint(given)) from error


def _load_hint(path: Path) -> str:
    return f"see that `python {path.name}` runs in the environment of mptune"


def _execute(path: Path) -> ModuleType:
    """Execute a script as a module of its own. It can import its neighbours, which shadow no installed module."""
    spec = importlib.util.spec_from_file_location(f"mptune_script_{path.stem}", path)
    assert spec is not None, "its name ends in .py"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses and pickle look a class's module up there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _same_directory() -> Iterator[None]:
    """The working directory after the block is that before it."""
    before = Path.cwd()
    try:
        yield
    finally:
        os.chdir(before)


def _cause(failure: Failure, script: Script) -> str:
    """Why the scripts' process gave no answer, with the script's line where a crash has one, and its last output."""
    if failure.kind in (FailureKind.WORKER, FailureKind.ERROR, FailureKind.DISK_FULL):
        return failure.message
    text = ""
    if failure.log_path is not None:
        with contextlib.suppress(OSError):
            text = failure.log_path.read_text(encoding="utf-8", errors="replace")
            shutil.rmtree(failure.log_path.parent)
    printed, _, crash = text.partition("Fatal Python error: ")
    frame = re.search(rf'File "{re.escape(str(script.path))}", line (\d+)', crash)
    place = f" ({script.path}:{frame[1]})" if frame else ""
    lines = [line.strip() for line in printed.splitlines() if line.strip()][-_LAST_LINES:]
    output = f"; its last output: {' | '.join(lines)}" if lines else ""
    return f"its process ended: {failure.message}{place}{output}"


_workers: dict[int, Worker] = {}
"""By the number of the process that started it: a fork does not take it along."""


def _process() -> Worker:
    logs = Path(tempfile.gettempdir()) / f"mptune-scripts-{secrets.token_hex(8)}"
    return _workers.setdefault(os.getpid(), Worker(logs))


@contextlib.contextmanager
def _exchange_file() -> Iterator[Path]:
    number, name = tempfile.mkstemp(prefix="mptune-script-")
    os.close(number)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def end_scripts() -> None:
    """End the scripts' process, if there is one; a later call starts a new one."""
    worker = _workers.get(os.getpid())
    if worker is not None:
        worker.close()
