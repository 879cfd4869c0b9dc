"""One worker of a search that another process prepared: it evaluates plans of the shared study, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mptune.data.metrics.accuracy import TaskMetric
from mptune.engines.base import Toolchain
from mptune.engines.environment import Environment
from mptune.engines.workload import Workload
from mptune.errors import RunError
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups, groups_sha256
from mptune.run_json import RunFile
from mptune.rundir import RunDirectory
from mptune.settings import SearchSettings
from mptune.tuning.listener import Listener
from mptune.tuning.runs.confirm_run import settings_of
from mptune.tuning.runs.measuring_run import OpenToolchain
from mptune.tuning.runs.model_copy import load_either
from mptune.tuning.runs.seals import refuse_damaged
from mptune.tuning.runs.search_run import BUDGET_NOTE, SPACE_FILE, SearchRun
from mptune.tuning.space import NamedSpace, load_space
from mptune.tuning.steps.prepare import Observations
from mptune.tuning.steps.tuner import has_converged, is_exhausted

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
    ) -> None:
        """Load the model.

        Args:
            run: the search's directory, or a copy of it.
            file: its run.json.
            storage: Optuna storage URL; None for the journal in the directory.
            listener: receives the progress.
            opener: opens the toolchain in place of the target's.
            metric: name and function of the search's metric.

        Raises:
            ModelError: the model cannot be read.
            RunError: the model has changed, or is gone without a copy.
        """
        self.file = file
        name, function = metric or (file.search.metric, None)
        settings = replace(
            settings_of(file, file.fixed_settings.target, file.fixed_settings.engine, file.search.budget),
            metric=name,
            metric_function=function,
            storage=storage,
            sampler=file.search.sampler,
            timeout_s=file.search.timeout_s,
            max_disk_bytes=file.search.max_disk_bytes,
        )
        super().__init__(run, load_either(run, file), settings, listener, opener)
        self._url = storage

    def work(self) -> None:
        """Evaluate plans until the search stops.

        Raises:
            RunError: the search is not prepared, this host differs from the one that prepared it, or the machine failed
                again and again.
            BaselineError: the all-FP32 engine disagrees with the reference.
            KeyboardInterrupt: passed on; the plan in work has been given back.
        """
        path, fixed = self.directory.path, self.file.fixed_settings
        groups = find_groups(self._model, fixed.granularity)
        if groups_sha256(groups) != fixed.groups_sha256:
            raise RunError(
                f"this mptune finds other layer groups in the model than mptune {self.file.mptune}, which searches",
                "use the same version of mptune for all workers",
            )
        self.grouped = GroupedModel(self._model, groups)
        observations = Observations.load(self.directory.observed_json)
        if observations is None or self.file.target is None:
            raise RunError(f"{path} is not prepared for workers yet", _PREPARE)
        refuse_damaged(self.directory.data)
        self._workload = Workload(self.grouped, self.directory.workspace(self._model.path.resolve()))
        named = self._named_space()
        space, _ = self._space(named, observations)
        self._warn(*self._open_study(space, named))
        budget = self.record.note(BUDGET_NOTE)
        if budget is None:
            raise RunError(f"the storage holds no search of {path} yet", _PREPARE)
        self._settings: SearchSettings = replace(self._settings, budget=int(budget))
        done = is_exhausted(self.record, space) or has_converged(self.record, self._settings)
        if self.record.spent < self._settings.budget and not done:
            self._tune(space)

    def _named_space(self) -> NamedSpace:
        fixed, kept = self.file.fixed_settings, self.directory.data / SPACE_FILE
        named = load_space(str(kept) if kept.exists() else fixed.space)
        if named.sha256 != fixed.space_sha256:
            raise RunError(
                f"the search space {fixed.space} differs from the one that is searched", "copy the run directory again"
            )
        return replace(named, name=fixed.space)

    def _open_toolchain(self) -> Toolchain:
        """As a search, but what it finds must be what the search was prepared on."""
        if self._toolchain is None:
            recorded = self.file.environment
            super()._open_toolchain()
            if recorded is not None and self.file.environment is not None:
                check_versions(recorded, self.file.environment)
        return super()._open_toolchain()

    def _save(self, **changes: Any) -> None:
        """In memory alone: run.json is the search's."""
        self.file = self.file.model_copy(update=changes)


def check_versions(recorded: Environment, here: Environment) -> None:
    """Refuse a host whose figures would not be comparable.

    Raises:
        RunError: a package that changes results, or the driver, has another version.
    """
    before, now = _versions(recorded), _versions(here)
    differing = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    if differing:
        name = differing[0]
        raise RunError(
            f"this host differs from the one that the search was prepared on: {name} {before.get(name, 'is missing')} "
            f"there, {now.get(name, 'is missing')} here",
            "install the same versions",
        )


_COMPARED = frozenset(
    {"mptune", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-lean", "tensorrt-rtx", "cuda driver"}
)
"""Versions that change figures."""


def _versions(environment: Environment) -> dict[str, str]:
    drivers = sorted({gpu.driver for gpu in environment.gpus if gpu.driver})
    found = {name: version for name, version in environment.versions.items() if name in _COMPARED}
    return {**found, "driver": ", ".join(drivers)} if drivers else found
