"""``search``, the call that makes a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mptune.api.arguments import (
    ModelLike,
    Shapes,
    check_batch,
    check_shapes,
    data_argument,
    listening,
    loaded_model,
    metric_arguments,
    paths_argument,
    placed_model,
    precisions_argument,
    refuse_other_bytes,
    run_path,
    shapes_argument,
)
from mptune.api.joining import check_gpus, only_gpu
from mptune.api.reading import one_or_several
from mptune.choice import Choice
from mptune.data.metrics.accuracy import TaskMetric
from mptune.data.metrics.whole_set import SetFunction
from mptune.data.scripts import end_scripts
from mptune.engines.toolchains.choose import probed_ahead
from mptune.errors import SettingsError
from mptune.files import full_disk_as_error
from mptune.reporting.run_files import write_run_files
from mptune.rundir import open_run
from mptune.settings import (
    DataSettings,
    EngineChoice,
    LatencySettings,
    SearchSettings,
    TensorRtSettings,
    Tolerance,
    Tolerances,
    WorkerSettings,
    read_error,
)
from mptune.targets.target import load_target
from mptune.tuning.front import Front
from mptune.tuning.fronts.limits import check_asked
from mptune.tuning.fronts.stopped import findings_kept
from mptune.tuning.listener import Listener
from mptune.tuning.measuring import OpenToolchain
from mptune.tuning.sampler.precision import check_sampler
from mptune.tuning.search import Search

_SCRIPT = "give it as script.py:function"


def search(
    model: ModelLike,
    *,
    data: Any = None,
    budget: int = 50,
    out: str | os.PathLike[str] | None = None,
    target: str | os.PathLike[str] = "auto",
    plugins: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    space: str | os.PathLike[str] = "default",
    precisions: Sequence[str] = ("fp32", "fp16"),
    opset: int | None = None,
    engine: EngineChoice = "auto",
    max_error: float | str | None = None,
    max_latency_ms: float | None = None,
    max_memory_bytes: int | None = None,
    tolerance: Tolerances | None = None,
    ignore: Sequence[str] | None = None,
    metric: str | TaskMetric | SetFunction | Sequence[str | TaskMetric | SetFunction] | None = None,
    labels: str | os.PathLike[str] | None = None,
    limits: str | Sequence[str] = (),
    knee: bool = False,
    feedback: str | Sequence[str] = (),
    steps: int | None = None,
    batch: int = 1,
    shapes: Shapes | None = None,
    timeout_s: float | None = None,
    max_disk_bytes: int | None = None,
    storage: str | None = None,
    gpus: Sequence[int] = (),
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
    nothing. ``budget``, ``timeout_s``, ``max_disk_bytes``, the limits and ``progress`` may differ from call
    to call; all other arguments, and the content of the data, must stay the same within a run directory.

    Args:
        model: Path of an FP32 ONNX file, or an ``onnx.ModelProto``.
        data: Calibration samples: the path of an ``.npz``, an ``.npy`` or a folder of them; an array, for a model with
            one input; a dictionary of arrays by input name, samples concatenated along axis 0; or an iterable with one
            dictionary per sample. None draws random inputs, whose errors say little about real ones.
        budget: Number of plans to evaluate, including the all-FP32 and all-FP16 plans and plans that fail.
        out: Run directory. By default the name of the model's file, or of the ModelProto's graph, + ``.mptune`` in the
            working directory.
        target: The device to tune for: ``auto`` (the GPU here, else a prediction), a name or a target file.
        plugins: Libraries with TensorRT plugins (``.so``) that building and running the engines needs.
        space: Which groups may be FP16: a name that ``mptune spaces`` lists, or a search-space file.
        precisions: What groups may be: ``("fp32", "fp16")``, ``("fp32", "bf16")`` or all three: then groups whose
            values leave FP16's range may be BF16.
        opset: Raises the model to this operator set first, as ``apply`` does; plans of the run are of the raised model.
        engine: What builds and runs the candidates: ``auto``, ``tensorrt``, ``tensorrt-rtx`` or ``onnxruntime``.
        max_error: Choose the fastest plan whose error is at most this. None stands for the metric's default limit, 1 %
            for ``worst_part`` and ``relative_l2``, unless the error, the latency or the metric's value is limited.
        max_latency_ms: Choose the plan with the smallest error whose latency is at most this, in milliseconds.
        max_memory_bytes: Choose among plans whose engine and its context take at most so much memory.
        tolerance: Largest errors of outputs, or of columns of them, that the chosen plan may have, such as
            ``["scores=1e-3", "detections[4]=abs:0.005"]`` or ``{"scores": 1e-3}``: in the metric's unit, or as the
            largest absolute error.
        ignore: Outputs whose errors do not count.
        metric: The error to minimize: a statistic such as ``relative_l2`` or ``max_abs``, ``"script.py:function"``, or
            a function ``(outputs, reference) -> float``. It is called once per sample with two dictionaries of arrays
            by output name; smaller is better. The run keeps a hash of a function: give it again to resume. A
            function ``(outputs, references, inputs, labels) -> float`` is called once with all samples. Of several
            metrics the first is optimised, the others are reported. None takes the run's statistic, in a new run
            ``worst_part``.
        labels: Path of an ``.npz`` with labels for metrics over all samples, rows in the order of the data.
        limits: On the metrics' own values, such as ``"map>=0.41"``: held-out where known.
        knee: Choose the knee of the plans, in place of the fastest within a limit.
        feedback: ``"OUTPUT:INPUT"`` of each state that is fed back: the samples in their order are recorded sequences,
            and errors are those at the end of a sequence.
        steps: Samples of one sequence; None takes all.
        batch: Rows per sample of a model with a dynamic batch.
        shapes: Shapes that a TensorRT engine takes, where inputs are dynamic: input -> one shape, or (smallest, usual,
            largest). By default those of the data.
        timeout_s: Start no new evaluation, and re-measure no more, after this many seconds.
        max_disk_bytes: Start no new evaluation that could make the run directory larger than this.
        storage: Optuna storage URL, to share a search: run directories of one name share a study if model, data and
            settings are the same. By default ``MPTUNE_STORAGE``, else a journal file in ``out``.
        gpus: GPUs of this machine that share the search, one worker process each: a ``metric`` must be a script's.
        seed: Of the calibration split, the sampler and random inputs.
        fresh: Start over; what the run directory holds is moved aside, not deleted. In ``storage``: a new study.
        tf32: Let FP32 groups use TF32. The reference never does.
        sampler: What proposes plans.
        confirm_rounds: Fresh processes in which the chosen plan, and points whose place is in doubt, are measured
            again; the other points of the front are in one.
        confirm_points: So many points of a longer front are; baselines, both ends and what may be chosen always.
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
        EndedEarlyError: ``timeout_s`` or ``max_disk_bytes`` ended it before all-FP32 was measured. It is a RunError.
        KeyboardInterrupt: It was interrupted; the same call resumes it.
    """
    path = run_path(model, out)
    refuse_other_bytes(model, data, out, target, space, labels)
    (metric_name, metric_function), reported_metrics = metric_arguments(metric, path, fresh=fresh)
    data_settings = data_settings or DataSettings()
    settings = SearchSettings(
        data=data_argument(data),
        data_settings=data_settings if batch == 1 else replace(data_settings, batch=batch),
        shapes=shapes_argument(shapes or ()),
        target=os.fspath(target),
        engine=engine,
        plugins=paths_argument(plugins),
        space=os.fspath(space),
        precisions=precisions_argument(precisions),
        opset=opset,
        metric=metric_name,
        metric_function=metric_function,
        reported_metrics=reported_metrics,
        labels=None if labels is None else Path(labels),
        tolerance=Tolerance.parse_all(tolerance or ()),
        ignore=one_or_several(ignore or ()),
        feedback=one_or_several(feedback),
        steps=steps,
        max_error=read_error(max_error),
        max_latency_ms=max_latency_ms,
        max_memory_bytes=max_memory_bytes,
        limits=one_or_several(limits),
        knee=knee,
        budget=budget,
        timeout_s=timeout_s,
        max_disk_bytes=max_disk_bytes,
        gpus=tuple(gpus),
        out=None if out is None else Path(out),
        fresh=fresh,
        storage=storage,
        sampler=sampler,
        seed=seed,
        tf32=tf32,
        tensorrt=tensorrt or TensorRtSettings(),
        skip_checks=skip_checks,
        confirm_rounds=confirm_rounds,
        confirm_points=confirm_points,
        latency=latency or LatencySettings(),
        worker=worker or WorkerSettings(),
    )
    check_sampler(settings.sampler)
    if settings.target != "auto":
        load_target(settings.target)
    check_gpus("gpus", settings.gpus, open_toolchain)
    if settings.gpus and metric_function is not None:
        raise SettingsError("cannot be a function where workers are other processes", _SCRIPT, setting="metric")
    variables = dict(os.environ)  # of the workers, before this process is limited to one GPU
    with contextlib.ExitStack() as stack:
        stack.callback(end_scripts)
        stack.enter_context(only_gpu(settings.gpus[0] if settings.gpus else None))
        workers = None if open_toolchain is not None else stack.enter_context(probed_ahead(settings))
        loaded = stack.enter_context(loaded_model(model, settings.opset))
        outputs = [output.name for output in loaded.outputs]
        check_asked(Choice.of(settings), (settings.metric, *settings.reported_metrics), outputs)
        check_shapes(settings.shapes, loaded.inputs)
        check_batch(settings.data_settings.batch, loaded.inputs)
        listens = stack.enter_context(listening(progress, listener, settings.max_error, settings.max_latency_ms))
        stack.enter_context(full_disk_as_error(path))
        run = stack.enter_context(open_run(path, fresh=settings.fresh))
        placed = placed_model(loaded, model, run)
        session = Search(run, placed, settings, listens, open_toolchain, workers, variables)
        stack.enter_context(contextlib.closing(session))
        stack.enter_context(findings_kept(run))
        return write_run_files(run, session.run(), session.record, session.grouped, session.file.environment)
