"""From a search to a device: ``confirm`` measures a run's front there, ``export`` packs it or writes it as files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from mptune.api.arguments import listening, recorded_metric, recorded_plugins
from mptune.api.reading import with_demands
from mptune.choice import Choice
from mptune.data.metrics.accuracy import TaskMetric
from mptune.data.metrics.tasks import CALLABLE, script_of, undirected
from mptune.data.scripts import end_scripts
from mptune.errors import RunError, SettingsError
from mptune.files import full_disk_as_error, refuse
from mptune.reporting.recipe import BuildRecipe
from mptune.reporting.run_files import write_run_files
from mptune.reporting.weak import write_weak_folder
from mptune.rundir import joined_run, read_run, read_search
from mptune.settings import EngineChoice, SearchSettings, Tolerances
from mptune.tuning.confirm import Confirm
from mptune.tuning.confirmation import Confirmation
from mptune.tuning.copies import load_grouped, pack
from mptune.tuning.listener import Listener
from mptune.tuning.measuring import OpenToolchain
from mptune.tuning.runs.result import front_of, read_record


def confirm(
    run: str | Path,
    *,
    target: str = "auto",
    engine: EngineChoice = "auto",
    metric: str | TaskMetric | Sequence[str | TaskMetric] | None = None,
    plugins: str | Path | Sequence[str | Path] | None = None,
    tolerance: Tolerances | None = None,
    ignore: Sequence[str] | None = None,
    storage: str | None = None,
    timeout_s: float | None = None,
    max_disk_bytes: int | None = None,
    progress: bool | None = None,
    listener: Listener | None = None,
    open_toolchain: OpenToolchain | None = None,
) -> Confirmation:
    """Build and measure the front of a search, and its seeds, on the device here. The same call again resumes.

    The run directory is enough: neither the machine of the search nor the model need be here.

    Args:
        run: the run directory of a search.
        target: the device; ``auto`` takes the search's own where it is here, else the GPU here, else the CPU.
        engine: toolchain family.
        metric: the search's, where it is a function or a script; several where reported metrics are scripts.
        plugins: as in ``search``, of this machine; needed where the search had some.
        tolerance: as in ``search``; None takes the search's.
        ignore: as in ``search``; None takes the search's.
        storage: as in ``report``.
        timeout_s: start no new measurement after this many seconds.
        max_disk_bytes: start no new measurement that could make the confirmation's directory larger than this.
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
    directory, file = read_search(run)
    file = with_demands(file, tolerance, ignore)
    recorded = file.search.metric, *file.search.reported_metrics
    name, function = recorded_metric(recorded, metric, directory.path, "confirm")
    loaded = recorded_plugins(file, plugins, directory.path, "confirm", may_differ=True)
    settings = replace(limits, target=target, engine=engine, storage=storage, metric=name, metric_function=function)
    settings = replace(settings, plugins=loaded)
    with full_disk_as_error(directory.path), contextlib.ExitStack() as stack:
        stack.callback(end_scripts)
        listens = stack.enter_context(listening(progress, listener))
        confirming = Confirm(directory, file, settings, listens, open_toolchain)
        stack.callback(confirming.close)
        confirmation = confirming.run()
        front = write_run_files(
            confirming.directory,
            confirmation.front,
            confirming.record,
            confirming.grouped,
            confirming.file.environment,
            confirmation,
        )
    return replace(confirmation, front=front)


def export(
    run: str | Path,
    out: str | Path | None = None,
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
        storage: as in ``report``.
        warn: receives what cannot be written, one line each.

    Returns:
        The path written.

    Raises:
        SettingsError: no such ``for_``, or a plan without one.
        RunError: it is no run directory, or not whole, or ``out`` exists already or cannot be written.
        PlanError: no such plan, or one with groups in BF16, which TensorRT 8 lacks.
        ModelError: TensorRT 8 lacks the operator set or an operator of the model.
    """
    if for_ is not None:
        return _export_weak(run, out, for_, plan, force, storage)
    if plan is not None:
        raise SettingsError("goes with --for", "a packed run holds all plans", setting="plan")
    directory, file = read_search(run)
    target = Path(f"{directory.path.resolve().name}.tar.gz" if out is None else out)
    if target.is_dir() or (target.exists() and not force):
        refuse(target)
    if not target.parent.is_dir():
        raise RunError(
            f"cannot write {target}: there is no folder {target.parent}", "make it, or give another path with -o"
        )
    with full_disk_as_error(target), joined_run(directory):  # so that nobody moves it aside
        with contextlib.closing(read_record(directory, file, storage)) as record:
            front_of(directory, file, record)  # a run without a baseline has nothing to confirm
        pack(directory, file, target, storage)
    metric = file.search.metric
    if warn is not None and metric.startswith(CALLABLE):
        function = undirected(metric).rpartition(":")[2]
        warn(
            f"the metric is the Python function {function}: mptune.confirm(run, metric={function}) needs it there, too"
        )
    elif warn is not None and (script := script_of(metric)):
        warn(f"the metric is a script of yours: copy {script} to the device, too, to the same relative path")
    return target


def _export_weak(
    run: str | Path,
    out: str | Path | None,
    target: str,
    plan: str | None,
    force: bool,
    storage: str | None,
) -> Path:
    if target != "tensorrt-8":
        raise SettingsError(f"{target} is unknown", "give --for tensorrt-8", setting="for_")
    directory, file = read_run(run)
    with contextlib.closing(read_record(directory, file, storage)) as record:
        asked = None if plan is None else Choice(plan=plan, ignore=file.choice.ignore)
        front = front_of(directory, file, record, asked=asked)
    if front.chosen is None:
        raise RunError(f"{directory.path} has no chosen plan", "choose one with `mptune pick`, or give --plan ID")
    grouped = load_grouped(directory, file)
    recipe = BuildRecipe.of(file, directory.data, grouped.model.inputs)
    folder = directory.path / "weak" if out is None else Path(out)
    with full_disk_as_error(folder):
        write_weak_folder(front.chosen.plan, grouped, folder, recipe, force=force)
    return folder
