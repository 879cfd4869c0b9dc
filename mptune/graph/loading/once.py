"""What is found once for each model: many parts ask the same of a model, which never changes."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

K = TypeVar("K")
T = TypeVar("T")


def once(find: Callable[[K], T]) -> Callable[[K], T]:
    """Let a function keep its result for each object that it was called with, as long as that object lives.

    Args:
        find: a function of one immutable object that is compared by identity, such as a ``Model`` or a
            ``GroupedModel``. Its result must not hold the object itself, or neither is ever freed.
    """
    known: MutableMapping[K, T] = WeakKeyDictionary()

    @wraps(find)
    def found(of: K) -> T:
        if of not in known:
            known[of] = find(of)
        return known[of]

    return found
