"""Processes that are started before they are needed."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from mptune.engines.toolchains import probing
from mptune.engines.worker import parent, process
from mptune.engines.worker.child import WorkerState
from mptune.engines.worker.once import run_once
from mptune.engines.worker.parent import Worker
from mptune.engines.worker.process import PRELOADED, add_spare, spare
from tests.engines import faults
from tests.engines.worker.test_parent import is_gone

PLENTY_S = 120.0


@dataclass(frozen=True)
class Loaded:
    """Which modules are loaded before a job needs them."""

    names: tuple[str, ...] = PRELOADED

    def run(self, state: WorkerState) -> set[str]:
        return {name for name in self.names if name in sys.modules}


def spare_pid() -> int:
    assert process._spares
    return process._spares[0][1].pid


def test_the_first_process_was_started_ahead_and_the_next_ones_start_while_the_last_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with spare({"MPTUNE_TEST": "1"}):
        first = spare_pid()
        with Worker(tmp_path, environment={"MPTUNE_TEST": "1"}) as worker:
            assert worker.call(Loaded(), PLENTY_S) == set(PRELOADED)
            assert worker.pid == first
            monkeypatch.setattr(parent, "PRELOADED", ("no.such.module", "colorsys"))
            worker.restart()
            assert worker._next is not None
            following = worker._next.pid
            assert worker.call(Loaded(("colorsys",)), PLENTY_S) == {"colorsys"}
            assert not psutil.pid_exists(first), "it is gone before the next one works"
            assert worker.pid == following
            worker.restart()
            unused = worker._next.pid
            worker.close()
            assert is_gone(unused)


def test_a_spare_process_is_for_its_environment_alone_and_ends_unused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "PRELOADED", ())
    with spare({}):
        pid = spare_pid()
        with Worker(tmp_path, environment={"MPTUNE_TEST": "1"}) as worker:
            worker.call(faults.Pid(), PLENTY_S)
            assert worker.pid != pid
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
        with Worker(tmp_path) as worker:
            worker.call(faults.Pid(), PLENTY_S)
            assert worker.pid != pid
        assert psutil.pid_exists(pid)
    assert is_gone(pid)
    assert not process._spares


def test_a_spare_process_that_has_died_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "PRELOADED", ())
    with spare({}):
        process._spares[0][1]._popen.kill()
        process._spares[0][1]._popen.wait()
        with Worker(tmp_path) as worker:
            assert worker.call(faults.Pid(), PLENTY_S) == worker.pid


def test_a_second_spare_process_is_taken_too_and_none_is_started_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "PRELOADED", ())
    add_spare(2)
    assert not process._spares
    with spare({}):
        add_spare(1)
        assert len(process._spares) == 1
        add_spare(2)
        ahead = {of.pid for _, of in process._spares}
        with Worker(tmp_path) as one, Worker(tmp_path) as two:
            assert {worker.call(faults.Pid(), PLENTY_S) for worker in (one, two)} == ahead


def test_no_spare_process_is_left_once_engines_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "PRELOADED", ())
    with spare({}):
        pid = spare_pid()
        with Worker(tmp_path) as worker:
            worker.call(faults.Pid(), PLENTY_S)
            add_spare(1)
            unused = spare_pid()
            process.end_spares()
            assert is_gone(unused)
            add_spare(1)
            worker.hand_on()
            assert is_gone(pid), "one that has probed until now is not kept either"
            assert not process._spares


def test_a_process_that_has_probed_works_for_the_next_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "PRELOADED", ())
    assert process.spare_environment() is None
    with spare({"MPTUNE_TEST": "1"}):
        pid, environment = spare_pid(), process.spare_environment()
        assert run_once(faults.Pid(), PLENTY_S, spare_environment=environment) == pid == spare_pid()
        failed = run_once(faults.Exit(3), PLENTY_S, spare_environment=environment)
        assert isinstance(failed, str)
        assert not process._spares, "one that has failed is not handed on"
        with Worker(tmp_path, environment={"MPTUNE_TEST": "1"}) as worker:
            worker.call(faults.Pid(), PLENTY_S)
            worker.hand_on()
            assert worker.pid is None
            assert worker.call(faults.Pid(), PLENTY_S) == worker.pid
    with Worker(tmp_path) as worker:
        pid = worker.call(faults.Pid(), PLENTY_S)
        worker.hand_on()
        assert is_gone(pid), "nobody keeps it"


def test_a_restart_before_any_job_starts_nothing(tmp_path: Path) -> None:
    with Worker(tmp_path) as worker:
        worker.restart()
        assert worker._next is None


def test_a_probe_that_runs_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def slow(job: object, *more: object) -> str:
        calls.append(job)
        time.sleep(0.3)
        return "no CUDA"

    monkeypatch.setattr(probing, "run_once", slow)
    probing.probed.cache_clear()
    try:
        other = threading.Thread(target=probing.probe, args=("cuda",))
        other.start()
        assert probing.probe("cuda") == "no CUDA"
        other.join()
        assert len(calls) == 1
    finally:
        probing.probed.cache_clear()


def test_a_gpu_is_probed_beside_what_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, done = [], threading.Semaphore(0)

    def ask(provider: str) -> None:
        asked.append((provider, len(process._spares)))
        done.release()

    monkeypatch.setattr(process, "PRELOADED", ())
    monkeypatch.setattr(probing, "detect_gpus", lambda: ("a GPU",))
    monkeypatch.setattr(probing, "observes_beside", lambda provider: True)
    monkeypatch.setattr(probing, "probe", ask)
    monkeypatch.setattr(probing, "_run_probe", ask)
    with probing.started_ahead("cpu", tf32=False):
        assert spare_pid()
    with probing.started_ahead("auto", tf32=False):
        assert done.acquire(timeout=PLENTY_S)
        assert done.acquire(timeout=PLENTY_S)
    assert asked == [("cuda", 2)] * 2, "one for each of two processes"
