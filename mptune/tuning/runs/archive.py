"""A run as one file to take to a device: what a confirmation reads, and nothing else."""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mptune.data.metrics.tasks import CALLABLE
from mptune.data.metrics.trusted_scripts import undirected
from mptune.errors import RunError
from mptune.files import whole_file, writing
from mptune.graph.writing.weights import bank_files
from mptune.run_json import RunFile
from mptune.rundir import RunDirectory
from mptune.tuning.record.backends.journal import copy_journal
from mptune.tuning.record.storage_urls import storage_url
from mptune.tuning.record.study import copy_study
from mptune.tuning.runs.model_copy import MODEL_FILE, SEAL_FILE
from mptune.tuning.runs.seals import refuse_damaged

_COMPRESSION = 1
"""Weights hardly shrink, whatever the effort."""


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
        document = file.model_copy(update={"storage": None, "accompanies": None}).model_dump_json(indent=2).encode()
        with (
            writing(out),
            whole_file(out) as partial,
            tarfile.open(partial, "w:gz", compresslevel=_COMPRESSION) as archive,
        ):
            entry = tarfile.TarInfo(f"{name}/run.json")
            entry.size, entry.mode, entry.mtime = len(document), 0o644, int(run.run_json.stat().st_mtime)
            archive.addfile(entry, io.BytesIO(document))
            for place, path in members.items():
                with path.open("rb") as content:  # It may be replaced: what is open stays what it is.
                    archive.addfile(_anonymous(archive.gettarinfo(arcname=f"{name}/{place}", fileobj=content)), content)


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
    for path in sorted(run.data.iterdir()) if run.data.is_dir() else ():
        # How often to repeat, and the baseline's latency then, are notes about this machine.
        is_left = path.name.startswith((".", "timing-")) or path.suffix == ".tmp"
        if path.is_file() and not is_left:
            yield f"{run.data.name}/{path.name}", path


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without the owner, whom another machine does not know."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry
