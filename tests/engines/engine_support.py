"""Workspaces with samples, for tests of jobs and toolchains."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mptune.data.calibration import CalibrationSet
from mptune.engines.base import Workspace


def make_workspace(model: Path, folder: Path, samples: dict[str, np.ndarray], count: int = 4) -> Workspace:
    """A workspace with ``count`` search and held-out samples that vary around the given feed."""
    generator = np.random.default_rng(5)
    workspace = Workspace(model, *(folder / name for name in ("weights", "data", "engines", "logs")))
    for which in ("search", "held_out"):
        feeds = tuple(
            {k: (v + generator.normal(0, 0.1, v.shape)).astype(v.dtype) for k, v in samples.items()}
            for _ in range(count)
        )
        path = workspace.samples(which)
        path.parent.mkdir(parents=True, exist_ok=True)
        CalibrationSet(feeds, "test", False, ()).save(path)
    return workspace
