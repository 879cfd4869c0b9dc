"""How a row of the table of findings says what is wrong: a function from the evidence to text and cure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

Severity = Literal["error", "warning", "info"]
"""error: no plan repairs it. warning: figures or the choice may mislead. info: good to know."""
SEVERITIES: tuple[Severity, ...] = get_args(Severity)  # the most severe first


class Words(NamedTuple):
    """What a finding says: one sentence, without a full stop, and what to do."""

    text: str
    cure: str = ""
    severity: Severity | None = None  # where it is not the code's


class Values:
    """What a text may name, as attributes.

    These are ``kind``, the evidence, ``node``, ``group``, ``tensor``, ``output``, ``input`` and ``sample``, the first
    of each in the place, and what else is given to ``Finding.from_code``. ``get`` is for what may be missing.
    """

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        return self._values[name]

    def get(self, name: str) -> Any:
        """A value, or None."""
        return self._values.get(name)


WordsOf = Callable[[Values], Words]


class CodeInfo(NamedTuple):
    """A row of the table."""

    severity: Severity
    """The default; a finding about a group that the plan keeps in FP32 is ``info`` whatever stands here."""
    meaning: str  # one line
    words: WordsOf

    def say(self, values: Mapping[str, object]) -> Words:
        """The words for these values; the meaning alone where a text names what they lack, so that nothing fails."""
        try:
            return self.words(Values(values))
        except (KeyError, TypeError, ValueError):
            return Words(self.meaning)


class Table(dict[str, CodeInfo]):
    """Rows by code, in the order in which they are written."""

    def row(self, code: str, severity: Severity, meaning: str) -> Callable[[WordsOf], WordsOf]:
        """Add a row whose words are those of the function below."""

        def add(words: WordsOf) -> WordsOf:
            self[code] = CodeInfo(severity, meaning, words)
            return words

        return add


def located(tensor: str, node: str | None) -> str:
    """Where a hazard is, before its text."""
    return f"value {tensor!r} at node {node!r}: " if node else f"value {tensor!r}: "


def counted(count: int, noun: str) -> str:
    """``1 row``, ``3 rows``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def percent(share: float) -> str:
    """A share in percent, to two digits."""
    return f"{100 * share:.2g} %" if share == 0 or share >= 1e-4 else "less than 0.01 %"


def listed(items: Sequence[object], most: int, more: str = ", ...") -> str:
    """The first of some items; ``more`` may name how many ``{others}`` there are."""
    others = len(items) - most
    return ", ".join(map(str, items[:most])) + (more.format(others=others) if others > 0 else "")
