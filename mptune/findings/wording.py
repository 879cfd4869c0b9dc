"""How a row of the table of findings says what is wrong: templates with named evidence."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any, Literal, get_args

Severity = Literal["error", "warning", "info"]
"""error: no plan repairs it. warning: figures or the choice may mislead. info: good to know."""

SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""The most severe first."""

AT = "value {tensor!r}[ at node {node!r}]: "
"""Where a hazard is."""

_OPTIONAL = re.compile(r"\[(?:(\w+)\?)?([^\[\]]*)\]")


@dataclass(frozen=True)
class Wording:
    """Text and cure of a finding as templates, which ``fill`` fills.

    The names are those of the evidence; ``node``, ``group``, ``tensor``, ``output`` and ``sample``, the first of each
    in the place; and what else is given to ``Finding.of``.

    Attributes:
        severity: where it is not the code's.
        at: what stands before the text where the place is not shown beside it.
        is_note: a hazard that has no code: it is shown as one, and is no finding by itself.
    """

    text: str
    cure: str = ""
    severity: Severity | None = None
    at: str = ""
    is_note: bool = False

    def filled(self, values: Mapping[str, object]) -> tuple[str, str]:
        """Text and cure with these values."""
        return fill(self.at + self.text, values), fill(self.cure, values)


@dataclass(frozen=True)
class CodeInfo:
    """A row of the table.

    Attributes:
        severity: the default; a finding about a group that the plan keeps in FP32 is ``info`` whatever stands here.
        meaning: one line.
        wordings: by kind; the empty kind stands for those that are not there.
        breaks: rank among the codes of values that FP16 cannot hold, 1 for the plainest; 0 for all other codes.
    """

    severity: Severity
    meaning: str
    wordings: Mapping[str, Wording]
    breaks: int = 0

    def wording(self, kind: str) -> Wording:
        """The wording of a kind; the empty kind stands for those that are not there."""
        return self.wordings.get(kind) or self.wordings[""]


def row(
    severity: Severity,
    meaning: str,
    text: str,
    cure: str = "",
    *,
    at: str = "",
    breaks: int = 0,
) -> CodeInfo:
    """A row with one wording."""
    return CodeInfo(severity, meaning, {"": Wording(text, cure, at=at)}, breaks)


class _Words(Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec.startswith("/"):
            singular, plural = format_spec[1:].split("/")
            return (singular if value == 1 else plural).replace("#", str(value))
        if format_spec.endswith("g%"):
            return f"{100 * value:{format_spec[:-1]}} %"
        return str(super().format_field(value, format_spec))


_WORDS = _Words()


def fill(template: str, values: Mapping[str, object]) -> str:
    """A template of the table with its names replaced.

    ``{name}`` takes Python's formats, and two more: ``{rows:/# row is/# rows are}`` gives ``1 row is`` or ``3 rows
    are``, ``{share:.2g%}`` per cent. A part in brackets goes where a name in it is
    unknown; one that begins with a name and a question mark, where that is unknown or false.
    """

    def part(match: re.Match[str]) -> str:
        if match[1]:
            return match[2] if values.get(match[1]) else ""
        names = [name for _, name, _, _ in _WORDS.parse(match[2]) if name]
        return match[2] if all(values.get(name) not in (None, "") for name in names) else ""

    return _WORDS.vformat(_OPTIONAL.sub(part, template), (), values)


def listed(items: Sequence[object], most: int, more: str = ", ...") -> str:
    """The first of some items; ``more`` may name how many others there are."""
    others = len(items) - most
    return ", ".join(map(str, items[:most])) + (fill(more, {"others": others}) if others > 0 else "")
