"""What the command line and a notebook call: from search to export, one function each. Wires the floors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from mptune.applying import CheckedData, apply_plan
from mptune.arguments import (
    ModelLike,
    Shapes,
    check_batch,
    check_shapes,
    choice_argument,
    data_argument,
    data_arguments,
    listening,
    loaded_model,
    metric_arguments,
    placed_model,
    run_path,
    shapes_argument,
)
from mptune.data.metrics.accuracy import TaskMetric
from mptune.data.metrics.sets.whole_set import SetFunction
from mptune.deploying import confirm, export
from mptune.engines.toolchains.choose import started_ahead
from mptune.files import full_disk_as_error
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.inspection import Inspection, inspect_model
from mptune.joining import only_gpu, worker_starter
from mptune.reading import report, tolerance_argument
from mptune.reporting.run_files import write_run_files
from mptune.rundir import open_run, read_run
from mptune.settings import (
    DataSettings,
    EngineChoice,
    LatencySettings,
    SearchSettings,
    TensorRtSettings,
    Tolerance,
    WorkerSettings,
)
from mptune.targets.target import load_target
from mptune.tuning.front import Front
from mptune.tuning.fronts.stopped import findings_kept
from mptune.tuning.fronts.tolerances import check_tolerances
from mptune.tuning.listener import Listener
from mptune.tuning.runs.confirm_run import known_confirmation
from mptune.tuning.runs.measuring_run import OpenToolchain
from mptune.tuning.runs.model_copy import load_either
from mptune.tuning.runs.result import front_of, read_record
from mptune.tuning.runs.search_run import SearchRun
from mptune.tuning.sampler.precision import load_ahead
from mptune.tuning.sampler.stock import check_sampler
from mptune.tuning.space import load_space

__all__ = ["apply", "confirm", "export", "inspect", "pick", "report", "search"]


def search(
    model: ModelLike,
    *,
    data: Any = None,
    budget: int = 50,
    out: str | os.PathLike[str] | None = None,
    target: str | os.PathLike[str] = "auto",
    space: str | os.PathLike[str] = "default",
    precisions: Sequence[str] = ("fp32", "fp16"),
    opset: int | None = None,
    engine: EngineChoice = "auto",
    max_error: float | None = None,
    max_latency_ms: float | None = None,
    max_memory_bytes: int | None = None,
    tolerance: Sequence[str | Tolerance] | None = None,
    ignore: Sequence[str] | None = None,
    metric: str | TaskMetric | SetFunction | Sequence[str | TaskMetric | SetFunction] | None = None,
    labels: str | os.PathLike[str] | None = None,
    limits: str | Sequence[str] = (),
    feedback: str | Sequence[str] = (),
    steps: int | None = None,
    batch: int = 1,
    shapes: Shapes | None = None,
    timeout_s: float | None = None,
    max_disk_bytes: int | None = None,
    storage: str | None = None,
    gpus: Sequence[int] = (),
    allow_mixed: bool = False,
    seed: int = 0,
    fresh: bool = False,
    tf32: bool = False,
    sampler: str = "precision",
    confirm_rounds: int = 3,
    confirm_points: int = 15,
    skip_checks: bool = False,
    latency: LatencySettings | None = None,
    worker: WorkerSettings | None = None,
    tensorrt: TensorRtSettings | None = None,
    data_settings: DataSettings | None = None,
    progress: bool | None = None,
    listener: Listener | None = None,
    open_toolchain: OpenToolchain | None = None,
) -> Front:
    """Search which layer groups of an ONNX model can run in FP16, and write the model of the chosen plan.

    The same call again resumes an interrupted search; when the budget is spent, it reads the result and measures
    nothing. ``budget``, ``timeout_s``, ``max_disk_bytes``, the limits, ``metric`` and ``progress`` may differ from call
    to call; all other arguments, and the content of the data, must stay the same within a run directory.

    Args:
        model: Path of an FP32 ONNX file, or an ``onnx.ModelProto``.
        data: Calibration samples: the path of an ``.npz``, an ``.npy`` or a folder of them; an array, for a model with
            one input; a dictionary of arrays by input name, samples concatenated along axis 0; or an iterable with one
            dictionary per sample. None draws random inputs, whose errors say little about real ones. Several paths are
            data sets of one size each: the search is on that of the usual size of ``shapes``, else on the first, and
            the chosen plan is looked at on the others, too.
        budget: Number of plans to evaluate, including the all-FP32 and all-FP16 plans and plans that fail.
        out: Run directory. By default the name of the model's file, or of the ModelProto's graph, + ``.mptune`` in the
            working directory.
        target: The device to tune for: ``auto`` (the GPU here, else a prediction), a name or a target file.
        space: Which groups may be FP16: a name that ``mptune spaces`` lists, or a search-space file.
        precisions: What groups may be: ``("fp32", "fp16")``, ``("fp32", "bf16")`` or all three: then groups whose
            values leave FP16's range may be BF16.
        opset: Raises the model to this operator set first, as ``apply`` does; plans of the run are of the raised model.
        engine: What builds and runs the candidates: ``auto``, ``tensorrt``, ``tensorrt-rtx`` or ``onnxruntime``.
        max_error: Choose the fastest plan whose error is at most this.
        max_latency_ms: Choose the plan with the smallest error whose latency is at most this, in milliseconds.
        max_memory_bytes: Choose among plans whose engine and its context take at most so much memory.
        tolerance: Largest errors of outputs, or of columns of them, that the chosen plan may have, such as
            ``["scores=1e-3", "detections[4]=abs:0.005"]``: in the metric's unit, or as the largest absolute error.
        ignore: Outputs whose errors do not count.
        metric: The error to minimize: a statistic such as ``relative_l2`` or ``max_abs``, ``"script.py:function"``, or
            a function ``(outputs, reference) -> float``. It is called once per sample with two dictionaries of arrays
            by output name; smaller is better. The run knows a function by its name only: give it again to resume. A
            function ``(outputs, references, inputs, labels) -> float`` is called once with all samples. Of several
            metrics the first is optimised, the others are reported. None takes the run's statistic, in a new run
            ``worst_part``.
        labels: Path of an ``.npz`` with labels for metrics over all samples, rows in the order of the data.
        limits: On the metrics' own values, such as ``"map>=0.41"``: held-out where known.
        feedback: ``"OUTPUT:INPUT"`` of each state that is fed back: the samples in their order are recorded sequences,
            and errors are those at the end of a sequence.
        steps: Samples of one sequence; None takes all.
        batch: Rows per sample of a model with a dynamic batch.
        shapes: Shapes that a TensorRT engine takes, where inputs are dynamic: input -> one shape, or (smallest, usual,
            largest). By default those of the data.
        timeout_s: Start no new evaluation, and no confirmation, after this many seconds.
        max_disk_bytes: Start no new evaluation that could make the run directory larger than this.
        storage: Optuna storage URL, to share a search. By default ``MPTUNE_STORAGE``, else a journal file in ``out``.
        gpus: GPUs of this machine that share the search, one worker process each: a ``metric`` must be importable.
        allow_mixed: GPUs that differ from the first keep fronts of their own, as in ``worker``.
        seed: Of the calibration split, the sampler and random inputs.
        fresh: Start over; what the run directory holds is moved aside, not deleted.
        tf32: Let FP32 groups use TF32. The reference never does.
        sampler: What proposes plans.
        confirm_rounds: Fresh processes in which the chosen plan, and points whose place is in doubt, are measured
            again; the other points of the front are in one.
        confirm_points: So many points of a longer front are; baselines, both ends, knee and chosen plan always.
        skip_checks: Search although a finding says that no plan repairs what is wrong; it is recorded.
        latency: How latencies are taken.
        worker: Deadlines of the worker process that builds and measures.
        tensorrt: How TensorRT builds engines.
        data_settings: How samples are drawn and split; ``batch`` above 1 replaces the one in here.
        progress: Show progress on stderr. None does in a terminal or a notebook, where no ``listener`` is given.
        listener: Is called at each step of the search.
        open_toolchain: Opens what evaluates plans, in place of the toolchain of ``target`` and ``engine``.

    Returns:
        The Pareto front of latency and error. The chosen plan's model is in ``chosen/`` in the run directory.

    Raises:
        SettingsError: An argument is out of range, or two contradict each other.
        ModelError: The model cannot be read, typed or tuned.
        DataError: The calibration data do not fit the model, or the metric failed.
        SpaceError: The search space is unknown or invalid.
        TargetError: The target or engine is unknown, or not available here.
        BaselineError: The all-FP32 baseline is broken already; ``findings`` says where.
        RunError: The run directory cannot be used, or the machine failed repeatedly.
        KeyboardInterrupt: It was interrupted; the same call resumes it.
    """
    path = run_path(model, out)
    (name, function), reported = metric_arguments(metric, path, fresh=fresh)
    sampling = data_settings or DataSettings()
    first, others = data_arguments(data)
    settings = SearchSettings(
        budget=budget,
        data=first,
        more_data=others,
        out=None if out is None else Path(out),
        target=os.fspath(target),
        space=os.fspath(space),
        precisions=tuple(precisions),
        opset=opset,
        engine=engine,
        max_error=max_error,
        max_latency_ms=max_latency_ms,
        max_memory_bytes=max_memory_bytes,
        tolerance=tolerance_argument(tolerance),
        ignore=tuple(ignore or ()),
        metric=name,
        reported_metrics=reported,
        labels=None if labels is None else Path(labels),
        limits=(limits,) if isinstance(limits, str) else tuple(limits),
        feedback=(feedback,) if isinstance(feedback, str) else tuple(feedback),
        steps=steps,
        timeout_s=timeout_s,
        max_disk_bytes=max_disk_bytes,
        storage=storage,
        gpus=tuple(gpus),
        allow_mixed=allow_mixed,
        seed=seed,
        fresh=fresh,
        tf32=tf32,
        sampler=sampler,
        confirm_rounds=confirm_rounds,
        confirm_points=confirm_points,
        skip_checks=skip_checks,
        shapes=shapes_argument(shapes),
        tensorrt=tensorrt or TensorRtSettings(),
        data_settings=sampling if batch == 1 else replace(sampling, batch=batch),
        latency=latency or LatencySettings(),
        worker=worker or WorkerSettings(),
        metric_function=function,
    )
    check_sampler(sampler)
    if settings.target != "auto":
        load_target(settings.target)
    starter = worker_starter(settings, open_toolchain)
    with contextlib.ExitStack() as stack:
        if open_toolchain is None and not settings.gpus and (fresh or not (path / "run.json").exists()):
            stack.enter_context(started_ahead(settings))
            load_ahead()
        loaded = stack.enter_context(loaded_model(model, opset))
        check_tolerances(settings.tolerance, settings.ignore, name, [output.name for output in loaded.outputs])
        check_shapes(settings.shapes, loaded.inputs)
        check_batch(settings.data_settings.batch, loaded.inputs)
        listens = stack.enter_context(listening(progress, listener, max_error, max_latency_ms))
        stack.enter_context(full_disk_as_error(path))
        stack.enter_context(only_gpu(settings.gpus[0] if settings.gpus else None))
        run = stack.enter_context(open_run(path, fresh=fresh))
        placed = placed_model(loaded, model, run)
        session = SearchRun(run, placed, settings, listens, open_toolchain, starter and starter(run))
        stack.enter_context(contextlib.closing(session))
        stack.enter_context(findings_kept(run))
        front = session.run()
        write_run_files(run, front, session.record, session.grouped, session.environment)
    return front


def pick(
    run: str | Path,
    *,
    max_error: float | None = None,
    max_latency_ms: float | None = None,
    max_memory_bytes: int | None = None,
    limits: str | Sequence[str] | None = None,
    tolerance: Sequence[str | Tolerance] | None = None,
    ignore: Sequence[str] | None = None,
    knee: bool = False,
    plan: str | None = None,
    storage: str | None = None,
) -> Front:
    """Choose another plan of a finished search and write ``chosen/`` and ``front.json`` anew.

    Args:
        run: the run directory.
        max_error: take the fastest plan whose error is at most this.
        max_latency_ms: take the most exact plan that is at most this slow.
        max_memory_bytes: take one whose engine and its context take at most so much memory.
        limits: on the metrics' own values, as in ``search``; None keeps the run's.
        tolerance: as in ``search``: take the fastest plan within these.
        ignore: outputs whose errors do not count; None leaves out those that the run leaves out.
        knee: take the knee of the front.
        plan: take this one, by its fingerprint or the beginning of it.
        storage: as in ``report``.

    Raises:
        SettingsError: ways to choose that exclude each other, or a limit that is not above 0.
        PlanError: no such plan, or it is not feasible.
        RunError: it is no run directory, another process uses it, or the model has changed, or is gone without a copy.
    """
    given = (limits,) if isinstance(limits, str) else limits
    choice = choice_argument(max_error, max_latency_ms, max_memory_bytes, knee, plan, tolerance, given)
    directory, _ = read_run(run)
    with full_disk_as_error(directory.path), open_run(directory.path), contextlib.ExitStack() as stack:
        directory, file = read_run(run)  # again, now that nobody else can write it
        record = stack.enter_context(contextlib.closing(read_record(directory, file, storage)))
        ignored = file.choice.ignore if ignore is None else tuple(ignore)
        limited = file.choice.limits if given is None else choice.limits
        kept = {"ignore": ignored, "limits": limited, "knee": knee and bool(limited)}
        file = file.model_copy(update={"choice": choice.model_copy(update=kept)})
        front = front_of(directory, file, record, keep=True)
        confirmation = None if file.confirms is None else known_confirmation(directory, file, record, storage)
        loaded = load_either(directory, file)
        grouped = GroupedModel(loaded, find_groups(loaded, file.fixed_settings.granularity))
        write_run_files(directory, front, record, grouped, file.environment, confirmation)
        directory.save(file)
        return front


def inspect(
    model: ModelLike, *, data: Any = None, space: str = "default", batch: int = 1, budget: int = 50
) -> Inspection:
    """Take a model apart as a search would: groups, operators, FLOPs, bytes, hazards and what they pin.

    Args:
        model: path of an ONNX model, or an ``onnx.ModelProto``.
        data: calibration samples, as in ``search``; the model is run once over each, and its values are judged, too.
        space: name or path of the search space whose granularity and pins count.
        batch: rows per sample where the batch is dynamic.
        budget: evaluations of the search to come, where the space's granularity is ``auto``.

    Raises:
        ModelError: the model cannot be read, typed or tuned.
        SpaceError: the search space is unknown or invalid.
        DataError: the data do not fit the model.
        BaselineError: the model does not run on them in FP32.
    """
    named = load_space(space)
    with loaded_model(model) as loaded:
        check_batch(batch, loaded.inputs)
        return inspect_model(loaded, named, data_argument(data), batch, budget)


def apply(
    model: str | Path,
    plan: PrecisionPlan | str | Path | None,
    out: str | Path,
    *,
    keep_fp32: Sequence[str] = (),
    force: bool = False,
    warn: Callable[[str], object] | None = None,
    data: Any = None,
    batch: int = 1,
    reduced: Literal["fp16", "bf16"] = "fp16",
    keep_bf16: Sequence[str] = (),
    opset: int | None = None,
) -> Path:
    """Write the mixed-precision model of a plan, self-contained; past 2 GiB its weights lie beside it.

    Args:
        model: path of the ONNX model that the plan was made for, or of one with the same nodes and other weights, such
            as one that was trained again: what FP16 cannot hold of its weights, and of its values on ``data``, is
            warned of.
        plan: a plan, the path of a plan.json (a search's, or one by hand that names nodes), or None for FP16 wherever
            FP16 can be right.
        out: where to write.
        keep_fp32: patterns as in search-space files; what they mean is FP32 whatever the plan says.
        force: overwrite ``out``.
        warn: receives what differs from the request, one line each.
        data: samples, as in ``search``: the plan is checked on the values that they give; without a plan, groups whose
            values FP16 cannot hold stay in FP32.
        batch: rows per sample where the batch is dynamic.
        reduced: what groups have where ``plan`` is None: ``bf16`` takes BF16 wherever BF16 can be right.
        keep_bf16: as ``keep_fp32``, of groups that are BF16; what both mean is FP32.
        opset: raises the model to this operator set first, by ONNX's own converter: most operators have BF16 from 22
            on.

    Returns:
        The path written.

    Raises:
        RunError: ``out`` exists already or cannot be written.
        ModelError: the model cannot be read, typed or tuned.
        PlanError: the plan cannot be read, or belongs to a model with other nodes, or a pattern means nothing.
        DataError: the data do not fit the model.
        BaselineError: the model does not run on them in FP32.
    """
    given, samples = Path(plan) if isinstance(plan, str) else plan, data_argument(data)
    checked = None if samples is None else CheckedData(samples, batch)
    written, warnings = apply_plan(
        Path(model),
        given,
        Path(out),
        keep_fp32,
        force=force,
        data=checked,
        reduced=Precision(reduced),
        keep_bf16=keep_bf16,
        opset=opset,
    )
    if warn is not None:
        for text in warnings:
            warn(text)
    return written
