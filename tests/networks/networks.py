"""The whole networks of ``tests/graph/exported/networks``: their files, samples for them, and how to read one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from mptune.graph.loading.model import Model
from mptune.graph.loading.tensors import TensorInfo
from tests.graph.exported.stripped import load_filled

FOLDER = Path(__file__).resolve().parent.parent / "graph" / "exported" / "networks"
FILES = {path.stem: path for path in sorted(FOLDER.glob("*.onnx"))}
SIZES = {"batch": 1, "length": 4, "before": 3, "height": 32, "width": 32}
"""Of the dynamic dimensions, in a sample."""
VOCABULARY = 60


def filled(stem: str, folder: Path) -> Path:
    """The path of a copy with weights."""
    path = folder / f"{stem}.onnx"
    onnx.save(load_filled(FILES[stem]), path)
    return path


def shapes_of(path: Path, feed: dict[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    """The shape of every value that a node computes, at one sample."""
    model = onnx.load(path)
    results = {output.name for output in model.graph.output}
    names = [name for node in model.graph.node for name in node.output if name and name not in results]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    outputs = [output.name for output in session.get_outputs()]
    shapes = {name: value.shape for name, value in zip(outputs, session.run(None, feed), strict=True)}
    return shapes | {name: value.shape for name, value in feed.items()}


def samples(model: Model, count: int = 4) -> list[dict[str, np.ndarray]]:
    """Samples that look like what the network reads: smooth signals, tokens, a mask of padding at the end."""
    rng = np.random.default_rng(3)
    return [{info.name: _value(info, rng) for info in model.inputs} for _ in range(count)]


def _value(info: TensorInfo, rng: np.random.Generator) -> np.ndarray:
    name, dtype = info.name, info.numpy_dtype
    sizes = [size if isinstance(size, int) else SIZES[str(size)] for size in info.shape or ()]
    if name == "attention_mask":
        return (np.arange(sizes[1]) < rng.integers(4, sizes[1] + 1, (sizes[0], 1))).astype(dtype)
    if name == "timestep":
        return rng.integers(0, 1000, sizes).astype(dtype)
    if dtype.kind != "f":
        return rng.integers(1, VOCABULARY, sizes).astype(dtype)
    return _smooth(rng, sizes).astype(dtype)


def _smooth(rng: np.random.Generator, shape: list[int]) -> np.ndarray:
    """A few waves over the axes behind the batch, of unit variance: neighbours are alike."""
    values = np.zeros(shape)
    for _ in range(4):
        phase = np.full(shape, rng.uniform(0, 6.3))
        for axis in range(1, len(shape)):
            steps = np.arange(shape[axis]).reshape([-1 if k == axis else 1 for k in range(len(shape))])
            phase = phase + rng.uniform(0.05, 0.35) * steps
        values += rng.uniform(0.5, 1.5) * np.sin(phase)
    return (values - values.mean()) / (values.std() + 1e-6)
