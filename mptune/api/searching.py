"""``search``, the call that makes a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mptune import settings
from mptune.api import arguments
from mptune.choice import Choice
from mptune.data.scripts import end_scripts
from mptune.engines.toolchains.choose import probed_ahead
from mptune.errors import SettingsError
from mptune.files import PathLike, full_disk_as_error, write_bytes
from mptune.graph.plan import precision_set
from mptune.reporting.run_files import write_run_files
from mptune.rundir import open_run
from mptune.targets.target import load_target
from mptune.tuning.bench import Listener
from mptune.tuning.front import Front
from mptune.tuning.measuring import OpenToolchain
from mptune.tuning.plan_limits import check_asked
from mptune.tuning.result import findings_kept
from mptune.tuning.sampler.precision import check_sampler
from mptune.tuning.search import Search


@settings.documented
def search(
    model: arguments.ModelLike,
    *,
    data: arguments.DataLike | None = None,
    budget: int | None = None,
    out: PathLike | None = None,
    target: PathLike = "auto",
    plugins: PathLike | Sequence[PathLike] | None = None,
    space: PathLike = "default",
    precisions: str | Sequence[str] = ("fp32", "fp16"),
    io: str = "fp32",
    opset: int | None = None,
    engine: str = "auto",
    max_error: float | str | None = None,
    max_latency_ms: float | None = None,
    max_memory_bytes: int | None = None,
    tolerance: settings.Tolerances | None = None,
    ignore: str | Sequence[str] | None = None,
    metric: arguments.MetricLike | Sequence[arguments.MetricLike] | None = None,
    labels: PathLike | None = None,
    limits: str | Sequence[str] | None = None,
    knee: bool = False,
    feedback: str | Sequence[str] | None = None,
    steps: int | None = None,
    batch: int = 1,
    shapes: arguments.Shapes | None = None,
    timeout_s: float | None = None,
    max_disk_bytes: int | None = None,
    storage: str | None = None,
    gpus: Sequence[int] | None = None,
    seed: int = 0,
    fresh: bool = False,
    tf32: bool = False,
    sampler: str = "precision",
    confirm_rounds: int = 3,
    confirm_points: int = 12,
    skip_checks: bool = False,
    latency: settings.LatencySettings | None = None,
    worker: settings.WorkerSettings | None = None,
    tensorrt: settings.TensorRtSettings | None = None,
    data_settings: settings.DataSettings | None = None,
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
        {settings}
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
    path = arguments.run_path(model, out)
    metric_name, metric_function, reported_metrics = arguments.metric_arguments(metric, path, fresh=fresh)
    data_settings = data_settings or settings.DataSettings()
    asked = settings.SearchSettings(
        data=arguments.data_argument(data),
        data_settings=data_settings if batch == 1 else replace(data_settings, batch=batch),
        shapes=arguments.shapes_argument(shapes),
        target=os.fspath(target),
        engine=engine,
        plugins=arguments.paths_argument(plugins),
        space=os.fspath(space),
        precisions=precision_set(precisions.split(",") if isinstance(precisions, str) else precisions),
        io=io,
        opset=opset,
        metric=metric_name,
        metric_function=metric_function,
        reported_metrics=reported_metrics,
        labels=None if labels is None else Path(labels),
        tolerance=settings.Tolerance.parse_all(tolerance),
        ignore=settings.one_or_several(ignore),
        feedback=settings.one_or_several(feedback),
        steps=steps,
        max_error=settings.read_error(max_error),
        max_latency_ms=max_latency_ms,
        max_memory_bytes=max_memory_bytes,
        limits=settings.one_or_several(limits),
        knee=knee,
        budget=arguments.budget_argument(budget, path, fresh=fresh),
        timeout_s=timeout_s,
        max_disk_bytes=max_disk_bytes,
        gpus=tuple(gpus or ()),
        out=None if out is None else Path(out),
        fresh=fresh,
        storage=storage,
        sampler=sampler,
        seed=seed,
        tf32=tf32,
        tensorrt=tensorrt or settings.TensorRtSettings(),
        skip_checks=skip_checks,
        confirm_rounds=confirm_rounds,
        confirm_points=confirm_points,
        latency=latency or settings.LatencySettings(),
        worker=worker or settings.WorkerSettings(),
    )
    check_sampler(asked.sampler)
    if asked.target != "auto":
        load_target(asked.target)
    if open_toolchain is None:
        arguments.check_gpus("gpus", asked.gpus)
    if asked.gpus and metric_function is not None:
        raise SettingsError(
            "cannot be a function where workers are other processes", "give it as script.py:function", setting="metric"
        )
    variables = dict(os.environ)  # of the workers, before this process is limited to one GPU
    with contextlib.ExitStack() as stack:
        stack.callback(end_scripts)
        stack.enter_context(arguments.only_gpu(asked.gpus[0] if asked.gpus else None))
        workers = None if open_toolchain is not None else stack.enter_context(probed_ahead(asked))
        loaded = stack.enter_context(arguments.loaded_model(model, asked.opset))
        outputs = [output.name for output in loaded.outputs]
        check_asked(Choice.from_settings(asked), (asked.metric, *asked.reported_metrics), outputs)
        arguments.check_shapes(asked.shapes, loaded)
        arguments.check_batch(asked.data_settings.batch, loaded)
        listens = stack.enter_context(arguments.listening(progress, listener, asked.max_error, asked.max_latency_ms))
        stack.enter_context(full_disk_as_error(path))
        run = stack.enter_context(open_run(path, fresh=asked.fresh))
        if not isinstance(model, (str, os.PathLike)):  # the file of a model in memory is to last as long as the run
            file = run.load()
            if file is None or file.model.sha256 == loaded.sha256:  # the search refuses another, and touches nothing
                write_bytes(run.source_onnx, [loaded.path.read_bytes()])
            loaded = replace(loaded, path=run.source_onnx)
        session = Search(run, loaded, asked, listens, open_toolchain, workers, variables)
        stack.enter_context(contextlib.closing(session))
        stack.enter_context(findings_kept(run))
        front = session.run()
        environment, checks = session.file.environment, session.worker
        return write_run_files(run, front, session.record, session.grouped, environment, worker=checks)
