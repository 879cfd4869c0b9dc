"""Fixtures for the engine floor: quick settings, the MLP with samples, a device on which TensorRT's sessions open."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mptune.engines import cuda
from mptune.engines.context import RunContext
from mptune.engines.tensorrt import session as tensorrt_session
from mptune.engines.tensorrt.library import MODULES, Library
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.settings import SearchSettings, WorkerSettings
from tests.device.cuda import FakeCuda
from tests.device.machines import ADA, write_nvidia_smi
from tests.device.tensorrt import make_module
from tests.engines.engine_support import QUICK, make_context


@pytest.fixture
def settings() -> SearchSettings:
    """Short timings and deadlines that only a hang reaches."""
    return SearchSettings(latency=QUICK, worker=WorkerSettings(build_timeout_s=60.0, measure_timeout_s=60.0))


@pytest.fixture
def mlp_context(mlp_path: Path, tmp_path: Path, settings: SearchSettings) -> RunContext:
    """The MLP with four search and four held-out samples of three rows, and those settings."""
    rows = np.random.default_rng(3).normal(size=(3, 32)).astype(np.float32)
    return make_context(load_model(mlp_path), tmp_path, {"x": rows}, settings=settings)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A device in host memory; in the end nothing is left on it, and no rule of TensorRT's was broken."""
    device = FakeCuda()
    monkeypatch.setattr(cuda, "runtime", lambda: device)
    modules = {kind: make_module("10.16.2", device, is_rtx=kind != "tensorrt") for kind in MODULES}
    monkeypatch.setattr(tensorrt_session, "load_library", lambda kind, plugins: Library(kind, modules[kind], "10.16"))
    yield device
    assert device.leaks == []
    assert device.rules.forbidden == []


@pytest.fixture
def fp32(mlp_context: RunContext) -> PrecisionPlan:
    return mlp_context.grouped.uniform(Precision.FP32)


@pytest.fixture
def fp16(mlp_context: RunContext) -> PrecisionPlan:
    return mlp_context.grouped.uniform(Precision.FP16)


@pytest.fixture
def gpu_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi shows an RTX 4500 Ada; nothing can run on it."""
    write_nvidia_smi(ADA, tmp_path / "bin" / "nvidia-smi")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")  # it alone, also where the tests run with a GPU hidden
