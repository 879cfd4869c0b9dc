"""All variants of the networks as a few small files, to take to a device machine.

A tensor of a kilobyte or more travels once: equal ones name the same file, and one in FP16 that is an FP32 tensor of
its network, rounded, is rounded again where it is unpacked. Of one that is so in most places, as where a converter
moves the smallest weights away from 0, the difference in bits travels.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from benchmarks.trained.variants import VARIANTS, file_of

PART_BYTES = 58 << 20
SMALLEST_BYTES = 1024


def pack(folder: Path, names: Iterable[str], out: Path) -> list[Path]:
    """Write ``out.00``, ``out.01`` and so on."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "set"
        for name in names:
            _pack_network(folder / name, root / name)
        whole = Path(scratch) / "set.tar.xz"
        with tarfile.open(whole, "w:xz", preset=1) as archive:
            archive.add(root, ".")
        parts = []
        with whole.open("rb") as file:
            while content := file.read(PART_BYTES):
                parts.append(out.with_name(f"{out.name}.{len(parts):02}"))
                parts[-1].write_bytes(content)
    return parts


def unpack(parts: Sequence[Path], folder: Path) -> None:
    """Write what was packed."""
    whole = lzma.decompress(b"".join(part.read_bytes() for part in sorted(parts)))
    with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
        archive.extractall(folder, filter="data")
    for pool in folder.glob("*/tensors"):
        for path in pool.parent.rglob("*.onnx"):
            model = onnx.load(path)
            tensors = list(_tensors(model))
            for index, digest, difference in json.loads(path.with_suffix(".json").read_text()):
                content = (pool / digest).read_bytes()
                if difference is not None:
                    content = _rounded(np.frombuffer(content, np.float32)).tobytes()
                if difference:
                    content = _xor(content, (pool / difference).read_bytes())
                tensors[index].raw_data = content
            onnx.save(model, path)
        shutil.rmtree(pool)


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Initializers and constants of the main graph, always in the same order."""
    yield from model.graph.initializer
    for node in model.graph.node:
        yield from (a.t for a in node.attribute if node.op_type == "Constant" and a.type == onnx.AttributeProto.TENSOR)


def _xor(a: bytes, b: bytes) -> bytes:
    return (np.frombuffer(a, np.uint8) ^ np.frombuffer(b, np.uint8)).tobytes()


def _rounded(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return values.astype(np.float16)


def _pack_network(folder: Path, out: Path) -> None:
    pool = out / "tensors"
    pool.mkdir(parents=True)
    singles: dict[str, np.ndarray] = {}

    def keep(content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        if not (pool / digest).exists():
            (pool / digest).write_bytes(content)
        return digest

    def reference(values: np.ndarray) -> tuple[str, str | None]:
        """The file of a tensor; or that of what it is the rounding of, with the file of the difference, if any."""
        for digest, single in singles.items() if values.dtype == np.float16 else ():
            if single.shape != values.shape:
                continue
            difference = _xor(_rounded(single).tobytes(), values.tobytes())
            if not any(difference):
                return digest, ""
            if np.mean(_rounded(single) == values) > 0.5:
                return digest, keep(difference)
        digest = keep(values.tobytes())
        if values.dtype == np.float32:
            singles[digest] = values
        return digest, None

    for variant in VARIANTS:
        path = file_of(folder, variant)
        if not path.exists():
            continue
        model, references = onnx.load(path), []
        for index, tensor in enumerate(_tensors(model)):
            values = numpy_helper.to_array(tensor)
            if values.nbytes >= SMALLEST_BYTES and values.dtype.kind in "fiu":
                references.append((index, *reference(values)))
                for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
                    tensor.ClearField(field)
        target = file_of(out, variant)
        target.parent.mkdir(exist_ok=True)
        onnx.save(model, target)
        target.with_suffix(".json").write_text(json.dumps(references))
    shutil.copytree(folder / "held_out", out / "held_out")
