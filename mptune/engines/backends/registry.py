"""The backends by name: mptune's own, and those that other packages bring as entry points of ``mptune.backends``."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from mptune.engines.environment import BACKEND_GROUP
from mptune.errors import TargetError

if TYPE_CHECKING:
    from mptune.engines.backends.backend import Backend

_BUILT_IN = {
    "tensorrt": "mptune.engines.backends.tensorrt:TENSORRT",
    "tensorrt-rtx": "mptune.engines.backends.tensorrt:TENSORRT_RTX",
    "onnxruntime": "mptune.engines.backends.onnxruntime:ONNXRUNTIME",
}
"""Name -> where it is; the first one that measures on the target is taken, unless one is named."""


@cache
def _entries() -> dict[str, EntryPoint]:
    """All entry points: mptune's own first, which no other package replaces."""
    own = {name: EntryPoint(name, value, BACKEND_GROUP) for name, value in _BUILT_IN.items()}
    others = sorted(entry_points(group=BACKEND_GROUP), key=lambda entry: entry.name)
    return {**own, **{entry.name: entry for entry in others if entry.name not in own}}


def backend_names() -> tuple[str, ...]:
    """All names, mptune's own first."""
    return tuple(_entries())


def find_backends(choice: str = "auto") -> tuple[Backend, ...]:
    """The backends that a choice leaves: the one that it names; of ``auto`` all, mptune's own first.

    Raises:
        TargetError: there is none of that name, or its package does not load.
    """
    backends: list[Backend] = []
    for name in backend_names() if choice == "auto" else (choice,):
        entry = _entries().get(name)
        if entry is None:
            raise TargetError(f"there is no engine {name!r}", f"give --engine auto, {', '.join(backend_names())}")
        try:
            backends.append(entry.load())
        except Exception as error:
            message = f"the engine {name} does not load ({entry.value}): {type(error).__name__}: {error}"
            raise TargetError(message, "install its package again, or uninstall it") from error
    return tuple(backends)
