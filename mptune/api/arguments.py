"""What a Python program gives to ``mptune.search`` and its neighbours, as the settings that the program works with."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import onnx

from mptune.data import arrays, scripts
from mptune.data.metrics import table
from mptune.engines.loading import load_typed_model
from mptune.errors import ModelError, RunError, SettingsError, TargetError
from mptune.files import PathLike
from mptune.graph.loading.model import Model
from mptune.run_json import PLUGINS, RunFile, plugins_sha256, refuse_other
from mptune.rundir import RunDirectory
from mptune.settings import InMemory, SearchSettings, ShapeRange, one_or_several
from mptune.targets.detect import detect_gpus, gpu_variables
from mptune.tuning.bench import Listener, Logged, passed_on
from mptune.tuning.record import waits_told_to

ModelLike: TypeAlias = "str | os.PathLike[str] | onnx.ModelProto"
"""A path, or a model in memory."""


class Array(Protocol):
    """An array of NumPy, and what NumPy converts as a whole, such as a CPU tensor of PyTorch."""

    def __array__(self) -> np.ndarray:
        """The values."""


_Arrays: TypeAlias = "Array | Mapping[str, Array | float]"

DataLike: TypeAlias = "str | os.PathLike[str] | _Arrays | Iterable[_Arrays]"
"""A path; an array, or arrays by input name, samples concatenated along axis 0; or one of these for each sample."""

MetricLike: TypeAlias = "str | Callable[..., float]"
"""A name, ``script.py:function``, or a function."""

Shapes: TypeAlias = "Mapping[str, Sequence[int] | Sequence[Sequence[int]]] | Iterable[str | ShapeRange]"
"""Input -> one shape, or (smallest, usual, largest); or texts as ``--shapes`` takes them."""

_SHAPES_HINT = "give {'x': (8, 32)} for one shape, or {'x': ((1, 32), (4, 32), (8, 32))} for smallest, usual, largest"


def run_path(model: ModelLike, out: PathLike | None) -> Path:
    """Where a search keeps its run: ``out``, else the model's name + ``.mptune`` in the working directory."""
    name = _file_stem(model)
    if out is None and not name:
        raise SettingsError("a ModelProto without a graph name needs a run directory", "give --out DIR")
    return Path(f"{name}.mptune" if out is None else out)


def model_name(model: ModelLike) -> str:
    """What messages call a model."""
    return "the ModelProto" if isinstance(model, onnx.ModelProto) else str(model)


def _file_stem(model: ModelLike) -> str:
    """The name of a model's file without suffix; for a model in memory that of its graph, which may be empty."""
    if isinstance(model, (str, os.PathLike)):
        return Path(model).stem
    if not isinstance(model, onnx.ModelProto):
        raise SettingsError(f"the model cannot be a {type(model).__name__}", "give a path or an onnx.ModelProto")
    return re.sub(r"[^\w.-]+", "_", model.graph.name).strip("._")


@contextlib.contextmanager
def loaded_model(model: ModelLike, opset: int | None = None, *, any_precision: bool = False) -> Iterator[Model]:
    """Load a model, raised where ``opset`` is given. The file of one in memory is there until the block ends."""
    stem = _file_stem(model)
    if not isinstance(model, onnx.ModelProto):
        yield load_typed_model(Path(model), opset=opset, any_precision=any_precision)
        return
    if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in model.graph.initializer):
        raise ModelError(
            "the ModelProto refers to external data, and has no folder to look for it",
            "give the path of its file, or load the data: onnx.load(path)",
        )
    with tempfile.TemporaryDirectory(prefix="mptune-model-") as folder:
        path = Path(folder) / f"{stem or 'model'}.onnx"
        path.write_bytes(model.SerializeToString(deterministic=True))  # protobuf itself refuses more than 2 GiB
        try:
            loaded = load_typed_model(path, opset=opset, any_precision=any_precision)
        except ModelError as error:
            raise ModelError(error.message.replace(str(path), "the ModelProto"), error.hint) from None
        yield loaded


def data_argument(data: DataLike | None) -> Path | InMemory | None:
    """The ``data`` of a search: a path, or arrays that are read once here, so that an iterator is not lost."""
    if data is None or isinstance(data, (str, os.PathLike)):
        return None if data is None else Path(data)
    if isinstance(data, Mapping) or hasattr(data, "__array__") or not isinstance(data, Iterable):
        return InMemory(data)
    return InMemory(arrays.copied_samples(data))


def paths_argument(given: Any) -> tuple[Path, ...]:
    """Paths, where a caller may give one of them by itself, as they hold for other working directories."""
    return tuple(Path(path).resolve() for path in one_or_several(given))


def shapes_argument(shapes: Shapes | None) -> tuple[ShapeRange, ...]:
    """The shape ranges of dynamic inputs, from any form that a caller may give them in."""
    if not isinstance(shapes, Mapping):
        several = one_or_several(shapes)
        return tuple(each if isinstance(each, ShapeRange) else ShapeRange.parse(each) for each in several)
    ranges = []
    for name, given in shapes.items():
        try:
            three: list[Any] = [given] * 3 if all(isinstance(size, int) for size in given) else list(given)
            smallest, usual, largest = (tuple(int(size) for size in shape) for shape in three)
        except (TypeError, ValueError):
            raise SettingsError(f"{name}: {given!r} is not understood", _SHAPES_HINT, setting="shapes") from None
        ranges.append(ShapeRange(name, smallest, usual, largest))
    return tuple(ranges)


def check_shapes(shapes: Sequence[ShapeRange], model: Model) -> None:
    """Refuse shapes of inputs that the model does not have, or has in another rank or with fixed sizes."""
    inputs = {info.name: info.shape for info in model.inputs}
    dynamic = {n: shape for n, shape in inputs.items() if shape is None or not all(isinstance(k, int) for k in shape)}
    for wanted in shapes:
        sizes = list(zip(wanted.smallest, wanted.usual, wanted.largest, strict=True))
        shape = dynamic.get(wanted.name)
        has_rank = shape is None or len(shape) == len(sizes)
        fits = has_rank and all(
            not isinstance(size, int) or {size} == {*range_} for size, range_ in zip(shape or (), sizes, strict=False)
        )
        if wanted.name not in dynamic or not fits:
            shown = ", ".join(f"{name} {arrays.shape_text(shape or ())}" for name, shape in dynamic.items()) or "none"
            hint = f"inputs of any size: {shown}; give every dimension, the fixed ones as they are"
            raise SettingsError(f"{wanted} fits no input of the model", hint, setting="shapes")


def check_batch(batch: int, model: Model) -> None:
    """Refuse a batch for a model whose batch is fixed at another size."""
    first = {info.shape[0] if info.shape else None for info in model.inputs if info.shape != ()}
    if batch != 1 and first and all(isinstance(size, int) and size != batch for size in first):
        shown = ", ".join(f"{info.name} {arrays.shape_text(info.shape or ())}" for info in model.inputs)
        hint = "leave it out, or export the model with a dynamic batch"
        raise SettingsError(f"is {batch}, but the model's batch is fixed ({shown})", hint, setting="batch")


def budget_argument(budget: int | None, run: Path, *, fresh: bool) -> int:
    """The number of plans; None is that of the run that is resumed, in a new run the default."""
    if budget is not None:
        return budget
    file = _resumed(run, fresh=fresh)
    return SearchSettings.budget if file is None else int(file.search.budget)


def _resumed(run: Path, *, fresh: bool) -> RunFile | None:
    """What a run was made with; None of a new one, and of one that cannot be read, which is refused later."""
    with contextlib.suppress(RunError):
        return None if fresh else RunDirectory(run).load()
    return None


def metric_arguments(metric: Any, run: Path, *, fresh: bool) -> tuple[str, Any, tuple[str, ...]]:
    """The objective's name, its function where the caller gave one, and the names of the metrics reported beside it.

    None takes the metrics that the run was made with, in a new run the default. Scripts are run to look at them.
    """
    several = one_or_several(metric)
    if not several:
        file = _resumed(run, fresh=fresh)
        several = (SearchSettings.metric,) if file is None else (file.search.metric, *file.search.reported_metrics)
        _refuse_unnamed(several, (), run, f"mptune search MODEL --out {shlex.quote(str(run))}")
    if any(map(callable, several[1:])):
        hint = "give the others as script.py:function"
        raise SettingsError("takes a function as the first metric only", hint, setting="metric")
    objective, *reported = dict.fromkeys(_metric_name(each, run) for each in several)
    return objective, several[0] if callable(several[0]) else None, tuple(reported)


def _metric_name(metric: Any, run: Path) -> str:
    if callable(metric):
        return table.callable_name(metric)
    if not isinstance(metric, str):
        raise SettingsError(f"cannot be a {type(metric).__name__}", "give a name, or a function", setting="metric")
    table.refuse_inside(metric, run)
    return scripts.resolve_metric(metric).name


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


def recorded_metric(file: RunFile, given: Any, run: Path, command: str) -> tuple[str, Any]:
    """The objective of a run that may come from a stranger, and the function where the caller gave one.

    No script that only the run names is executed. The name differs from the recorded one where the caller's script lies
    elsewhere.
    """

    def function_name(metric: str) -> str | None:
        return table.undirected(metric).rpartition(":")[2] if table.script_of(metric) else None

    recorded = (file.search.metric, *file.search.reported_metrics)
    objective, function, named = recorded[0], None, dict[str, str]()
    for metric in one_or_several(given):
        if callable(metric):
            function = metric
            continue
        # The same function of a script elsewhere: the run was copied to another machine.
        is_moved = function_name(metric) is not None and function_name(metric) == function_name(objective)
        if metric not in recorded and not is_moved:
            hint = "leave it out, or give that one"
            raise SettingsError(f"is {metric!r}, and that of the run {objective!r}", hint, setting="metric")
        _metric_name(metric, run)
        named[metric if metric in recorded else objective] = metric
    _refuse_unnamed(recorded, named, run, shlex.join(["mptune", command, str(run)]))
    name = named.get(objective, objective)
    scripts.resolve_metric(name, function)
    return name, function


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


def check_gpus(setting: str, wanted: Sequence[int]) -> None:
    """Refuse GPUs that are not here."""
    if wanted and max(wanted) >= (count := len(detect_gpus())):
        here = f"{count or 'no'} GPU{'' if count == 1 else 's'} found here"
        raise TargetError(f"names GPU {max(wanted)}: {here}", "leave it out, or give fewer", setting=setting)


@contextlib.contextmanager
def only_gpu(index: int | None) -> Iterator[None]:
    """Let this process and its children see one GPU alone meanwhile; None changes nothing."""
    wanted = {} if index is None else gpu_variables(index)
    before = {name: os.environ.pop(name, None) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


@contextlib.contextmanager
def listening(
    progress: bool | None,
    listener: Listener | None,
    max_error: float | None = None,
    max_latency_ms: float | None = None,
) -> Iterator[Listener]:
    """The listener of a run: the logger ``mptune``, the caller's, and mptune's own on stderr.

    ``progress`` None shows it in a terminal or a notebook, where no listener is given.
    """
    if progress is None and listener is None and sys.stderr is not None:
        get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
        progress = sys.stderr.isatty() or type(get_ipython()).__name__ == "ZMQInteractiveShell"
    with contextlib.ExitStack() as stack:
        listeners: list[Listener] = [Logged()] if listener is None else [Logged(), listener]
        if progress and sys.stderr is not None:
            from mptune.reporting.terminal.progress import TerminalListener  # rich: nothing else of a search needs it

            listeners.insert(0, stack.enter_context(TerminalListener(None, max_error, max_latency_ms)))
        passed = passed_on(*listeners)
        stack.enter_context(waits_told_to(passed.warning))
        yield passed
