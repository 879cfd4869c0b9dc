"""Arrays that other tools write as JSON: Polygraphy's inputs and outputs, and trtexec's outputs.

Polygraphy's array is an object whose key ``array`` is the Base64 text of a ``.npy`` file; a ``LazyArray`` has it in its
key ``values`` (https://github.com/NVIDIA/TensorRT: ``tools/Polygraphy/polygraphy/json/serde.py``). trtexec writes its
values with six digits, and the words of C++ for what is not finite (there, ``samples/common/sampleReporting.cpp``).
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mptune.data.archive import read_numpy
from mptune.data.arrays import Arrays
from mptune.errors import DataError
from mptune.files import files_in_order, parse_json, read_text

_INPUTS = "write it with `polygraphy run ... --save-inputs inputs.json`"
_OUTPUTS = "write it with `trtexec ... --exportOutput=FILE` or `polygraphy run ... --save-outputs FILE`"
_MOST_JSON_BYTES = 2 << 30  # arrays as text may be larger than other JSON
_NOT_FINITE = re.compile(r"(?<=[\s,])-?(?:nan|inf)(?=[\s,])")
_WORDS = {"nan": "NaN", "-nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def polygraphy_inputs(path: Path) -> list[Arrays]:
    """What ``polygraphy run --save-inputs`` writes: a list with one object per sample, input name -> array."""
    document = _read(path, _INPUTS)
    if not isinstance(document, list) or not document or not all(isinstance(feed, dict) for feed in document):
        raise DataError(f"{path} holds no inputs of Polygraphy: a list with one object per sample", _INPUTS)
    return [_arrays(feed, f"{path}, sample {number}: input", _INPUTS) for number, feed in enumerate(document)]


def recorded_runs(path: Path) -> list[Arrays]:
    """Outputs that a deployment recorded, by name, run after run in the order of the data.

    ``path`` is a ``.npz`` (one run), a ``.npy`` (whose array has the name ``""``), a JSON file of ``trtexec
    --exportOutput`` (one run) or of ``polygraphy run --save-outputs`` (its iterations), or a folder of such files.
    DataError: it cannot be read, or holds the outputs of several runners.
    """
    if path.is_dir():
        files = [file for file in files_in_order(path) if file.suffix.lower() in (".npz", ".npy", ".json")]
        if not files:
            raise DataError(f"{path} holds no .npz, .npy or .json files", _OUTPUTS)
        return [run for file in files for run in recorded_runs(file)]
    if path.suffix.lower() != ".json":
        content = read_numpy(path)
        return [content if isinstance(content, dict) else {"": content}]
    document = _read(path, _OUTPUTS)
    try:
        if isinstance(document, list):
            return [{binding["name"]: _trtexec_array(binding) for binding in document}]
        runners = [(str(name), [dict(run["outputs"]) for run in runs]) for name, runs in document["lst"]]
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(f"{path} holds no outputs of trtexec or Polygraphy: {error}", _OUTPUTS) from None
    # Where one session ran several backends, that of TensorRT is the deployment.
    named = [each for each in runners if each[0].startswith("trt")] if len(runners) > 1 else runners
    if len(named) != 1:
        names = ", ".join(name for name, _ in runners) or "none"
        raise DataError(f"{path} holds the outputs of these runners: {names}", "save those of one: --trt or --onnxrt")
    runner, runs = named[0]
    return [_arrays(run, f"{path}, iteration {k} of {runner}: output", _OUTPUTS) for k, run in enumerate(runs)]


def _read(path: Path, hint: str) -> Any:
    """The JSON in a file."""
    try:
        return parse_json(_NOT_FINITE.sub(lambda match: _WORDS[match[0]], read_text(path, _MOST_JSON_BYTES)))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as JSON: {' '.join(str(error).split())}", hint) from None


def _arrays(values: Mapping[str, Any], where: str, hint: str) -> Arrays:
    """The arrays of Polygraphy's objects."""
    arrays: Arrays = {}
    for name, value in values.items():
        try:
            content = io.BytesIO(base64.b64decode(value.get("values", value)["array"], validate=True))
            arrays[name] = np.lib.format.read_array(content, allow_pickle=False)
        except Exception as error:  # NumPy raises nearly anything for damaged bytes
            text = " ".join(str(error).split())
            raise DataError(f"{where} {name!r} is no array of Polygraphy: {text}", hint) from None
    return arrays


def _trtexec_array(binding: Mapping[str, Any]) -> np.ndarray:
    """One binding: its dimensions are a text such as ``1x3x8``, its values one list."""
    sizes = [int(size) for size in binding["dimensions"].split("x") if size]
    values = np.array(binding["values"], np.float64).reshape(sizes).astype(np.float32)
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    # Values that FP16 holds, but for what six digits leave out (5e-6 at most), come from a binding of FP16.
    return half if np.allclose(half, values, rtol=5e-6, atol=0, equal_nan=True) else values
