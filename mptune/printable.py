"""The one place where text that comes from a model or a run is made fit to be shown.

Names of nodes and tensors may hold any character: sequences that drive a terminal, line breaks that forge a line of
their own, controls that turn the direction of writing around.
"""

from __future__ import annotations

from collections.abc import Mapping


def printable(text: object) -> str:
    r"""The text on one line; characters that are not printable are written out, such as ``\n`` and ``\x1b``."""
    words = str(text)
    if words.isprintable():
        return words
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in words)


WIDEST = 60
"""Names that a person gave are cut to this many characters in tables."""


def cut(text: str, width: int = WIDEST) -> str:
    """The text on one line, ``printable``, or as much of its beginning as fits then, with dots after it."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= width else line[: max(0, width - 3)] + "..."


def counts_text(counts: Mapping[str, int]) -> str:
    """Names with how often each is there, such as ``MatMul, Add x2``."""
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in counts.items())
