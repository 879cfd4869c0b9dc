"""Models without their weights: a few kilobytes each. Every weight is drawn anew, by a seed, when one is read.

A stripped initializer has its type and shape, no data, and in ``doc_string`` how its values are distributed:
``normal MEAN STD LOW HIGH`` or ``integers LOW HIGH``. The seed is the CRC-32 of its name.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

SMALLEST = 256
"""Elements of the smallest constant that is stripped."""
WEIGHT_READERS = frozenset(
    {"Conv", "ConvTranspose", "MatMul", "Gemm", "LSTM", "GRU", "Gather", "FusedMatMul", "FusedConv"}
)
STRIPPED_TYPES = {TensorProto.FLOAT, TensorProto.INT8, TensorProto.UINT8}


def strip(model: onnx.ModelProto, keep: tuple[str, ...] = ()) -> onnx.ModelProto:
    """Remove weights, stack traces of the exporting machine and what an exporter repeats at each node.

    Args:
        keep: weights whose name contains one of these stay, as their values mean something.
    """
    graph = model.graph
    for entries in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        kept = [e for e in entries.metadata_props if e.key == "namespace" or e.key.endswith("name_scopes")]
        del entries.metadata_props[:]
        entries.metadata_props.extend(kept)
        entries.doc_string = ""
    del model.metadata_props[:]
    read = _read_by_layers(graph)
    for tensor in graph.initializer:
        values = numpy_helper.to_array(tensor)
        if tensor.data_type not in STRIPPED_TYPES or values.size < SMALLEST or tensor.name not in read:
            continue
        if any(word in tensor.name for word in keep):
            continue
        if tensor.data_type == TensorProto.FLOAT:
            figures = (values.mean(), values.std(), values.min(), values.max())
            said = "normal " + " ".join(f"{float(f):.6g}" for f in figures)
        else:
            said = f"integers {values.min()} {values.max()}"
        bare = TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type, doc_string=said)
        tensor.CopyFrom(bare)
    return model


def _read_by_layers(graph: onnx.GraphProto) -> set[str]:
    """Constants that layers read, directly or through nodes that only move or dequantise them."""
    through = {
        "Transpose",
        "Reshape",
        "Slice",
        "Concat",
        "Unsqueeze",
        "Squeeze",
        "DequantizeLinear",
        "Identity",
        "Split",
    }
    wanted: set[str] = set()
    for node in reversed(graph.node):
        if node.op_type in WEIGHT_READERS or (node.op_type in through and wanted & set(node.output)):
            wanted |= set(node.input)
    return wanted


def fill(model: onnx.ModelProto) -> onnx.ModelProto:
    """Inverse of ``strip``, with other values."""
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
