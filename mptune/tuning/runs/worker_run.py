"""One worker of a search that another process prepared; and the front of a host that cannot be compared with it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from mptune.data.metrics.accuracy import TaskMetric
from mptune.engines.base import Toolchain
from mptune.engines.environment import Environment, engine_packages
from mptune.engines.toolchains.choose import is_here
from mptune.engines.workload import Workload
from mptune.errors import RunError, TargetError
from mptune.files import link_or_copy, writing
from mptune.graph.plan import Precision
from mptune.graph.writing.weights import bank_files
from mptune.identity import target_text
from mptune.run_json import RunFile, TargetSection
from mptune.rundir import HOME, RunDirectory, RunInUseError, joined_run, open_run
from mptune.settings import SearchSettings, Tolerance
from mptune.targets.mismatch import TARGET_CODE
from mptune.targets.target import detect_gpus, load_target
from mptune.tuning.front import Front
from mptune.tuning.listener import Listener
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.record.study import BUDGET_NOTE, START_NOTE, read_study
from mptune.tuning.runs.confirm_run import directory_name
from mptune.tuning.runs.measuring_run import MeasuringRun, OpenToolchain
from mptune.tuning.runs.model_copy import MODEL_FILE, SEAL_FILE, TARGETS, group_as_searched, load_copy, target_copy
from mptune.tuning.runs.result import front_of
from mptune.tuning.runs.seals import damaged, is_sealed, present_names, refuse_damaged, seal, unseal
from mptune.tuning.runs.search_run import SPACE_FILE, SearchRun
from mptune.tuning.sample_sets import recorded_rollout
from mptune.tuning.space import NamedSpace, load_space
from mptune.tuning.steps.kernels import KERNELS_JSON, ask_for_kernels, kernel_codes
from mptune.tuning.steps.limits import Limits
from mptune.tuning.steps.prepare import Observations, search_space, split_groups

_POLL_S = 0.5

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
        may_differ: bool = False,
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
        self._may_differ = may_differ
        self._prepared = file
        self._start_s: float | None = None

    def join(self) -> str:
        """Wait until the search is prepared, and open the toolchain."""
        self._wait(self._is_prepared)
        recorded, path = self.file, self.directory.path
        self._prepared = recorded
        if recorded.target is None or not self._is_prepared():
            raise RunError(f"{path} is not prepared for workers yet", _PREPARE)
        refuse_damaged(self.directory.data)
        self._model = load_copy(self.directory, recorded)
        self.grouped = group_as_searched(self._model, recorded)
        self._settings: SearchSettings = recorded_rollout(self._settings, recorded, self._model)
        self._workload = self._make_workload()
        self._open_toolchain()
        here, environment = self.file.target, self.file.environment
        assert here is not None
        assert environment is not None
        return difference(recorded.target, recorded.environment, here, environment)

    def work(self) -> None:
        """Evaluate plans until the search stops; ``join`` has been called."""
        observations = Observations.load(self.directory.observed_json)
        if observations is None:
            raise RunError(
                f"damaged: {self.directory.observed_json} cannot be read", "the same `mptune search` writes it anew"
            )
        named = self._named_space()
        _, hazards = split_groups(self._workload, observations, self._kernels)
        space = search_space(self._workload, named, hazards, observations, self._kernels)
        self._warn(*self._open_study(space))
        self._take_budget(self.record)
        self._tune()

    def close_toolchain(self) -> None:
        """End what ``join`` has opened: another run opens its own."""
        if self._toolchain is not None:
            self._toolchain.close()

    @property
    def device_name(self) -> str:
        """Of the directory and the study of a front of this host's own; other versions have another; after ``join``."""
        here, environment = self.file.target, self.file.environment
        assert here is not None
        assert environment is not None
        return directory_name(here, self._target, environment) + versions_suffix(
            self._prepared.environment, environment
        )

    def device_file(self, name: str) -> RunFile:
        """The run.json of a front of this host's own; findings about the model and the data hold on every device."""
        file = self.file
        return file.model_copy(
            update={
                "study": f"{file.study}@{name}",
                "fixed_settings": file.fixed_settings.model_copy(update={"target": self._settings.target}),
                "accompanies": HOME,
                "findings": tuple(f for f in file.findings if f.code not in (TARGET_CODE, *kernel_codes())),
                "warnings": (),
                "choice": file.choice.again().model_copy(update={"replaced": None}),
            }
        )

    def read_budget(self) -> tuple[int, float | None]:
        """The budget of the search, and when it began, in seconds since the epoch; waits as ``work`` does."""
        record = read_study(
            model_sha256=self._model.sha256,
            name=self.file.study,
            metric=self._settings.metric,
            journal=self.directory.journal,
            url=self._url,
        )
        with contextlib.closing(record):
            self._take_budget(record)
        return self._settings.budget, self._start_s

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
        self._start_s = record.note(START_NOTE)
        elapsed_s = 0.0 if self._start_s is None else time.time() - self._start_s
        self._limits = Limits(self._settings, self.directory.path, elapsed_s=elapsed_s)

    def _is_prepared(self) -> bool:
        file = self.directory.load()
        if file is None or file.target is None or not is_sealed(self.directory.data):
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

    def _open_by_target(self, workload: Workload, settings: SearchSettings) -> Toolchain:
        """The search's target; or, where this host may differ, the device here."""
        settings = replace(settings, target=target_copy(self.directory, settings.target))
        there = self._prepared.target
        if not self._may_differ or there is None or there.latency_source == "predicted":
            return super()._open_by_target(workload, settings)
        if settings.target != "auto":
            target = load_target(settings.target)
            if target.kind != "cpu" and not any(is_here(target, gpu) for gpu in detect_gpus()):
                settings = self._settings = replace(self._settings, target="auto")
        toolchain = super()._open_by_target(workload, settings)
        if toolchain.latency_source == "predicted":
            toolchain.close()
            raise TargetError(
                f"{there.device} is not here, and nothing else can be measured: the search measures",
                "`mptune doctor` says what is missing",
            )
        return toolchain

    def _save(self, **changes: Any) -> None:
        """In memory alone: run.json is the search's."""
        self.file = self.file.model_copy(update=changes)


_LOCK_POLL_S = 0.3


class MixedRun(WorkerRun):
    """Searches on one device, confirms its front, and keeps it in the directory that ``open_device_run`` has locked."""

    def search(self, budget: int, start_s: float | None) -> Front:
        """Everything that is not recorded yet."""
        self._budget, self._began_s = budget, start_s
        self.join()
        if not is_sealed(self.directory.data):
            asked = ask_for_kernels(self._open_toolchain(), self._settings.precisions)
            asked.save(self.directory.data / KERNELS_JSON)
            seal(self.directory.data)
        kernels = self._kernels
        about_kernels = kernels.findings(self.grouped)
        others = (finding for finding in self.file.findings if finding.code not in kernel_codes())
        self._save(findings=(*others, *about_kernels))
        self._warn(*kernels.warnings)
        self.work()
        self._check_begun(self._limits)
        self._confirm()
        observations = Observations.load(self.directory.observed_json) or Observations({}, {})
        self._check_engine(self._settings, "search")
        about = () if self.environment is None else self.environment.warnings
        warnings = (*observations.warnings, *about, *kernels.warnings)
        self._save(warnings=tuple(dict.fromkeys(warnings)))
        again = self.file.choice.again()
        return front_of(self.directory, self.file, self.record, asked=again, is_again=True)

    def _take_budget(self, record: StudyRecord) -> None:
        record.set_note(START_NOTE, self._began_s)
        record.set_note(BUDGET_NOTE, self._budget)
        super()._take_budget(record)

    def _is_prepared(self) -> bool:
        return self.directory.observed_json.exists()

    def _save(self, **changes: Any) -> None:
        MeasuringRun._save(self, **changes)


@contextmanager
def open_device_run(search: WorkerRun) -> Iterator[tuple[RunDirectory, RunFile, bool]]:
    """Make or open the run directory of this host's device below that of a search, which a worker has joined."""
    home, name = search.directory, search.device_name
    path = home.devices / name
    run = RunDirectory(path, accompanies=path / HOME)
    with writing(home.devices):
        home.devices.mkdir(exist_ok=True)
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(open_run(path))
                is_locked = True
                break
            except RunInUseError:
                is_locked = False
                if run.load() is not None:
                    stack.enter_context(joined_run(run))
                    break
                time.sleep(_LOCK_POLL_S)  # Another worker makes it.
        file = run.load()
        if is_locked and (file is None or damaged(run.data)):
            _share(home, run)
            file = file or search.device_file(name)
            run.save(file)
        assert file is not None
        yield run, file, is_locked


def _share(home: RunDirectory, run: RunDirectory) -> None:
    """Give the samples, references and weights of a search a second name each: the same numbers for every device."""
    with writing(run.path):
        unseal(run.data)
        for folder, source, names in (
            (run.weights, home.weights, (*bank_files(Precision), MODEL_FILE, SEAL_FILE)),
            (run.data, home.data, (*present_names(home.data), SPACE_FILE, home.observed_json.name)),
            (run.data / TARGETS, home.data / TARGETS, [path.name for path in home.data.glob(f"{TARGETS}/*")]),
        ):
            folder.mkdir(parents=True, exist_ok=True)
            for name in names:
                if name != KERNELS_JSON and (source / name).is_file():
                    (folder / name).unlink(missing_ok=True)
                    link_or_copy(str(source / name), str(folder / name))


_DIGITS = 6


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


def versions_suffix(prepared: Environment | None, environment: Environment) -> str:
    """Digits that tell hosts of one device with other versions apart; empty where the versions are the search's."""
    now = versions(environment)
    if prepared is None or versions(prepared) == now:
        return ""
    return "-" + hashlib.sha256(json.dumps(now, sort_keys=True).encode()).hexdigest()[:_DIGITS]
