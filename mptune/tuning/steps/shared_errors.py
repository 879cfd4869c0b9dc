"""One-group errors that the workers of one search have found, as notes of the study.

Two workers may now and then take the same groups, which costs time and changes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from mptune.data.metrics.accuracy import OutputError
from mptune.tuning.record.record import StudyRecord

_PREFIX = "one-group errors:"


class SharedErrors:
    """Reads and writes the one-group errors of a study; those of other metrics are left alone."""

    def __init__(self, record: StudyRecord, metric: str) -> None:
        self._record = record
        self._metric = metric
        self.is_alone = record.is_alone

    def results(self) -> list[tuple[range, dict[str, OutputError | None]]]:
        """What any worker has found: samples, and group -> its error on them; None where emulation fails.

        Parts of the samples that come first are first.
        """
        batches = []
        for note in self._record.notes(_PREFIX).values():
            if note["metric"] == self._metric:
                errors = {g: None if e is None else OutputError.from_json(e) for g, e in note["errors"].items()}
                batches.append((range(*note["samples"]), errors))
        return sorted(batches, key=lambda batch: batch[0].start)

    def keep(self, part: range, errors: Mapping[str, OutputError | None]) -> None:
        """Write down the errors of a batch of groups on a part of the samples."""
        batch = f"{self._metric} {part.start} {part.stop} {' '.join(sorted(errors))}"
        note = {
            "metric": self._metric,
            "samples": [part.start, part.stop],
            "errors": {group: None if error is None else error.to_json() for group, error in errors.items()},
        }
        # A hash: the keys of a database's attributes are short.
        self._record.set_note(_PREFIX + hashlib.sha256(batch.encode()).hexdigest()[:16], note)
