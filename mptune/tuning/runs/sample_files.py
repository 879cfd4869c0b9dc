"""The files of samples and reference outputs in a run directory: which there are, and whether each is whole."""

from __future__ import annotations

import zipfile
from pathlib import Path

from mptune.data.metrics.parts import HELD_OUT_PARTS_JSON, PARTS_JSON, load_parts
from mptune.errors import RunError
from mptune.files import open_file

_NEEDED = ("search.npz", "held_out.npz", "search_reference.npz", "held_out_reference.npz")
_OTHERS = ("search_labels.npz", "held_out_labels.npz", PARTS_JSON, HELD_OUT_PARTS_JSON)


def sample_files(data: Path) -> tuple[Path, ...]:
    """Those that are there."""
    return tuple(data / name for name in (*_NEEDED, *_OTHERS) if (data / name).is_file())


def damaged_file(data: Path) -> Path | None:
    """The first that is missing or damaged; None where all are as they were written."""
    for name in _NEEDED:
        if not (data / name).is_file():
            return data / name
    return next((path for path in sample_files(data) if not _is_whole(path)), None)


def refuse_damaged(data: Path) -> None:
    """Refuse a run whose samples or reference outputs are missing or damaged, and cannot be prepared here."""
    if (path := damaged_file(data)) is not None:
        raise RunError(
            f"{path} is missing or damaged",
            "copy the run directory again; where the search ran, the same `mptune search` prepares its data again",
        )


def _is_whole(path: Path) -> bool:
    if path.suffix == ".json":
        return load_parts(path) is not None
    try:
        with open_file(path) as stream, zipfile.ZipFile(stream) as archive:
            # Stored as they are: a small file cannot unfold to a large one.
            return all(e.compress_type == zipfile.ZIP_STORED for e in archive.infolist()) and archive.testzip() is None
    except Exception:  # zipfile raises nearly anything for a damaged file
        return False
