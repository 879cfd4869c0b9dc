"""The parts of the outputs, kept beside the reference that they were found from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mptune.data.metrics.parts import OutputParts
from mptune.data.numbers import decode_float, encode_float
from mptune.files import write_json

PARTS_JSON = "parts.json"
"""Name of the file in the run's data directory, beside the reference that the parts were found from."""

HELD_OUT_PARTS_JSON = "held_out_parts.json"
"""The same for the held-out samples: the search's parts, with scales that count these samples in."""

Load = Callable[[Path], "dict[str, OutputParts] | None"]


def parts_path(reference: Path) -> Path:
    """Where the parts of the outputs in a reference file are: beside it."""
    return reference.with_name(HELD_OUT_PARTS_JSON if reference.name.startswith("held_out") else PARTS_JSON)


def parts_beside(reference: Path, load: Load | None = None) -> dict[str, OutputParts] | None:
    """The parts that were kept with a reference file; None where none were.

    A run of an older version kept none for held-out samples, and takes the search's.

    Args:
        reference: the file.
        load: reads one file, as ``load_parts`` does.
    """
    known = (parts_path(reference), reference.with_name(PARTS_JSON))
    return next((found for path in known if (found := (load or load_parts)(path)) is not None), None)


def save_parts(path: Path, parts: Mapping[str, OutputParts]) -> None:
    """Write the JSON file that ``load_parts`` reads.

    Raises:
        RunError: the disk is full, or the place cannot be written.
    """
    outputs = {
        name: {
            "axis": one.axis,
            "scale": encode_float(one.whole),
            "column_scales": [encode_float(scale) for scale in one.scales],
            "is_split": one.is_split,
            "units": list(one.units),
        }
        for name, one in parts.items()
    }
    write_json(path, {"format": 1, "outputs": outputs})


def load_parts(path: Path) -> dict[str, OutputParts] | None:
    """What ``save_parts`` wrote; None where there is nothing that can be read."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        return {
            name: OutputParts(
                one["axis"],
                decode_float(one["scale"]),
                tuple(map(decode_float, one["column_scales"])),
                one["is_split"],
                tuple(one.get("units", ())),  # mptune 0.1.0 had none
            )
            for name, one in document["outputs"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
