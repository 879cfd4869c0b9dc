"""What others make of a model, each at its best documented use: a plan of our layer groups, or a model file of theirs.

Converters run in a process of their own, whose seconds and peak memory are taken; where one crashes, its last words are
the result. Each converter's module says here which documented call it is.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.huge import peak_mib

CONVERTER_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Made:
    """What a peer came to.

    Attributes:
        peer: its name.
        plan: one 0 or 1 per layer group, or a model file.
        builds: engines that it built to get there.
        seconds: that it took, without those builds; None where nobody timed it.
        peak_mib: peak memory of its process; None where it had none.
        budget: builds that it was allowed, of a search; None where it takes none.
        emulated: plans that it emulated.
    """

    peer: str
    plan: str | Path
    builds: int = 0
    seconds: float | None = None
    peak_mib: float | None = None
    budget: int | None = None
    emulated: int = 0


@dataclass(frozen=True)
class Crashed:
    """A peer that came to nothing, with its words."""

    peer: str
    words: str


def _first_sample(data: Path, rows: int) -> dict[str, np.ndarray]:
    with np.load(data) as arrays:
        return {name: arrays[name][:rows] for name in arrays.files}


def ort_float16(model: Path, data: Path, rows: int, out: Path) -> None:
    """ONNX Runtime's float16 converter, its own block list, inputs and outputs kept (onnxruntime.ai, float16)."""
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(model), keep_io_types=True), out)


def converter_common(model: Path, data: Path, rows: int, out: Path) -> None:
    """onnxconverter-common's automatic mixed precision, which keeps nodes in FP32 until a sample is within 1 %."""
    import onnx
    from onnxconverter_common.auto_mixed_precision import auto_convert_mixed_precision

    feed = _first_sample(data, rows)
    onnx.save(auto_convert_mixed_precision(onnx.load(model), feed, rtol=0.01, atol=0.001, keep_io_types=True), out)


def autocast(model: Path, data: Path, rows: int, out: Path) -> None:
    """ModelOpt AutoCast as its guide begins: no data, so activations of random inputs decide."""
    _autocast(model, out)


def autocast_calibrated(model: Path, data: Path, rows: int, out: Path) -> None:
    """ModelOpt AutoCast with calibration data: activations over 512 stay FP32."""
    batch = out.with_suffix(".npz")
    np.savez(batch, **_first_sample(data, rows))
    _autocast(model, out, calibration_data=str(batch))


def _autocast(model: Path, out: Path, **options: Any) -> None:
    import onnx
    from modelopt.onnx.autocast import convert_to_mixed_precision

    onnx.save(convert_to_mixed_precision(str(model), low_precision_type="fp16", keep_io_types=True, **options), out)


def olive(model: Path, data: Path, rows: int, out: Path) -> None:
    """Olive's pass OnnxFloatToFloat16, inputs and outputs kept."""
    from olive.workflows import run

    folder = out.with_suffix(".olive")
    config = {
        "input_model": {"type": "OnnxModel", "model_path": str(model)},
        "passes": {"fp16": {"type": "OnnxFloatToFloat16", "keep_io_types": True}},
        "output_dir": str(folder),
        "cache_dir": str(folder / "cache"),
    }
    run(config)
    found = sorted(path for path in folder.rglob("*.onnx") if "cache" not in path.parts)
    if not found:
        raise FileNotFoundError("Olive wrote no model")
    found[0].rename(out)


CONVERTERS: dict[str, tuple[Callable[[Path, Path, int, Path], None], str]] = {
    "ONNX Runtime float16": (ort_float16, "onnxruntime"),
    "onnxconverter-common auto": (converter_common, "onnxconverter_common"),
    "AutoCast": (autocast, "modelopt"),
    "AutoCast, calibrated": (autocast_calibrated, "modelopt"),
    "Olive float16": (olive, "olive"),
}
"""Name -> what it does, and the package that it needs."""


def convert(name: str, model: Path, data: Path, rows: int, work: Path) -> Made | Crashed:
    """Run a converter in a process of its own; an earlier result in ``work`` is taken as it is."""
    out = work / f"{name.replace(' ', '_').replace(',', '')}.onnx"
    note = out.with_suffix(".json")
    if not note.exists():
        _, package = CONVERTERS[name]
        if importlib.util.find_spec(package) is None:
            return Crashed(name, f"not run: the package {package} is not installed here")
        work.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "benchmarks.peers.own", name, str(model), str(data), str(rows), str(out)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=CONVERTER_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return Crashed(name, f"stopped after {CONVERTER_TIMEOUT_S:g} s")
        if done.returncode:
            words = [line for line in done.stderr.splitlines() if line.strip()]
            return Crashed(name, words[-1][:300] if words else f"exit status {done.returncode}")
    figures = json.loads(note.read_text())
    return Made(name, out, seconds=figures["seconds"], peak_mib=figures["peak_mib"])


def bisect(groups: Sequence[int], count: int, is_good: Callable[[str], bool], *, forward: bool) -> tuple[str, int]:
    """Polygraphy's idea (``debug precision --mode bisect``): the fewest leading or trailing groups to keep in FP32.

    Args:
        groups: positions of the groups that may be FP16, in the order of the graph.
        count: of all groups.
        is_good: whether a plan is within the tolerance; called once for each plan, which is then built.
        forward: keep groups from the front of the network in FP32, else from its end.

    Returns:
        The plan with the fewest FP32 groups that was seen to be good (all-FP32 where none was), and the builds.
    """

    def plan(kept: int) -> str:
        half = set(groups[kept:] if forward else groups[: len(groups) - kept])
        return "".join("01"[position in half] for position in range(count))

    low, high, builds = 0, len(groups), 0  # all of them in FP32 is taken to be good
    while low < high:
        middle = (low + high) // 2
        builds += 1
        low, high = (low, middle) if is_good(plan(middle)) else (middle + 1, high)
    return plan(high), builds


def main() -> None:
    parser = argparse.ArgumentParser(description="one converter, in this process")
    parser.add_argument("name", choices=CONVERTERS)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("rows", type=int)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    started = time.monotonic()
    CONVERTERS[given.name][0](given.model, given.data, given.rows, given.out)
    figures = {"seconds": time.monotonic() - started, "peak_mib": peak_mib()}
    given.out.with_suffix(".json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
