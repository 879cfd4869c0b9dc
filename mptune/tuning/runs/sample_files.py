"""What was prepared for a search, in a run directory: samples, reference outputs, and the kernels that are missing."""

from __future__ import annotations

import contextlib
import itertools
import zipfile
from pathlib import Path

from mptune.data.metrics.parts import HELD_OUT_PARTS_JSON, PARTS_JSON, load_parts
from mptune.errors import RunError
from mptune.files import open_file
from mptune.tuning.steps.kernels import KERNELS_JSON, MissingKernels

_SAMPLES = ("search.npz", "held_out.npz", "search_reference.npz", "held_out_reference.npz")
_WITH_SOME = ("search_labels.npz", "held_out_labels.npz", PARTS_JSON, HELD_OUT_PARTS_JSON)


def sample_files(data: Path) -> tuple[Path, ...]:
    """The files of samples and of reference outputs that are there."""
    return tuple(data / name for name in (*_SAMPLES, *_WITH_SOME) if (data / name).is_file())


def damaged_file(data: Path) -> Path | None:
    """The first file that is missing or damaged; None where all are as they were written."""
    needed = (*_SAMPLES, KERNELS_JSON)
    missing = (data / name for name in needed if not (data / name).is_file())
    damaged = (path for path in (*sample_files(data), data / KERNELS_JSON) if not _is_whole(path))
    return next(itertools.chain(missing, damaged), None)


def refuse_damaged(data: Path) -> None:
    """Refuse a run of which something is missing or damaged that cannot be prepared here."""
    if (path := damaged_file(data)) is not None:
        raise RunError(
            f"{path} is missing or damaged",
            "copy the run directory again; where the search ran, the same `mptune search` prepares its data again",
        )


def _is_whole(path: Path) -> bool:
    if path.name == KERNELS_JSON:
        with contextlib.suppress(RunError):
            MissingKernels.load(path)
            return True
        return False
    if path.suffix == ".json":
        return load_parts(path) is not None
    try:
        with open_file(path) as stream, zipfile.ZipFile(stream) as archive:
            # Stored as they are: a small file cannot unfold to a large one.
            return all(e.compress_type == zipfile.ZIP_STORED for e in archive.infolist()) and archive.testzip() is None
    except Exception:  # zipfile raises nearly anything for a damaged file
        return False
