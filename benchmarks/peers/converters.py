"""Converters of others, each by its documented call, in the process that this module is run as.

It needs the standard library, NumPy and the converter's packages, so that every converter may have an environment of
its own.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def peak_mib() -> float:
    """The most memory that was resident in this process so far."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def _first_sample(data: Path, rows: int) -> dict[str, np.ndarray]:
    with np.load(data) as arrays:
        return {name: array[:rows] if array.ndim else array for name, array in arrays.items()}


def ort_float16(model: Path, data: Path, rows: int, out: Path, excluded: Sequence[str] = ()) -> None:
    """ONNX Runtime's float16 converter, its own block list, inputs and outputs kept (onnxruntime.ai, float16)."""
    import onnx
    from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16

    blocked = [*DEFAULT_OP_BLOCK_LIST, *excluded]
    onnx.save(convert_float_to_float16(onnx.load(model), keep_io_types=True, op_block_list=blocked), out)


def converter_common_float16(model: Path, data: Path, rows: int, out: Path, excluded: Sequence[str] = ()) -> None:
    """onnxconverter-common's float16, its own block list, inputs and outputs kept."""
    import onnx
    from onnxconverter_common.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16

    blocked = [*DEFAULT_OP_BLOCK_LIST, *excluded]
    onnx.save(convert_float_to_float16(onnx.load(model), keep_io_types=True, op_block_list=blocked), out)


def converter_common(model: Path, data: Path, rows: int, out: Path, excluded: Sequence[str] = ()) -> None:
    """onnxconverter-common's automatic mixed precision, which keeps nodes in FP32 until a sample is within 1 %."""
    assert not excluded, "it takes no operators to leave out"
    import onnx
    from onnxconverter_common.auto_mixed_precision import auto_convert_mixed_precision

    feed = _first_sample(data, rows)
    onnx.save(auto_convert_mixed_precision(onnx.load(model), feed, rtol=0.01, atol=0.001, keep_io_types=True), out)


def autocast(model: Path, data: Path, rows: int, out: Path, excluded: Sequence[str] = ()) -> None:
    """ModelOpt AutoCast as its guide begins: no data, so activations of random inputs decide."""
    _autocast(model, out, op_types_to_exclude=list(excluded) or None)


def autocast_calibrated(model: Path, data: Path, rows: int, out: Path, excluded: Sequence[str] = ()) -> None:
    """ModelOpt AutoCast with calibration data: activations over 512 stay FP32."""
    batch = out.with_suffix(".npz")
    np.savez(batch, **_first_sample(data, rows))
    _autocast(model, out, calibration_data=str(batch), op_types_to_exclude=list(excluded) or None)


def _autocast(model: Path, out: Path, **options: Any) -> None:
    import onnx
    from modelopt.onnx.autocast import convert_to_mixed_precision

    onnx.save(convert_to_mixed_precision(str(model), low_precision_type="fp16", keep_io_types=True, **options), out)


def olive(model: Path, data: Path, rows: int, out: Path, excluded: Sequence[str] = ()) -> None:
    """Olive's pass OnnxFloatToFloat16, inputs and outputs kept."""
    os.environ["OLIVE_DISABLE_TELEMETRY"] = "1"
    from olive.workflows import run

    folder = out.with_suffix(".olive")
    fp16: dict[str, Any] = {"type": "OnnxFloatToFloat16", "keep_io_types": True}
    if excluded:
        from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST

        fp16["op_block_list"] = [*DEFAULT_OP_BLOCK_LIST, *excluded]
    config = {
        "input_model": {"type": "OnnxModel", "model_path": str(model)},
        "passes": {"fp16": fp16},
        "output_dir": str(folder),
        "cache_dir": str(folder / "cache"),
    }
    run(config)
    found = sorted(path for path in folder.rglob("*.onnx") if "cache" not in path.parts)
    if not found:
        raise FileNotFoundError("Olive wrote no model")
    found[0].rename(out)


CONVERTERS: dict[str, tuple[Callable[[Path, Path, int, Path, Sequence[str]], None], str]] = {
    "ONNX Runtime float16": (ort_float16, "onnxruntime"),
    "onnxconverter-common auto": (converter_common, "onnxconverter_common"),
    "AutoCast": (autocast, "modelopt"),
    "AutoCast, calibrated": (autocast_calibrated, "modelopt"),
    "Olive float16": (olive, "olive"),
}
"""Name -> what it does, and the package that it needs."""

FLOAT16_OF_COMMON = "onnxconverter-common float16"
"""For ``benchmarks.trained``; no peer by itself, as ONNX Runtime's converter began as a copy of it."""

EXCLUDING = ("ONNX Runtime float16", "AutoCast", "AutoCast, calibrated", "Olive float16")
"""Those that take operators to leave in FP32."""


def label(name: str, excluded: Sequence[str]) -> str:
    """What a converter is called where it was told to leave operators in FP32."""
    return f"{name}, {' and '.join(excluded)} in FP32" if excluded else name


def main() -> None:
    parser = argparse.ArgumentParser(description="one converter, in this process")
    parser.add_argument("name", choices=(*CONVERTERS, FLOAT16_OF_COMMON))
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("rows", type=int)
    parser.add_argument("out", type=Path)
    parser.add_argument("--exclude", nargs="+", default=[], metavar="OPERATOR", help="left in FP32")
    given = parser.parse_args()
    started = time.monotonic()
    convert = converter_common_float16 if given.name == FLOAT16_OF_COMMON else CONVERTERS[given.name][0]
    convert(given.model, given.data, given.rows, given.out, given.exclude)
    figures = {"seconds": time.monotonic() - started, "peak_mib": peak_mib()}
    given.out.with_suffix(".json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
