"""Models without their weights: a few kilobytes each. Every weight is drawn anew, by a seed, when one is read.

A stripped initializer has its type and shape, no data, and in ``doc_string`` how its values are distributed:
``normal MEAN STD LOW HIGH`` or ``integers LOW HIGH``. The seed is the CRC-32 of its name.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper


def fill(model: onnx.ModelProto) -> onnx.ModelProto:
    """Draw the weights of a stripped model."""
    for tensor in model.graph.initializer:
        kind, *figures = tensor.doc_string.split() or [""]
        if kind not in ("normal", "integers"):
            continue
        rng = np.random.default_rng(zlib.crc32(tensor.name.encode()))
        shape = tuple(tensor.dims)
        if kind == "normal":
            mean, std, low, high = map(float, figures)
            values = np.clip(rng.normal(mean, std, shape), low, high).astype(np.float32)
        else:
            low, high = map(float, figures)
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            values = rng.integers(int(low), int(high) + 1, shape).astype(dtype)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    return model


def load_filled(path: Path) -> onnx.ModelProto:
    return fill(onnx.load(path))
