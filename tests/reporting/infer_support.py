"""chosen/infer.py as a user has it: as a module, and as a script with numpy and onnxruntime alone."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import onnxruntime
import pytest

from mptune.graph.loading.model import load_model
from mptune.reporting.chosen import infer_script
from mptune.reporting.recipe import BuildRecipe

ALONE = """\
import runpy, sys
sys.path.insert(0, sys.argv[1])
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def infer_module(model: Path, folder: Path, recipe: BuildRecipe | None = None) -> dict[str, Any]:
    """The functions of a model's infer.py, which is written to the folder."""
    with pytest.MonkeyPatch.context() as patch:  # it sets variables of the environment
        patch.setenv("NVIDIA_TF32_OVERRIDE", "0")
        patch.setenv("ORT_DISABLE_TELEMETRY", "1")
        path = folder / "infer.py"
        path.write_text(infer_script(load_model(model), recipe=recipe), encoding="utf-8")
        return runpy.run_path(str(path), run_name="infer")


def run_alone(script: Path, *arguments: str, packages: Path) -> subprocess.CompletedProcess[str]:
    """Run infer.py where numpy and onnxruntime are installed, and nothing else.

    ``packages`` is an empty folder, or one of an earlier call.
    """
    for module in (numpy, onnxruntime):
        name, source = module.__name__, Path(str(module.__file__)).parent
        for path in (source, source.with_name(f"{name}.libs")):  # wheels keep shared libraries there
            if path.exists() and not (packages / path.name).exists():
                (packages / path.name).symlink_to(path)
    command = [sys.executable, "-I", "-S", "-c", ALONE, str(packages), str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=packages)
