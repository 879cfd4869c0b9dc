"""The sampler finds as much of simulated models as it did when the thresholds were taken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

MODELS, BUILDS = 16, 25
ROWS = [
    ("no limit", 12, False, "shares", 0.990),
    ("no limit", 40, False, "shares", 0.948),
    ("precision", 40, True, "gains", 0.97),
    ("profiled", 40, True, "gains", 0.97),
]
"""Sampler, groups, whether the models are hard, and the least mean of a figure (``benchmarks/search_quality.py``).

Of the front, without a limit, today's is 0.9938 and 0.9526. The noise is that of other seeds of the sampler on the same
models: ten at 12 groups (over 20 models) have a mean of 0.9932 and a standard deviation of 0.0007, six at 40 groups
0.9521 and 0.0012. The thresholds are at least three of them below their means. Of the gain within 1 %, where a quarter
of the boundaries breaks a fusion, it is 0.990, and 0.987 with profiles.
"""


@pytest.mark.slow
@pytest.mark.parametrize(("sampler", "groups", "is_hard", "figure", "least"), ROWS)
def test_what_is_known_after_25_builds(
    sampler: str, groups: int, is_hard: bool, figure: str, least: float, tmp_path: Path
) -> None:
    """In a process of its own, where NumPy has one thread: on a busy machine more of them wait for each other."""
    out = tmp_path / "quality.json"
    options = ["--groups", str(groups), "--samplers", sampler, "--seeds", str(MODELS), "--budget", str(BUILDS)]
    options += ["--limits", "1e-2", *(["--hard"] if is_hard else [])]
    command = [sys.executable, "-m", "benchmarks.search_quality", *options, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    figures = [run[figure][-1] for run in json.loads(out.read_text())["runs"]]
    assert len(figures) == MODELS
    assert np.mean(figures) >= least, f"{np.mean(figures):.4f}"
