"""What is done with a finished run, from its directory alone: ``report``, ``layers`` and ``pick``.

What runs a model, and Optuna, are imported inside functions, so that ``mptune report`` starts fast.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mptune.choice import Choice, ChoiceLimits
from mptune.errors import RunError, SettingsError
from mptune.files import PathLike, full_disk_as_error, read_form
from mptune.run_json import RunFile
from mptune.rundir import open_run, read_run
from mptune.settings import Tolerance, Tolerances, check_limits, documented, one_or_several, read_error
from mptune.tuning.front import Front

if TYPE_CHECKING:
    from mptune.engines.tensorrt.layers import EngineLayers


@documented
def report(
    run: PathLike,
    *,
    tolerance: Tolerances | None = None,
    ignore: str | Sequence[str] | None = None,
    storage: str | None = None,
) -> Front:
    """Read a front, with the reasons for FP32, from its run directory alone: no model, no data, no lock.

    Args:
        run: the run directory.
        {settings}
        tolerance: as in ``search``, or the run's: the plans within it, and which of them ``pick`` would choose.

    Raises:
        RunError: it is no run directory, or holds no baseline yet.
    """
    from mptune.tuning.result import front_of, read_record

    directory, file = read_run(run)
    demanded = with_demands(file, tolerance, ignore)
    with contextlib.closing(read_record(directory, file, storage)) as record:
        front = front_of(directory, demanded, record)
        if demanded == file:
            return front
        wanted = front_of(directory, file, record, asked=demanded.choice.again())
    choice = wanted.choice
    if choice.unmet is not None:
        unmet = {"unmet": choice.unmet, "nearest": choice.nearest}
        return replace(front, choice=front.choice.model_copy(update=unmet), nearest=wanted.nearest)
    return front if choice.chosen == front.choice.chosen else replace(front, proposed=choice)


def with_demands(file: RunFile, tolerance: Tolerances | None, ignore: str | Sequence[str] | None) -> RunFile:
    """A run.json whose plan is chosen under other tolerances, without other outputs; None keeps the run's."""
    update: dict[str, Any] = {}
    if tolerance is not None:
        update |= {"tolerance": tuple(map(str, Tolerance.parse_all(tolerance))), "plan": None}
    if ignore is not None:
        update["ignore"] = one_or_several(ignore)
    return file.model_copy(update={"choice": file.choice.model_copy(update=update)}) if update else file


def layers(run: PathLike, *, storage: str | None = None) -> EngineLayers:
    """Which layers of the chosen plan's engine compute which nodes, with their types and times.

    Raises:
        RunError: there is no front, no plan is chosen, or the layers of its engine were not recorded.
    """
    from mptune.engines.tensorrt.layers import EngineLayers

    front = report(run, storage=storage)
    if front.chosen is None:
        raise RunError("no plan is chosen, so there is no engine to describe", "`mptune pick` chooses one")
    engine = front.chosen.engine_in(front.run_dir / "engines")
    hint = "delete it, and measure the plan again: `mptune confirm RUN`"
    if engine is not None and (recorded := read_form(EngineLayers, EngineLayers.path(engine), hint)):
        return recorded
    why = "its engine was not profiled" if engine is not None else f"{front.engine} left no engine file"
    why = "its latency is predicted" if front.chosen.latency.source == "predicted" else why
    raise RunError(
        f"of plan {front.chosen.plan.fingerprint} no layers were recorded: {why}",
        "`mptune confirm RUN` with TensorRT or TensorRT-RTX records them, then `mptune report RUN/confirmed/DEVICE"
        " --layers`",
    )


@documented
def pick(
    run: PathLike,
    *,
    max_error: float | str | None = None,
    max_latency_ms: float | None = None,
    max_memory_bytes: int | None = None,
    limits: str | Sequence[str] | None = None,
    tolerance: Tolerances | None = None,
    ignore: str | Sequence[str] | None = None,
    knee: bool = False,
    plan: str | None = None,
    storage: str | None = None,
) -> Front:
    """Choose another plan of a finished search and write ``chosen/`` and ``front.json`` anew.

    Limits that no plan meets change neither the choice nor ``chosen/``: ``limits_met`` is False then, and ``unmet``
    names the nearest plan. A later ``search`` keeps the choice until it is given other limits.

    Args:
        run: the run directory.
        {settings}
        ignore: outputs whose errors do not count; None leaves out those that the run leaves out.
        plan: take this one, by its fingerprint or the beginning of it.

    Raises:
        SettingsError: ways to choose that exclude each other, or a limit that is not above 0.
        PlanError: no such plan, or it is not feasible.
        RunError: it is no run directory, another process uses it, or its copy of the model is gone or damaged.
    """
    max_error = read_error(max_error)
    check_limits(max_error, max_latency_ms, max_memory_bytes)
    choice = Choice(
        max_error=max_error,
        max_latency_ms=max_latency_ms,
        max_memory_bytes=max_memory_bytes,
        knee=knee,
        plan=plan,
        tolerance=tuple(map(str, Tolerance.parse_all(tolerance))),
        limits=one_or_several(limits),
    )
    is_limited = choice.given_limits != ChoiceLimits(knee=knee)
    if sum((is_limited, knee, plan is not None)) > 1:
        raise SettingsError("limits, the knee and a plan's id exclude each other", "give one of them")
    from mptune.reporting.run_files import write_run_files
    from mptune.tuning.confirmation import read_confirmation
    from mptune.tuning.copies import load_grouped
    from mptune.tuning.result import front_of, read_record

    directory, _ = read_run(run)
    with full_disk_as_error(directory.path), open_run(directory.path), contextlib.ExitStack() as stack:
        directory, file = read_run(run)  # again, now that nobody else can write it
        record = stack.enter_context(contextlib.closing(read_record(directory, file, storage)))
        standing = {
            "ignore": file.choice.ignore if ignore is None else one_or_several(ignore),
            "limits": file.choice.limits if limits is None else choice.limits,
            "search_limits": file.choice.search_limits or file.choice.given_limits,
        }
        front = front_of(directory, file, record, asked=choice.model_copy(update=standing))
        file = file.model_copy(update={"choice": front.choice})
        confirmation = None if file.confirms is None else read_confirmation(directory, file, record, storage)
        grouped = load_grouped(directory, file)
        return write_run_files(directory, front, record, grouped, file.environment, confirmation)
