"""Sensitivity: the output error of each free group alone in FP16, by emulation.

Not all of it is taken before the search begins. One sample tells most of what eight do where outputs are large, so
every group has one first; then those whose samples differ have more, until their error is known well enough. What is
left is taken between plans, in proportion to them, so that a resumed search goes on where it was.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.files import read_json, write_json
from mptune.json_form import JsonForm
from mptune.settings import SearchSettings
from mptune.tuning.fronts.hypervolume import ERROR_FLOOR
from mptune.tuning.fronts.searched_error import stored, suffices
from mptune.tuning.listener import Listener
from mptune.tuning.space import SearchSpace
from mptune.tuning.steps.emulated import emulate_outputs
from mptune.tuning.steps.limits import Limits
from mptune.tuning.steps.shared_errors import SharedErrors

SENSITIVITY_JSON = "sensitivity.json"
"""Name of the file in the run's data directory."""

KNOWN_WELL = 0.15
"""A one-group error whose relative doubt is at most this needs no more samples: the law of squares is no better."""

_AT_A_TIME = 8
"""Groups per job: an interrupted run repeats at most one job, and progress is reported after each."""

_ASSUMED_SPREAD, _ASSUMED_WEIGHT = 0.4, 2.0
"""Relative standard deviation between samples of one group's error before any group has two, and how many degrees of
freedom the groups' common spread stands for beside a group's own."""

_SHARE = 0.25
"""Of the groups that could do with more samples this share comes first, those of which least is known."""

_UNSEEN_DOUBT = 1.0
"""Relative doubt of an error that was zero on the samples taken so far: others may show one."""


@dataclass(frozen=True)
class Sensitivity(JsonForm):
    """One-group errors.

    Attributes:
        metric: the statistic.
        errors: group id -> error with that group alone in FP16; ``inf`` where it is not finite. Groups whose error has
            not been taken are missing.
        output_errors: group id -> the statistics behind its error, by sample.
        doubts: group id -> standard deviation of the logarithm of its error, against the error on all samples; missing
            where all were taken.
        failed: groups whose emulation failed for good, which says nothing about their error. Those that were taken on
            some samples before have an error all the same.
    """

    metric: str
    errors: Mapping[str, float]
    output_errors: Mapping[str, OutputError] = field(default_factory=dict)
    doubts: Mapping[str, float] = field(default_factory=dict)
    failed: tuple[str, ...] = ()

    def ignoring(self, outputs: Collection[str]) -> Sensitivity:
        """The same without some outputs of the model."""
        counted = {group: error.without(outputs) for group, error in self.output_errors.items()}
        errors = {**self.errors, **{g: _value(e, self.metric) for g, e in counted.items()}}
        return replace(self, errors=errors, output_errors=counted)

    def save(self, path: Path) -> None:
        """Write the JSON file that ``load`` reads."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path, metric: str) -> Sensitivity:
        """What was written for this metric; empty where there is nothing that can be read."""
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            read = cls.from_json(read_json(path))
            if read.metric == metric:
                return read
        return cls(metric, {})


@dataclass(frozen=True)
class _Job:
    """Groups that are emulated on one part of the samples."""

    part: range
    groups: tuple[str, ...]


class OneGroupErrors:
    """Takes one-group errors, a few at a time, and keeps them in a file and in the study."""

    def __init__(
        self,
        space: SearchSpace,
        toolchain: Toolchain,
        metric: str,
        path: Path,
        listener: Listener,
        shared: SharedErrors | None = None,
        settings: SearchSettings | None = None,
        limits: Limits | None = None,
    ) -> None:
        """Go on where the file at ``path`` ends; ``metric`` is the statistic that adds in squares."""
        self._space, self._toolchain, self._listener = space, toolchain, listener
        self._metric, self._settings = metric, settings or SearchSettings()
        self._path, self._shared, self._limits = path, shared, limits
        self._parts = toolchain.emulated_samples.parts
        self._saved = Sensitivity.load(path, metric)
        # Under tolerances that the search did not have before, errors are taken anew.
        self._errors = {
            group: error
            for group, error in self._saved.output_errors.items()
            if group in space.free and suffices(error, metric, self._settings)
        }
        self._failed = {group for group in self._saved.failed if group in space.free}
        self._doubted: dict[str, float] | None = None  # until more is taken: asked for before every plan

    @property
    def spent(self) -> int:
        """Emulations so far, each of one group on one sample; those of all workers, and of earlier runs."""
        return sum(map(self._samples, self._errors)) + len(self._failed - self._errors.keys())

    def take(self, allowed: float) -> bool:
        """Emulate what is wanted most while ``spent`` stays within what is allowed; whether more is known then."""
        before = self.spent
        while self._limits is None or self._limits.reached() is None:
            if self._shared is not None:
                for part, errors in self._shared.results():
                    for group in errors.keys() & set(self._space.free):
                        self._add(group, part, errors[group])
            jobs = [job for job in self._wanted() if self.spent + len(job.part) * len(job.groups) <= allowed]
            if not jobs:
                break
            # Several workers take the jobs of the first rank in a random order, so that they seldom take the same.
            is_alone = self._shared is None or self._shared.is_alone
            first = [job for job in jobs if (job.part.start > 0) == (jobs[0].part.start > 0)]
            self._do(jobs[0] if is_alone else random.choice(first))
        self._save()
        return self.spent > before

    def sensitivity(self) -> Sensitivity:
        """All that is known, by the metric, without the outputs that are ignored; of those the statistics stay."""
        doubts, free = self._doubts(), [group for group in self._space.free if group in self._errors]
        return Sensitivity(
            self._metric,
            {g: _value(self._errors[g].without(self._settings.ignore), self._metric) for g in free},
            {g: self._errors[g] for g in free},
            {g: doubts[g] for g in free if doubts.get(g)},
            tuple(group for group in self._space.free if group in self._failed),
        )

    def _wanted(self) -> list[_Job]:
        """Jobs: a first sample of each group, then more of those whose error is in doubt, the most doubted first.

        Where emulations take long, groups that repeat a pattern wait until every pattern is known.
        """
        free, doubts = set(self._space.free), self._doubts()
        is_quick = self._toolchain.emulated_samples.per_plan is None
        first_of = {group.pattern or group.id: group.id for group in reversed(self._space.groups) if group.id in free}
        firsts = free if is_quick else set(first_of.values())
        lists = [g for g in self._space.free if g in firsts], [g for g in self._space.free if g not in firsts]

        def is_lacking(group: str, part: range) -> bool:
            if group in self._failed or self._samples(group) != part.start:
                return False
            return part.start == 0 or is_quick or doubts[group] > KNOWN_WELL

        lacking: list[_Job] = []
        for groups in lists:
            for start in range(0, len(groups), _AT_A_TIME):
                for part in self._parts:
                    few = tuple(g for g in groups[start : start + _AT_A_TIME] if is_lacking(g, part))
                    lacking += [_Job(part, few)] if few else []

        # What a sample takes away of a doubt: of the groups that could do with more, those with most of it come first.
        worth = {g: doubts[g] ** 2 / len(job.part) for job in lacking if job.part.start for g in job.groups}
        least = float(np.quantile(list(worth.values()), 1.0 - _SHARE)) if worth else 0.0
        chosen = [replace(j, groups=tuple(g for g in j.groups if worth.get(g, least) >= least)) for j in lacking]

        def rank(job: _Job) -> tuple[bool, float]:
            return job.part.start > 0, -sum(worth.get(g, 0.0) for g in job.groups) / len(job.groups)

        return sorted((job for job in chosen if job.groups), key=rank)

    def _samples(self, group: str) -> int:
        return self._errors[group].sample_count if group in self._errors else 0

    def _doubts(self) -> dict[str, float]:
        """Standard deviation of the log of each error that has been taken, against the one on all samples.

        Samples differ by a spread that is estimated for each group from its own samples and from those of all groups;
        that of the mean of n of N samples is smaller by ``sqrt((1 - n / N) / n)`` (sampling without replacement).
        """
        if self._doubted is not None:
            return self._doubted
        count = self._parts[-1].stop
        counted = {group: error.without(self._settings.ignore) for group, error in self._errors.items()}
        own = {g: spread for g, e in counted.items() if (spread := _spread(e, self._metric)) is not None}
        squares = [spread**2 for spread in own.values()]
        common = math.sqrt(float(np.mean(squares))) if squares else _ASSUMED_SPREAD
        self._doubted = {}
        for group, error in counted.items():
            n, value = error.sample_count, _value(error, self._metric)
            if n >= count or math.isinf(value):
                self._doubted[group] = 0.0
            elif value <= ERROR_FLOOR:
                self._doubted[group] = _UNSEEN_DOUBT
            else:
                weight = n - 1 if group in own else 0
                square = (_ASSUMED_WEIGHT * common**2 + weight * own.get(group, 0.0) ** 2) / (_ASSUMED_WEIGHT + weight)
                self._doubted[group] = math.sqrt(square * (1.0 - n / count) / n)
        return self._doubted

    def _do(self, job: _Job) -> None:
        """Emulate the groups of a job, each alone, and write down what comes of it."""
        tried, doubts = self._failed | self._errors.keys(), self._doubts()
        text = f"one-group errors: {len(tried)} of {len(self._space.free)} groups"
        if job.part.start:
            text += f", {sum(doubts.get(g, 0.0) <= KNOWN_WELL for g in tried)} of them to {KNOWN_WELL:.0%}"
        self._listener.stage(text)
        plans = [self._space.all_fp32.replace({group: self._space.reduced_of(group)}) for group in job.groups]
        outputs = emulate_outputs(self._toolchain, plans, self._listener, job.part if len(self._parts) > 1 else None)
        errors = {
            group: None if error is None else stored(error, self._metric, self._settings)
            for group, error in zip(job.groups, outputs, strict=True)
        }
        for group, error in errors.items():
            self._add(group, job.part, error)
        if self._shared is not None:
            self._shared.keep(job.part, errors)
        self._save()

    def _add(self, group: str, part: range, error: OutputError | None) -> None:
        """Add what a part of the samples showed; None where emulation fails, which is no evidence of overflow."""
        if error is None:
            self._failed.add(group)
        elif self._samples(group) == part.start:
            self._doubted = None
            earlier = self._errors.get(group)
            joined = error if earlier is None else earlier.with_samples_of(error)
            if earlier is None or (earlier.per_output.keys() == error.per_output.keys() and joined.has(self._metric)):
                self._errors[group] = joined
            else:  # Outputs whose shape depends on values were compared in another way: the parts do not add up.
                self._failed.add(group)

    def _save(self) -> None:
        if (sensitivity := self.sensitivity()) != self._saved:
            sensitivity.save(self._path)
            self._saved = sensitivity


def _value(error: OutputError, metric: str) -> float:
    value = error.value(metric)
    return value if error.non_finite == 0 and math.isfinite(value) else math.inf


def _spread(error: OutputError, metric: str) -> float | None:
    """Standard deviation between samples of the log of an error, by the jackknife; None where it is unknown."""
    value = _value(error, metric)
    if error.sample_count < 2 or not ERROR_FLOOR < value < math.inf:
        return None
    left = error.values_without_one(metric)
    if not (left > 0.0).all():  # One sample has all of the error.
        return 1.0
    logs = np.log(left)
    return float(math.sqrt((len(logs) - 1) * ((logs - logs.mean()) ** 2).sum()))
