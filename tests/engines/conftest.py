"""Fixtures for the engine floor: quick settings, and the MLP with samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mptune.engines.context import RunContext
from mptune.graph.loading.model import load_model
from mptune.settings import LatencySettings, SearchSettings, WorkerSettings
from tests.engines.engine_support import make_context

QUICK = LatencySettings(warmup_ms=1.0, duration_ms=1.0, min_iterations=10)


@pytest.fixture
def settings() -> SearchSettings:
    """Short timings and deadlines that only a hang reaches."""
    return SearchSettings(latency=QUICK, worker=WorkerSettings(build_timeout_s=60.0, measure_timeout_s=60.0))


@pytest.fixture
def mlp_context(mlp_path: Path, tmp_path: Path, settings: SearchSettings) -> RunContext:
    """The MLP with four search and four held-out samples of three rows, and those settings."""
    rows = np.random.default_rng(3).normal(size=(3, 32)).astype(np.float32)
    return make_context(load_model(mlp_path), tmp_path, {"x": rows}, settings=settings)
