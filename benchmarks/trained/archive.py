"""All variants of the networks as a few small files, to take to a device machine.

A weight of a kilobyte or more travels once: of equal ones the second names the first, and one in FP16 that is an FP32
weight of its network, rounded, is rounded again where it is unpacked.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from benchmarks.trained.variants import VARIANTS, file_of

PART_BYTES = 58 << 20
SMALLEST_BYTES = 1024
SAMPLES = 4
"""Of the search's samples, for one-group errors."""


def pack(folder: Path, names: Iterable[str], out: Path) -> list[Path]:
    """Write ``out.00``, ``out.01`` and so on."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "set"
        for name in names:
            _pack_network(folder / name, root / name)
        whole = Path(scratch) / "set.tar.xz"
        with tarfile.open(whole, "w:xz", preset=6) as archive:
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
    for pool in folder.glob("*/weights"):
        for path in pool.parent.rglob("*.onnx"):
            model = onnx.load(path)
            references = json.loads(path.with_suffix(".json").read_text())
            for tensor in model.graph.initializer:
                if tensor.name in references:
                    digest, is_rounded = references[tensor.name]
                    content = (pool / digest).read_bytes()
                    if is_rounded:
                        content = _rounded(np.frombuffer(content, np.float32)).tobytes()
                    tensor.raw_data = content
            onnx.save(model, path)
        shutil.rmtree(pool)


def _rounded(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return values.astype(np.float16)


def _pack_network(folder: Path, out: Path) -> None:
    pool = out / "weights"
    pool.mkdir(parents=True)
    halves: dict[str, str] = {}
    for variant in VARIANTS:
        path = file_of(folder, variant)
        if not path.exists():
            continue
        model, references = onnx.load(path), {}
        for tensor in model.graph.initializer:
            if tensor.data_type not in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16):
                continue
            values = numpy_helper.to_array(tensor)
            if values.nbytes < SMALLEST_BYTES:
                continue
            digest = hashlib.sha256(values.tobytes()).hexdigest()
            references[tensor.name] = (halves.get(digest, digest), digest in halves)
            if digest not in halves and not (pool / digest).exists():
                (pool / digest).write_bytes(values.tobytes())
            if values.dtype == np.float32:
                halves[hashlib.sha256(_rounded(values).tobytes()).hexdigest()] = digest
            for field in ("raw_data", "float_data", "int32_data"):
                tensor.ClearField(field)
        target = file_of(out, variant)
        target.parent.mkdir(exist_ok=True)
        onnx.save(model, target)
        target.with_suffix(".json").write_text(json.dumps(references))
    for which, count in (("held_out", None), ("search", SAMPLES)):
        (out / which).mkdir()
        for path in sorted((folder / which).iterdir())[:count]:
            shutil.copy(path, out / which)
