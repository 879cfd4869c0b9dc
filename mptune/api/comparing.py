"""What ``mptune compare`` and ``check`` call: two models, or what a deployment recorded, against a model in FP32."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import onnx

from mptune.api.arguments import ModelLike, data_argument, loaded_model
from mptune.data.calibration import load_calibration
from mptune.data.samples import CalibrationSet
from mptune.diagnosis.comparing import check_sides, compare_sides, make_sides
from mptune.diagnosis.comparison import Comparison
from mptune.diagnosis.engines import EngineRunner, engine_kinds, is_engine
from mptune.diagnosis.limits import parse_tolerances
from mptune.diagnosis.pairs.structure import align, structure_finding, with_candidate_plan
from mptune.diagnosis.pairs.tracing import first_difference
from mptune.diagnosis.repeating import repetition_findings
from mptune.diagnosis.runner import Runner
from mptune.diagnosis.sides import Sides
from mptune.engines.loading import check_loads
from mptune.errors import DataError, ModelError, SettingsError
from mptune.finding import Finding
from mptune.graph.hazards.interface import state_inputs
from mptune.graph.loading.model import Model
from mptune.graph.loading.shapes import static_shapes
from mptune.settings import DataSettings, read_error
from mptune.targets.findings import already_mixed_findings
from mptune.tuning.listener import Listener, Silent
from mptune.tuning.reasons.reference import training_findings

_REDUCED_TYPES = frozenset({"float16", "bfloat16"})


def compare(
    model: ModelLike,
    candidate: ModelLike | None = None,
    *,
    data: Any,
    outputs: str | os.PathLike[str] | None = None,
    reference_outputs: str | os.PathLike[str] | None = None,
    tolerance: Mapping[str, float | str] | Sequence[str] = (),
    max_error: float | str | None = None,
    ignore: Collection[str] = (),
    trace: bool = False,
    repeat: int = 1,
    stress: bool = False,
    batch: int = 1,
    listener: Listener | None = None,
) -> Comparison:
    """Compare recorded outputs, or another model, with a model in true FP32, and name the cause of a difference.

    The left side is ``reference_outputs``, else ``model`` in FP32; the right side is ``candidate`` or ``outputs``, else
    ``model`` in FP32.

    Args:
        model: The FP32 model: a path, or an ``onnx.ModelProto``.
        candidate: Another model with the same inputs and outputs, or a file with an engine of TensorRT or TensorRT-RTX,
            which is run on the GPU here.
        data: Samples, as in ``search``; all of them are used.
        outputs: ``.npz`` of what a deployment gave: one array per output by its name, rows in the order of the data.
        reference_outputs: The same of what holds for right.
        tolerance: Output, or columns of it as ``"boxes[0:4]"`` -> largest error (root mean square difference of a
            sample by the part's standard deviation), or ``"abs:X"`` for the largest absolute difference; or texts
            ``"OUTPUT[COLUMNS]=X"``. By default twice the emulated error of
            all-FP16 in each part (the plan that ``search`` evaluates), at most 0.1.
        max_error: Largest error of what no tolerance is about.
        ignore: Outputs that are not compared.
        trace: Find the first group along the graph whose values differ between ``model`` and ``candidate``: beyond the
            smallest tolerance given, else beyond FP32 rounding.
        repeat: Run the right side so often, and compare the runs with each other.
        stress: Run the right side in several threads at the same time, and compare with isolated runs.
        batch: Rows per sample where the batch is dynamic.
        listener: Receives the stages of the work.

    Returns:
        Verdict, findings and statistics.

    Raises:
        SettingsError: Nothing to compare, two candidates, or an argument is out of range.
        ModelError: A model cannot be read or typed, the candidate does not load in ONNX Runtime, or the two have other
            inputs or outputs.
        DataError: The data, or what was recorded, do not fit the model.
        TargetError: The candidate is an engine, and what runs it is not here.
        BaselineError: A model or an engine does not run on the data.
    """
    is_recorded = outputs is not None
    limit = read_error(max_error)
    _refuse(
        (repeat < 1, "repeat", f"is {repeat}", "give at least 1"),
        (candidate is not None and is_recorded, "", "a candidate and --outputs exclude each other", "give one of them"),
        (
            candidate is None and not is_recorded and reference_outputs is None and repeat < 2 and not stress,
            "",
            "there is nothing to compare",
            "give a CANDIDATE, --outputs FILE or --reference-outputs FILE",
        ),
        (
            trace and (candidate is None or _engine_path(candidate) is not None),
            "trace",
            "needs two ONNX models",
            "give one as CANDIDATE; recorded outputs and engines hold no inner values",
        ),
        *_of_limits(data, batch, limit),
    )
    sources = _Sources(outputs, reference_outputs, tolerance, limit, ignore, batch)
    with _open(model, candidate, data, sources, listener) as opened:
        return opened.explained(repeat, stress=stress, trace=trace)


def check(
    mixed: ModelLike,
    *,
    against: ModelLike,
    data: Any,
    max_error: float | str,
    batch: int = 1,
    explain: bool = False,
    listener: Listener | None = None,
) -> Comparison:
    """Compare a mixed-precision model with the FP32 model that it was made from, for continuous integration.

    Args:
        mixed: The mixed model.
        against: The FP32 model.
        data: Samples, as in ``search``.
        max_error: Largest error of every output, as in ``compare``.
        batch: Rows per sample where the batch is dynamic.
        explain: Where an output is beyond its limit, name what makes the difference, as ``compare`` does.
        listener: Receives the stages of the work.

    Raises:
        SettingsError: An argument is out of range.
        ModelError: As of ``compare``.
        DataError: The data do not fit the model.
        BaselineError: A model does not run on the data.
    """
    limit = read_error(max_error)
    _refuse(*_of_limits(data, batch, limit))
    with _open(against, mixed, data, _Sources(max_error=limit, batch=batch), listener) as opened:
        right = opened.right
        if isinstance(right, Runner) and _is_reduced(opened.left.model) and not _is_reduced(right.model):
            raise ModelError(
                "the model of --against has FP16 or BF16 values, and MIXED has none",
                f"exchange them: MIXED is {opened.left.name}, and --against {right.name}",
            )
        comparison = check_sides(opened.sides, opened.samples)
        if explain and not comparison.agrees:
            return opened.explained()
        return replace(comparison, warnings=(*opened.loading, *comparison.warnings))


@dataclass(frozen=True)
class _Sources:
    """What is compared beside two models, and by which limits."""

    outputs: str | os.PathLike[str] | None = None
    reference_outputs: str | os.PathLike[str] | None = None
    tolerance: Mapping[str, float | str] | Sequence[str] = ()
    max_error: float | None = None
    ignore: Collection[str] = ()
    batch: int = 1


@dataclass(frozen=True)
class _Opened:
    """Both sides, run; what was asked of their loading."""

    left: Runner
    right: Runner | EngineRunner | None
    sides: Sides
    samples: CalibrationSet
    loading: Sequence[str]
    sources: _Sources

    def explained(self, repeat: int = 1, *, stress: bool = False, trace: bool = False) -> Comparison:
        """Name what makes the outputs differ."""
        left, right, sides = self.left, self.right, self.sides
        more = repetition_findings(sides, right or left, repeat, stress=stress)
        structural: list[Finding] = []
        if isinstance(right, Runner):
            sides, structural, traced = _models_compared(sides, right, trace=trace)
            more += traced
        if self.sources.reference_outputs is None:
            shapes = static_shapes(left.model, self.sources.batch).shapes
            more += already_mixed_findings(left.grouped, shapes, "compare")
        models = (left.model, right.model) if isinstance(right, Runner) else (left.model,)
        drawn = [each for each_model in models for each in training_findings(each_model, "compare", is_run=False)]
        comparison = compare_sides(sides, self.samples, structural, more, drawn[:1])
        return replace(comparison, warnings=(*self.loading, *comparison.warnings))


@contextlib.contextmanager
def _open(
    model: ModelLike, candidate: ModelLike | None, data: Any, sources: _Sources, listener: Listener | None
) -> Iterator[_Opened]:
    """Read and run what is compared."""
    batch, ignore = sources.batch, sources.ignore
    with contextlib.ExitStack() as stack:
        loaded = stack.enter_context(loaded_model(model))
        other = stack.enter_context(_opened(candidate))
        tolerances = parse_tolerances(sources.tolerance, _output_names(loaded, ignore))
        settings, states = DataSettings(batch=batch), state_inputs(loaded)
        samples = load_calibration(data_argument(data), loaded.inputs, settings, 0, states)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mptune-compare-")))
        stage = (listener or Silent()).stage
        left = Runner(loaded, samples.samples, folder / "model", batch, _name(model), stage)
        stack.enter_context(left)
        right = None if other is None else _runner(other, _name(candidate), left, folder, batch, ignore, stage)
        if right is not None:
            stack.enter_context(right)
        loading = check_loads(right.model.path, right.name, right.worker) if isinstance(right, Runner) else ()
        sides = make_sides(
            left,
            right,
            batch,
            recorded=None if sources.outputs is None else Path(sources.outputs),
            recorded_reference=None if sources.reference_outputs is None else Path(sources.reference_outputs),
            ignore=ignore,
            tolerances=tolerances,
            max_error=sources.max_error,
        )
        yield _Opened(left, right, sides, samples, loading, sources)


def _of_limits(data: Any, batch: int, max_error: float | None) -> tuple[tuple[bool, str, str, str], ...]:
    return (
        (data is None, "data", "is missing", "give the samples that both sides compute"),
        (batch < 1, "batch", f"is {batch}", "give at least 1"),
        (max_error is not None and not max_error > 0, "max_error", f"is {max_error or 0:g}", "give a limit above 0"),
    )


def _refuse(*faults: tuple[bool, str, str, str]) -> None:
    """Raise the first fault that is there: setting, text and hint."""
    for is_there, setting, text, hint in faults:
        if is_there:
            raise SettingsError(text, hint, setting=setting)


def _output_names(model: Model, ignore: Collection[str]) -> list[str]:
    """The names of all outputs, of which ``ignore`` leaves some to compare."""
    names = [output.name for output in model.outputs]
    if unknown := [name for name in ignore if name not in names]:
        raise SettingsError(
            f"names {unknown[0]!r}, which is no output", f"there are {', '.join(names)}", setting="ignore"
        )
    if set(names) <= set(ignore):
        raise SettingsError("all outputs are ignored", "leave one to compare")
    return names


def _engine_path(candidate: ModelLike) -> Path | None:
    """Where a candidate is an engine: its path."""
    if isinstance(candidate, onnx.ModelProto) or not is_engine(Path(candidate)):
        return None
    return Path(candidate)


@contextlib.contextmanager
def _opened(candidate: ModelLike | None) -> Iterator[Model | Path | None]:
    """The candidate: a model that was read, the path of an engine, or None."""
    if candidate is None:
        yield None
    elif (engine := _engine_path(candidate)) is not None:
        yield engine
    else:
        with loaded_model(candidate, any_precision=True) as loaded:
            yield loaded


def _runner(
    other: Model | Path,
    name: str,
    left: Runner,
    folder: Path,
    batch: int,
    ignore: Collection[str],
    stage: Callable[[str], None],
) -> Runner | EngineRunner:
    """What runs the candidate on the samples of the model, under its own names of the inputs."""
    if isinstance(other, Path):
        return EngineRunner(other, engine_kinds(other), left, folder / "engine", ignore)
    feeds = [_fed(feed, left.model, other) for feed in left.samples]
    _check_outputs(left.model, other)
    return Runner(other, feeds, folder / "candidate", batch, name, stage)


def _models_compared(sides: Sides, right: Runner, *, trace: bool) -> tuple[Sides, list[Finding], list[Finding]]:
    """The graphs of two models, node by node.

    Returns:
        The sides with the precisions that the candidate's groups have; what the graphs differ in; with ``trace``, where
        their values first differ.
    """
    alignment = align(sides.runner.model, right.model)
    sides = with_candidate_plan(sides, alignment)
    difference, harmless = structure_finding(sides, alignment)
    limits = [each.limit for every in sides.tolerances.values() for each in every if not each.is_absolute]
    first = first_difference(sides, right, alignment, harmless, min(limits, default=None)) if trace else None
    traced = [] if first is None else [first]
    if difference is None:
        return sides, [], traced
    return (sides, [], [difference, *traced]) if difference.severity == "info" else (sides, [difference], traced)


def _name(model: ModelLike | None) -> str:
    return "the ModelProto" if isinstance(model, onnx.ModelProto) or model is None else str(model)


def _fed(feed: Mapping[str, Any], model: Model, other: Model) -> dict[str, Any]:
    """A sample under the candidate's names of the inputs: by name, else by position where there are as many."""
    ours, theirs = [i.name for i in model.inputs], [i.name for i in other.inputs]
    if set(theirs) <= set(ours):
        return {name: feed[name] for name in theirs}
    if len(ours) != len(theirs):
        _refuse_inputs(ours, theirs)
    return {name: feed[ours[k]] for k, name in enumerate(theirs)}


def _is_reduced(model: Model) -> bool:
    return any(info.dtype in _REDUCED_TYPES for info in model.tensors.values())


def _refuse_inputs(ours: Sequence[str], theirs: Sequence[str]) -> NoReturn:
    raise DataError(
        f"the candidate has other inputs: {', '.join(theirs)}, the model {', '.join(ours)}",
        "compare models with the same inputs",
    )


def _check_outputs(model: Model, other: Model) -> None:
    ours, theirs = [o.name for o in model.outputs], [o.name for o in other.outputs]
    if not set(ours) <= set(theirs) and len(ours) != len(theirs):
        inputs, other_inputs = [i.name for i in model.inputs], [i.name for i in other.inputs]
        if set(inputs).isdisjoint(other_inputs):
            _refuse_inputs(inputs, other_inputs)
        raise ModelError(
            f"the candidate has the outputs {', '.join(theirs)}, the model {', '.join(ours)}",
            "compare models with the same outputs",
        )
