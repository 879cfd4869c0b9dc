"""``report``: a run read from its directory alone. Apart from ``mptune.api``: nothing that runs a model is imported."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mptune.errors import RunError
from mptune.files import PathLike, read_form
from mptune.run_json import RunFile
from mptune.rundir import read_run
from mptune.settings import Tolerance, Tolerances, documented, one_or_several
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
    directory, file = read_run(run)
    demanded = with_demands(file, tolerance, ignore)
    from mptune.tuning.result import front_of, read_record  # They import Optuna.

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


def layers(run: PathLike, *, storage: str | None = None) -> EngineLayers:
    """Which layers of the chosen plan's engine compute which nodes, with their types and times.

    Args:
        run: the run directory of a search or of a confirmation.
        storage: as in ``report``.

    Raises:
        RunError: there is no front, no plan is chosen, or the layers of its engine were not recorded.
    """
    from mptune.engines.tensorrt.layers import EngineLayers

    front = report(run, storage=storage)
    chosen = front.chosen
    if chosen is None:
        raise RunError("no plan is chosen, so there is no engine to describe", "`mptune pick` chooses one")
    engine = chosen.engine_in(front.run_dir / "engines")
    hint = "delete it, and measure the plan again: `mptune confirm RUN`"
    if engine is not None and (recorded := read_form(EngineLayers, EngineLayers.path(engine), hint)):
        return recorded
    why = "its engine was not profiled" if engine is not None else f"{front.engine} left no engine file"
    why = "its latency is predicted" if chosen.latency.source == "predicted" else why
    raise RunError(
        f"of plan {chosen.plan.fingerprint} no layers were recorded: {why}",
        "`mptune confirm RUN` with TensorRT or TensorRT-RTX records them, then `mptune report RUN/confirmed/DEVICE"
        " --layers`",
    )


def with_demands(file: RunFile, tolerance: Tolerances | None, ignore: str | Sequence[str] | None) -> RunFile:
    """A run.json whose plan is chosen under other tolerances, without other outputs; None keeps the run's."""
    update: dict[str, Any] = {}
    if tolerance is not None:
        update |= {"tolerance": tuple(map(str, Tolerance.parse_all(tolerance))), "plan": None}
    if ignore is not None:
        update["ignore"] = one_or_several(ignore)
    return file.model_copy(update={"choice": file.choice.model_copy(update=update)}) if update else file
