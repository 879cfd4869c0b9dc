"""``report``: a run read from its directory alone. Apart from ``mptune.api``: nothing that runs a model is imported."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mptune.run_json import RunFile
from mptune.rundir import read_run
from mptune.settings import Tolerance
from mptune.tuning.front import Front
from mptune.tuning.fronts.kept import kept_front


def report(
    run: str | Path,
    *,
    tolerance: Sequence[str | Tolerance] | None = None,
    ignore: Sequence[str] | None = None,
    storage: str | None = None,
) -> Front:
    """Read a front, with the reasons for FP32, from its run directory alone: no model, no data, no lock.

    Args:
        run: the run directory.
        tolerance: as in ``search``; None takes the run's. Nothing is written.
        ignore: as in ``search``; None takes the run's.
        storage: URL of the run's database, if any; None takes that of ``MPTUNE_STORAGE``.

    Raises:
        RunError: it is no run directory, or holds no baseline yet.
    """
    directory, file = read_run(run)
    file = with_demands(file, tolerance, ignore)
    kept = kept_front(directory, file)
    if kept is not None:
        return kept
    from mptune.tuning.runs.result import front_of, read_record  # They import Optuna.

    with contextlib.closing(read_record(directory, file, storage)) as record:
        return front_of(directory, file, record)


def with_demands(file: RunFile, tolerance: Sequence[str | Tolerance] | None, ignore: Sequence[str] | None) -> RunFile:
    """A run.json whose plan is chosen under other tolerances, without other outputs; None keeps the run's.

    Raises:
        SettingsError: a tolerance is not understood.
    """
    update: dict[str, Any] = {}
    if tolerance is not None:
        update |= {"tolerance": tuple(map(str, tolerance_argument(tolerance))), "plan": None}
    if ignore is not None:
        update["ignore"] = tuple(ignore)
    return file.model_copy(update={"choice": file.choice.model_copy(update=update)}) if update else file


def tolerance_argument(tolerance: Sequence[str | Tolerance] | None) -> tuple[Tolerance, ...]:
    """The tolerances that a caller gave, as values or as ``--tolerance`` takes them.

    Raises:
        SettingsError: not understood.
    """
    given = (tolerance,) if isinstance(tolerance, str | Tolerance) else tolerance or ()
    return tuple(one if isinstance(one, Tolerance) else Tolerance.parse(one) for one in given)
