"""TensorRT-RTX's parser and builder, which need no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

COMPUTE_CAPABILITIES = ("SM86", "SM89", "SM120")
RANGE = (1, 3, 4)
"""Smallest, usual and largest size of every dynamic dimension."""


def require() -> Any:
    """The module, or skip the test with the reason."""
    return pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed (pip install tensorrt-rtx)")


def refusal(trt: Any, path: Path, *, build: bool = True) -> str | None:
    """Parse a model as a strongly typed network and build it ahead of time; None where both work, or the message."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.ERROR:
                self.errors.append(message)

    log = Log()
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(path)):
        errors = [parser.get_error(k) for k in range(parser.num_errors)]
        return "; ".join(dict.fromkeys(f"{e.node_operator()}: {e.desc()}" for e in errors)) or "cannot be parsed"
    if not build:
        return None
    config = builder.create_builder_config()
    config.num_compute_capabilities = len(COMPUTE_CAPABILITIES)
    for position, name in enumerate(COMPUTE_CAPABILITIES):
        config.set_compute_capability(getattr(trt.ComputeCapability, name), position)
    profile = builder.create_optimization_profile()
    for position in range(network.num_inputs):
        value = network.get_input(position)
        if value.is_shape_tensor:
            continue
        shapes = [tuple(size if dim < 0 else dim for dim in value.shape) for size in RANGE]
        profile.set_shape(value.name, *shapes)
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    if engine is None or not engine.nbytes:
        return "; ".join(dict.fromkeys(log.errors)) or "cannot be built"
    return None
