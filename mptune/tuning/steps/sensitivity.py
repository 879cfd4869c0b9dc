"""Sensitivity: the output error of each free group alone in FP16, by emulation.

Where emulation is slow not all of it is taken before the search begins. One sample tells most of what eight
do, so every group has one first, and then more, part by part of the samples. What is left is taken between plans, in
proportion to them, so that a resumed search goes on where it was.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import Failure
from mptune.engines.failures import machine_error
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.files import read_json, write_json
from mptune.graph.plan import PrecisionPlan
from mptune.json_form import JsonForm
from mptune.settings import SearchSettings
from mptune.tuning.fronts.searched_error import stored, suffices
from mptune.tuning.listener import Listener
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.steps.attempts import TRIES, run_job
from mptune.tuning.steps.limits import Limits

SENSITIVITY_JSON = "sensitivity.json"
"""Name of the file in the run's data directory."""

_NOTE = "one-group errors:"
"""Of the study: a note for each batch of groups on a part of the samples."""

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
    """

    metric: str
    errors: Mapping[str, float]
    output_errors: Mapping[str, OutputError] = field(default_factory=dict)
    doubts: Mapping[str, float] = field(default_factory=dict)

    def ignoring(self, outputs: Collection[str]) -> Sensitivity:
        """The same without some outputs of the model."""
        counted = {group: error.without(outputs) for group, error in self.output_errors.items()}
        errors = {**self.errors, **{g: _value(e, self.metric) for g, e in counted.items()}}
        return replace(self, errors=errors, output_errors=counted)

    @classmethod
    def load(cls, path: Path, metric: str) -> Sensitivity:
        """What a search has left for explanations; empty where there is nothing of this metric that can be read."""
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            read = cls.from_json(read_json(path))
            if read.metric == metric:
                return read
        return cls(metric, {})


class OneGroupErrors:
    """Takes one-group errors, a few at a time; the study keeps them, for all of its workers and for later runs."""

    def __init__(
        self,
        record: StudyRecord,
        toolchain: Toolchain,
        metric: str,
        path: Path,
        listener: Listener,
        settings: SearchSettings | None = None,
        limits: Limits | None = None,
    ) -> None:
        """``metric`` is the statistic that adds in squares; a copy for explanations is written to ``path``."""
        self._record, self._space, self._toolchain, self._listener = record, record.space, toolchain, listener
        self._metric, self._settings, self._limits, self._path = metric, settings or SearchSettings(), limits, path
        self._parts = toolchain.emulated_samples.parts
        self._errors: dict[str, OutputError] = {}
        self._failed: set[str] = set()
        self._read: set[str] = set()  # keys of the notes that have been added
        self._written: Sensitivity | None = None
        self._add_notes(is_first=True)

    @property
    def spent(self) -> int:
        """Emulations so far, each of one group on one sample; those of all workers, and of earlier runs."""
        return sum(map(self._samples, self._errors)) + len(self._failed - self._errors.keys())

    def take(self, allowed: float) -> bool:
        """Emulate what is wanted most while ``spent`` stays within what is allowed; whether more is known then."""
        before = self.spent
        while self._limits is None or self._limits.reached() is None:
            self._add_notes()
            # The first part of the samples for each group, then the second, and so on.
            jobs: list[tuple[range, list[str]]] = []
            for part in self._parts:
                lacking = [g for g in self._space.free if g not in self._failed and self._samples(g) == part.start]
                # An overflow shows on the first sample that has it, and more of them say nothing more.
                lacking = [g for g in lacking if part.start == 0 or self._errors[g].non_finite == 0]
                jobs += [(part, lacking[k : k + _AT_A_TIME]) for k in range(0, len(lacking), _AT_A_TIME)]
            jobs = [(part, groups) for part, groups in jobs if self.spent + len(part) * len(groups) <= allowed]
            if not jobs:
                break
            # Several workers take the jobs of one part in a random order, so that they seldom take the same.
            alike = jobs[:1] if self._record.is_alone else [job for job in jobs if job[0] == jobs[0][0]]
            self._do(*random.choice(alike))
        if (sensitivity := self.sensitivity()) != self._written:
            write_json(self._path, sensitivity.to_json())
            self._written = sensitivity
        return self.spent > before

    def sensitivity(self) -> Sensitivity:
        """All that is known, by the metric, without the outputs that are ignored; of those the statistics stay."""
        errors = {group: self._errors[group] for group in self._space.free if group in self._errors}
        doubts: dict[str, float] = {}
        for group, error in errors.items():
            # Of the mean of n of N samples: sqrt((1 - n / N) / n) of one's (sampling without replacement).
            left = 1.0 - error.sample_count / self._parts[-1].stop
            if left > 0.0 and not error.non_finite:
                doubts[group] = _SPREAD * math.sqrt(left / error.sample_count)
        values = {group: _value(error.without(self._settings.ignore), self._metric) for group, error in errors.items()}
        return Sensitivity(self._metric, values, errors, doubts)

    def _samples(self, group: str) -> int:
        return self._errors[group].sample_count if group in self._errors else 0

    def _do(self, part: range, groups: list[str]) -> None:
        """Emulate groups, each alone, and note what comes of it; two workers may now and then do the same."""
        tried = self._failed | self._errors.keys()
        more = f", now on samples {part.start + 1} to {part.stop}" if part.start else ""
        self._listener.stage(f"one-group errors: {len(tried)} of {len(self._space.free)} groups{more}")
        plans = [self._space.all_fp32.replace({group: self._space.reduced_of(group)}) for group in groups]
        outputs = emulate_outputs(self._toolchain, plans, self._listener, part if len(self._parts) > 1 else None)
        kept = [None if error is None else stored(error, self._metric, self._settings) for error in outputs]
        note = {
            "metric": self._metric,
            "samples": [part.start, part.stop],
            "errors": {g: None if e is None else e.to_json() for g, e in zip(groups, kept, strict=True)},
        }
        # A hash: the keys of a database's attributes are short.
        batch = f"{self._metric} {part.start} {part.stop} {' '.join(groups)} {self._settings.tolerance}"
        key = _NOTE + hashlib.sha256(batch.encode()).hexdigest()[:16]
        self._record.set_note(key, note)
        self._read.discard(key)
        self._add_notes()

    def _add_notes(self, *, is_first: bool = False) -> None:
        """Add what any worker has noted since; a group without an error failed, which is no evidence of overflow.

        At first under tolerances that the search did not have before: errors that say nothing of them are taken anew.
        """
        notes = {key: note for key, note in self._record.notes(_NOTE).items() if key not in self._read}
        self._read |= notes.keys()
        for note in sorted(notes.values(), key=lambda note: note["samples"]):
            for group in note["errors"].keys() & set(self._space.free) if note["metric"] == self._metric else ():
                if note["errors"][group] is None:
                    self._failed.add(group)
                    continue
                error, earlier = OutputError.from_json(note["errors"][group]), self._errors.get(group)
                if self._samples(group) != note["samples"][0]:
                    continue
                joined = error if earlier is None else earlier.with_samples_of(error)
                is_like = earlier is None or earlier.per_output.keys() == error.per_output.keys()
                if not is_like or (earlier is not None and not joined.has(self._metric)):
                    self._failed.add(group)  # outputs whose shape depends on values: the parts do not add up
                elif not is_first or suffices(error, self._metric, self._settings):
                    self._errors[group] = joined


def _value(error: OutputError, metric: str) -> float:
    value = error.value(metric)
    return value if error.non_finite == 0 and math.isfinite(value) else math.inf


def emulate_outputs(
    toolchain: Toolchain, plans: Sequence[PrecisionPlan], listener: Listener, part: range | None = None
) -> list[OutputError | None]:
    """Emulate plans in one job, or one by one where that fails; None for a plan that fails alone.

    Raises:
        RunError: the machine fails.
    """
    of_part = () if part is None else (part,)
    errors: list[OutputError | None] = []
    for batch in (plans, *([plan] for plan in plans if len(plans) > 1)):
        what = f"emulating {'plans' if len(batch) > 1 else f'plan {batch[0].fingerprint}'}"
        result = run_job(partial(toolchain.emulate, batch, *of_part), toolchain, listener, what)
        if not isinstance(result, Failure):
            errors += result
        elif result.is_machine_fault:
            raise machine_error(result, TRIES)
        elif len(batch) == 1:
            errors.append(None)
        if len(errors) == len(plans):
            break
    return errors
