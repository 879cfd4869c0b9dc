"""The run directory: its paths, its locks, and the reading and writing of its run.json.

One process at a time writes a run directory, but for the workers that it shares its search with. Nothing in it is ever
deleted that a person might miss: ``fresh`` moves the whole directory aside.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from mptune.engines.base import SKETCHES
from mptune.engines.context import RunContext
from mptune.errors import RunError, one_line
from mptune.files import delete_scratch, is_disk_full, write_json, write_text, writing
from mptune.run_json import HOME, RunFile, read_run_file
from mptune.settings import SearchSettings

if TYPE_CHECKING:
    from mptune.graph.groups import GroupedModel


class RunDirectory:
    """The paths of one run, and its run.json. Made by ``open_run`` (to write) or ``read_run`` (to read).

    A confirmation has its weights and its data from the run that it confirms.
    """

    def __init__(self, path: Path, *, confirms: bool = False) -> None:
        self.path = path
        home = path / HOME if confirms else path
        self.run_json = path / "run.json"
        self.lock = path / "run.lock"
        self.workers_lock = path / "workers.lock"
        self.source_onnx = path / "source.onnx"
        self.journal = path / "study.journal"
        self.weights = home / "weights"
        self.front_json = path / "front.json"
        self.report_html = path / "report.html"
        self.outputs_json = path / "outputs.json"
        self.chosen = path / "chosen"
        self.engines = path / "engines"
        self.logs = path / "logs"
        self.data = home / "data"
        self.confirmed = path / "confirmed"
        self.sketches = path / "data" / SKETCHES
        self.observed_json = self.data / "observed.json"

    def context(self, grouped: GroupedModel, settings: SearchSettings) -> RunContext:
        """What the engines of this run work on; its directories exist afterwards."""
        own_data = self.path / "data"
        for directory in (self.weights, self.engines, self.logs, self.data, own_data):
            with writing(directory):
                directory.mkdir(exist_ok=True)
        return RunContext(grouped, settings, self.weights, self.data, self.engines, self.logs, own_data)

    def load(self) -> RunFile | None:
        """Read run.json; None where there is none."""
        return read_run_file(self.run_json)

    def save(self, file: RunFile) -> None:
        """Write run.json, whole or not at all."""
        write_json(self.run_json, file.model_dump(mode="json"))

    def forget(self) -> None:
        """Delete the study, and what jobs derived from the model and the data, of a run without an evaluation."""
        with writing(self.path):
            self.journal.unlink(missing_ok=True)
            for folder in (self.weights, self.engines, self.data):
                if folder.is_dir() and not folder.is_symlink():
                    shutil.rmtree(folder)


_OWN = frozenset(path.parts[0] for path in vars(RunDirectory(Path())).values() if path.parts)
"""Names of what mptune itself writes in a run directory."""


def read_run(path: str | os.PathLike[str], *, of_search: bool = False) -> tuple[RunDirectory, RunFile]:
    """Open a run directory to read it; ``of_search`` refuses a confirmation.

    Needs no lock: a search may be writing at the same time.
    """
    run = RunDirectory(Path(path))
    refuse_links(run.path)
    file = run.load()
    if file is None:
        hint = "`mptune search MODEL` makes one: MODEL.mptune in the working directory"
        raise RunError(f"{path} is no run directory: there is no run.json in it", hint)
    if file.confirms is None:
        return run, file
    if run.path.resolve().parent.name != run.confirmed.name:
        text = f"{run.path} is a confirmation that does not lie in the run that it confirms"
        raise RunError(text, "give the run directory of the search: a confirmation lies in RUN/confirmed/DEVICE")
    if of_search:
        raise RunError(f"{run.path} is a confirmation already", f"give the run: {run.path / HOME}")
    refuse_links(run.path / HOME)
    return RunDirectory(run.path, confirms=True), file


def refuse_links(path: Path) -> None:
    """Refuse a run directory that holds symbolic links out of it: whoever made them chose what is read or overwritten.

    Named pipes, sockets and devices are refused, too: reading one may never end. The user's own files, those in
    ``chosen`` among them, are only carried over; a confirmation is a run directory, and looked at when it is opened.
    """
    own = [path / name for name in _OWN]
    inside = (entry for each in own if each.name not in ("chosen", "confirmed") for entry in each.rglob("*"))
    root = os.path.realpath(path)
    # Each link is looked at before anything behind it.
    for entry in itertools.chain(own, (path / "confirmed").glob("*"), inside):
        target = Path(os.path.realpath(entry))
        if entry.is_symlink() and (target.is_symlink() or not target.is_relative_to(root)):  # or to itself
            raise RunError(
                f"{entry} is a link out of the run directory, which is not followed",
                "copy what it points to in its place, if you trust it, or delete the link",
            )
        if entry.exists() and not (entry.is_file() or entry.is_dir()):
            raise RunError(f"{entry} is a named pipe, a socket or a device, and no file", "delete it")


@contextmanager
def open_run(path: Path, *, fresh: bool = False) -> Iterator[RunDirectory]:
    """Create or open a run directory to write it, and hold its lock meanwhile.

    ``fresh`` moves what is there aside first, to ``NAME.old-1`` (or the next free number).
    """
    run = RunDirectory(path)
    entries: list[str] = []
    with writing(path), suppress(FileNotFoundError):
        entries = sorted(entry.name for entry in path.iterdir())
    foreign = [name for name in entries if name not in _OWN and not name.startswith(".")]
    if foreign and run.run_json.name not in entries:
        raise RunError(
            f"{path} is not a run directory, and it holds other files ({', '.join(foreign[:3])})",
            "choose another directory with --out DIR; nothing was written",
        )
    refuse_links(path)
    if fresh and path.exists():
        with _locked(run.lock), _locked(run.workers_lock):  # nobody is in it
            numbers = itertools.count(1)
            aside = next(name for n in numbers if not (name := path.with_name(f"{path.name}.old-{n}")).exists())
            with writing(path):
                path.rename(aside)
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    with _locked(run.lock):
        delete_scratch((run.path, run.weights, run.data, run.engines, run.chosen))
        yield run


def joined_run(run: RunDirectory) -> AbstractContextManager[None]:
    """Say that a worker shares the run directory meanwhile, beside the process that holds its lock, if one does.

    Any number of workers may: what they write there is written whole or belongs to them alone.
    """
    return _locked(run.workers_lock, fcntl.LOCK_SH)


def has_workers(run: RunDirectory) -> bool:
    """Whether a worker shares the run directory now."""
    if not run.workers_lock.exists():
        return False
    with suppress(RunError), _locked(run.workers_lock):
        return False
    return True


@contextmanager
def _locked(lock: Path, how: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> Iterator[None]:
    with writing(lock):
        file = lock.open("a+b")
    with file:
        try:
            fcntl.flock(file, how)
        except BlockingIOError:
            file.seek(0)
            pid = file.read(20).strip().decode("ascii", "replace")
            raise RunError(
                f"{lock.parent} is in use by another process{f' (pid {pid})' if pid.isdigit() else ''}",
                "wait for it, or give this search a run directory of its own with --out DIR",
            ) from None
        with suppress(OSError):  # for the message above; a full disk locks all the same
            file.truncate(0)
            file.write(f"{os.getpid()}\n".encode())
            file.flush()
        yield


@contextmanager
def tolerated(what: str, logs: Path, warnings: list[str]) -> Iterator[None]:
    """Turn an exception in the block, which makes ``what`` beside a result, into a warning, with a log in ``logs``.

    A full disk is raised: the same command goes on once there is space.
    """
    try:
        yield
    except Exception as error:
        if is_disk_full(error) or is_disk_full(error.__cause__):
            raise
        log = logs / f"{what.replace('/', '-').replace(' ', '-')}.log"
        log.parent.mkdir(exist_ok=True)
        write_text(log, "".join(traceback.format_exception(error)))
        reason = one_line(error) or "no message"
        warnings.append(f"{what} could not be made ({type(error).__name__}: {reason}): see {log}")
