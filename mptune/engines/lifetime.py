"""Whether a native object is gone once it was closed: one that outlives its CUDA stream crashes the process."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

Reference = weakref.ReferenceType[Any]


def references(*objects: Any) -> tuple[Reference, ...]:
    """Weak references to the objects that can have one; None is left out."""
    watched = []
    for each in objects:
        try:
            watched.append(weakref.ref(each))
        except TypeError:
            continue  # None, or a type without weak references.
    return tuple(watched)


def are_gone(watched: tuple[Reference, ...], what: str) -> bool:
    """Whether all of them have been freed; where not, a ``RuntimeWarning`` says so (in a worker it goes to the log)."""
    if any(reference() is not None for reference in watched):
        gc.collect()  # Only a cycle may still hold it.
    if all(reference() is None for reference in watched):
        return True
    warnings.warn(
        f"{what} is still alive after it was closed: an object outside holds it", RuntimeWarning, stacklevel=3
    )
    return False
