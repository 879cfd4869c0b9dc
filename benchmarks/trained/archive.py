"""All variants of the networks as a few small files, to take to a device machine.

Each network's FP32 model travels whole, and every variant without the weights that follow from it
(``benchmarks.packed``).
"""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.packed import pack, unpack
from benchmarks.trained.variants import FP32, VARIANTS, file_of

PART_BYTES = 58 << 20


def pack_all(folder: Path, names: Iterable[str], out: Path) -> list[Path]:
    """Write ``out.00``, ``out.01`` and so on."""
    with tempfile.TemporaryDirectory() as scratch:
        root, whole = Path(scratch) / "set", Path(scratch) / "set.tar.xz"
        for name in names:
            shutil.copytree(folder / name / "held_out", root / name / "held_out")
            (root / name / "variants").mkdir()
            for variant in VARIANTS:
                path, target = (file_of(place / name, variant) for place in (folder, root))
                if variant == FP32:
                    shutil.copy(path, target)
                elif path.exists():
                    pack(file_of(folder / name, FP32), path, target.with_suffix(".onnx.gz"))
        with tarfile.open(whole, "w:xz", preset=1) as archive:
            archive.add(root, ".")
        parts = []
        with whole.open("rb") as file:
            while content := file.read(PART_BYTES):
                parts.append(out.with_name(f"{out.name}.{len(parts):02}"))
                parts[-1].write_bytes(content)
    return parts


def unpack_all(parts: Sequence[Path], folder: Path) -> None:
    """Write what was packed."""
    with tempfile.TemporaryFile() as whole:
        for part in sorted(parts):
            whole.write(part.read_bytes())
        whole.seek(0)
        with tarfile.open(fileobj=whole) as archive:
            archive.extractall(folder, filter="data")
    for packed in folder.glob("*/variants/*.onnx.gz"):
        unpack(file_of(packed.parents[1], FP32), packed, packed.with_suffix(""))
        packed.unlink()
