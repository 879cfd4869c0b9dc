"""Attributes of trials as compact bytes: a study of a thousand plans holds their evaluations, and seldom looks at them.

An evaluation as JSON types is some hundreds of objects, five times as many bytes as its values take.
"""

from __future__ import annotations

import marshal
from collections.abc import Mapping
from typing import Any


class Packed:
    """A JSON object as bytes. Of this process only: nothing of it is ever written."""

    __slots__ = ("_content",)

    def __init__(self, document: dict[str, Any]) -> None:
        """Pack it."""
        self._content = marshal.dumps(document)

    def load(self) -> dict[str, Any]:
        """The object, made anew with each call."""
        document: dict[str, Any] = marshal.loads(self._content)
        return document


def pack(attrs: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """The attributes, with JSON objects packed whose names begin with ``mark``."""
    return {
        name: Packed(value) if isinstance(value, dict) and name.startswith(mark) else value
        for name, value in attrs.items()
    }


def unpacked(value: Any) -> Any:
    """The JSON object where a value is a packed one, else the value."""
    return value.load() if isinstance(value, Packed) else value
