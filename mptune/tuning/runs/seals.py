"""Whether the data in a run directory are still what was written: by hash, once a session.

Samples, reference outputs, and what the engine answered before the search.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mptune.data.metrics.parts import HELD_OUT_PARTS_JSON, PARTS_JSON
from mptune.errors import RunError
from mptune.files import READ_ERRORS, files_sha256, read_json, write_json
from mptune.tuning.steps.kernels import KERNELS_JSON

SEALS_FILE = "seals.json"

_REFERENCES = ("search_reference.npz", "held_out_reference.npz")
_PARTS = (PARTS_JSON, HELD_OUT_PARTS_JSON)
"""Each is written with the reference of the same place."""
NEEDED = ("search.npz", "held_out.npz", *_REFERENCES)
_EVERY = (*NEEDED, "search_labels.npz", "held_out_labels.npz", *_PARTS, KERNELS_JSON)
_FORMAT = 1


def seal(data: Path) -> None:
    """Write down the SHA-256 of every such file that is there."""
    hashes = {name: files_sha256(data / name) for name in present_names(data)}
    write_json(data / SEALS_FILE, {"format": _FORMAT, "sha256": hashes})


def present_names(data: Path) -> tuple[str, ...]:
    """Names of the files that are there."""
    return tuple(name for name in _EVERY if (data / name).is_file())


def unseal(data: Path) -> None:
    """Forget the hashes: other files are to come."""
    (data / SEALS_FILE).unlink(missing_ok=True)


def is_sealed(data: Path) -> bool:
    """Whether the hashes are known."""
    return _read(data) is not None


def damaged(data: Path) -> tuple[str, ...]:
    """Names of the files that are gone or changed; without hashes all samples and references."""
    sealed = _read(data)
    if sealed is None:
        return NEEDED
    changed = [n for n, sha256 in sealed.items() if not (data / n).is_file() or files_sha256(data / n) != sha256]
    changed += [reference for parts, reference in zip(_PARTS, _REFERENCES, strict=True) if parts in changed]
    return tuple(dict.fromkeys(changed))


def refuse_damaged(data: Path) -> None:
    """Refuse a run whose data are not what the search wrote, and cannot be written here."""
    if is_sealed(data) and (lost := damaged(data)):
        raise RunError(
            f"{data / lost[0]} is gone, or is not what the search wrote",
            "copy the run directory again; where the search ran, the same `mptune search` writes the file anew",
        )


def _read(data: Path) -> dict[str, str] | None:
    try:
        document: Any = read_json(data / SEALS_FILE)
        return {str(name): str(sha256) for name, sha256 in document["sha256"].items() if name in _EVERY}
    except READ_ERRORS:
        return None
