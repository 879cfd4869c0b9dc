"""The search of a host whose figures cannot be compared with those of the search that it joins: a front of its own.

It lies in ``RUN/devices/DEVICE``, a run directory with the samples, references and weights of RUN; its study is called
``NAME@DEVICE`` and lies in the same storage. Any number of workers of one device share it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from mptune.files import link_or_copy, writing
from mptune.graph.plan import Precision
from mptune.graph.writing.weights import bank_files
from mptune.run_json import RunFile
from mptune.rundir import HOME, RunDirectory, RunInUseError, joined_run, open_run
from mptune.targets.mismatch import TARGET_CODE
from mptune.tuning.front import Front
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.record.study import BUDGET_NOTE, START_NOTE
from mptune.tuning.runs.measuring_run import MeasuringRun
from mptune.tuning.runs.model_copy import MODEL_FILE, SEAL_FILE
from mptune.tuning.runs.result import front_of
from mptune.tuning.runs.seals import damaged, is_sealed, seal, sealed_names, unseal
from mptune.tuning.runs.search_run import SPACE_FILE
from mptune.tuning.runs.worker_run import WorkerRun
from mptune.tuning.steps.kernels import CODES as KERNEL_CODES
from mptune.tuning.steps.kernels import KERNELS_JSON, ask_for_kernels
from mptune.tuning.steps.prepare import Observations

_POLL_S = 0.3


class MixedRun(WorkerRun):
    """Searches on one device, confirms its front, and keeps it in the directory that ``open_device_run`` has locked."""

    def search(self, budget: int, start_s: float | None) -> Front:
        """Everything that is not recorded yet.

        Args:
            budget: plans to evaluate on this device: that of the search.
            start_s: when that began, in seconds since the epoch; None where it is not known.

        Raises:
            RunError: the machine failed again and again, or the directory cannot be written.
            BaselineError: the all-FP32 engine disagrees with the reference.
            KeyboardInterrupt: passed on; the plan in work has been given back.
        """
        self._budget, self._began_s = budget, start_s
        self.join()
        if not is_sealed(self.directory.data):
            asked = ask_for_kernels(self._open_toolchain(), self._settings.precisions)
            asked.save(self.directory.data / KERNELS_JSON)
            seal(self.directory.data)
        kernels = self._kernels
        found = kernels.findings(self.grouped)
        self._save(findings=(*(one for one in self.file.findings if one.code not in KERNEL_CODES.values()), *found))
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
        return front_of(self.directory, self.file, self.record, asked=again, is_again=True, keep=True)

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
    """Make or open the run directory of this host's device below that of a search, which a worker has joined.

    Yields:
        The directory, its run.json, and whether it is locked; else another worker of the same device has it, and this
        one shares its search.

    Raises:
        RunError: it cannot be written.
    """
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
                time.sleep(_POLL_S)  # Another worker makes it.
        file = run.load()
        if is_locked and (file is None or damaged(run.data)):
            _share(home, run)
            file = file or _fresh_file(search.device_file(name))
            run.save(file)
        assert file is not None
        yield run, file, is_locked


def _fresh_file(file: RunFile) -> RunFile:
    """Findings and warnings about the model and the data hold on every device."""
    kept = tuple(one for one in file.findings if one.code not in (TARGET_CODE, *KERNEL_CODES.values()))
    choice = file.choice.again().model_copy(update={"replaced": None})
    return file.model_copy(update={"findings": kept, "warnings": (), "choice": choice})


def _share(home: RunDirectory, run: RunDirectory) -> None:
    """Give the samples, references and weights of a search a second name each: the same numbers for every device."""
    with writing(run.path):
        unseal(run.data)
        for folder, source, names in (
            (run.weights, home.weights, (*bank_files(Precision), MODEL_FILE, SEAL_FILE)),
            (run.data, home.data, (*sealed_names(home.data), SPACE_FILE, home.observed_json.name)),
        ):
            folder.mkdir(exist_ok=True)
            for name in names:
                if name != KERNELS_JSON and (source / name).is_file():
                    (folder / name).unlink(missing_ok=True)
                    link_or_copy(str(source / name), str(folder / name))
