"""What the sampler knows before each proposal: one-group errors as far as they were taken, and latency terms."""

from __future__ import annotations

import math
from statistics import median

from mptune.engines.toolchains.toolchain import Toolchain
from mptune.settings import SearchSettings
from mptune.targets.roofline import LatencyTerms
from mptune.tuning.evaluation import ORIGIN_SAMPLER
from mptune.tuning.fronts.searched_error import SearchedError
from mptune.tuning.listener import Listener
from mptune.tuning.record.record import StudyRecord, origin_of
from mptune.tuning.sampler.posterior import Prior
from mptune.tuning.space import SearchSpace, Seed
from mptune.tuning.steps.emulated import PlanEmulator
from mptune.tuning.steps.prior import make_prior
from mptune.tuning.steps.sensitivity import OneGroupErrors

SEEDS_FIRST = 2
"""Where plans take long to evaluate, so many seeds come before the sampler's first plan: all-FP32 and all-FP16."""

AT_FIRST = 200
"""Emulations of one group on one sample that come soon, at least; as many as all seeds take, where those take more. One
computes about half of the model, as it begins at a waist before its group."""

_SOON = 2.0
"""Until then, emulations for each sample of the plans that have been evaluated: about as long as those took."""

_LEARNING_SHARE = 0.5
"""Of the time of a build, that emulations of plans may take from which the groups' errors are learnt."""

_PER_PLAN_SAMPLE = 0.5
"""Later, emulations between two proposals for each sample of a plan's evaluation: a quarter of its time."""


def due_seeds(record: StudyRecord, space: SearchSpace, first: int | None = None) -> list[Seed]:
    """The seeds that come next: of those that nobody has evaluated or in work.

    The baseline comes alone: nothing is worth a build before it is known to be sound. Where another worker has it in
    work, this one takes the other seeds meanwhile.
    """
    started = record.started()
    seeds = [seed for seed in space.seeds if seed.plan.fingerprint not in started]
    if seeds[:1] == list(space.seeds[:1]):
        return seeds[:1]
    if first is None or has_proposed(record):
        return seeds
    return [seed for seed in seeds if seed in space.seeds[:first]]


def has_proposed(record: StudyRecord) -> bool:
    """Whether a plan of the sampler has been evaluated, or failed."""
    return any(origin_of(trial.user_attrs) == ORIGIN_SAMPLER for trial in record.settled())


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
        searched: SearchedError | None = None,
    ) -> None:
        self._record = record
        self._space = space
        self._toolchain = toolchain
        self._seed = settings.seed
        self._listener = listener
        self._errors = errors
        self._terms = terms
        self._emulator = emulator
        self._searched = searched
        self._per_plan = toolchain.emulated_samples.per_plan
        self._told = ""
        self.prior: Prior = self._guide()
        """What the sampler knows beside the evaluations."""

    @property
    def seeds_first(self) -> int | None:
        """How many seeds come before the sampler's first plan; None for all."""
        return None if self._per_plan is None else SEEDS_FIRST

    def before_proposal(self) -> None:
        """Take more one-group errors, as many as are due by now, and tell the sampler.

        Called before the sampler's first plan and before every plan behind it, so that none waits for many.
        """
        is_first = not self._told
        if self._emulator is not None:
            self._emulator.learn_measured(self._record.evaluations())
        if self._errors.take(self._allowed()) or is_first:
            self.prior = self._guide()
            self._tell()

    def _allowed(self) -> float:
        """By the plans that were evaluated, so that a resumed search takes the same as one that was not interrupted."""
        if self._per_plan is None:
            return math.inf
        seeds, spent = len(self._space.seeds), self._record.spent
        soon = min(max(AT_FIRST, _SOON * seeds * self._per_plan), _SOON * spent * self._per_plan)
        return soon + _PER_PLAN_SAMPLE * self._per_plan * max(0, spent - seeds)

    def _guide(self) -> Prior:
        sensitivity = self._errors.sensitivity()
        exact = self._toolchain.latency_source == "predicted"
        prior = make_prior(self._space, sensitivity, self._terms, exact=exact)
        if self._emulator is not None:
            plain = self._errors.unjudged().errors
            unknown = {*sensitivity.doubts, *self._space.not_emulated}
            done = [g for g in sensitivity.errors if g not in unknown]
            self._emulator.learn({g: plain[g] for g in done}, {g: sensitivity.errors[g] for g in done})
        self._record.guide(prior, self._seed, self._emulator, self._searched, self._emulations_to_learn)
        return prior

    def _emulations_to_learn(self) -> int:
        """How many plans may be emulated before a proposal to learn from: as many as take little beside a build."""
        if self._emulator is None:
            return 0
        build_s = median([e.build_s for e in self._record.evaluations()] or [0.0])
        return self._emulator.affordable(_LEARNING_SHARE * build_s)

    def _tell(self) -> None:
        sensitivity = self._errors.sensitivity()
        failed = sum(group not in sensitivity.errors for group in sensitivity.failed)
        missing = len(self._space.free) - len(sensitivity.errors) - failed
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
