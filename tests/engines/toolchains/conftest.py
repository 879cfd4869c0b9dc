"""Two plans of the usual model, and a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from mptune.engines.context import RunContext
from mptune.graph.plan import Precision, PrecisionPlan
from tests.device.machines import ADA, write_nvidia_smi


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
