"""What a Python program gives to ``mptune.search`` and its neighbours, as the settings that the program works with."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import onnx

from mptune.data.arrays import copied_samples, shape_text
from mptune.data.metrics import table
from mptune.data.metrics.table import TaskMetric
from mptune.data.metrics.whole_set import SetFunction
from mptune.data.scripts import resolve_metric
from mptune.engines.loading import load_typed_model
from mptune.errors import ModelError, RunError, SettingsError, TargetError
from mptune.files import PathLike, write_bytes
from mptune.graph.loading.model import Model
from mptune.graph.loading.tensors import TensorInfo
from mptune.run_json import PLUGINS, RunFile, plugins_sha256, refuse_other
from mptune.rundir import RunDirectory
from mptune.settings import InMemory, SearchSettings, ShapeRange, Tolerance, Tolerances, one_or_several, read_error
from mptune.targets.detect import detect_gpus, gpu_variables
from mptune.tuning.bench import Listener, Silent, passed_on
from mptune.tuning.record import waits_told_to

ModelLike: TypeAlias = "str | os.PathLike[str] | onnx.ModelProto"
"""A path, or a model in memory."""

MetricLike: TypeAlias = "str | TaskMetric | SetFunction"
"""A name, ``script.py:function``, or a function."""

TolerancesLike: TypeAlias = Tolerances
Shapes: TypeAlias = "Mapping[str, Sequence[int] | Sequence[Sequence[int]]] | Iterable[str | ShapeRange]"
"""Input -> one shape, or (smallest, usual, largest); or texts as ``--shapes`` takes them."""

_SHAPES_HINT = "give {'x': (8, 32)} for one shape, or {'x': ((1, 32), (4, 32), (8, 32))} for smallest, usual, largest"


# The readers of the settings, beside those below.
texts, tolerances_argument, error_argument = one_or_several, Tolerance.parse_all, read_error


def run_path(model: ModelLike, out: PathLike | None) -> Path:
    """Where a search keeps its run: ``out``, else the model's name + ``.mptune`` in the working directory."""
    _refuse_type(model)
    if out is not None:
        return Path(out)
    if isinstance(model, (str, os.PathLike)):
        return Path(f"{Path(model).stem}.mptune")
    if not model.graph.name:
        raise SettingsError("a ModelProto without a graph name says nowhere to keep the run", "give --out DIR")
    return Path(f"{_file_stem(model)}.mptune")


def _refuse_type(model: object) -> None:
    if not isinstance(model, (str, os.PathLike, onnx.ModelProto)):
        raise SettingsError(f"the model cannot be a {type(model).__name__}", "give a path or an onnx.ModelProto")


def _file_stem(model: onnx.ModelProto) -> str:
    """What a file of a model in memory is called, without suffix."""
    return re.sub(r"[^\w.-]+", "_", model.graph.name).strip("._") or "model"


def data_argument(data: Any) -> Path | InMemory | None:
    """The ``data`` of a search: a path, or arrays that are read once here, so that an iterator is not lost."""
    if data is None or isinstance(data, (str, os.PathLike)):
        return None if data is None else Path(data)
    is_whole = isinstance(data, Mapping) or hasattr(data, "__array__") or not isinstance(data, Iterable)
    return InMemory(data if is_whole else copied_samples(data))


def metric_arguments(metric: Any, run: Path, *, fresh: bool) -> tuple[str, TaskMetric | None, tuple[str, ...]]:
    """The objective's name, its function where the caller gave one, and the names of the metrics reported beside it.

    None takes the metrics that the run was made with, in a new run the default. Scripts are run to look at them.
    """
    several = one_or_several(metric)
    if metric is None:
        file: RunFile | None = None
        with contextlib.suppress(RunError):  # raised again where the run is opened
            file = None if fresh else RunDirectory(run).load()
        several = (SearchSettings.metric,) if file is None else (file.search.metric, *file.search.reported_metrics)
        _refuse_unnamed(several, (), run, f"mptune search MODEL --out {shlex.quote(str(run))}")
    if not several:
        raise SettingsError("names nothing", "give at least one, or leave it away", setting="metric")
    if any(callable(each) for each in several[1:]):
        raise SettingsError(
            "takes a function as the first metric only", "give the others as script.py:function", setting="metric"
        )
    names = [_metric_name(each, run) for each in several]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SettingsError(f"{twice} is given twice", "give each metric once", setting="metric")
    return names[0], several[0] if callable(several[0]) else None, tuple(names[1:])


def _metric_name(metric: Any, run: Path) -> str:
    if callable(metric):
        return table.callable_name(metric)
    if not isinstance(metric, str):
        raise SettingsError(f"cannot be a {type(metric).__name__}", "give a name, or a function", setting="metric")
    table.refuse_inside(metric, run)
    return resolve_metric(metric).name


def _refuse_unnamed(recorded: Sequence[str], named: Iterable[str], run: Path, command: str) -> None:
    """Refuse scripts that only a run names: it may come from a stranger."""
    scripts = [metric for metric in recorded if table.script_of(metric)]
    for metric in scripts:
        if metric not in named:
            table.refuse_inside(metric, run)
            options = " ".join(f"--metric {shlex.quote(script)}" for script in scripts)
            raise RunError(
                f"the run's metric is the Python script {table.script_of(metric)}, which is not run unless you name it",
                f"read the script; if you trust it: `{command} {options}`",
            )


def recorded_metric(file: RunFile, given: Any, run: Path, command: str) -> tuple[str, TaskMetric | None]:
    """The objective of a run that may come from a stranger, and the function where the caller gave one.

    No script that only the run names is executed. The name differs from the recorded one where the caller's script lies
    elsewhere.
    """
    recorded = (file.search.metric, *file.search.reported_metrics)
    objective, function, named = recorded[0], None, dict[str, str]()
    for metric in one_or_several(given):
        if callable(metric):
            function = metric
            continue
        is_moved = table.script_of(metric) and table.script_of(objective) and _function_of(metric, objective)
        if metric not in recorded and not is_moved:
            raise SettingsError(
                f"is {metric!r}, and that of the run {objective!r}", "leave it away, or give that one", setting="metric"
            )
        _metric_name(metric, run)
        named[metric if metric in recorded else objective] = metric
    _refuse_unnamed(recorded, named, run, shlex.join(["mptune", command, str(run)]))
    resolve_metric(named.get(objective, objective), function)
    return named.get(objective, objective), function


def _function_of(*scripts: str) -> bool:
    """Whether scripts name the same function."""
    return len({table.undirected(script).rpartition(":")[2] for script in scripts}) == 1


def paths_argument(given: Any) -> tuple[Path, ...]:
    """Paths, where a caller may give one of them by itself, as they hold for other working directories."""
    return tuple(Path(path).resolve() for path in one_or_several(given))


def recorded_plugins(
    file: RunFile, given: Any, run: Path, command: str, *, may_differ: bool = False
) -> tuple[Path, ...]:
    """The libraries of plugins for a run that may come from a stranger: none is loaded that only the run names.

    ``may_differ``: those of another machine are other files.
    """
    plugins, recorded = paths_argument(given), file.fixed_settings.plugins_sha256
    if recorded and not plugins:
        options = " ".join(f"--plugin {shlex.quote(path)}" for path in file.search.plugins)
        raise RunError(
            "the run was made with plugins (native code), which are not loaded unless you name them",
            f"if you trust them: `{shlex.join(['mptune', command, str(run)])} {options}`",
        )
    if plugins_sha256(plugins) != recorded and not may_differ:
        refuse_other(run, PLUGINS)
    return plugins


def shapes_argument(shapes: Shapes | None) -> tuple[ShapeRange, ...]:
    """The shape ranges of dynamic inputs, from any form that a caller may give them in."""
    if not isinstance(shapes, Mapping):
        return tuple(
            each if isinstance(each, ShapeRange) else ShapeRange.parse(each) for each in one_or_several(shapes)
        )
    ranges = []
    for name, given in shapes.items():
        try:
            three: list[Any] = [given] * 3 if all(isinstance(size, int) for size in given) else list(given)
            smallest, usual, largest = (tuple(int(size) for size in shape) for shape in three)
        except (TypeError, ValueError):
            raise SettingsError(f"{name}: {given!r} is not understood", _SHAPES_HINT, setting="shapes") from None
        ranges.append(ShapeRange(name, smallest, usual, largest))
    return tuple(ranges)


def check_shapes(shapes: Sequence[ShapeRange], inputs: Sequence[TensorInfo]) -> None:
    """Refuse shapes of inputs that the model does not have, or has in another rank or with fixed sizes."""
    dynamic = {i.name: i.shape for i in inputs if i.shape is None or not all(isinstance(size, int) for size in i.shape)}
    for wanted in shapes:
        if wanted.name not in dynamic:
            names = ", ".join(f"{name} {shape_text(shape or ())}" for name, shape in dynamic.items()) or "none"
            hint = f"inputs of any size: {names}"
            raise SettingsError(f"names {wanted.name!r}, which is no input of any size", hint, setting="shapes")
        shape = dynamic[wanted.name]
        given = zip(wanted.smallest, wanted.usual, wanted.largest, strict=True)
        if shape is not None and (
            len(shape) != len(wanted.usual)
            or any(isinstance(size, int) and set(sizes) != {size} for size, sizes in zip(shape, given, strict=True))
        ):
            raise SettingsError(
                f"{wanted}: input {wanted.name!r} has the shape {shape_text(shape)}",
                "give every dimension, the fixed ones as they are",
                setting="shapes",
            )


def check_batch(batch: int, inputs: Sequence[TensorInfo]) -> None:
    """Refuse a batch for a model whose batch is fixed at another size."""
    first = [info.shape[0] if info.shape else None for info in inputs if info.shape is None or info.shape]
    if batch == 1 or not first or any(not isinstance(size, int) or size == batch for size in first):
        return
    shown = ", ".join(f"{info.name} {shape_text(info.shape or ())}" for info in inputs)
    raise SettingsError(
        f"is {batch}, but the model's batch is fixed ({shown})",
        "leave it away, or export the model with a dynamic batch",
        setting="batch",
    )


def check_gpus(setting: str, wanted: Sequence[int]) -> None:
    """Refuse GPUs that are not here."""
    if wanted and max(wanted) >= (count := len(detect_gpus())):
        here = f"{count or 'no'} GPU{'' if count == 1 else 's'} found here"
        raise TargetError(f"names GPU {max(wanted)}: {here}", "leave it away, or give fewer", setting=setting)


@contextlib.contextmanager
def only_gpu(index: int | None) -> Iterator[None]:
    """Let this process and its children see one GPU alone meanwhile; None changes nothing."""
    wanted = {} if index is None else gpu_variables(index)
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def loaded_model(model: ModelLike, opset: int | None = None, *, any_precision: bool = False) -> Iterator[Model]:
    """Load a model, raised where ``opset`` is given. The file of one in memory is there until the block ends."""
    _refuse_type(model)
    if not isinstance(model, onnx.ModelProto):
        yield load_typed_model(Path(model), opset=opset, any_precision=any_precision)
        return
    if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in model.graph.initializer):
        raise ModelError(
            "the ModelProto refers to external data, and has no folder to look for it",
            "give the path of its file, or load the data: onnx.load(path)",
        )
    with tempfile.TemporaryDirectory(prefix="mptune-model-") as folder:
        path = Path(folder) / f"{_file_stem(model)}.onnx"
        try:
            path.write_bytes(model.SerializeToString(deterministic=True))
        except ValueError:  # protobuf's limit
            text = "the ModelProto is larger than 2 GiB"
            raise ModelError(text, "save it with external data, and give the path of its file") from None
        try:
            loaded = load_typed_model(path, opset=opset, any_precision=any_precision)
        except ModelError as error:
            raise ModelError(error.message.replace(str(path), "the ModelProto"), error.hint) from None
        yield loaded


def placed_model(model: Model, given: ModelLike, run: RunDirectory) -> Model:
    """The model at a path that lasts: one that was given in memory is written into the run directory."""
    if not isinstance(given, onnx.ModelProto):
        return model
    file = run.load()
    if file is None or file.model.sha256 == model.sha256:  # the search refuses another model, and touches nothing
        write_bytes(run.source_onnx, [model.path.read_bytes()])
    return replace(model, path=run.source_onnx)


@contextlib.contextmanager
def listening(
    progress: bool | None,
    listener: Listener | None,
    max_error: float | None = None,
    max_latency_ms: float | None = None,
) -> Iterator[Listener]:
    """The listener of a run: the caller's, mptune's own on stderr, both, or one that does nothing.

    ``progress`` None shows it in a terminal or a notebook, where no listener is given.
    """
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    is_seen = sys.stderr is not None and (sys.stderr.isatty() or type(get_ipython()).__name__ == "ZMQInteractiveShell")
    with contextlib.ExitStack() as stack:
        listeners = [] if listener is None else [listener]
        if sys.stderr is not None and (progress or (progress is None and is_seen and listener is None)):
            from mptune.reporting.terminal.progress import (
                TerminalListener,
            )  # rich, which nothing else of a search needs

            listeners.insert(0, stack.enter_context(TerminalListener(None, max_error, max_latency_ms)))
        passed = passed_on(*listeners) if listeners else Silent()
        stack.enter_context(waits_told_to(passed.warning))
        yield passed
