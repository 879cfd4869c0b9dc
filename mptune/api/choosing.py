"""``pick``: another plan of a finished search."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from mptune.choice import Choice, ChoiceLimits
from mptune.errors import SettingsError
from mptune.files import PathLike, full_disk_as_error
from mptune.reporting.run_files import write_run_files
from mptune.rundir import open_run, read_run
from mptune.settings import Tolerance, Tolerances, check_limits, documented, one_or_several, read_error
from mptune.tuning.confirmation import read_confirmation
from mptune.tuning.copies import load_grouped
from mptune.tuning.front import Front
from mptune.tuning.result import front_of, read_record


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
    directory, _ = read_run(run)
    with full_disk_as_error(directory.path), open_run(directory.path), contextlib.ExitStack() as stack:
        directory, file = read_run(run)  # again, now that nobody else can write it
        record = stack.enter_context(contextlib.closing(read_record(directory, file, storage)))
        ignored = file.choice.ignore if ignore is None else one_or_several(ignore)
        limited = file.choice.limits if limits is None else choice.limits
        searched = file.choice.search_limits or file.choice.given_limits
        kept = {"ignore": ignored, "limits": limited, "search_limits": searched}
        front = front_of(directory, file, record, asked=choice.model_copy(update=kept))
        file = file.model_copy(update={"choice": front.choice})
        confirmation = None if file.confirms is None else read_confirmation(directory, file, record, storage)
        grouped = load_grouped(directory, file)
        return write_run_files(directory, front, record, grouped, file.environment, confirmation)
