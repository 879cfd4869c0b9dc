"""A run's own copies of model, target and search space, and a run as one file to take to a device."""

from __future__ import annotations

import os
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mptune.data.images import PREPROCESS_JSON
from mptune.engines.loading import load_typed_model
from mptune.errors import ModelError, RunError
from mptune.files import open_file, read_bytes, whole_file, write_bytes, write_json, writing
from mptune.graph.groups import GroupedModel, find_groups, groups_sha256, set_apart
from mptune.graph.plan import Precision
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank, bank_files
from mptune.resources import is_path
from mptune.run_json import RunFile
from mptune.rundir import RunDirectory
from mptune.tuning.record.storage import storage_url
from mptune.tuning.record.study import copy_study

MODEL_FILE, SPACE_FILE, TARGETS = "model.onnx", "space.toml", "target"
"""The model, beside its weights; the search space, beside the data; the folder there that has the target's file."""


def keep_model(run: RunDirectory, grouped: GroupedModel, bank: WeightBank | None = None) -> None:
    """Write the copy beside the weights, unless it is there. What is made of another model ``forget`` has deleted."""
    if not (run.weights / MODEL_FILE).exists():
        bank = bank or WeightBank.write(grouped.model, run.weights)
        Rewriter(grouped, bank).write(grouped.uniform(Precision.FP32), run.weights / MODEL_FILE)


def keep_inputs(run: RunDirectory, target: str, space: Path, preprocessing: Mapping[str, object] | None) -> None:
    """Copy what a worker or a device may not find where it was: the files of target and space, how images are read."""
    copies = {run.data / SPACE_FILE: space}
    if is_path(target):
        copies[Path(target_copy(run, target))] = Path(target)
    for place, source in copies.items():
        content = read_bytes(source)
        if not place.exists() or read_bytes(place) != content:
            write_bytes(place, [content])
    if preprocessing is not None:
        write_json(run.data / PREPROCESS_JSON, dict(preprocessing))


def target_copy(run: RunDirectory, named: str) -> str:
    """The target of a run as ``load_target`` takes it: a name, or the run's own copy of the file."""
    return str(run.data / TARGETS / Path(named).name) if is_path(named) else named


def load_grouped(run: RunDirectory, file: RunFile) -> GroupedModel:
    """The run's copy of its model, by whose hash plans name it, with the layer groups that were searched.

    Raises:
        RunError: there is no copy, or it is damaged; or this mptune groups the model otherwise.
    """
    path = run.weights / MODEL_FILE
    if not path.exists():
        raise RunError(
            f"{run.path} holds no copy of its model", "pack the run where the search ran: `mptune export RUN`"
        )
    try:
        model = replace(load_typed_model(path), sha256=file.model.sha256)
    except ModelError as error:
        damaged = f"the copy of the model in {run.weights} is damaged or incomplete: {error.message}"
        raise RunError(damaged, "copy the run directory again") from None
    groups = find_groups(model, file.fixed_settings.granularity)
    if groups_sha256(groups) != file.fixed_settings.groups_sha256:
        raise RunError(
            f"this mptune finds other layer groups in the model than mptune {file.mptune}, which searched",
            "use the same version of mptune on all machines, and a complete copy of the run directory",
        )
    return GroupedModel(model, set_apart(model, groups, file.nodes_apart), io=file.fixed_settings.io)


def pack(run: RunDirectory, file: RunFile, out: Path, storage: str | None = None) -> None:
    """Write ``out``, a .tar.gz with the run's directory in it: record, samples, references, model and weights.

    The study is copied into a journal, so that the device needs no database. A search may be writing meanwhile: the
    record is what it was at one moment, and each file is whole.
    """
    url, home = storage_url(file.storage, storage), run.data.parent
    with tempfile.TemporaryDirectory(prefix="mptune-export-") as folder:
        members = {name: Path(folder) / name for name in (run.run_json.name, run.journal.name)}
        write_json(members[run.run_json.name], file.model_copy(update={"storage": None}).model_dump(mode="json"))
        copy_study(file.study, run.journal, url, members[run.journal.name])
        needed = [run.weights / name for name in (*bank_files(file.fixed_settings.precisions), MODEL_FILE)]
        needed += [run.data / f"{which}{part}.npz" for which in ("search", "held_out") for part in ("", "_reference")]
        if absent := [path for path in needed if not path.exists()]:
            raise RunError(f"{absent[0]} is missing: the run is incomplete", "continue it with `mptune search` first")
        # How often to repeat, and the baseline's latency then, are notes about this machine.
        files = (path for path in sorted((*run.data.glob("*"), *run.data.glob(f"{TARGETS}/*"))) if path.is_file())
        needed += [path for path in files if not path.name.startswith((".", "timing-")) and path.suffix != ".tmp"]
        members |= {str(path.relative_to(home)): path for path in needed}
        with writing(out), whole_file(out) as partial, tarfile.open(partial, "w:gz", compresslevel=1) as archive:
            for place, path in members.items():
                with open_file(path) as content:  # it may be replaced: what is open stays what it is
                    status = os.fstat(content.fileno())
                    entry = tarfile.TarInfo(f"{run.path.resolve().name}/{place}")  # without an owner
                    entry.size, entry.mtime = status.st_size, int(status.st_mtime)
                    archive.addfile(entry, content)
