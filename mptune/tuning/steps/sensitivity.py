"""Sensitivity: the output error of each free group alone in FP16, by emulation.

Not all of it is taken before the search begins where emulation is slow. One sample tells most of what eight do, so
every group has one first, and then more, part by part of the samples. What is left is taken between plans, in
proportion to them, so that a resumed search goes on where it was.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.files import read_json, write_json
from mptune.json_form import JsonForm
from mptune.settings import SearchSettings
from mptune.tuning.fronts.searched_error import stored, suffices
from mptune.tuning.listener import Listener
from mptune.tuning.space import SearchSpace
from mptune.tuning.steps.emulated import emulate_outputs
from mptune.tuning.steps.limits import Limits
from mptune.tuning.steps.shared_errors import SharedErrors

SENSITIVITY_JSON = "sensitivity.json"
"""Name of the file in the run's data directory."""

_AT_A_TIME = 8
"""Groups per job: an interrupted run repeats at most one job, and progress is reported after each."""

_SPREAD = 0.4
"""Relative standard deviation of one group's error between samples, about: what few of them leave in doubt."""


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
        free = [group for group in self._space.free if group in self._errors]
        return Sensitivity(
            self._metric,
            {g: _value(self._errors[g].without(self._settings.ignore), self._metric) for g in free},
            {g: self._errors[g] for g in free},
            {g: doubt for g in free if (doubt := self._doubt(g))},
            tuple(group for group in self._space.free if group in self._failed),
        )

    def _wanted(self) -> list[_Job]:
        """Jobs that are left, in their order: the first part of the samples for each group, then the second, and so on.

        Where emulations take long, groups that repeat a pattern wait until every pattern is known.
        """
        free = set(self._space.free)
        first_of = {group.pattern or group.id: group.id for group in reversed(self._space.groups) if group.id in free}
        is_quick = self._toolchain.emulated_samples.per_plan is None
        firsts = free if is_quick else set(first_of.values())
        jobs = []
        for part in self._parts:
            lacking = [g for g in self._space.free if g not in self._failed and self._samples(g) == part.start]
            # An overflow shows on the first sample that has it, and more of them say nothing more.
            lacking = [g for g in lacking if part.start == 0 or self._errors[g].non_finite == 0]
            for groups in ([g for g in lacking if g in firsts], [g for g in lacking if g not in firsts]):
                starts = range(0, len(groups), _AT_A_TIME)
                jobs += [_Job(part, tuple(groups[start : start + _AT_A_TIME])) for start in starts]
        return jobs

    def _samples(self, group: str) -> int:
        return self._errors[group].sample_count if group in self._errors else 0

    def _doubt(self, group: str) -> float:
        """Standard deviation of the log of an error, against the one on all samples.

        That of the mean of n of N samples is ``sqrt((1 - n / N) / n)`` of one's (sampling without replacement).
        """
        error, count = self._errors[group], self._parts[-1].stop
        share = error.sample_count / count
        return 0.0 if error.non_finite else _SPREAD * math.sqrt(max(1.0 - share, 0.0) / error.sample_count)

    def _do(self, job: _Job) -> None:
        """Emulate the groups of a job, each alone, and write down what comes of it."""
        tried = self._failed | self._errors.keys()
        text = f"one-group errors: {len(tried)} of {len(self._space.free)} groups"
        if job.part.start:
            text += f", now on samples {job.part.start + 1} to {job.part.stop}"
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
