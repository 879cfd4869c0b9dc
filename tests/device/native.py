"""What TensorRT's Python objects have in common: no attributes of one's own, enumerations as pybind11 makes them."""

from __future__ import annotations

from functools import total_ordering
from typing import Any


class Native:
    """A class of a C++ module: it takes no attribute that it does not declare."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and not hasattr(type(self), name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        object.__setattr__(self, name, value)


class Overridable:
    """A class of which Python inherits: pybind11 needs its ``__init__`` called."""

    def __init__(self) -> None:
        self._is_made = True


def require_made(given: Any, kind: type[Any]) -> None:
    """Raise as pybind11 does for what is no instance, or one without ``super().__init__()``."""
    if not isinstance(given, kind):
        raise TypeError(f"incompatible function arguments: {type(given).__name__} is no {kind.__name__}")
    if not getattr(given, "_is_made", False):
        raise TypeError(f"{kind.__name__}.__init__() must be called when overriding __init__")


@total_ordering
class Member:
    """A value of an enumeration (``py::enum_`` with ``py::arithmetic``)."""

    def __init__(self, name: str, value: int) -> None:
        self.name, self.value = name.lstrip("_"), value

    def __int__(self) -> int:
        return self.value

    def __index__(self) -> int:
        return self.value

    def __hash__(self) -> int:
        return self.value

    def __eq__(self, other: object) -> bool:
        return self is other or (type(self) is type(other) and isinstance(other, Member) and self.value == other.value)

    def __lt__(self, other: Any) -> bool:
        return self.value < int(other)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self.value}>"


def enumeration(title: str, **values: int) -> type[Any]:
    """A class whose attributes are its members; a name that begins with ``_`` is one that mptune does not use."""
    kind = type(title, (Member,), {})
    for name, value in values.items():
        setattr(kind, name, kind(name, value))
    return kind
