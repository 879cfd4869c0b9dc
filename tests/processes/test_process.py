"""A restart ends the process before the next one works; a job in a worker of its own leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import psutil  # type: ignore[import-untyped]

from mptune.processes.parent import Worker, end_idle, run_once
from mptune.processes.process import KEEP_BYTES, Output
from tests.engines import faults
from tests.processes.test_parent import is_gone

PLENTY_S = 120.0


def test_a_restart_ends_the_process_before_the_next_job(tmp_path: Path) -> None:
    with Worker(tmp_path) as worker:
        worker.close()
        assert worker.pid is None, "before any job it starts nothing"
        first = worker.call(faults.Pid(), PLENTY_S)
        worker.close()
        assert worker.call(faults.Pid(), PLENTY_S) == worker.pid != first
        assert not psutil.pid_exists(first)


def test_the_process_before_a_restart_has_ended_when_the_next_job_begins(tmp_path: Path) -> None:
    with Worker(tmp_path) as worker:
        first = worker.call(faults.Pid(), PLENTY_S)
        worker.restart()
        worker.restart()
        assert worker.call(faults.Pid(), PLENTY_S) == worker.pid != first
        assert not psutil.pid_exists(first)


def test_a_process_that_is_left_serves_one_worker_with_its_variables(tmp_path: Path) -> None:
    workers = [Worker(tmp_path, None, {"A": "1"}) for _ in range(2)]
    left = [worker.call(faults.Pid(), PLENTY_S) for worker in workers]
    for worker in workers:
        worker.leave()
    try:
        with Worker(tmp_path) as other, Worker(tmp_path, None, {"A": "1"}) as worker:
            assert other.call(faults.Pid(), PLENTY_S) not in left
            first = worker.call(faults.Pid(), PLENTY_S)
            assert first in left
            psutil.Process(next(pid for pid in left if pid != first)).kill()
            worker.restart()
            assert worker.call(faults.Pid(), PLENTY_S) not in left, "the other has died"
    finally:
        end_idle()
    unused = run_once(faults.Pid(), PLENTY_S, leave_to={})
    end_idle()
    assert is_gone(unused)


def test_a_job_in_a_worker_of_its_own_gives_its_result_or_why_it_failed() -> None:
    pid = run_once(faults.Pid(), PLENTY_S)
    assert isinstance(pid, int)
    assert is_gone(pid)
    assert run_once(faults.Exit(3), PLENTY_S) == "exited with status 3"
    assert run_once(faults.Exit(3), PLENTY_S, lambda failure: f"the {failure.stage.value} failed") == "the build failed"


def test_output_keeps_the_beginning_and_the_end() -> None:
    output = Output()
    for index in range(40):
        output.add(bytes([index]) * 100_000)
    text = output.text()
    assert text.startswith(bytes([0]))
    assert text.endswith(bytes([39]))
    left_out = 40 * 100_000 - 2 * KEEP_BYTES
    assert f"[... {left_out} bytes left out ...]".encode() in text
    output.clear()
    output.add(b"short")
    assert output.text() == b"short"
