"""The usual model and two plans of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mptune.graph.grouping.groups import LayerGroup, find_groups
from mptune.graph.loading.model import Model, load_model
from mptune.graph.plan import Precision, PrecisionPlan


@pytest.fixture
def model(mlp_path: Path) -> Model:
    return load_model(mlp_path)


@pytest.fixture
def groups(model: Model) -> tuple[LayerGroup, ...]:
    return find_groups(model)


@pytest.fixture
def fp32(model: Model, groups: tuple[LayerGroup, ...]) -> PrecisionPlan:
    return PrecisionPlan.uniform(model.sha256, [group.id for group in groups], Precision.FP32)


@pytest.fixture
def fp16(fp32: PrecisionPlan, groups: tuple[LayerGroup, ...]) -> PrecisionPlan:
    return fp32.replace({group.id: Precision.FP16 for group in groups if group.pinned is None})
