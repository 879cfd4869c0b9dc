"""What a search and a confirmation share: toolchain, study and warnings of one run directory, and its run.json."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from mptune.engines.context import RunContext
from mptune.engines.environment import Environment
from mptune.engines.toolchains.choose import TargetChoice
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.errors import EndedEarlyError
from mptune.finding import FindingOrigin
from mptune.graph.grouping.grouped import GroupedModel
from mptune.run_json import RunFile, TargetSection
from mptune.rundir import RunDirectory
from mptune.settings import SearchSettings
from mptune.targets.target import Target
from mptune.tuning.fronts.stopped import with_suspects
from mptune.tuning.listener import Listener
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.steps.baseline import ENGINE_CODE, check_baseline
from mptune.tuning.steps.limits import Limits

OpenToolchain = Callable[[RunContext], Toolchain]


class MeasuringRun:
    """One call that measures plans and records them in a run directory.

    ``close`` ends the worker and lets go of study, samples and lock. The attributes are there once ``run`` of the
    subclass has set them.
    """

    directory: RunDirectory
    file: RunFile
    record: StudyRecord
    grouped: GroupedModel

    def __init__(self, listener: Listener, opener: OpenToolchain | None) -> None:
        self._listener = listener
        self._opener = opener
        self._stack = contextlib.ExitStack()
        self._engines = self._stack.enter_context(contextlib.ExitStack())
        self._target: Target | None = None
        self._warned: set[str] = set()

    @property
    def environment(self) -> Environment | None:
        """Where the figures were taken; None before anything ran."""
        return self.file.environment

    def close(self) -> None:
        """End the worker and let go of everything. Idempotent."""
        self._stack.close()

    def _settle(self, choice: TargetChoice) -> Target:
        """Take a target, and say why it is this one where nobody named it."""
        self._target = choice.target
        if choice.why:
            self._listener.stage(choice.why)
        return choice.target

    def _target_section(self, toolchain: Toolchain, named: str) -> TargetSection:
        """What the figures are taken on; ``named`` where the caller brought a toolchain and no profile was read."""
        profile = None if toolchain.latency_source == "measured" else getattr(toolchain, "target", self._target)
        return TargetSection(
            name=named if self._target is None else self._target.name,
            engine=toolchain.name,
            device=toolchain.device,
            latency_source=toolchain.latency_source,
            error_source=toolchain.error_source,
            profile_sha256=None if profile is None else profile.figures_sha256,
        )

    def _hold(self, record: StudyRecord) -> None:
        """Take a study that was opened, to be closed at the end."""
        self.record = record
        self._stack.callback(record.close)

    def _check_engine(self, settings: SearchSettings, origin: FindingOrigin) -> None:
        """Keep in run.json whether the all-FP32 engine agrees with the reference."""
        baseline = self.record.baseline()
        if baseline is None:
            return
        differing = check_baseline(baseline.error, tf32=settings.tf32, origin=origin, skip=settings.skip_checks)
        others = (finding for finding in self.file.findings if finding.code != ENGINE_CODE)
        self._save(findings=with_suspects((*others, *differing)))

    def _check_begun(self, limits: Limits) -> None:
        """Whether there is anything to make a front of."""
        if self.record.baseline() is None:
            limit = limits.reached()
            raise EndedEarlyError(
                f"{'a limit was reached' if limit is None else limit.value}, and all-FP32 was not measured yet: there "
                "is no front, and no plan is chosen",
                f"what was computed is kept in {self.directory.path}: the same command goes on with it; if it ends "
                "here again, give it a larger --timeout or --max-disk",
            )

    def _save(self, **changes: Any) -> None:
        """Write run.json with some sections changed, if that changes anything."""
        changed = self.file.model_copy(update=changes)
        if changed != self.file:
            self.directory.save(changed)
            self.file = changed

    def _warn(self, *texts: str) -> None:
        """Pass each warning on once."""
        for text in texts:
            if text not in self._warned:
                self._warned.add(text)
                self._listener.warning(text)
