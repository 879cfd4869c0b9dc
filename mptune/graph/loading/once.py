"""What is found once for each model: many parts ask the same of a model, which never changes."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

K = TypeVar("K")
T = TypeVar("T")


def once(find: Callable[[K], T]) -> Callable[[K], T]:
    """Let a function of one object keep its result for as long as that object lives.

    Objects are compared by identity. A result must not hold its object, or neither is ever freed.
    """
    results: MutableMapping[K, T] = WeakKeyDictionary()

    @wraps(find)
    def result_of(subject: K) -> T:
        if subject not in results:
            results[subject] = find(subject)
        return results[subject]

    return result_of
