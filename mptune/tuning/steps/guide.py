"""What the sampler knows before each proposal: one-group errors as far as they were taken, and latency terms."""

from __future__ import annotations

import math

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import Toolchain
from mptune.settings import SearchSettings
from mptune.targets.roofline import LatencyTerms
from mptune.tuning.evaluation import ORIGIN_FP16
from mptune.tuning.listener import Listener
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.sampler.posterior import Prior
from mptune.tuning.space import SearchSpace
from mptune.tuning.steps.emulated import PlanEmulator
from mptune.tuning.steps.prior import make_prior
from mptune.tuning.steps.sensitivity import OneGroupErrors

AT_FIRST = 200
"""Emulations of one group on one sample before the first proposal, at least; as many as all seeds take, where those
take more. One computes about half of the model, as it begins at a waist before its group."""

_PER_PLAN_SAMPLE = 0.5
"""Emulations between two proposals for each sample of a plan's evaluation: a quarter of its time."""


class Guide:
    """Tells the sampler what is known, and has more found out between plans."""

    def __init__(
        self,
        record: StudyRecord,
        space: SearchSpace,
        toolchain: Toolchain,
        settings: SearchSettings,
        listener: Listener,
        errors: OneGroupErrors,
        terms: LatencyTerms | None,
        emulator: PlanEmulator | None = None,
    ) -> None:
        """Tell the sampler what earlier runs have found.

        Args:
            record: of the search; its sampler is guided.
            space: what may vary.
            toolchain: of the search.
            settings: of the search.
            listener: receives the progress.
            errors: one-group errors.
            terms: of the roofline; None where no latency can be predicted.
            emulator: of whole plans; None where evaluations are emulations themselves.
        """
        self._record = record
        self._space = space
        self._toolchain = toolchain
        self._seed = settings.seed
        self._listener = listener
        self._errors = errors
        self._terms = terms
        self._emulator = emulator
        self._per_plan = toolchain.emulated_samples.per_plan
        self._told = ""
        self.prior: Prior = self._guide()
        """What the sampler knows beside the evaluations."""

    def before_proposal(self) -> None:
        """Take more one-group errors, as many as are due by now, and tell the sampler.

        Raises:
            RunError: the machine failed, or a file cannot be written.
        """
        is_first = not self._told
        if self._errors.take(self._allowed(), wait=is_first) or is_first:
            self.prior = self._guide()
            self._tell()

    def _allowed(self) -> float:
        """By the plans that were evaluated, so that a resumed search takes the same as one that was not interrupted."""
        if self._per_plan is None:
            return math.inf
        seeds = len(self._space.seeds)
        at_first = max(AT_FIRST, 2 * seeds * self._per_plan)
        return at_first + _PER_PLAN_SAMPLE * self._per_plan * max(0, self._record.spent - seeds)

    def _guide(self) -> Prior:
        known = self._errors.sensitivity()
        exact = self._toolchain.latency_source == "predicted"
        prior = make_prior(self._space, known, self._terms, exact=exact, anchor=self._anchor())
        if self._emulator is not None:
            self._emulator.learn({g: error for g, error in known.errors.items() if g not in known.doubts})
        self._record.guide(prior, self._seed, self._emulator)
        return prior

    def _anchor(self) -> OutputError | None:
        """The error of all-FP16 on the samples that one-group errors are taken on."""
        count = self._toolchain.emulated_samples.count
        found = [e for e in self._record.evaluations() if e.origin == ORIGIN_FP16 and e.is_finite]
        return found[0].counted.of_first(count) if found else None

    def _tell(self) -> None:
        known = self._errors.sensitivity()
        failed = sum(group not in known.errors for group in known.failed)
        missing = len(self._space.free) - len(known.errors) - failed
        text = "searching"
        if missing:
            text += (
                f"; the errors of {missing} groups alone are estimated from groups like them, and filled in meanwhile"
            )
        if failed:
            text += f"; the errors of {failed} groups alone are estimated, since their emulation fails"
        if text != self._told:
            self._told = text
            self._listener.stage(text)
