"""One-group errors of the workers of one search: who emulates which groups, and what they found, as notes of the study.

Two workers may now and then take the same groups, which costs time and changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from mptune.data.metrics.accuracy import OutputError
from mptune.tuning.record.owner import is_alive, this_process
from mptune.tuning.record.record import StudyRecord

_ABANDONED_S = 600.0
"""A claim that is so old is void, whoever made it: one job of a few groups takes seconds to minutes."""


class SharedErrors:
    """Shares the emulation of groups out, through the study."""

    def __init__(self, record: StudyRecord, metric: str) -> None:
        self._record = record
        self._results = f"one-group errors by sample:{metric}:"
        self._claims = f"one-group errors in work:{metric}:"
        self._mine = this_process()

    def results(self) -> list[tuple[range, dict[str, OutputError | None]]]:
        """What any worker has found: samples, and group -> its error on them; None where emulation fails.

        Parts of the samples that come first are first.
        """
        parts = []
        for note in self._record.notes(self._results).values():
            errors = {g: None if e is None else OutputError.from_json(e) for g, e in note["errors"].items()}
            parts.append((range(*note["samples"]), errors))
        return sorted(parts, key=lambda entry: entry[0].start)

    def claim(self, jobs: Sequence[str]) -> str | None:
        """Take the first of the jobs that no living worker has in work; None where each has one."""
        claims = self._record.notes(self._claims)
        for job in jobs:
            if self._is_free(claims.get(f"{self._claims}{job}")):
                key = f"{self._claims}{job}"
                self._record.set_note(key, {**self._mine, "at": time.time()})
                if self._is_mine(self._record.note(key)):  # Else another was faster.
                    return job
        return None

    def keep(self, job: str, part: range, errors: Mapping[str, OutputError | None]) -> None:
        """Write down what was found for the groups of a job on a part of the samples."""
        key = f"{self._results}{job}"
        added = {group: None if error is None else error.to_json() for group, error in errors.items()}
        before = (self._record.note(key) or {}).get("errors", {})
        self._record.set_note(key, {"samples": [part.start, part.stop], "errors": {**before, **added}})
        # Other groups of it may be wanted later. Not None: a study keeps that beside a dictionary, not in its place.
        self._record.set_note(f"{self._claims}{job}", {})

    def _is_mine(self, claim: Mapping[str, Any]) -> bool:
        return {name: claim.get(name) for name in self._mine} == self._mine

    def _is_free(self, claim: dict[str, Any] | None) -> bool:
        if not claim or self._is_mine(claim):
            return True
        return is_alive(claim) is False or abs(time.time() - claim["at"]) > _ABANDONED_S
