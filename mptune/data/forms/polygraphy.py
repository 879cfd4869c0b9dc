"""Polygraphy's input data: the JSON that ``polygraphy run --save-inputs`` writes, and its data loader scripts.

The JSON is a list with one object per iteration, input name -> array; an array is an object with the key ``array``,
the Base64 text of a ``.npy`` file (https://github.com/NVIDIA/TensorRT/tree/main/tools/Polygraphy, ``json/serde.py``).
A loader script has a function, ``load_data`` if none is named, that returns or yields one dictionary per iteration.
"""

from __future__ import annotations

import base64
import binascii
import io
from pathlib import Path
from typing import Any

import numpy as np

from mptune.errors import DataError
from mptune.files import read_json

LOADER = "load_data"
"""The function of a loader script where none is named."""

_MOST_BYTES = 2 << 30
"""Arrays as text may be larger than other JSON."""

_HINT = "write it with `polygraphy run ... --save-inputs inputs.json`"


def read_json_inputs(path: Path) -> tuple[dict[str, np.ndarray], ...]:
    """The feeds of a JSON file of Polygraphy."""
    try:
        document: Any = read_json(path, _MOST_BYTES)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}", "check the path given to --data") from None
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {' '.join(str(error).split())}", _HINT) from None
    if isinstance(document, dict) and "lst" in document:  # RunResults, which hold outputs
        raise DataError(f"{path} holds the outputs of a run of Polygraphy, not inputs", _HINT)
    if not isinstance(document, list) or not document or not all(isinstance(feed, dict) for feed in document):
        raise DataError(f"{path} holds no inputs of Polygraphy: a list with one object per sample is expected", _HINT)
    return tuple(
        {str(name): _array(value, f"{path}, sample {number}: input {name!r}") for name, value in feed.items()}
        for number, feed in enumerate(document)
    )


def _array(value: Any, where: str) -> np.ndarray:
    if isinstance(value, dict) and "values" in value and "array" not in value:  # LazyArray
        value = value["values"]
    if not isinstance(value, dict) or not isinstance(value.get("array"), str):
        raise DataError(f"{where} is no array of Polygraphy", _HINT)
    try:
        array = np.load(io.BytesIO(base64.b64decode(value["array"], validate=True)), allow_pickle=False)
    except (ValueError, binascii.Error, EOFError, OSError) as error:
        raise DataError(f"{where} cannot be read: {' '.join(str(error).split())}", _HINT) from None
    if not isinstance(array, np.ndarray):
        raise DataError(f"{where} is no single array", _HINT)
    return array


def script_and_function(source: Path) -> tuple[Path, str] | None:
    """The parts of ``script.py`` and ``script.py:function``; None for anything else."""
    if source.suffix == ".py":
        return source, LOADER
    file, colon, name = str(source).rpartition(":")
    return (Path(file), name) if colon and Path(file).suffix == ".py" else None
