"""Where a search keeps its run. Apart from ``mptune.api.arguments``: it is known before onnx is loaded."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mptune.errors import SettingsError

if TYPE_CHECKING:
    import onnx


def run_path(model: str | os.PathLike[str] | onnx.ModelProto, out: str | os.PathLike[str] | None) -> Path:
    """Where a search keeps its run: ``out``, else the model's name + ``.mptune`` in the working directory."""
    if out is not None:
        return Path(out)
    if isinstance(model, (str, os.PathLike)):
        return Path(f"{Path(model).stem}.mptune")
    if not model.graph.name:
        raise SettingsError("a ModelProto without a graph name says nowhere to keep the run", "give --out DIR")
    return Path(f"{file_stem(model)}.mptune")


def file_stem(model: onnx.ModelProto) -> str:
    """What a file of a model in memory is called, without suffix."""
    return re.sub(r"[^\w.-]+", "_", model.graph.name).strip("._") or "model"
