"""What a Python program gives to ``mptune.search`` and its neighbours, as the settings that the program works with."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import onnx

from mptune.data.arrays import copied_samples, shape_text
from mptune.data.metrics.accuracy import TaskMetric
from mptune.data.metrics.tasks import callable_name, refuse_inside, resolve_metric, script_of, undirected
from mptune.engines.loading import load_typed_model
from mptune.errors import ModelError, RunError, SettingsError
from mptune.files import write_bytes
from mptune.graph.loading.model import Model
from mptune.graph.loading.tensors import TensorInfo
from mptune.graph.precision import precision_set
from mptune.identity import PLUGINS, plugins_sha256, refuse_other
from mptune.printable import printable
from mptune.run_json import RunFile
from mptune.rundir import RunDirectory
from mptune.settings import InMemory, SearchSettings, ShapeRange
from mptune.tuning.listener import Listener, Silent, passed_on
from mptune.tuning.record.waiting import waits_told_to

ModelLike: TypeAlias = "str | os.PathLike[str] | onnx.ModelProto"
"""A path, or a model in memory."""

Shape: TypeAlias = Sequence[int]
Shapes: TypeAlias = "Mapping[str, Shape | Sequence[Shape]] | Iterable[str | ShapeRange]"
"""Input -> one shape, or (smallest, usual, largest); or texts as ``--shapes`` takes them."""

_SHAPES_HINT = "give {'x': (8, 32)} for one shape, or {'x': ((1, 32), (4, 32), (8, 32))} for smallest, usual, largest"


def run_path(model: ModelLike, out: str | os.PathLike[str] | None) -> Path:
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
    if data is None:
        return None
    if isinstance(data, (str, os.PathLike)):
        return Path(data)
    is_whole = isinstance(data, Mapping) or hasattr(data, "__array__") or not isinstance(data, Iterable)
    return InMemory(data if is_whole else copied_samples(data))


def metric_argument(metric: str | TaskMetric, run: Path) -> tuple[str, TaskMetric | None]:
    """The name of a metric that the caller gave, and the function where it is one; a script is run to find it."""
    if callable(metric):
        return callable_name(metric), metric
    if not isinstance(metric, str):
        raise SettingsError(f"cannot be a {type(metric).__name__}", "give a name, or a function", setting="metric")
    refuse_inside(metric, run)
    return resolve_metric(metric).name, None


def metric_arguments(metric: Any, run: Path, *, fresh: bool) -> tuple[tuple[str, TaskMetric | None], tuple[str, ...]]:
    """The objective, as ``metric_argument`` has it, and the names of the metrics that are reported beside it."""
    several = _resumed_metrics(run, fresh=fresh) if metric is None else _several(metric)
    if not several:
        raise SettingsError("names nothing", "give at least one, or leave it away", setting="metric")
    if any(callable(metric) for metric in several[1:]):
        raise SettingsError(
            "takes a function as the first metric only", "give the others as script.py:function", setting="metric"
        )
    resolved = [metric_argument(each, run) for each in several]
    names = [name for name, _ in resolved]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SettingsError(f"{twice} is given twice", "give each metric once", setting="metric")
    return resolved[0], tuple(names[1:])


def _several(metric: Any) -> list[Any]:
    return [metric] if isinstance(metric, str) or not isinstance(metric, Sequence) else list(metric)


def _resumed_metrics(run: Path, *, fresh: bool) -> list[str]:
    """The metrics of a search that names none: those that the run was made with, else the default."""
    try:
        file = None if fresh else RunDirectory(run).load()
    except RunError:  # said where the run is opened
        file = None
    if file is None:
        return [SearchSettings().metric]
    names = [file.search.metric, *file.search.reported_metrics]
    _refuse_unnamed(names, (), run, f"mptune search MODEL --out {shlex.quote(str(run))}")
    return names


def _refuse_unnamed(recorded: Sequence[str], named: Collection[str], run: Path, command: str) -> None:
    scripts = [metric for metric in recorded if script_of(metric)]
    for metric in scripts:
        if metric not in named:
            refuse_inside(metric, run)
            options = " ".join(f"--metric {shlex.quote(script)}" for script in scripts)
            raise RunError(
                f"the run's metric is the Python script {script_of(metric)}, which is not run unless you name it",
                f"read the script; if you trust it: `{command} {options}`",
            )


def recorded_metric(recorded: Sequence[str], given: Any, run: Path, command: str) -> tuple[str, TaskMetric | None]:
    """The objective of a run that may come from a stranger, and the function where the caller gave one.

    No script that only the run names is executed: ``recorded`` are the metrics in run.json, the objective first,
    ``given`` those of the caller, if any. The name differs from the recorded one where the caller's script lies
    elsewhere.
    """
    objective = recorded[0]
    function, named = None, dict[str, str]()
    for metric in () if given is None else _several(given):
        if callable(metric):
            function = metric
            continue
        is_moved = script_of(metric) and script_of(objective) and _function_of(metric) == _function_of(objective)
        if metric not in recorded and not is_moved:
            raise SettingsError(
                f"the run's metric is {objective!r}, not {metric!r}", "leave --metric away, or give that one"
            )
        metric_argument(metric, run)
        named[metric if metric in recorded else objective] = metric
    _refuse_unnamed(recorded, named, run, shlex.join(["mptune", command, str(run)]))
    resolve_metric(named.get(objective, objective), function)
    return named.get(objective, objective), function


def paths_argument(given: Any) -> tuple[Path, ...]:
    """Paths, where a caller may give one of them by itself, as they hold for other working directories."""
    several = (given,) if isinstance(given, (str, os.PathLike)) else given or ()
    return tuple(Path(path).resolve() for path in several)


def recorded_plugins(
    file: RunFile, given: Any, run: Path, command: str, *, may_differ: bool = False
) -> tuple[Path, ...]:
    """The libraries of plugins for a run that may come from a stranger: none is loaded that only the run names.

    ``may_differ``: those of another machine are other files.
    """
    plugins, recorded = paths_argument(given), file.fixed_settings.plugins_sha256
    options = " ".join(f"--plugin {shlex.quote(path)}" for path in file.search.plugins)
    if recorded and not plugins:
        raise RunError(
            "the run was made with plugins (native code), which are not loaded unless you name them",
            f"if you trust them: `{shlex.join(['mptune', command, str(run)])} {options}`",
        )
    if plugins_sha256(plugins) != recorded and not may_differ:
        refuse_other(run, PLUGINS)
    return plugins


def _function_of(script: str) -> str:
    return undirected(script).rpartition(":")[2]


def shapes_argument(shapes: Shapes) -> tuple[ShapeRange, ...]:
    """The shape ranges of dynamic inputs, from any form that a caller may give them in."""
    if isinstance(shapes, str):
        return (ShapeRange.parse(shapes),)
    if isinstance(shapes, Mapping):
        return tuple(_range(name, given) for name, given in shapes.items())
    return tuple(given if isinstance(given, ShapeRange) else ShapeRange.parse(given) for given in shapes)


def _range(name: str, given: Any) -> ShapeRange:
    try:
        shapes = [given] * 3 if all(isinstance(size, int) for size in given) else list(given)
        smallest, usual, largest = (tuple(int(size) for size in shape) for shape in shapes)
    except (TypeError, ValueError):
        raise SettingsError(f"{name}: {given!r} is not understood", _SHAPES_HINT, setting="shapes") from None
    return ShapeRange(name, smallest, usual, largest)


def precisions_argument(given: str | Sequence[str]) -> tuple[str, ...]:
    """The precisions of a search, from a text with commas, or several."""
    names = given.split(",") if isinstance(given, str) else given
    return precision_set([name.strip() for name in names])


def refuse_other_bytes(*given: object) -> None:
    """Refuse paths that JSON files cannot hold."""
    for path in given:
        if isinstance(path, (str, os.PathLike)):
            try:
                os.fspath(path).encode("utf-8")
            except UnicodeEncodeError:
                raise SettingsError(f"the path {printable(os.fspath(path))} is not UTF-8", "rename it") from None


def check_shapes(shapes: Sequence[ShapeRange], inputs: Sequence[TensorInfo]) -> None:
    """Refuse shapes of inputs that the model does not have, or has in another rank or with fixed sizes."""
    declared = {info.name: info for info in inputs}
    dynamic = ", ".join(f"{i.name} {shape_text(i.shape or ())}" for i in inputs if not _is_fixed(i)) or "none"
    for wanted in shapes:
        info = declared.get(wanted.name)
        if info is None:
            raise SettingsError(
                f"names {wanted.name!r}, which is no input", f"inputs of any size: {dynamic}", setting="shapes"
            )
        if _is_fixed(info):
            text = f"--shapes {wanted.name}: the input's shape is fixed at {shape_text(info.shape or ())}"
            raise SettingsError(text, f"inputs of any size: {dynamic}")
        if info.shape is None:
            continue
        if len(wanted.usual) != len(info.shape):
            raise SettingsError(
                f"{wanted}: input {wanted.name!r} has rank {len(info.shape)}, not {len(wanted.usual)}",
                f"its shape is {shape_text(info.shape or ())}",
                setting="shapes",
            )
        for size, *given in zip(info.shape, wanted.smallest, wanted.usual, wanted.largest, strict=True):
            if isinstance(size, int) and set(given) != {size}:
                raise SettingsError(
                    f"{wanted}: input {wanted.name!r} has the shape {shape_text(info.shape or ())}",
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


def _is_fixed(info: TensorInfo) -> bool:
    return info.shape is not None and all(isinstance(size, int) for size in info.shape)


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
    if sys.stderr is None:
        progress = False
    elif progress is None:
        progress = listener is None and (sys.stderr.isatty() or _in_notebook())
    if not progress:
        own_or_silent = Silent() if listener is None else passed_on(listener)
        with waits_told_to(own_or_silent.warning):
            yield own_or_silent
        return
    from mptune.reporting.terminal.progress import TerminalListener  # rich, which nothing else of a search needs

    with TerminalListener(None, max_error, max_latency_ms) as own:
        shown = own if listener is None else passed_on(own, listener)
        with waits_told_to(shown.warning):
            yield shown


def _in_notebook() -> bool:
    get_ipython: Callable[[], Any] = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return type(get_ipython()).__name__ == "ZMQInteractiveShell"
