"""What is done with models without a search: ``inspect``, ``apply``, ``compare`` and ``check``."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from mptune import applying, observing
from mptune.api import arguments
from mptune.data.calibration import load_calibration
from mptune.diagnosis import comparing, engines, runner, structure
from mptune.diagnosis.extract import extract as extract_group
from mptune.engines.loading import check_loads, load_typed_model
from mptune.errors import ModelError, SettingsError
from mptune.files import PathLike
from mptune.graph.hazards.static import state_inputs
from mptune.graph.loading.model import Model
from mptune.graph.loading.shapes import static_shapes
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.inspection import Inspection, inspect_model
from mptune.settings import DataSettings, Tolerance, check_io, check_limits, documented, one_or_several, read_error
from mptune.targets.findings import already_mixed_findings
from mptune.tuning import output_findings, plan_limits
from mptune.tuning.bench import Listener, Logged
from mptune.tuning.space import load_space

__all__ = ["apply", "check", "compare", "inspect", "load_model"]


def load_model(path: PathLike, *, any_precision: bool = False, opset: int | None = None) -> Model:
    """Load, check and type a model.

    ONNX Runtime is asked about operators that ONNX does not define, in a worker.

    Args:
        path: of the ONNX file.
        any_precision: take a model that computes nothing in FP32, too, such as one that is FP16 throughout.
        opset: the operator set that ONNX's converter raises the model to; None leaves it as it is.

    Raises:
        ModelError: no such file, not ONNX, truncated, an opset or a construct that cannot be tuned, external data that
            is missing, too short or outside the model's folder, or no FP32 value to tune.
    """
    return load_typed_model(Path(path), any_precision=any_precision, opset=opset)


def inspect(
    model: arguments.ModelLike,
    *,
    data: arguments.DataLike | None = None,
    space: str = "default",
    batch: int = 1,
    budget: int = 50,
    all_samples: bool = False,
    stage: Callable[[str], object] | None = None,
) -> Inspection:
    """Take a model apart as a search would: groups, operators, FLOPs, bytes, hazards and what they pin.

    Args:
        model: path of an ONNX model, or an ``onnx.ModelProto``.
        data: calibration samples, as in ``search``; the model is run once over each, and its values are judged, too. A
            large model is run over the first ones only: at least 4, and as many as 150 GFLOP cover.
        all_samples: run it over as many as a search would, however large it is.
        space: name or path of the search space whose granularity and pins count.
        batch: rows per sample where the batch is dynamic.
        budget: evaluations of the search to come, where the space's granularity is ``auto``.
        stage: receives what is done, one line each, while a large model is run on the data.

    Raises:
        ModelError: the model cannot be read, typed or tuned.
        SpaceError: the search space is unknown or invalid.
        DataError: the data do not fit the model.
        BaselineError: the model does not run on them in FP32.
    """
    DataSettings(batch=batch)  # refuses what cannot be meant
    named = load_space(space)
    with arguments.loaded_model(model) as loaded:
        arguments.check_batch(batch, loaded)
        samples = arguments.data_argument(data)
        return inspect_model(loaded, named, samples, batch, budget, stage, all_samples=all_samples)


@documented
def apply(
    model: PathLike,
    plan: PrecisionPlan | PathLike | None,
    out: PathLike,
    *,
    keep_fp32: Sequence[str] = (),
    force: bool = False,
    warn: Callable[[str], object] | None = None,
    data: arguments.DataLike | None = None,
    batch: int = 1,
    reduced: Literal["fp16", "bf16"] = "fp16",
    keep_bf16: Sequence[str] = (),
    opset: int | None = None,
    io: str | None = None,
) -> Path:
    """Write the mixed-precision model of a plan, self-contained; past 2 GiB its weights lie beside it.

    Args:
        model: path of the ONNX model that the plan was made for, or of one with the same nodes and other weights, such
            as one that was trained again: what FP16 cannot hold of it is warned of.
        plan: a plan, the path of a plan.json (a search's, or one by hand that names nodes), or None for FP16 wherever
            FP16 can be right.
        out: where to write; ``force`` overwrites it.
        keep_fp32: patterns as in search-space files; what they mean is FP32 whatever the plan says.
        warn: receives what differs from the request, one line each.
        data: samples, as in ``search``: the plan is checked on the values that they give; without a plan, groups that
            would be warned of stay in FP32. Without data, a line says what was written and that nothing was tried.
        reduced: what groups have where ``plan`` is None: ``bf16`` takes BF16 wherever BF16 can be right.
        keep_bf16: as ``keep_fp32``, of groups that are BF16; what both mean is FP32.
        io: type of FP32 inputs and outputs in the mixed model; None takes that of a plan's file, else ``fp32``.
        {settings}

    Returns:
        The path written.

    Raises:
        RunError: ``out`` exists already or cannot be written.
        ModelError: the model cannot be read, typed or tuned.
        PlanError: the plan cannot be read, or belongs to a model with other nodes, or a pattern means nothing.
        DataError: the data do not fit the model.
        BaselineError: the model does not run on them in FP32.
    """
    if io is not None:
        check_io(io)
    given = plan if plan is None or isinstance(plan, PrecisionPlan) else Path(plan)
    written, source = Path(out), arguments.data_argument(data)
    applying.check_out(given, written, force=force)
    loaded = applying.load_for_plan(Path(model), given, opset)
    samples = None if source is None else observing.load_samples(loaded, source, batch)
    resolved = applying.resolve_plan(
        loaded, given, keep_fp32, samples, reduced=Precision.named(reduced), keep_bf16=keep_bf16, io=io
    )
    doubts = applying.write_model(loaded, resolved, written, force=force)
    if warn is not None:
        for text in (*resolved.warnings, *doubts):
            warn(text)
    return written


def compare(
    model: arguments.ModelLike,
    candidate: arguments.ModelLike | None = None,
    *,
    data: arguments.DataLike,
    outputs: PathLike | None = None,
    reference_outputs: PathLike | None = None,
    tolerance: Mapping[str, float | str] | Sequence[str] = (),
    max_error: float | str | None = None,
    ignore: Collection[str] = (),
    trace: bool = False,
    repeat: int = 1,
    stress: bool = False,
    batch: int = 1,
    explain: Literal["always", "beyond", "never"] = "always",
    extract: PathLike | None = None,
    listener: Listener | None = None,
) -> comparing.Comparison:
    """Compare recorded outputs, or another model, with a model in true FP32, and name the cause of a difference.

    The left side is ``reference_outputs``, else ``model`` in FP32; the right side is ``candidate`` or ``outputs``, else
    ``model`` in FP32.

    Args:
        model: The FP32 model: a path, or an ``onnx.ModelProto``.
        candidate: Another model with the same inputs and outputs, or a file with an engine of TensorRT or TensorRT-RTX,
            which is run on the GPU here.
        data: Samples, as in ``search``; all of them are used.
        outputs: What a deployment gave, rows in the order of the data: ``.npz`` with one array per output by its name,
            JSON of ``trtexec --exportOutput`` or ``polygraphy run --save-outputs``, or a folder with one file per run.
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
        extract: Folder to write the group to that makes the difference: a model, its inputs and its expected outputs.
        explain: When causes are looked for: always, only where an output is beyond its limit, or never.
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
        RunError: The folder of ``extract`` is there already.
    """
    name = "" if candidate is None else arguments.model_name(candidate)
    is_engine_given = engines.is_engine(Path(name))
    limit, ignored = read_error(max_error), one_or_several(ignore)
    check_limits(limit, None)
    if repeat < 1:
        raise SettingsError(f"is {repeat}", "give at least 1", setting="repeat")
    if data is None:
        raise SettingsError("is missing", "give the samples that both sides compute", setting="data")
    if candidate is not None and outputs is not None:
        raise SettingsError("a candidate and --outputs exclude each other", "give one of them")
    if candidate is None and outputs is None and reference_outputs is None and repeat < 2 and not stress:
        hint = "give a CANDIDATE, --outputs FILE or --reference-outputs FILE"
        raise SettingsError("there is nothing to compare", hint)
    if trace and (candidate is None or is_engine_given):
        hint = "give one as CANDIDATE; recorded outputs and engines hold no inner values"
        raise SettingsError("needs two ONNX models", hint, setting="trace")
    with contextlib.ExitStack() as stack:
        # The two sides: the model, and the candidate on the same samples.
        loaded = stack.enter_context(arguments.loaded_model(model))
        other = None
        if candidate is not None and not is_engine_given:
            other = stack.enter_context(arguments.loaded_model(candidate, any_precision=True))
        names = [output.name for output in loaded.outputs]
        tolerances = plan_limits.check_tolerances(Tolerance.parse_all(tolerance), ignored, names)
        given = arguments.data_argument(data)
        samples = load_calibration(given, loaded.inputs, DataSettings(batch=batch), 0, state_inputs(loaded))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mptune-compare-")))
        stage = (listener or Logged()).stage
        left = runner.Runner(loaded, samples.samples, folder / "model", batch, arguments.model_name(model), stage)
        stack.callback(left.worker.close)
        right: runner.Runner | engines.EngineRunner | None = None
        warnings: Sequence[str] = ()
        if is_engine_given:
            right = engines.EngineRunner(Path(name), engines.engine_kinds(Path(name)), left, folder / "engine", ignored)
            stack.callback(right.worker.close)
        elif other is not None:
            theirs = [info.name for info in other.inputs], [info.name for info in other.outputs]
            right = runner.Runner(other, _feeds(left, *theirs), folder / "candidate", batch, name, stage)
            stack.callback(right.worker.close)
            warnings = check_loads(other.path, name, right.worker)
        sides = comparing.make_sides(
            left,
            right,
            batch,
            recorded=None if outputs is None else Path(outputs),
            recorded_reference=None if reference_outputs is None else Path(reference_outputs),
            ignore=ignored,
            tolerances=tolerances,
            max_error=limit,
        )
        if explain != "always":
            if isinstance(right, runner.Runner) and _is_reduced(left) and not _is_reduced(right):
                raise ModelError(
                    "the model of --against has FP16 or BF16 values, and MIXED has none",
                    f"exchange them: MIXED is {left.name}, and --against {right.name}",
                )
            verdict = comparing.check_sides(sides, samples, texts=warnings)
            if verdict.agrees and isinstance(right, runner.Runner) and right.as_given is not None:
                optimised = replace(sides, candidate=comparing.named(left, right, right.as_given))
                text = f"{name} agrees node by node; these errors are of ONNX Runtime, which optimises it on a CPU"
                given_verdict = comparing.check_sides(optimised, samples, texts=[text, *warnings])
                return verdict if given_verdict.agrees else given_verdict
            if explain == "never" or verdict.agrees:
                return verdict

        # What makes the outputs differ: repeated runs, the graphs of two models node by node, and with ``trace`` where
        # their values first differ.
        more = comparing.repetition_findings(sides, right or left, repeat, stress=stress)
        differing, models = None, [left.model]
        if isinstance(right, runner.Runner):
            models.append(right.model)
            alignment = structure.align(left.model, right.model)
            sides = structure.with_candidate_plan(sides, alignment)
            differing = structure.structure_finding(sides, alignment)
            if trace:
                limits = [
                    tolerance.limit
                    for tolerance in tolerances
                    if tolerance.output in sides.layouts and not tolerance.is_absolute
                ]
                first = structure.first_difference(sides, right, alignment, min(limits, default=None))
                more += [] if first is None else [first]
        if reference_outputs is None:
            more += already_mixed_findings(left.grouped, static_shapes(left.model, batch).shapes, "compare")
        drawn = [
            finding for each in models for finding in output_findings.training_findings(each, "compare", is_run=False)
        ]
        structural = [] if differing is None else [differing]
        comparison = comparing.compare_sides(sides, samples, structural, more, drawn[:1], warnings)
        if extract is None:
            return comparison
        return replace(comparison, extracted=extract_group(comparison, sides, right, Path(extract)))


def _is_reduced(side: runner.Runner) -> bool:
    return any(info.dtype in ("float16", "bfloat16") for info in side.model.tensors.values())


def _feeds(left: runner.Runner, inputs: Sequence[str], outputs: Sequence[str]) -> list[dict[str, Any]]:
    """The samples under a candidate's names of the inputs: by name, else by position where there are as many."""
    ours, our_outputs = [info.name for info in left.model.inputs], [info.name for info in left.model.outputs]
    is_named = set(inputs) <= set(ours)
    for what, theirs, mine, agrees in (
        ("inputs", inputs, ours, is_named),
        ("outputs", outputs, our_outputs, set(our_outputs) <= set(outputs)),
    ):
        if not agrees and len(theirs) != len(mine):
            text = f"the candidate has the {what} {', '.join(theirs)}, the model {', '.join(mine)}"
            raise ModelError(text, f"compare models with the same {what}")
    sources = inputs if is_named else ours
    return [{name: feed[source] for name, source in zip(inputs, sources, strict=False)} for feed in left.samples]


def check(
    mixed: arguments.ModelLike,
    *,
    against: arguments.ModelLike,
    data: arguments.DataLike,
    max_error: float | str,
    batch: int = 1,
    explain: bool = False,
    listener: Listener | None = None,
) -> comparing.Comparison:
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
    causes: Literal["beyond", "never"] = "beyond" if explain else "never"
    return compare(against, mixed, data=data, max_error=max_error, batch=batch, explain=causes, listener=listener)
