"""What the benchmarks share: a workspace of their own, and tables."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from mptune.data.calibration import CalibrationSet, load_calibration
from mptune.engines.base import Failure, Workspace
from mptune.engines.environment import describe_environment
from mptune.graph.groups import LayerGroup
from mptune.graph.model import Model, load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.settings import DataSettings

T = TypeVar("T")


def workspace(model: Path, data: Path, folder: Path, samples: int, batch: int) -> Workspace:
    """A run's folders under ``folder``, with the first ``samples`` samples as both search and held-out samples."""
    made = Workspace(model, *(folder / name for name in ("weights", "data", "engines", "logs")))
    for path in (made.weights_dir, made.data_dir, made.engines_dir, made.logs_dir):
        path.mkdir(parents=True, exist_ok=True)
    loaded = load_calibration(data, load_model(model).inputs, DataSettings(batch=batch), seed=0)
    chosen = CalibrationSet(loaded.samples[:samples], loaded.source, loaded.is_random, loaded.warnings)
    chosen.save(made.samples("search"))
    chosen.save(made.samples("held_out"))
    return made


def one_group_plans(model: Model, groups: Sequence[LayerGroup]) -> dict[str, PrecisionPlan]:
    """Group id -> the plan with that group alone in FP16."""
    fp32 = PrecisionPlan.uniform(model.sha256, [g.id for g in groups], Precision.FP32)
    return {g.id: fp32.replace({g.id: Precision.FP16}) for g in groups}


def require(result: T | Failure) -> T:
    """The result, or stop with the failure's words."""
    if isinstance(result, Failure):
        raise SystemExit(f"{result.kind.value} ({result.stage.value}): {result.message}")
    return result


def save(path: Path | None, document: dict[str, Any]) -> None:
    """Write the figures with the environment they were taken in."""
    if path is not None:
        document = {**document, "environment": describe_environment().to_json(), "host": platform.machine()}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1))
