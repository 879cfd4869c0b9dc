"""One worker of a search that another process prepared."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mptune.data.metrics.accuracy import TaskMetric
from mptune.engines.context import RunContext
from mptune.engines.environment import Environment, engine_packages
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.errors import RunError
from mptune.identity import target_text
from mptune.run_json import RunFile, TargetSection
from mptune.rundir import RunDirectory
from mptune.settings import SearchSettings, Tolerance
from mptune.tuning.listener import Listener
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.record.study import BUDGET_NOTE, START_NOTE
from mptune.tuning.runs.measuring_run import OpenToolchain
from mptune.tuning.runs.model_copy import group_as_searched, load_copy, target_copy
from mptune.tuning.runs.sample_files import refuse_damaged
from mptune.tuning.runs.search_run import SPACE_FILE, SearchRun
from mptune.tuning.sample_sets import recorded_rollout
from mptune.tuning.space import NamedSpace, load_space
from mptune.tuning.steps.limits import Limits
from mptune.tuning.steps.prepare import Observations, search_space, split_groups

_POLL_S = 0.5

_DIFFERENT_HINT = "install the same versions on the same kind of device, or search here with a run directory of its own"

_PREPARE = "start it where the model and the data are: `mptune search` with the same storage"


class WorkerRun(SearchRun):
    """Shares the search of a run directory, or of its unpacked export, by the study alone; run.json is only read."""

    _is_worker = True

    def __init__(
        self,
        run: RunDirectory,
        file: RunFile,
        storage: str | None,
        listener: Listener,
        opener: OpenToolchain | None = None,
        metric: tuple[str, TaskMetric | None] | None = None,
        plugins: tuple[Path, ...] = (),
        wait_s: float = 0.0,
    ) -> None:
        name, function = metric or (file.search.metric, None)
        kept = ("budget", "sampler", "timeout_s", "max_disk_bytes", "ignore", "max_error")
        settings = SearchSettings(
            **file.measured_settings,
            **{setting: getattr(file.search, setting) for setting in kept},
            tolerance=tuple(map(Tolerance.parse, file.search.tolerance)),
            target=file.fixed_settings.target,
            engine=file.fixed_settings.engine,
            metric=name,
            metric_function=function,
            plugins=plugins,
            storage=storage,
        )
        self.file = file
        super().__init__(run, None, settings, listener, opener)
        self._url = storage
        self._wait_s = wait_s

    def join(self) -> None:
        """Wait until the search is prepared, and open the toolchain; refuse a host that differs."""
        self._wait(self._is_prepared)
        recorded, path = self.file, self.directory.path
        if recorded.target is None or not self._is_prepared():
            raise RunError(f"{path} is not prepared for workers yet", _PREPARE)
        refuse_damaged(self.directory.data)
        self._model = load_copy(self.directory, recorded)
        self.grouped = group_as_searched(self._model, recorded)
        self._settings: SearchSettings = recorded_rollout(self._settings, recorded, self._model)
        self._context = self._make_context()
        self._open_toolchain()
        here, environment = self.file.target, self.file.environment
        assert here is not None
        assert environment is not None
        if differs := difference(recorded.target, recorded.environment, here, environment):
            raise RunError(differs, _DIFFERENT_HINT)

    def work(self) -> None:
        """Evaluate plans until the search stops; ``join`` has been called."""
        observations = Observations.load(self.directory.observed_json)
        if observations is None:
            raise RunError(
                f"damaged: {self.directory.observed_json} cannot be read", "the same `mptune search` writes it anew"
            )
        named = self._named_space()
        _, hazards = split_groups(self._context, observations, self._kernels)
        space = search_space(self._context, named, hazards, observations, self._kernels)
        self._open_study(space)
        self._take_budget(self.record)
        self._tune()

    def _take_budget(self, record: StudyRecord) -> None:
        """Take the budget and the start of the search from its study; wait a while for one that is not spent.

        Whoever prepares a search with a small budget, and then searches with the real one, starts workers between.
        """

        def is_left() -> bool:
            return record.spent < (record.note(BUDGET_NOTE) or 0)

        spent = f"the search's budget of {record.note(BUDGET_NOTE)} plans is spent"
        self._wait(is_left, spent if record.note(BUDGET_NOTE) is not None and not is_left() else "")
        budget = record.note(BUDGET_NOTE)
        if budget is None:
            raise RunError(f"the storage holds no search of {self.directory.path} yet", _PREPARE)
        self._settings = replace(self._settings, budget=int(budget))
        start_s = record.note(START_NOTE)
        elapsed_s = 0.0 if start_s is None else time.time() - start_s
        self._limits = Limits(self._settings, self.directory.path, elapsed_s=elapsed_s)

    def _is_prepared(self) -> bool:
        file = self.directory.load()
        if file is None or file.target is None:
            return False
        if self._toolchain is None:
            self.file = file
        return self.directory.observed_json.exists()

    def _wait(self, holds: Callable[[], bool], reason: str = "") -> None:
        """Until something holds, or for as long as this worker waits for its search."""
        until_s = time.monotonic() + self._wait_s
        is_said = False
        while not holds() and (left_s := until_s - time.monotonic()) > 0:
            if not is_said:
                why = f"{reason}: " if reason else ""
                self._listener.stage(f"{why}waiting up to {left_s:.0f} s for the search to have work")
                is_said = True
            time.sleep(min(_POLL_S, left_s))
        if reason and not holds():
            self._listener.stage(f"nothing to do: {reason}")

    def _named_space(self) -> NamedSpace:
        fixed = self.file.fixed_settings
        named = load_space(str(self.directory.data / SPACE_FILE))
        if named.sha256 != fixed.space_sha256:
            raise RunError(
                f"the search space {fixed.space} differs from the one that is searched", "copy the run directory again"
            )
        return replace(named, name=fixed.space)

    def _open_by_target(self, context: RunContext) -> Toolchain:
        target = target_copy(self.directory, context.settings.target)
        return super()._open_by_target(context.with_settings(target=target))

    def _save(self, **changes: Any) -> None:
        """In memory alone: run.json is the search's."""
        self.file = self.file.model_copy(update=changes)


def difference(
    there: TargetSection, prepared: Environment | None, here: TargetSection, environment: Environment
) -> str:
    """What differs between the host that a search was prepared on and this one, one line; empty where nothing does."""
    prefix = "this host differs from the one that the search was prepared on"
    if there != here:
        return f"{prefix}: another target ({target_text(there)} there, {target_text(here)} here)"
    if prepared is None:
        return ""
    before, now = versions(prepared), versions(environment)
    differing = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    if not differing:
        return ""
    name = differing[0]
    return f"{prefix}: {name} {before.get(name, 'is missing')} there, {now.get(name, 'is missing')} here"


def versions(environment: Environment) -> dict[str, str]:
    """The versions that change figures, and the drivers of the GPUs."""
    drivers = sorted({gpu.driver for gpu in environment.gpus if gpu.driver})
    names = {"mptune", "cuda driver", *engine_packages()}
    compared = {name: version for name, version in environment.versions.items() if name in names}
    return {**compared, "driver": ", ".join(drivers)} if drivers else compared
