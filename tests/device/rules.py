"""What NVIDIA's headers forbid: a call that breaks a rule is kept, and raises where its behaviour is undefined."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn


class ForbiddenError(AssertionError):
    """A call whose behaviour NVIDIA's headers leave undefined."""


class Rules:
    """The record of what was forbidden and of what was refused, also in a file that outlives a worker.

    Attributes:
        forbidden: calls whose behaviour is undefined.
        refused: calls that fail as documented, since an argument or their order is wrong.
    """

    def __init__(self, log: Path | None = None) -> None:
        self.forbidden: list[str] = []
        self.refused: list[str] = []
        self._log = log

    def forbid(self, text: str) -> NoReturn:
        """Keep a call whose behaviour is undefined.

        Raises:
            ForbiddenError: always; on a device the process would have crashed, or gone on with wrong values.
        """
        self.forbidden.append(text)
        self._write("forbidden", text)
        raise ForbiddenError(text)

    def refuse(self, text: str) -> None:
        """Keep a call that returns an error."""
        self.refused.append(text)
        self._write("refused", text)

    def _write(self, kind: str, text: str) -> None:
        if self._log is not None:
            with self._log.open("a", encoding="utf-8") as file:
                file.write(f"{kind}: {text}\n")
