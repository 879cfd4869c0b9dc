"""Whether samples and reference outputs in a run directory are still what was written: by hash, once a session."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mptune.data.archive import read_samples
from mptune.errors import DataError, RunError
from mptune.files import file_sha256, write_json

SEALS_FILE = "seals.json"

_SAMPLES = ("search.npz", "held_out.npz")
_REFERENCES = ("search_reference.npz", "held_out_reference.npz")
_FORMAT = 1


def seal(data: Path) -> None:
    """Write down the SHA-256 of every file of samples and references that is there.

    Raises:
        RunError: the disk is full, or the directory cannot be written.
    """
    present = [name for name in (*_SAMPLES, *_REFERENCES) if (data / name).is_file()]
    write_json(data / SEALS_FILE, {"format": _FORMAT, "sha256": {name: file_sha256(data / name) for name in present}})


def is_sealed(data: Path) -> bool:
    """Whether the hashes are known: version 0.1.0 did not write them down."""
    return _read(data) is not None


def damaged(data: Path) -> tuple[str, ...]:
    """Names of the files that are gone, or hold something else than was written.

    Where no hashes are known: samples that are gone, and files that cannot be read.
    """
    sealed = _read(data)
    if sealed is None:
        gone = [name for name in _SAMPLES if not (data / name).is_file()]
        there = [name for name in (*_SAMPLES, *_REFERENCES) if (data / name).is_file()]
        return (*gone, *(name for name in there if not _can_be_read(data / name)))
    return tuple(
        name for name, sha256 in sealed.items() if not (data / name).is_file() or file_sha256(data / name) != sha256
    )


def refuse_damaged(data: Path) -> None:
    """Refuse a run whose samples or references are not what the search wrote, and cannot be written here.

    Raises:
        RunError: naming the first of them.
    """
    lost: Sequence[str] = damaged(data) if is_sealed(data) else ()
    if lost:
        raise RunError(
            f"{data / lost[0]} is gone, or is not what the search wrote",
            "copy the run directory again; where the search ran, the same `mptune search` writes the file anew",
        )


def _can_be_read(path: Path) -> bool:
    try:
        read_samples(path)
    except DataError:
        return False
    return True


def _read(data: Path) -> dict[str, str] | None:
    try:
        document: Any = json.loads((data / SEALS_FILE).read_text(encoding="utf-8"))
        names = {*_SAMPLES, *_REFERENCES}
        return {str(name): str(sha256) for name, sha256 in document["sha256"].items() if name in names}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
