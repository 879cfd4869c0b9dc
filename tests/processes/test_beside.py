"""Work beside the first worker's: its result, its errors, and its end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mptune.engines.base import Failure, FailureKind
from mptune.errors import RunError
from mptune.processes.parent import Beside, Worker
from tests.engines import faults
from tests.processes.test_parent import is_gone

PLENTY_S = 120.0


def test_gives_its_result_once_its_process_has_ended_and_raises_where_it_is_asked_for(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    given, pid = Beside(worker, lambda worker: (worker.call(faults.Pid(), PLENTY_S), worker.pid)).result()
    assert given == pid
    assert is_gone(pid)
    assert worker.pid is None

    def refuse(worker: Worker) -> None:
        raise RunError("the disk is full")

    with pytest.raises(RunError, match="the disk is full"):
        Beside(Worker(tmp_path), refuse).result()


@pytest.mark.parametrize("begun", [True, False])
def test_ends_at_once_where_it_is_given_up(begun: bool, tmp_path: Path) -> None:
    worker = Worker(tmp_path / "logs")
    pids = tmp_path / "pids"
    work = Beside(worker, lambda worker: worker.call(faults.Hang(pids), PLENTY_S))
    deadline = time.monotonic() + PLENTY_S
    while begun and not pids.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    pid = worker.pid
    work.stop()
    assert pid is None or is_gone(pid)
    found = work.result()
    assert isinstance(found, Failure)
    assert found.kind is FailureKind.WORKER
    assert not list(tmp_path.glob("logs/*")), "what was given up has failed in nothing: no log"
    assert isinstance(worker.call(faults.Pid(), PLENTY_S), Failure)
