"""Models of converters, as small files: made where the converters are installed, put together where the GPU is.

A converter leaves most weights as they were, or rounds them to FP16. Such weights are left out, and each is noted with
the weight of the original model that it comes from; what is left are some 100 KB. The original that it is put together
with may be exported anew, by another version of torch: weights are found by name, shape and some of their values.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
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
    """Write a converted model without the weights that follow from the original's.

    Args:
        original: the model that was converted.
        converted: what the converter wrote; without external data.
        out: the packed file.
    """
    weights = _weights(onnx.load(original))
    with np.errstate(over="ignore"):
        found = {
            how(weight).tobytes(): (name, key)
            for name, weight in weights.items()
            for key, how in reversed(HOW.items())
            if key == "same" or weight.dtype == np.float32
        }
    model = onnx.load(converted)
    noted = {}
    for tensor in model.graph.initializer:
        source = found.get(numpy_helper.to_array(tensor).tobytes())
        if source is not None:
            name, how = source
            noted[tensor.name] = [name, how, list(weights[name].shape), _some(weights[name])]
            tensor.ClearField("raw_data")
            tensor.ClearField("float_data")
            tensor.ClearField("int32_data")
    model.metadata_props.add(key=_KEY, value=json.dumps(noted))
    out.write_bytes(gzip.compress(model.SerializeToString(), mtime=0))


def unpack(original: Path, packed: Path, out: Path) -> None:
    """Write the converted model.

    Args:
        original: the model that was converted, maybe exported anew.
        packed: of ``pack``.
        out: the model file.

    Raises:
        ValueError: the original has not all of the weights.
    """
    weights = _weights(onnx.load(original))
    model = onnx.load_from_string(gzip.decompress(packed.read_bytes()))
    noted = {prop.key: prop.value for prop in model.metadata_props}[_KEY]
    sources = json.loads(noted)
    for tensor in model.graph.initializer:
        if tensor.name in sources:
            name, how, shape, some = sources[tensor.name]
            with np.errstate(over="ignore"):
                tensor.raw_data = HOW[how](_find(weights, name, shape, some)).tobytes()
    onnx.save(model, out)


def _some(weight: Array) -> list[float]:
    """A few of its values, from everywhere."""
    values = weight.ravel()[:: max(1, weight.size // _COMPARED)][:_COMPARED]
    return [float(f"{float(value):.6g}") for value in values]


def _find(weights: Mapping[str, Array], name: str, shape: list[int], some: list[float]) -> Array:
    """The weight of this shape and with these values; names that an exporter counted may have shifted."""
    for one in (name, *weights):
        weight = weights.get(one)
        if weight is not None and list(weight.shape) == shape:
            scale = float(np.abs(some).max())
            if np.allclose(_some(weight), some, rtol=1e-3, atol=1e-3 * scale):
                return weight
    raise ValueError(f"the model here has no weight like {name} {shape}")


def _weights(model: onnx.ModelProto) -> dict[str, Array]:
    """Weights by name, and by their node's output where a Constant holds them; not the small ones."""
    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            found[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
    return {name: weight for name, weight in found.items() if weight.nbytes >= _LEAST_BYTES}
