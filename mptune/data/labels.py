"""Labels beside calibration samples, for metrics over a whole set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mptune.data.archive import read_archive, save_samples
from mptune.errors import DataError


def load_labels(path: Path, samples: int) -> tuple[dict[str, np.ndarray], ...]:
    """Read an ``.npz`` with one array per kind of label, rows in the order of the data, and cut it into samples."""
    if not path.is_file():
        raise DataError(f"no such file: {path}", "check the path given to --labels")
    arrays = read_archive(path)
    if not arrays:
        raise DataError(f"{path} holds no labels", "write the file with np.savez(path, NAME=labels)")
    for name, array in arrays.items():
        if array.ndim == 0 or not len(array) or len(array) % samples:
            rows = "no rows" if array.ndim == 0 else f"{len(array)} rows"
            raise DataError(
                f"{path}: {name!r} has {rows}, the data have {samples} samples",
                "give as many rows as the data have, in the same order",
            )
    each = {name: np.split(array, samples) for name, array in arrays.items()}
    return tuple({name: parts[number] for name, parts in each.items()} for number in range(samples))


def labels_beside(samples: Path) -> Path:
    """Where the labels of a file of samples lie in a run directory."""
    return samples.with_name(f"{samples.stem}_labels.npz")


def save_labels(samples: Path, labels: Sequence[dict[str, np.ndarray]]) -> None:
    """Write labels beside a file of samples; none deletes what was there."""
    if labels:
        save_samples(labels_beside(samples), labels)
    else:
        labels_beside(samples).unlink(missing_ok=True)
