"""One-group errors of the workers of one search: who emulates which groups, and what they found, as notes of the study.

Two workers may now and then take the same groups, which costs time and changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from mptune.data.numbers import decode_float, encode_float
from mptune.tuning.record.owner import is_alive, this_process
from mptune.tuning.record.record import StudyRecord

_ABANDONED_S = 600.0
"""A claim that is so old is void, whoever made it: one job of a few groups takes seconds to minutes."""


class SharedErrors:
    """Shares the emulation of chunks of groups out, through the study."""

    def __init__(self, record: StudyRecord, metric: str) -> None:
        """Read nothing yet.

        Args:
            record: the study.
            metric: the statistic: each has errors of its own.
        """
        self._record = record
        self._found = f"one-group errors:{metric}:"
        self._claims = f"one-group errors in work:{metric}:"
        self._mine = this_process()

    def known(self) -> dict[str, float]:
        """Group -> error, of what any worker has found."""
        notes = self._record.notes(self._found).values()
        return {group: decode_float(error) for note in notes for group, error in note.items()}

    def claim(self, chunks: Sequence[int]) -> int | None:
        """Take one of the chunks that no living worker has in work; None where each has one."""
        claims = self._record.notes(self._claims)
        for chunk in chunks:
            if self._is_free(claims.get(f"{self._claims}{chunk}")):
                key = f"{self._claims}{chunk}"
                self._record.set_note(key, {**self._mine, "at": time.time()})
                if self._is_mine(self._record.note(key)):  # Else another was faster.
                    return chunk
        return None

    def keep(self, chunk: int, errors: Mapping[str, float]) -> None:
        """Write down what was found for groups of a chunk."""
        self._record.set_note(f"{self._found}{chunk}", {group: encode_float(error) for group, error in errors.items()})

    def _is_mine(self, claim: Mapping[str, Any]) -> bool:
        return {name: claim.get(name) for name in self._mine} == self._mine

    def _is_free(self, claim: dict[str, Any] | None) -> bool:
        if claim is None or self._is_mine(claim):
            return True
        return is_alive(claim) is False or abs(time.time() - claim["at"]) > _ABANDONED_S
