"""What ``mptune compare`` and ``check`` call: two models, or what a deployment recorded, against a model in FP32."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from mptune.api.arguments import ModelLike, data_argument, loaded_model
from mptune.choice import Choice
from mptune.data.calibration import load_calibration
from mptune.data.samples import CalibrationSet
from mptune.diagnosis import comparing, engines, structure
from mptune.diagnosis.comparing import Comparison
from mptune.diagnosis.runner import Runner
from mptune.diagnosis.sides import Sides, parse_tolerances
from mptune.engines.loading import check_loads
from mptune.errors import DataError, ModelError, SettingsError
from mptune.files import PathLike
from mptune.finding import Finding
from mptune.graph.hazards.static import state_inputs
from mptune.graph.loading.model import Model
from mptune.graph.loading.shapes import static_shapes
from mptune.settings import DataSettings, check_limits, read_error
from mptune.targets.findings import already_mixed_findings
from mptune.tuning.fronts.limits import check_asked
from mptune.tuning.listener import Listener, Silent
from mptune.tuning.reasons.reference import training_findings

_REDUCED_TYPES = frozenset({"float16", "bfloat16"})


def compare(
    model: ModelLike,
    candidate: ModelLike | None = None,
    *,
    data: Any,
    outputs: PathLike | None = None,
    reference_outputs: PathLike | None = None,
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
        repeat: Run the right side this many times, and compare the runs with each other.
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
    is_engine_given = not isinstance(candidate, onnx.ModelProto | None) and engines.is_engine(Path(candidate))
    if repeat < 1:
        raise SettingsError(f"is {repeat}", "give at least 1", setting="repeat")
    if candidate is not None and outputs is not None:
        raise SettingsError("a candidate and --outputs exclude each other", "give one of them")
    if candidate is None and outputs is None and reference_outputs is None and repeat < 2 and not stress:
        hint = "give a CANDIDATE, --outputs FILE or --reference-outputs FILE"
        raise SettingsError("there is nothing to compare", hint)
    if trace and (candidate is None or is_engine_given):
        hint = "give one as CANDIDATE; recorded outputs and engines hold no inner values"
        raise SettingsError("needs two ONNX models", hint, setting="trace")
    with _ran(
        model,
        candidate,
        data,
        batch,
        listener,
        recorded=None if outputs is None else Path(outputs),
        recorded_reference=None if reference_outputs is None else Path(reference_outputs),
        tolerance=tolerance,
        max_error=max_error,
        ignore=ignore,
    ) as compared:
        return _explained(compared, repeat, stress=stress, trace=trace)


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
    with _ran(against, mixed, data, batch, listener, max_error=max_error) as compared:
        left, right = compared.left, compared.right
        if isinstance(right, Runner) and _is_reduced(left.model) and not _is_reduced(right.model):
            raise ModelError(
                "the model of --against has FP16 or BF16 values, and MIXED has none",
                f"exchange them: MIXED is {left.name}, and --against {right.name}",
            )
        comparison = comparing.check_sides(compared.sides, compared.samples)
        if explain and not comparison.agrees:
            return _explained(compared)
        return replace(comparison, warnings=(*compared.warnings, *comparison.warnings))


def _is_reduced(model: Model) -> bool:
    return any(info.dtype in _REDUCED_TYPES for info in model.tensors.values())


@dataclass(frozen=True)
class _Compared:
    """Two sides that have run on the samples; ``warnings`` are of the candidate's loading."""

    left: Runner
    right: Runner | engines.EngineRunner | None
    sides: Sides
    samples: CalibrationSet
    warnings: Sequence[str]
    batch: int
    is_reference_recorded: bool


@contextlib.contextmanager
def _ran(
    model: ModelLike,
    candidate: ModelLike | None,
    data: Any,
    batch: int,
    listener: Listener | None,
    *,
    recorded: Path | None = None,
    recorded_reference: Path | None = None,
    tolerance: Mapping[str, float | str] | Sequence[str] = (),
    max_error: float | str | None = None,
    ignore: Collection[str] | None = None,
) -> Iterator[_Compared]:
    """Read what is compared, and run it."""
    if data is None:
        raise SettingsError("is missing", "give the samples that both sides compute", setting="data")
    settings, limit, ignored = DataSettings(batch=batch), read_error(max_error), tuple(ignore or ())
    check_limits(limit, None)
    with contextlib.ExitStack() as stack:
        loaded = stack.enter_context(loaded_model(model))
        other: Model | Path | None = None
        if not isinstance(candidate, onnx.ModelProto | None) and engines.is_engine(Path(candidate)):
            other = Path(candidate)
        elif candidate is not None:
            other = stack.enter_context(loaded_model(candidate, any_precision=True))
        outputs = [output.name for output in loaded.outputs]
        check_asked(Choice(ignore=ignored), ("",), outputs)
        tolerances = parse_tolerances(tolerance, outputs)
        samples = load_calibration(data_argument(data), loaded.inputs, settings, 0, state_inputs(loaded))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mptune-compare-")))
        stage = (listener or Silent()).stage
        left = Runner(loaded, samples.samples, folder / "model", batch, _name(model), stage)
        stack.callback(left.worker.close)
        right: Runner | engines.EngineRunner | None = None
        warnings: Sequence[str] = ()
        if isinstance(other, Path):
            right = engines.EngineRunner(other, engines.engine_kinds(other), left, folder / "engine", ignored)
            stack.callback(right.worker.close)
        elif other is not None:
            feeds = _feeds(left, other)
            right = Runner(other, feeds, folder / "candidate", batch, _name(candidate), stage)
            stack.callback(right.worker.close)
            warnings = check_loads(other.path, right.name, right.worker)
        sides = comparing.make_sides(
            left,
            right,
            batch,
            recorded=recorded,
            recorded_reference=recorded_reference,
            ignore=ignored,
            tolerances=tolerances,
            max_error=limit,
        )
        yield _Compared(left, right, sides, samples, warnings, batch, recorded_reference is not None)


def _name(model: ModelLike | None) -> str:
    return "the ModelProto" if isinstance(model, onnx.ModelProto) else str(model)


def _feeds(left: Runner, other: Model) -> list[dict[str, Any]]:
    """The samples under the candidate's names of the inputs: by name, else by position where there are as many."""
    ours, theirs = [each.name for each in left.model.inputs], [each.name for each in other.inputs]
    if not set(theirs) <= set(ours) and len(theirs) != len(ours):
        raise DataError(
            f"the candidate has other inputs: {', '.join(theirs)}, the model {', '.join(ours)}",
            "compare models with the same inputs",
        )
    sources = theirs if set(theirs) <= set(ours) else ours
    outputs, other_outputs = [each.name for each in left.model.outputs], [each.name for each in other.outputs]
    if not set(outputs) <= set(other_outputs) and len(outputs) != len(other_outputs):
        raise ModelError(
            f"the candidate has the outputs {', '.join(other_outputs)}, the model {', '.join(outputs)}",
            "compare models with the same outputs",
        )
    return [{name: feed[source] for name, source in zip(theirs, sources, strict=False)} for feed in left.samples]


def _explained(compared: _Compared, repeat: int = 1, *, stress: bool = False, trace: bool = False) -> Comparison:
    """Name what makes the outputs differ."""
    left, right, sides = compared.left, compared.right, compared.sides
    more = comparing.repetition_findings(sides, right or left, repeat, stress=stress)
    structural: list[Finding] = []
    models = [left.model]
    if isinstance(right, Runner):
        # The graphs of two models, node by node; with ``trace``, where their values first differ.
        models.append(right.model)
        alignment = structure.align(left.model, right.model)
        sides = structure.with_candidate_plan(sides, alignment)
        difference = structure.structure_finding(sides, alignment)
        structural = [] if difference is None else [difference]
        if trace:
            limits = [tolerance.limit for tolerance in sides.tolerances if not tolerance.is_absolute]
            first = structure.first_difference(sides, right, alignment, min(limits, default=None))
            more += [] if first is None else [first]
    if not compared.is_reference_recorded:
        more += already_mixed_findings(left.grouped, static_shapes(left.model, compared.batch).shapes, "compare")
    drawn = [finding for model in models for finding in training_findings(model, "compare", is_run=False)]
    comparison = comparing.compare_sides(sides, compared.samples, structural, more, drawn[:1])
    return replace(comparison, warnings=(*compared.warnings, *comparison.warnings))
