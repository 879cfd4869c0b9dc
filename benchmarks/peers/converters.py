"""Converters of others, each by its documented call, in the process that this module is run as.

It needs the standard library, NumPy and the converter's packages, so that every converter may have an environment of
its own. Inputs and outputs keep their types.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Conversion:
    """What is converted: the model, with the rows of the first of its samples; to a file; but for some operators."""

    model: Path
    data: Path
    rows: int
    out: Path
    excluded: Sequence[str] = ()

    def first_sample(self) -> dict[str, np.ndarray]:
        """By input."""
        with np.load(self.data) as arrays:
            return {name: array[: self.rows] if array.ndim else array for name, array in arrays.items()}


def float16(given: Conversion, module: str) -> None:
    """ONNX Runtime's float16 converter, or onnxconverter-common's that it began as: its own block list."""
    import onnx

    converter = importlib.import_module(module)
    blocked = [*converter.DEFAULT_OP_BLOCK_LIST, *given.excluded]
    model = converter.convert_float_to_float16(onnx.load(given.model), keep_io_types=True, op_block_list=blocked)
    onnx.save(model, given.out)


def common_auto(given: Conversion) -> None:
    """onnxconverter-common's automatic mixed precision, which keeps nodes in FP32 until a sample is within 1 %."""
    import onnx
    from onnxconverter_common.auto_mixed_precision import auto_convert_mixed_precision

    sample, limits = given.first_sample(), {"rtol": 0.01, "atol": 0.001}
    onnx.save(auto_convert_mixed_precision(onnx.load(given.model), sample, **limits, keep_io_types=True), given.out)


def autocast(given: Conversion, **options: Any) -> None:
    """ModelOpt AutoCast as its guide begins: no data, so activations of random inputs decide."""
    import onnx
    from modelopt.onnx.autocast import convert_to_mixed_precision

    options |= {"low_precision_type": "fp16", "keep_io_types": True}
    options["op_types_to_exclude"] = list(given.excluded) or None
    onnx.save(convert_to_mixed_precision(str(given.model), **options), given.out)


def autocast_calibrated(given: Conversion) -> None:
    """ModelOpt AutoCast with calibration data: activations over 512 stay FP32."""
    batch = given.out.with_suffix(".npz")
    np.savez(batch, **given.first_sample())  # type: ignore[arg-type]
    autocast(given, calibration_data=str(batch))


def olive(given: Conversion) -> None:
    """Olive's pass OnnxFloatToFloat16."""
    os.environ["OLIVE_DISABLE_TELEMETRY"] = "1"
    from olive.workflows import run

    folder = given.out.with_suffix(".olive")
    fp16: dict[str, Any] = {"type": "OnnxFloatToFloat16", "keep_io_types": True}
    if given.excluded:
        from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST

        fp16["op_block_list"] = [*DEFAULT_OP_BLOCK_LIST, *given.excluded]
    config = {
        "input_model": {"type": "OnnxModel", "model_path": str(given.model)},
        "passes": {"fp16": fp16},
        "output_dir": str(folder),
        "cache_dir": str(folder / "cache"),
    }
    run(config)
    written = sorted(path for path in folder.rglob("*.onnx") if "cache" not in path.parts)
    if not written:
        raise FileNotFoundError("Olive wrote no model")
    written[0].rename(given.out)


CONVERTERS: dict[str, tuple[Callable[[Conversion], None], str]] = {
    "ONNX Runtime float16": (partial(float16, module="onnxruntime.transformers.float16"), "onnxruntime"),
    "onnxconverter-common auto": (common_auto, "onnxconverter_common"),
    "AutoCast": (autocast, "modelopt"),
    "AutoCast, calibrated": (autocast_calibrated, "modelopt"),
    "Olive float16": (olive, "olive"),
}
"""Name -> what it does, and the package that it needs. All but the second take operators to leave in FP32."""

NO_PEERS = {"onnxconverter-common float16": partial(float16, module="onnxconverter_common.float16")}
"""For ``benchmarks.trained``; no peer by itself, as ONNX Runtime's converter began as a copy of it."""


def main() -> None:
    parser = argparse.ArgumentParser(description="one converter, in this process")
    parser.add_argument("name", choices=(*CONVERTERS, *NO_PEERS))
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("rows", type=int)
    parser.add_argument("out", type=Path)
    parser.add_argument("--exclude", nargs="+", default=[], metavar="OPERATOR", help="left in FP32")
    given = parser.parse_args()
    started = time.monotonic()
    convert = NO_PEERS[given.name] if given.name in NO_PEERS else CONVERTERS[given.name][0]
    convert(Conversion(given.model, given.data, given.rows, given.out, given.exclude))
    peak_kib = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    figures = {"seconds": time.monotonic() - started, "peak_mib": peak_kib / 1024}
    given.out.with_suffix(".json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
