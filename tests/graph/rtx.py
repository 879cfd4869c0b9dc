"""TensorRT-RTX's parser and builder, which need no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from mptune.engines.base import EngineError
from mptune.engines.tensorrt.builder import BuildOptions, Feed, build_engine, parse_network
from mptune.engines.tensorrt.library import Library, load_library, open_log

COMPUTE_CAPABILITIES = ((8, 6), (8, 9), (12, 0))
SIZES = (3, 1, 4)
"""Usual, smallest and largest size of every dynamic dimension."""


def library() -> Library:
    """For tests that are marked ``tensorrt_rtx``."""
    return load_library("tensorrt-rtx")


def refusal(
    library: Library, path: Path, *, build: bool = True, capabilities: Sequence[tuple[int, int]] = COMPUTE_CAPABILITIES
) -> str | None:
    """Parse a model as a strongly typed network and build it ahead of time; None where both work, or the message."""
    try:
        if build:
            options = BuildOptions("tensorrt-rtx", capabilities=tuple(capabilities))
            build_engine(library, path, options, outlines(path))
        else:
            parse_network(library, path)
    except EngineError as error:
        return f"{error.kind.value}: {error.message}"
    return None


def outlines(path: Path) -> tuple[Feed, ...]:
    """Feeds of the sizes in question, all zero."""
    graph = onnx.load(path, load_external_data=False).graph
    constants = {value.name for value in graph.initializer}
    types = {value.name: value.type.tensor_type for value in graph.input if value.name not in constants}
    return tuple(
        {
            name: np.zeros(
                [dim.dim_value if dim.HasField("dim_value") else size for dim in kind.shape.dim],
                onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type),
            )
            for name, kind in types.items()
        }
        for size in SIZES
    )


def engine_faults(library: Library, data: Any) -> tuple[str, ...]:
    """Faults of an engine file by TensorRT-RTX's check of its header, as names of ``EngineInvalidityDiagnostics``."""
    trt = library.trt
    _, diagnostics = trt.Runtime(open_log(trt)).get_engine_validity(data)
    faults = trt.EngineInvalidityDiagnostics
    return tuple(fault.name for fault in (faults.MALFORMED_ENGINE, faults.VERSION_MISMATCH) if diagnostics & int(fault))
