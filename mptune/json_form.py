"""The JSON form of dataclasses: an object with a key for each field, from which the same dataclass is read again.

JSON has no NaN and no infinity, so those numbers are the texts ``"nan"``, ``"inf"`` and ``"-inf"``.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

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
        return _encode_fields(value)
    return [encode(entry) for entry in value]


class JsonForm:
    """Gives a dataclass its JSON form: all fields under their names.

    What cannot be read raises ``KeyError``, ``TypeError``, ``ValueError`` or ``AttributeError``.
    """

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return _encode_fields(self)

    @classmethod
    def from_json(cls: type[T], document: Mapping[str, Any]) -> T:
        """Inverse of ``to_json``."""
        read: T = _decode_fields(cls, document)
        return read


def _encode_fields(value: Any) -> dict[str, Any]:
    return {each.name: encode(getattr(value, each.name)) for each in fields(value)}


def _decode_fields(cls: Any, document: Mapping[str, Any]) -> Any:
    return cls(**{name: decode(document[name]) for name, decode in _decoders(cls).items()})


@cache
def _decoders(cls: Any) -> dict[str, Callable[[Any], Any]]:
    """Field -> what reads it."""
    hints = get_type_hints(cls)
    return {each.name: _decoder(hints[each.name]) for each in fields(cls)}


def _decoder(hint: Any) -> Callable[[Any], Any]:
    """What turns JSON into a value of a type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        (inner,) = (_decoder(each) for each in arguments if each is not type(None))
        return lambda value: None if value is None else inner(value)
    if origin is Literal:
        return partial(_choice, arguments)
    if origin is tuple and arguments[-1] is ...:
        inner = _decoder(arguments[0])
        return lambda value: tuple([inner(entry) for entry in value])
    if origin is tuple:
        each = tuple(map(_decoder, arguments))
        return lambda value: tuple([read(entry) for read, entry in zip(each, value, strict=True)])
    if origin is not None and issubclass(origin, Mapping):
        name, inner = map(_decoder, arguments)
        return lambda value: {name(key): inner(entry) for key, entry in value.items()}
    if hint is float:
        return lambda value: value if type(value) is float else decode_float(value)
    if hint is str:
        return _text
    if is_dataclass(hint) and not hasattr(hint, "from_json"):
        return partial(_decode_fields, hint)
    decode: Callable[[Any], Any] = getattr(hint, "from_json", hint)
    return decode


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _choice(choices: tuple[Any, ...], value: Any) -> Any:
    if value not in choices:
        raise ValueError(f"{value!r} is none of {choices}")
    return value
