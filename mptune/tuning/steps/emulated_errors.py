"""The emulated errors of a run's plans, in a file that several processes append to.

A line holds the errors of one request: ``{"metric": ..., "errors": {fingerprint: [error, samples]}}``. Appending costs
the same after ten thousand plans as after ten. What a killed process left of a line is passed over: the file saves
work, and nothing is lost with it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mptune.files import writing
from mptune.json_form import decode_float, encode_float
from mptune.tuning.evaluation import EmulatedError


class EmulatedErrors:
    """The errors of one metric, as far as the file holds them.

    Attributes:
        errors: fingerprint of the plan -> its error.
    """

    def __init__(self, path: Path, metric: str) -> None:
        self._path = path
        self._metric = metric
        self._offset = 0
        self.errors: dict[str, EmulatedError] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read what has been appended since."""
        if not self._path.exists():
            return
        with writing(self._path), self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):  # is being written, or never will be
                    break
                self._offset += len(line)
                self._take(line)

    def add(self, errors: Mapping[str, EmulatedError]) -> None:
        """Append errors of plans."""
        self.errors.update(errors)
        document = {plan: [encode_float(error.value), error.samples] for plan, error in errors.items()}
        line = json.dumps({"metric": self._metric, "errors": document}, separators=(",", ":"), allow_nan=False)
        # One write, which other processes' do not mix with; its own line also after one that was torn.
        with writing(self._path):
            number = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            with os.fdopen(number, "wb", buffering=0) as file:
                file.write(b"\n" + line.encode() + b"\n")

    def _take(self, text: bytes) -> None:
        try:
            document: Any = json.loads(text)
            if document["metric"] == self._metric:
                errors = document["errors"].items()
                self.errors.update({plan: EmulatedError(decode_float(error), n) for plan, (error, n) in errors})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
