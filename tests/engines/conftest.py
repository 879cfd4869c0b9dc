"""Fixtures for the engine floor: quick settings and a workspace of the MLP."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mptune.engines.base import Workspace
from mptune.engines.workload import Workload
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.settings import LatencySettings, SearchSettings, WorkerSettings
from tests.engines.engine_support import make_workspace

QUICK = LatencySettings(warmup_ms=1.0, duration_ms=1.0, min_iterations=10)


@pytest.fixture
def settings() -> SearchSettings:
    """Short timings and deadlines that only a hang reaches."""
    return SearchSettings(latency=QUICK, worker=WorkerSettings(build_timeout_s=60.0, measure_timeout_s=60.0))


@pytest.fixture
def mlp_workspace(mlp_path: Path, tmp_path: Path) -> Workspace:
    """The MLP with four search and four held-out samples of three rows."""
    rows = np.random.default_rng(3).normal(size=(3, 32)).astype(np.float32)
    return make_workspace(mlp_path, tmp_path, {"x": rows})


@pytest.fixture
def mlp_workload(mlp_path: Path, mlp_workspace: Workspace) -> Workload:
    """The MLP, its layer groups and that workspace."""
    model = load_model(mlp_path)
    return Workload(GroupedModel(model, find_groups(model)), mlp_workspace)
