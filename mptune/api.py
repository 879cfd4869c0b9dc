"""What the command line and a notebook call: from search to export, one function each. Wires the floors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mptune.applying import refuse, resolve_plan, write_model
from mptune.data.metrics.tasks import resolve_metric
from mptune.errors import PlanError, RunError, SettingsError
from mptune.files import full_disk_as_error
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import PrecisionPlan
from mptune.inspection import Inspection, inspect_model
from mptune.reporting.run_files import write_run_files
from mptune.run_json import ChoiceSection, RunFile
from mptune.rundir import RunDirectory, open_run, read_run
from mptune.settings import EngineChoice, SearchSettings
from mptune.targets.target import load_target
from mptune.tuning.front import Front
from mptune.tuning.listener import Listener, Silent
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.runs.archive import pack
from mptune.tuning.runs.confirm_run import Confirming, read_confirmation, read_record, read_searched
from mptune.tuning.runs.confirmation import Confirmation
from mptune.tuning.runs.model_copy import has_copy, keep_model, load_copy, load_either, load_original
from mptune.tuning.runs.search_run import OpenToolchain, Session, front_of
from mptune.tuning.sampler.stock import check_sampler
from mptune.tuning.space import load_space

__all__ = ["apply", "confirm", "export", "inspect", "pick", "report", "search"]


def search(
    model: str | Path,
    *,
    listener: Listener | None = None,
    open_toolchain: OpenToolchain | None = None,
    **settings: Any,
) -> Front:
    """Find which layer groups of a model can run in FP16. The same call again resumes, or answers from the record.

    Args:
        model: path of an ONNX model.
        listener: hears of the progress.
        open_toolchain: who evaluates plans, in place of ``mptune.engines.toolchains.choose.open_toolchain``.
        **settings: the fields of ``SearchSettings``.

    Returns:
        The front, confirmed, with one plan chosen and written to ``chosen/`` in the run directory.

    Raises:
        SettingsError: a setting is unknown or out of range.
        ModelError: the model cannot be read, typed or tuned.
        DataError: the calibration data do not fit the model.
        SpaceError: the search space is unknown or invalid.
        TargetError: the target or engine is unknown or not to be had here.
        BaselineError: the FP32 baseline is broken already.
        RunError: the run directory cannot be used, or the machine failed again and again.
        KeyboardInterrupt: passed on; the same call resumes.
    """
    wanted = _settings(settings)
    resolve_metric(wanted.metric)
    check_sampler(wanted.sampler)
    if wanted.target != "auto":
        load_target(wanted.target)
    loaded = load_model(model)
    path = wanted.out or Path(f"{Path(model).stem}.mptune")
    with full_disk_as_error(path), open_run(path, fresh=wanted.fresh) as run:
        session = Session(run, loaded, wanted, listener or Silent(), open_toolchain)
        with contextlib.closing(session):
            front = session.run()
            write_run_files(run, front, session.record, loaded, session.groups, session.environment)
    return front


def report(run: str | Path) -> Front:
    """Read a front again from its run directory alone: no model, no data, no measurement, no lock.

    Its ``explanation`` says why groups stay FP32, plan by plan, and what each group costs and gains.

    Raises:
        RunError: it is no run directory, or holds no baseline yet.
    """
    directory, file = read_run(run)
    with contextlib.closing(read_record(directory, file)) as record:
        return front_of(directory, file, record)


def pick(
    run: str | Path,
    *,
    max_error: float | None = None,
    max_latency_ms: float | None = None,
    knee: bool = False,
    plan: str | None = None,
) -> Front:
    """Choose another plan of a finished search and write ``chosen/`` and ``front.json`` anew.

    Args:
        run: the run directory.
        max_error: take the fastest plan whose error is at most this.
        max_latency_ms: take the most exact plan that is at most this slow.
        knee: take the knee of the front.
        plan: take this one, by its fingerprint or the beginning of it.

    Raises:
        SettingsError: ways to choose that exclude each other.
        PlanError: no such plan, or it is not feasible.
        RunError: it is no run directory, another process uses it, or the model has changed, or is gone without a copy.
    """
    ways = [max_error is not None or max_latency_ms is not None, knee, plan is not None]
    if sum(ways) > 1:
        raise SettingsError("limits, the knee and a plan's id exclude each other", "give one of them")
    directory, _ = read_run(run)
    with (
        full_disk_as_error(directory.path),
        open_run(directory.path),
        contextlib.ExitStack() as stack,
    ):
        directory, file = read_run(run)  # again, now that nobody else can write it
        record = stack.enter_context(contextlib.closing(read_record(directory, file)))
        file = file.model_copy(
            update={"choice": ChoiceSection(max_error=max_error, max_latency_ms=max_latency_ms, plan=plan)}
        )
        front = front_of(directory, file, record)
        confirmation = None if file.confirms is None else _confirmation(directory, file, record)
        loaded = load_either(directory, file)
        groups = find_groups(loaded, file.fixed_settings.granularity)
        write_run_files(directory, front, record, loaded, groups, file.environment, confirmation)
        directory.save(file)
        return front


def confirm(
    run: str | Path,
    *,
    target: str = "auto",
    engine: EngineChoice = "auto",
    listener: Listener | None = None,
    open_toolchain: OpenToolchain | None = None,
) -> Confirmation:
    """Build and measure the front of a search, and its seeds, on the device here. The same call again resumes.

    The run directory is enough: it may have been searched on another machine, and the model need not be here.

    Args:
        run: the run directory of a search.
        target: the device; ``auto`` takes the search's own where it is here, else the GPU here, else the CPU.
        engine: toolchain family.
        listener: hears of the progress.
        open_toolchain: who evaluates plans, in place of ``mptune.engines.toolchains.choose.open_toolchain``.

    Returns:
        The confirmed front, written to ``RUN/confirmed/DEVICE`` with one plan chosen, against the search's.

    Raises:
        RunError: it is no run directory, is not whole, or another process confirms it on the same device.
        TargetError: the target or engine is unknown, or cannot be measured here.
        BaselineError: the all-FP32 engine of this device is broken already.
        KeyboardInterrupt: passed on; the same call resumes.
    """
    directory, file = read_run(run)
    _refuse_confirmation(directory, file)
    with full_disk_as_error(directory.path):
        if not has_copy(directory, file):
            _keep_copy(directory, file)
        confirming = Confirming(directory, file, target, engine, listener or Silent(), open_toolchain)
        with contextlib.closing(confirming):
            found = confirming.run()
            write_run_files(
                confirming.directory,
                found.front,
                confirming.record,
                confirming.model,
                confirming.groups,
                confirming.environment,
                found,
            )
    return found


def export(
    run: str | Path,
    out: str | Path | None = None,
    *,
    force: bool = False,
    warn: Callable[[str], object] | None = None,
) -> Path:
    """Pack what ``confirm`` needs of a run into one file for a device.

    Args:
        run: the run directory of a search.
        out: where to write, a .tar.gz; None means the run's name + ``.tar.gz`` in the working directory.
        force: overwrite ``out``.
        warn: hears what the file cannot hold, one line each.

    Returns:
        The path written.

    Raises:
        RunError: it is no run directory, is not whole or in use, or ``out`` exists already or cannot be written.
    """
    directory, file = read_run(run)
    _refuse_confirmation(directory, file)
    target = Path(out) if out is not None else Path(f"{directory.path.resolve().name}.tar.gz")
    if target.is_dir() or (target.exists() and not force):
        refuse(target)
    with full_disk_as_error(target), open_run(directory.path):
        directory, file = read_run(run)  # again, now that nobody else can write it
        with contextlib.closing(read_record(directory, file)) as record:
            front_of(directory, file, record)  # a run without a baseline has nothing to confirm
        if not has_copy(directory, file):
            _keep_copy(directory, file)
        pack(directory, file, target)
    script, _, function = file.search.metric.rpartition(":")
    if script and function and warn is not None:
        warn(f"the metric is a script of yours: copy {script} to the device, too, to the same relative path")
    return target


def inspect(
    model: str | Path, *, data: str | Path | None = None, space: str = "default", batch: int = 1, budget: int = 50
) -> Inspection:
    """Take a model apart as a search would: groups, operators, FLOPs, bytes, hazards and what they pin.

    Args:
        model: path of an ONNX model.
        data: calibration samples; with them the model is run once over each, and the values seen are judged, too.
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
    return inspect_model(load_model(model), named, None if data is None else Path(data), batch, budget)


def apply(
    model: str | Path,
    plan: PrecisionPlan | str | Path | None,
    out: str | Path,
    *,
    keep_fp32: Sequence[str] = (),
    force: bool = False,
    warn: Callable[[str], object] | None = None,
) -> Path:
    """Write the mixed-precision model of a plan, self-contained; past 2 GiB its weights lie beside it.

    Args:
        model: path of the ONNX model that the plan was made for.
        plan: a plan, the path of a plan.json (a search's, or one by hand that names nodes), or None for FP16 wherever
            FP16 can be right.
        out: where to write.
        keep_fp32: patterns as in search-space files; what they mean is FP32 whatever the plan says.
        force: overwrite ``out``.
        warn: hears what is not as it was asked for, one line each.

    Returns:
        The path written.

    Raises:
        RunError: ``out`` exists already or cannot be written.
        ModelError: the model cannot be read, typed or tuned.
        PlanError: the plan cannot be read, or belongs to another model, or a pattern means nothing.
    """
    target = Path(out)
    if isinstance(plan, str):
        plan = Path(plan)
    if target.is_dir() or (target.exists() and not force):
        refuse(target)  # before a large model is read
    if isinstance(plan, Path) and target.exists() and plan.exists() and target.samefile(plan):
        raise PlanError(f"{target} is what the mixed model is made from", "give another path with -o")
    loaded = load_model(model)
    resolved = resolve_plan(loaded, plan, keep_fp32)
    written = write_model(loaded, resolved, target, force=force)
    for text in resolved.warnings:
        if warn is not None:
            warn(text)
    return written


def _settings(given: dict[str, Any]) -> SearchSettings:
    unknown = sorted(set(given) - set(SearchSettings.__dataclass_fields__))
    if unknown:
        raise SettingsError(
            f"there is no setting {unknown[0]!r}", f"there are {', '.join(SearchSettings.__dataclass_fields__)}"
        )
    paths = {name: Path(given[name]) for name in ("data", "out") if given.get(name) is not None}
    return SearchSettings(**{**given, **paths})


def _refuse_confirmation(directory: RunDirectory, file: RunFile) -> None:
    if file.confirms is not None:
        raise RunError(f"{directory.path} is a confirmation already", f"give the run: {directory.path / file.confirms}")


def _keep_copy(directory: RunDirectory, file: RunFile) -> None:
    """The copy of the model for a run that was interrupted, or made before runs had one."""
    if not Path(file.model.path).exists():
        load_copy(directory, file)  # raises with what to do
    model = load_original(file)
    keep_model(directory, model, find_groups(model, file.fixed_settings.granularity))


def _confirmation(directory: RunDirectory, file: RunFile, record: StudyRecord) -> Confirmation:
    """What a confirmation has found already."""
    search = read_run(directory.path / str(file.confirms))
    return read_confirmation(directory, file, record, search, read_searched(*search))
