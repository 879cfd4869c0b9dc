"""A run and other machines: ``worker`` joins a search, ``confirm`` measures its front, ``export`` packs it.

``Run`` is a run directory as an object, with all that can be done with it.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from mptune.api import arguments, reading
from mptune.data.metrics.table import METRICS
from mptune.data.scripts import end_scripts
from mptune.errors import RunError, SettingsError
from mptune.files import PathLike, full_disk_as_error, refuse
from mptune.reporting import recipe, run_files
from mptune.rundir import RunDirectory, joined_run, read_run
from mptune.settings import SearchSettings, Tolerances, documented
from mptune.tuning import confirm as confirming, confirmation, copies, measuring
from mptune.tuning.bench import Listener
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.front import Front
from mptune.tuning.record.storage import storage_url
from mptune.tuning.record.study import Study, copy_study
from mptune.tuning.result import front_of, read_record
from mptune.tuning.worker import end_with_search, work

__all__ = ["Run", "confirm", "export", "open_run", "worker"]

P = ParamSpec("P")
T = TypeVar("T")

_POLL_S = 0.2


def worker(
    run: PathLike,
    *,
    storage: str | None = None,
    gpu: int | None = None,
    metric: arguments.MetricLike | Sequence[arguments.MetricLike] | None = None,
    plugins: PathLike | Sequence[PathLike] | None = None,
    wait_s: float = 60.0,
    progress: bool | None = None,
    listener: Listener | None = None,
    open_toolchain: measuring.OpenToolchain | None = None,
) -> None:
    """Join a search: evaluate its plans until it stops. Any number of workers can, on several hosts with a database.

    The search must have been started. When the workers have ended, the call that started it confirms the front.

    A host with another device, engine or version is refused: its figures cannot be compared.

    Args:
        run: The run directory of the search, or its unpacked ``export`` on another host.
        storage: Optuna storage URL of the search. By default what the run names, or its journal.
        gpu: Use this GPU of those that CUDA shows, counted by their PCI addresses.
        metric: The search's metric, where it is a function or a script; several where reported metrics are scripts.
        plugins: The search's libraries with TensorRT plugins.
        wait_s: How long to wait for a search that is not prepared yet, or whose budget is spent.
        progress: Show progress on stderr, as in ``search``.
        listener: Is called at each step.
        open_toolchain: Opens what evaluates plans, in place of the toolchain of the search's target and engine.

    Raises:
        RunError: It is no run directory, the search was not started, this host differs from the one that started it,
            or the storage does not answer.
        TargetError: The target or engine is not available here.
        KeyboardInterrupt: The worker was interrupted; its plan has been given back.
    """
    end_with_search()
    if gpu is not None and open_toolchain is None:
        arguments.check_gpus("gpu", (gpu,))
    with contextlib.ExitStack() as stack:
        listens = stack.enter_context(arguments.listening(progress, listener))
        run_json, until_s = RunDirectory(Path(run)).run_json, time.monotonic() + wait_s
        if wait_s > 0 and not run_json.exists():
            listens.stage(f"waiting up to {wait_s:.0f} s for {run_json}")
        while not run_json.exists() and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        directory, file = read_run(run, of_search=True)
        name, function = arguments.recorded_metric(file, metric, directory.path, "worker")
        loaded = arguments.recorded_plugins(file, plugins, directory.path, "worker")
        for context in (full_disk_as_error(directory.path), arguments.only_gpu(gpu), joined_run(directory)):
            stack.enter_context(context)
        # An exported run names no storage: its journal is a copy.
        url = storage if storage is not None else storage_url(file.storage)
        own = SearchSettings(metric=name, metric_function=function, plugins=loaded, storage=url)
        work(directory, own, listens, open_toolchain, max(0.0, until_s - time.monotonic()))


@documented
def confirm(
    run: PathLike,
    *,
    target: str = "auto",
    engine: str = "auto",
    metric: arguments.MetricLike | Sequence[arguments.MetricLike] | None = None,
    plugins: PathLike | Sequence[PathLike] | None = None,
    tolerance: Tolerances | None = None,
    ignore: str | Sequence[str] | None = None,
    storage: str | None = None,
    timeout_s: float | None = None,
    max_disk_bytes: int | None = None,
    progress: bool | None = None,
    listener: Listener | None = None,
    open_toolchain: measuring.OpenToolchain | None = None,
) -> confirmation.Confirmation:
    """Build and measure the front of a search, and its seeds, on the device here. The same call again resumes.

    The run directory is enough: neither the machine of the search nor the model need be here.

    Args:
        run: the run directory of a search.
        {settings}
        target: the device; ``auto`` takes the search's own where it is here, else the GPU here, else the CPU.
        metric: the search's, where it is a function or a script; several where reported metrics are scripts.
        plugins: as in ``search``, of this machine; needed where the search had some.
        progress: show progress on stderr, as in ``search``.
        listener: is called at each step.
        open_toolchain: opens what evaluates plans, in place of the toolchain of ``target`` and ``engine``.

    Returns:
        The confirmed front, written to ``RUN/confirmed/DEVICE`` with one plan chosen, against the search's.

    Raises:
        SettingsError: a limit is not above 0.
        RunError: it is no run directory, is not whole, or another process confirms it on the same device.
        TargetError: the target or engine is unknown, or cannot be measured here.
        BaselineError: the all-FP32 engine of this device is broken already.
        EndedEarlyError: a limit ended it before all-FP32 was measured.
        KeyboardInterrupt: passed on; the same call resumes.
    """
    limits = SearchSettings(timeout_s=timeout_s, max_disk_bytes=max_disk_bytes)  # refuses what cannot be meant
    directory, file = read_run(run, of_search=True)
    file = reading.with_demands(file, tolerance, ignore)
    name, function = arguments.recorded_metric(file, metric, directory.path, "confirm")
    loaded = arguments.recorded_plugins(file, plugins, directory.path, "confirm", may_differ=True)
    settings = replace(limits, target=target, engine=engine, storage=storage, metric=name, metric_function=function)
    settings = replace(settings, plugins=loaded)
    with full_disk_as_error(directory.path), contextlib.ExitStack() as stack:
        stack.callback(end_scripts)
        listens = stack.enter_context(arguments.listening(progress, listener))
        begun = confirming.confirm(directory, file, settings, listens, stack, open_toolchain)
        result, directory, file, record, grouped = begun
        front = run_files.write_run_files(directory, result.front, record, grouped, file.environment, result)
        return replace(result, front=front)


def export(
    run: PathLike,
    out: PathLike | None = None,
    *,
    for_: str | None = None,
    plan: str | None = None,
    force: bool = False,
    storage: str | None = None,
    warn: Callable[[str], object] | None = None,
) -> Path:
    """Pack what ``confirm`` and ``worker`` need of a run into one file; a search may be writing it meanwhile.

    With ``for_`` it writes a folder instead: one plan for TensorRT 8, which has no strong typing.

    Args:
        run: the run directory of a search.
        out: a .tar.gz to write; None means the run's name + ``.tar.gz`` in the working directory. With ``for_`` a
            folder; None means ``RUN/weak``.
        for_: ``tensorrt-8``.
        plan: the plan to write, by its fingerprint or the beginning of it; None takes the chosen one.
        force: overwrite ``out``.
        storage: URL of the run's database, if any; None takes that of ``MPTUNE_STORAGE``.
        warn: receives what cannot be written, one line each.

    Returns:
        The path written.

    Raises:
        SettingsError: no such ``for_``, or a plan without one.
        RunError: it is no run directory, or not whole, or ``out`` exists already or cannot be written.
        PlanError: no such plan, or one with groups in BF16, which TensorRT 8 lacks.
        ModelError: TensorRT 8 lacks the operator set or an operator of the model.
    """
    if for_ not in (None, "tensorrt-8"):
        raise SettingsError(f"{for_} is unknown", "give --for tensorrt-8", setting="for_")
    if for_ is not None:
        directory, file = read_run(run)
        asked = None if plan is None else file.choice.again().model_copy(update={"plan": plan})
        with contextlib.closing(read_record(directory, file, storage)) as record:
            front = front_of(directory, file, record, asked=asked)
        if front.chosen is None:
            raise RunError(f"{directory.path} has no chosen plan", "choose one with `mptune pick`, or give --plan ID")
        grouped = copies.load_grouped(directory, file)
        build_recipe = recipe.BuildRecipe.for_run(file, directory.data, grouped.model.inputs)
        folder = directory.path / "weak" if out is None else Path(out)
        with full_disk_as_error(folder):
            recipe.write_weak_folder(front.chosen.plan, grouped, folder, build_recipe, force=force)
        return folder
    if plan is not None:
        raise SettingsError("needs --for", "a packed run contains all plans", setting="plan")
    directory, file = read_run(run, of_search=True)
    target = Path(f"{directory.path.resolve().name}.tar.gz" if out is None else out)
    if target.is_dir() or (target.exists() and not force):
        refuse(target)
    with full_disk_as_error(target), joined_run(directory):  # so that nobody moves it aside
        with contextlib.closing(read_record(directory, file, storage)) as record:
            front_of(directory, file, record)  # a run without a baseline has nothing to confirm
        copies.pack(directory, file, target, storage)
    if warn is not None and file.search.metric not in METRICS:
        name = file.search.metric
        warn(f"the metric {name} is a Python function or script of yours and not packed: bring it to the device, too")
    return target


def open_run(path: PathLike) -> Run:
    """Open the run directory of a search, or of a confirmation. Nothing is locked, written or measured.

    Args:
        path: The run directory. A search may be writing to it at the same time.

    Raises:
        RunError: It is no run directory, or one of another version of mptune.
    """
    read_run(Path(path))
    return Run(path)


def _for_run(function: Callable[Concatenate[PathLike, P], T]) -> Callable[Concatenate[Run, P], T]:
    """A function of a run directory as a method of ``Run``, with the other arguments as they are."""

    @functools.wraps(function)
    def method(self: Run, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return function(self.path, *args, **kwargs)

    method.__qualname__ = f"Run.{function.__name__}"
    return method


class Run:
    """A run directory. Every attribute is read from the disk when it is asked for, so it is never out of date.

    Attributes:
        path: The directory.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def front(self) -> Front:
        """The Pareto front, with the plan that was chosen last.

        Raises:
            RunError: Nothing has been evaluated yet.
        """
        return self.report()

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """Every plan that was evaluated, in order, also those that are not on the front or not finite.

        Raises:
            RunError: The record cannot be read, or there is none yet.
        """
        with contextlib.closing(read_record(*read_run(self.path))) as record:
            return record.evaluations()

    @property
    def study(self) -> Study:
        """A copy of the run's Optuna study, in memory: what is done to it does not change the run.

        Its trials hold latency in milliseconds and error as values, for ``optuna.visualization`` and the like.

        Raises:
            RunError: The record cannot be read, or there is none yet.
        """
        directory, file = read_run(self.path)
        return copy_study(file.study, directory.journal, storage_url(file.storage))

    report = _for_run(reading.report)
    pick = _for_run(reading.pick)
    confirm = _for_run(confirm)
    export = _for_run(export)
