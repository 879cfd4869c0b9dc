"""The sampler finds as much of the front of simulated models as it did when the thresholds were taken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

MODELS, BUILDS = 16, 25
LEAST = {12: 0.990, 40: 0.948}
"""Least mean share of the near-exact front's hypervolume (``benchmarks/simulator.py``), by groups.

Today's is 0.9938 and 0.9526. The noise is that of other seeds of the sampler on the same models, with a mean of 0.9932
and a standard deviation of 0.0007 at 12 groups, of 0.9521 and 0.0012 at 40; the thresholds are three of them below.
"""


@pytest.mark.slow
def test_share_of_the_hypervolume_after_25_builds(tmp_path: Path) -> None:
    """In a process of its own, where NumPy has one thread: on a busy machine more of them wait for each other."""
    out = tmp_path / "quality.json"
    options = ["--groups", "12", "40", "--samplers", "precision", "--seeds", str(MODELS), "--budget", str(BUILDS)]
    command = [sys.executable, "-m", "benchmarks.search_quality", *options, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    runs = json.loads(out.read_text())["runs"]
    for groups, least in LEAST.items():
        shares = [run["shares"][-1] for run in runs if run["groups"] == groups]
        assert len(shares) == MODELS
        assert np.mean(shares) >= least, f"{groups} groups: {np.mean(shares):.4f}"
