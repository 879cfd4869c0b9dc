"""The run's own copy of its model: a small ONNX file beside the weight bank, which holds the weights already.

It is the all-FP32 rewrite, which changes nothing: the same nodes and names, so the same layer groups and plans. So a
run directory can go to another machine alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from mptune.engines.loading import load_typed_model
from mptune.engines.workload import Workload
from mptune.errors import ModelError, RunError
from mptune.files import parse_json, write_json
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import Model
from mptune.graph.plan import Precision
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from mptune.run_json import RunFile
from mptune.rundir import RunDirectory

MODEL_FILE = "model.onnx"
SEAL_FILE = "model.json"
"""The hashes of the model and of its copy, so that a damaged copy is detected."""

_FORMAT = 1


def keep_model(run: RunDirectory, grouped: GroupedModel, bank: WeightBank | None = None) -> None:
    """Write the copy, unless it is there."""
    model = grouped.model
    seal = _seal(run)
    path = run.weights / MODEL_FILE
    if seal is not None and seal["model_sha256"] == model.sha256 and path.exists():
        return
    bank = bank or WeightBank.write(model, run.weights)
    Rewriter(grouped, bank).write(grouped.uniform(Precision.FP32), path)
    document = {"format": _FORMAT, "model_sha256": model.sha256, "copy_sha256": load_typed_model(path).sha256}
    write_json(run.weights / SEAL_FILE, document)


@contextmanager
def kept_meanwhile(run: RunDirectory, workload: Workload) -> Iterator[None]:
    """Write the copy beside what the caller does, which waits for jobs and times nothing."""
    with ThreadPoolExecutor(1, thread_name_prefix="mptune-copy") as pool:
        kept = pool.submit(keep_model, run, workload.grouped, workload.bank)
        yield
        kept.result()


def ensure_copy(run: RunDirectory, file: RunFile) -> None:
    """Write the copy for a run without one: it was interrupted, or made before runs had copies."""
    if has_copy(run, file):
        return
    if not Path(file.model.path).is_file():
        load_copy(run, file)  # raises with what to do
    model = load_original(file)
    keep_model(run, GroupedModel(model, find_groups(model, file.fixed_settings.granularity)))


def has_copy(run: RunDirectory, file: RunFile) -> bool:
    """Whether the run holds a copy of its model."""
    seal = _seal(run)
    return seal is not None and seal["model_sha256"] == file.model.sha256 and (run.weights / MODEL_FILE).exists()


def load_copy(run: RunDirectory, file: RunFile) -> Model:
    """Load the copy; its hash is the original's, since plans refer to it."""
    seal = _seal(run)
    if seal is None or not has_copy(run, file):
        raise RunError(
            f"{run.path} holds no copy of its model, and {file.model.path} is not here",
            "pack the run where the search ran: `mptune export RUN`",
        )
    damaged = f"the copy of the model in {run.weights} is damaged or not whole"
    try:
        copy = load_typed_model(run.weights / MODEL_FILE)
    except ModelError as error:
        raise RunError(f"{damaged}: {error.message}", "copy the run directory again") from None
    if copy.sha256 != seal["copy_sha256"]:
        raise RunError(damaged, "copy the run directory again")
    return replace(copy, sha256=file.model.sha256)


def load_original(file: RunFile) -> Model:
    """Load the model that the search was made with from where it was."""
    model = load_typed_model(file.model.path, opset=file.fixed_settings.opset)
    if model.sha256 != file.model.sha256:
        raise RunError(
            f"{file.model.path} has changed since the search", "put the model back, or search again with --fresh"
        )
    return model


def load_either(run: RunDirectory, file: RunFile) -> Model:
    """The original where it still is, else the copy."""
    if Path(file.model.path).is_file():  # no device, no pipe
        return load_original(file)
    return load_copy(run, file)


def _seal(run: RunDirectory) -> dict[str, Any] | None:
    try:
        document = parse_json((run.weights / SEAL_FILE).read_text(encoding="utf-8"))
        if document["format"] == _FORMAT and document["model_sha256"] and document["copy_sha256"]:
            return dict(document)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None
