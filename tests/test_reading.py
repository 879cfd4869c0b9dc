"""What reading a run imports: commands that run no model start fast."""

from __future__ import annotations

import subprocess
import sys

import pytest


def imported(modules: str) -> set[str]:
    """The names of all modules that a fresh process has after importing these."""
    code = f"import sys, {modules}; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


@pytest.mark.parametrize("modules", ["mptune.api.reading, mptune.reporting.terminal.front", "mptune.tuning.space"])
def test_what_runs_no_model_is_without_what_does(modules: str) -> None:
    names = imported(modules)
    assert "mptune.tuning.evaluation" in names
    heavy = {"onnx", "onnxruntime", "scipy", "scipy.special", "PIL", "mptune.engines.toolchains.choose"}
    assert not heavy & names
    running = {name for name in names if name.startswith(("mptune.graph.writing.", "mptune.processes."))}
    assert running <= {"mptune.processes.child"}, "they start no process"
