"""The JSON form of dataclasses: an object with a key for each field, from which the same dataclass is read again.

JSON has no NaN and no infinity, so those numbers are the texts ``"nan"``, ``"inf"`` and ``"-inf"``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import pydantic

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

T = TypeVar("T", bound="JsonForm")


def encode_float(value: float) -> float | str:
    """A number as JSON can hold it: itself, or ``"nan"``, ``"inf"``, ``"-inf"``."""
    value = float(value)
    return value if math.isfinite(value) else str(value)


def decode_float(value: float | str) -> float:
    """Inverse of ``encode_float``; a ``ValueError`` for other texts."""
    if isinstance(value, str):
        if value not in _NON_FINITE:
            raise ValueError(f"{value!r} is not a number; non-finite ones are written 'nan', 'inf' and '-inf'")
        return _NON_FINITE[value]
    return float(value)


def encode(value: Any) -> Any:
    """A value as JSON types; what has a ``to_json`` of its own has that form."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return encode_float(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {encode(key): encode(entry) for key, entry in value.items()}
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        return {each.name: encode(getattr(value, each.name)) for each in fields(value)}
    return [encode(entry) for entry in value]


class JsonForm:
    """Gives a dataclass its JSON form: all fields under their names."""

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return {each.name: encode(getattr(self, each.name)) for each in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_json(cls: type[T], document: Any) -> T:
        """Inverse of ``to_json``; a ``ValueError`` for what cannot be read."""
        read: T = _reader(cls).validate_python(document)  # type: ignore[arg-type]
        return read


class TextForm:
    """Gives a class a text as its JSON form, which its ``from_json`` reads, where it is a field of a ``JsonForm``."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(cls.from_json)  # type: ignore[attr-defined]


@cache
def _reader(cls: type) -> pydantic.TypeAdapter[Any]:
    import pydantic  # slow to import, and most commands read nothing

    return pydantic.TypeAdapter(cls)
