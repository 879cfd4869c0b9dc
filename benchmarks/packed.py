"""Models that others made of one, as small files: packed where the converters are, put together where the GPU is.

A converter leaves most weights as they were, or rounds them to FP16. Such weights are left out, and each is noted with
the weight of the original that it comes from; what is left are some 100 KB. The original that it is put together with
may be exported anew, by another version of torch: weights are found by name, shape and some of their values.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

_LEAST_BYTES = 256
"""Smaller weights stay in the file."""

_COMPARED = 16
"""Values by which a weight is known again; a norm that was folded in is off by some 1e-6 from machine to machine."""

_KEY = "benchmarks.peers.weights"

Array = np.ndarray


def _sized(least: float, most: float) -> Callable[[Array], Array]:
    """As converters round that let no value become 0 or infinite."""

    def rounded(values: Array) -> Array:
        size = np.where(values == 0.0, 0.0, np.clip(np.abs(values), least, most))
        result: Array = np.copysign(size, values).astype(np.float16)
        return result

    return rounded


def _as_autocast(values: Array) -> Array:
    """As AutoCast rounds: what would become 0 becomes the smallest positive value, whatever its sign."""
    least, most = (float(getattr(np.finfo(np.float16), name)) for name in ("smallest_subnormal", "max"))
    is_small = (values != 0.0) & (np.abs(values) < least)
    result: Array = np.where(is_small, least, np.clip(values, -most, most)).astype(np.float16)
    return result


HOW: Mapping[str, Callable[[Array], Array]] = {
    "same": lambda values: values,
    "fp16": lambda values: values.astype(np.float16),
    "fp16, 1e-7 to 1e4": _sized(1e-7, 1e4),
    "fp16, 5.96e-8 to 65504": _sized(5.96e-8, 65504.0),
    "AutoCast": _as_autocast,
}
"""What a converter may have done to a weight: the third is onnxconverter-common's, the fourth ONNX Runtime's."""


def pack(original: Path, converted: Path, out: Path) -> None:
    """Write a converted model, which has no external data, without the weights that follow from the original's."""
    weights = _weights(onnx.load(original))
    with np.errstate(over="ignore"):
        sources = {
            how(weight).tobytes(): (name, key)
            for name, weight in weights.items()
            for key, how in reversed(HOW.items())
            if key == "same" or weight.dtype == np.float32
        }
    model = onnx.load(converted)
    notes = {}
    for where, tensor in _tensors(model):
        source = sources.get(numpy_helper.to_array(tensor).tobytes())
        if source is not None:
            name, how = source
            notes[where] = [name, how, list(weights[name].shape), _some_values(weights[name])]
            for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
                tensor.ClearField(field)
    model.metadata_props.add(key=_KEY, value=json.dumps(notes))
    out.write_bytes(gzip.compress(model.SerializeToString(), mtime=0))


def unpack(original: Path, packed: Path, out: Path) -> None:
    """Write the converted model.

    Raises:
        ValueError: the original, which may be exported anew, has not all of the weights.
    """
    weights = _weights(onnx.load(original))
    model = onnx.load_from_string(gzip.decompress(packed.read_bytes()))
    notes = json.loads({prop.key: prop.value for prop in model.metadata_props}[_KEY])
    for where, tensor in _tensors(model):
        if where in notes:
            name, how, shape, values = notes[where]
            with np.errstate(over="ignore"):
                tensor.raw_data = HOW[how](_find(weights, name, shape, values)).tobytes()
    onnx.save(model, out)


def _tensors(model: onnx.ModelProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """Initializers by name, and the values of Constants by the output of their node."""
    for tensor in model.graph.initializer:
        yield tensor.name, tensor
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            yield node.output[0], node.attribute[0].t


def _weights(model: onnx.ModelProto) -> dict[str, Array]:
    """All tensors by name, but for the small ones."""
    arrays = {name: numpy_helper.to_array(tensor) for name, tensor in _tensors(model)}
    return {name: weight for name, weight in arrays.items() if weight.nbytes >= _LEAST_BYTES}


def _some_values(weight: Array) -> list[float]:
    """A few of its values, from everywhere."""
    values = weight.ravel()[:: max(1, weight.size // _COMPARED)][:_COMPARED]
    return [float(f"{float(value):.6g}") for value in values]


def _find(weights: Mapping[str, Array], name: str, shape: list[int], values: list[float]) -> Array:
    """The weight of this shape and with these values; names that an exporter counted may have shifted."""
    for candidate in (name, *weights):
        weight = weights.get(candidate)
        if weight is not None and list(weight.shape) == shape:
            scale = float(np.abs(values).max())
            if np.allclose(_some_values(weight), values, rtol=1e-3, atol=1e-3 * scale):
                return weight
    raise ValueError(f"the model here has no weight like {name} {shape}")
