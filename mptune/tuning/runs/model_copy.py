"""The run's own copy of its model beside the weight bank, and a run as one file to take to a device."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from mptune.data.metrics.tasks import CALLABLE, undirected
from mptune.engines.loading import load_typed_model
from mptune.errors import ModelError, RunError
from mptune.files import READ_ERRORS, open_file, read_bytes, read_json, whole_file, write_bytes, write_json, writing
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups, groups_sha256, set_apart
from mptune.graph.loading.model import Model
from mptune.graph.plan import Precision
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank, bank_files
from mptune.resources import is_path
from mptune.run_json import RunFile
from mptune.rundir import RunDirectory
from mptune.tuning.record.journal import copy_journal
from mptune.tuning.record.storage import storage_url
from mptune.tuning.record.study import copy_study
from mptune.tuning.runs.sample_files import refuse_damaged

MODEL_FILE = "model.onnx"

SEAL_FILE = "model.json"
"""The hashes of the model and of its copy, so that a damaged copy is detected."""


def keep_model(run: RunDirectory, grouped: GroupedModel, bank: WeightBank | None = None) -> None:
    """Write the copy, unless it is there."""
    model = grouped.model
    seal = _seal(run)
    path = run.weights / MODEL_FILE
    if seal is not None and seal["model_sha256"] == model.sha256 and path.exists():
        return
    bank = bank or WeightBank.write(model, run.weights)
    Rewriter(grouped, bank).write(grouped.uniform(Precision.FP32), path)
    document = {"model_sha256": model.sha256, "copy_sha256": load_typed_model(path).sha256}
    write_json(run.weights / SEAL_FILE, document)


def load_copy(run: RunDirectory, file: RunFile) -> Model:
    """Load the copy; its hash is the original's, since plans refer to it."""
    seal = _seal(run)
    if seal is None or seal["model_sha256"] != file.model.sha256 or not (run.weights / MODEL_FILE).exists():
        raise RunError(
            f"{run.path} holds no copy of its model", "pack the run where the search ran: `mptune export RUN`"
        )
    damaged = f"the copy of the model in {run.weights} is damaged or not whole"
    try:
        copy = load_typed_model(run.weights / MODEL_FILE)
    except ModelError as error:
        raise RunError(f"{damaged}: {error.message}", "copy the run directory again") from None
    if copy.sha256 != seal["copy_sha256"]:
        raise RunError(damaged, "copy the run directory again")
    return replace(copy, sha256=file.model.sha256)


def _seal(run: RunDirectory) -> dict[str, Any] | None:
    try:
        document = read_json(run.weights / SEAL_FILE)
        if document["model_sha256"] and document["copy_sha256"]:
            return dict(document)
    except READ_ERRORS:
        pass
    return None


_COMPRESSION = 1
"""Weights hardly shrink, whatever the effort."""


TARGETS = "target"
"""Folder of the run's data: the target's file, where it is none of mptune's own."""


def keep_target(run: RunDirectory, named: str) -> None:
    """Copy a target's file into the run: a worker reads no other."""
    place = target_copy(run, named)
    if place != named:
        write_bytes(Path(place), [read_bytes(Path(named))])


def target_copy(run: RunDirectory, named: str) -> str:
    """The target of a run as ``load_target`` takes it: a name, or the run's own copy of the file."""
    return str(run.data / TARGETS / Path(named).name) if is_path(named) else named


def pack(run: RunDirectory, file: RunFile, out: Path, storage: str | None = None) -> None:
    """Write ``out``, a .tar.gz with the run's directory in it: record, samples, references, model and weights.

    A study that is kept in a database is copied into a journal, so that the device needs no database. A search may be
    writing meanwhile: the record is what it was at one moment, and each file is whole.
    """
    name = run.path.resolve().name
    with tempfile.TemporaryDirectory(prefix="mptune-export-") as folder:
        members = dict(_members(run, file, Path(folder), storage))
        absent = next((path for path in members.values() if not path.exists()), None)
        if absent is not None:
            raise RunError(f"{absent} is missing: the run is not whole", "let `mptune search` go on with it first")
        refuse_damaged(run.data)
        document = file.model_copy(update={"storage": None}).model_dump_json(indent=2).encode()
        with (
            writing(out),
            whole_file(out) as partial,
            tarfile.open(partial, "w:gz", compresslevel=_COMPRESSION) as archive,
        ):
            _add(archive, f"{name}/run.json", io.BytesIO(document), len(document), run.run_json.stat().st_mtime)
            for place, path in members.items():
                with open_file(path) as content:  # It may be replaced: what is open stays what it is.
                    status = os.fstat(content.fileno())
                    _add(archive, f"{name}/{place}", content, status.st_size, status.st_mtime)


def group_as_searched(model: Model, file: RunFile) -> GroupedModel:
    """The layer groups of a run.

    Raises:
        RunError: this mptune groups the model otherwise.
    """
    groups = find_groups(model, file.fixed_settings.granularity)
    if groups_sha256(groups) != file.fixed_settings.groups_sha256:
        raise RunError(
            f"this mptune finds other layer groups in the model than mptune {file.mptune}, which searched",
            "use the same version of mptune on all machines",
        )
    return GroupedModel(model, set_apart(model, groups, file.nodes_apart))


def metric_warning(metric: str) -> str:
    """What to bring to the device beside the packed run: a metric of the user's own; empty if there is none."""
    script, _, function = undirected(metric).rpartition(":")
    if metric.startswith(CALLABLE):
        return (
            f"the metric is the Python function {function}: mptune.confirm(run, metric={function}) needs it there, too"
        )
    if script and function:
        return f"the metric is a script of yours: copy {script} to the device, too, to the same relative path"
    return ""


def _members(run: RunDirectory, file: RunFile, folder: Path, storage: str | None) -> Iterator[tuple[str, Path]]:
    """Place in the archive -> file, run.json left out."""
    journal = folder / run.journal.name
    url = storage_url(file.storage, storage)
    if url is None:
        copy_journal(run.journal, journal)
    else:
        copy_study(file.study, url, journal)
    yield run.journal.name, journal
    for name in (*bank_files(file.fixed_settings.precisions), MODEL_FILE, SEAL_FILE):
        yield f"{run.weights.name}/{name}", run.weights / name
    for path in sorted((*run.data.glob("*"), *run.data.glob(f"{TARGETS}/*"))):
        # How often to repeat, and the baseline's latency then, are notes about this machine.
        is_left = path.name.startswith((".", "timing-")) or path.suffix == ".tmp"
        if path.is_file() and not is_left:
            yield str(path.relative_to(run.data.parent)), path


def _add(archive: tarfile.TarFile, name: str, content: BinaryIO, size: int, modified_s: float) -> None:
    """Add a file without its owner, whom another machine does not know."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime = size, int(modified_s)
    archive.addfile(entry, content)
