"""Jobs that crash, hang, leak, lie or print without end: each is a failure, and the next one finds a worker."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from mptune.engines.base import EngineError, Failure, FailureKind, Stage
from mptune.errors import ModelError
from mptune.processes import parent as parent_module
from mptune.processes.child import Job
from mptune.processes.parent import KEEP_BYTES, Worker, run_once
from mptune.settings import WorkerSettings
from tests.engines import faults

PLENTY_S = 120.0
UNSUPPORTED = EngineError(FailureKind.UNSUPPORTED, "in its own words")


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    return tmp_path / "logs"


@pytest.fixture
def worker(logs: Path) -> Iterator[Worker]:
    with Worker(logs) as worker:
        yield worker


def is_gone(pid: int) -> bool:
    """Whether a process has ended (a zombie that nobody reaps has)."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        with suppress(psutil.TimeoutExpired):
            process.wait(timeout=0 if process.status() == psutil.STATUS_ZOMBIE else 20)
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def fail(worker: Worker, job: Job[Any], timeout_s: float = PLENTY_S) -> Failure:
    """The failure of a job, after which another one works."""
    failure = worker.call(job, timeout_s)
    assert isinstance(failure, Failure)
    assert worker.call(faults.echo(("still", "here")), PLENTY_S) == ("still", "here")
    return failure


def log_of(failure: Failure) -> str:
    assert failure.log_path is not None
    return failure.log_path.read_text()


def test_a_job_runs_in_another_process_and_leaves_no_log_and_no_output(worker: Worker, logs: Path, capfd) -> None:
    pid = worker.call(faults.pid(), PLENTY_S)
    assert pid == worker.pid != os.getpid()
    assert worker.call(faults.echo({"a": [1, None]}), PLENTY_S) == {"a": [1, None]}
    assert worker.call(faults.babble(20, False), PLENTY_S) == "done"
    assert [worker.call(faults.count(key), PLENTY_S) for key in (1, 1, 2, 2)] == [1, 1, 2, 2]
    with pytest.raises(ModelError, match="odd") as caught:  # an error of mptune's is raised as it is
        worker.call(faults.fail(ModelError("the model is odd", "mend it")), PLENTY_S)
    assert caught.value.hint == "mend it"
    assert worker.call(faults.pid(), PLENTY_S) == pid
    assert not list(logs.glob("*"))
    assert capfd.readouterr() == ("", "")


def test_progress_reaches_the_parent_and_does_not_break_into_an_answer(worker: Worker) -> None:
    heard: dict[str, list[int]] = defaultdict(list)
    worker.on_progress = lambda progress: heard[progress.phase].append(progress.done)
    assert worker.call(faults.report(4, 200), PLENTY_S) == "told"
    assert list(heard.values()) == [list(range(1, 201))] * 4
    answer = bytes(range(256)) * 2**15
    assert [worker.call(faults.report_on(answer), PLENTY_S) for _ in range(3)] == [answer] * 3


def test_a_job_asks_the_parent_whatever_the_sizes(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    passed_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s[0], sleep=time.sleep)
    monkeypatch.setattr(parent_module, "time", clock)

    def answer(question: bytes) -> int:
        if not question:
            raise ModelError("the question is odd", "mend it")
        passed_s[0] += 2 * PLENTY_S
        return len(question)

    worker.on_question = answer
    assert worker.call(faults.ask(bytes(1 << 22)), PLENTY_S) == 1 << 22
    with pytest.raises(ModelError, match="the question is odd"):
        worker.call(faults.ask(b""), PLENTY_S)


def test_a_worker_gets_its_variables_and_its_parents_import_path(logs: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "numpy.py").write_text("raise ImportError('the wrong one')")
    with Worker(logs, environment={"MPTUNE_TEST": "of the worker"}) as worker:
        variable, path = worker.call(faults.surroundings("MPTUNE_TEST"), PLENTY_S)
    assert variable == "of the worker"
    assert "MPTUNE_TEST" not in os.environ
    assert [entry for entry in sys.path if entry] == [entry for entry in path if entry in sys.path]
    assert all(Path(entry).is_absolute() for entry in path)


def test_calls_from_many_threads_queue_up_and_the_process_outlives_the_first(worker: Worker) -> None:
    with ThreadPoolExecutor(1) as first:
        pid = first.submit(worker.call, faults.pid(), PLENTY_S).result()
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda number: worker.call(faults.echo(number), PLENTY_S), range(8)))
    assert (worker.pid, numbers) == (pid, list(range(8)))


ENDS = [
    (faults.die(signal.SIGSEGV), FailureKind.CRASH, "SIGSEGV", "last words"),
    (faults.die(signal.SIGKILL), FailureKind.OUT_OF_MEMORY, "SIGKILL", "last words"),
    (faults.abort("terminate called after throwing 'std::bad_alloc'\n"), FailureKind.OUT_OF_MEMORY, "SIGABRT", ""),
    (faults.abort(), FailureKind.CRASH, "SIGABRT", "faults.py"),  # faulthandler
    (faults.exit_with(sys.exit, 3), FailureKind.CRASH, "exited with status 3", ""),
    (faults.exit_with(os._exit, 3), FailureKind.CRASH, "exited with status 3", ""),
    (faults.close_all(), FailureKind.CRASH, "exited with status 1", ""),
    (faults.gorge(3 << 30), FailureKind.OUT_OF_MEMORY, "out of memory", "MemoryError"),
    (faults.fail(ValueError("a\nb")), FailureKind.ERROR, "ValueError: a", "ValueError"),
    (faults.fail(RuntimeError()), FailureKind.ERROR, "RuntimeError", "RuntimeError"),
    (faults.fail(OSError(errno.ENOSPC, "No space left on device")), FailureKind.DISK_FULL, "No space left", "OSError"),
    (faults.fail(KeyboardInterrupt()), FailureKind.ERROR, "KeyboardInterrupt", "KeyboardInterrupt"),
    (faults.fail(UNSUPPORTED), FailureKind.UNSUPPORTED, "in its own words", ""),
    (faults.unpicklable(), FailureKind.ERROR, "pickle", ""),
    (faults.return_trap(), FailureKind.ERROR, "cannot be read", ""),
    (faults.echo(faults.Trap()), FailureKind.ERROR, "not a number", ""),
    (faults.garble(), FailureKind.ERROR, "cannot be read", ""),
    (faults.fork(), FailureKind.ERROR, "RuntimeError: in the parent", "ValueError: in the child"),
]


@pytest.mark.parametrize("end", ENDS)
def test_a_failure_names_its_cause_and_has_a_log(worker: Worker, end: tuple[Job[Any], FailureKind, str, str]) -> None:
    job, kind, words, logged = end
    failure = fail(worker, job)
    assert failure.kind is kind
    assert words in failure.message
    assert "\n" not in failure.message
    assert logged in log_of(failure)


def test_a_failure_names_the_stage_that_was_entered_also_where_no_log_can_be_written(logs: Path) -> None:
    logs.write_text("a file where the folder should be")
    with Worker(logs) as worker:
        assert fail(worker, faults.fail(UNSUPPORTED, Stage.TIME)).stage is Stage.TIME
        assert fail(worker, faults.die(signal.SIGSEGV, Stage.RUN)).stage is Stage.RUN
        failure = fail(worker, faults.fail(ValueError("x")))
    assert (failure.stage, failure.message, failure.log_path) == (Stage.BUILD, "ValueError: x", None)


@pytest.mark.smoke
def test_a_hang_is_killed_with_everything_it_started(worker: Worker, tmp_path: Path) -> None:
    worker.call(faults.pid(), PLENTY_S)  # what is imported first takes its time
    failure = fail(worker, faults.hang(tmp_path / "pids"), timeout_s=6.0)
    assert (failure.stage, failure.kind, failure.message) == (Stage.TIME, FailureKind.TIMEOUT, "no result after 6 s")
    assert [is_gone(int(pid)) for pid in (tmp_path / "pids").read_text().split()] == [True] * 3
    endless = faults.report(1, 10**9)
    assert fail(worker, endless, timeout_s=2.0).kind is FailureKind.TIMEOUT, "though it reports without end"


def test_a_crash_is_noticed_though_a_grandchild_holds_all_descriptors(worker: Worker, tmp_path: Path) -> None:
    assert fail(worker, faults.start_and_leave(tmp_path / "orphan", True)).kind is FailureKind.CRASH
    assert is_gone(int((tmp_path / "orphan").read_text()))
    try:
        assert fail(worker, faults.fork_and_crash(tmp_path / "fork")).kind is FailureKind.CRASH
    finally:
        os.kill(int((tmp_path / "fork").read_text()), signal.SIGKILL)


def test_the_log_of_a_babbling_job_holds_its_beginning_and_its_end(worker: Worker) -> None:
    failure = fail(worker, faults.babble(100, True))
    assert (failure.kind, failure.message) == (FailureKind.ERROR, "ValueError: first line")
    log = log_of(failure)
    assert len(log) < 2 * KEEP_BYTES + 200
    assert re.fullmatch("the beginning\n.*bytes left out.*the end\n.*second line\n*", log, re.DOTALL)


def test_a_worker_that_lost_its_device_or_memory_is_replaced(worker: Worker) -> None:
    for kind in (FailureKind.UNSUPPORTED, FailureKind.DEVICE_LOST, FailureKind.OUT_OF_MEMORY):
        pid = worker.call(faults.pid(), PLENTY_S)
        fail(worker, faults.fail(EngineError(kind, "of the device")))
        assert (worker.call(faults.pid(), PLENTY_S) == pid) == (kind is FailureKind.UNSUPPORTED)


def test_a_crash_or_hang_while_a_job_is_torn_down_costs_neither_its_result_nor_the_next_job(logs: Path) -> None:
    with Worker(logs, WorkerSettings(start_timeout_s=10.0)) as worker:
        for value, hangs in enumerate((False, False, True)):
            assert worker.call(faults.fail_in_teardown(value, hangs), PLENTY_S) == value
        assert worker.call(faults.echo("here"), PLENTY_S) == "here"
    assert not list(logs.glob("*"))


def test_a_worker_that_was_killed_between_jobs_leaves_nothing(worker: Worker, tmp_path: Path) -> None:
    worker.call(faults.start_and_leave(tmp_path / "pids", False), PLENTY_S)
    pid = worker.pid
    os.kill(pid, signal.SIGKILL)
    assert is_gone(int((tmp_path / "pids").read_text())), "whatever the parent does next"
    assert worker.call(faults.pid(), PLENTY_S) != pid


def test_a_process_ends_after_its_most_jobs_at_a_restart_and_at_the_close(logs: Path) -> None:
    worker = Worker(logs, WorkerSettings(max_jobs=2))
    worker.restart()
    assert worker.pid is None, "before any job it starts nothing"
    pids = [worker.call(faults.pid(), PLENTY_S) for _ in range(3)]
    assert pids[0] == pids[1] != pids[2]
    worker.restart()
    worker.restart()
    pids.append(worker.call(faults.pid(), PLENTY_S))
    assert pids[3] == worker.pid != pids[2]
    assert not any(psutil.pid_exists(pid) for pid in pids[:3]), "they have ended before the next job begins"
    worker.close()
    worker.close()
    assert worker.pid is None
    pids.append(run_once(faults.pid(), PLENTY_S))  # in a worker of its own
    assert all(map(is_gone, pids[3:]))
    assert run_once(faults.exit_with(sys.exit, 3), PLENTY_S) == "exited with status 3"


def test_a_process_that_was_started_ahead_takes_the_place_of_the_first(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = "tests.engines.faults:note_start"
    monkeypatch.setenv("NOTE_START", str(tmp_path / "started"))
    first = worker.call(faults.pid(), PLENTY_S)
    worker.start_ahead(load)
    worker.start_ahead(load)
    assert worker.call(faults.pid(), PLENTY_S) == first
    worker.restart()
    second = worker.call(faults.pid(), PLENTY_S)
    assert (tmp_path / "started").read_text() == f"{second} "

    worker.start_ahead("no.such.module:name")
    worker.restart()
    third = worker.call(faults.pid(), PLENTY_S)
    worker.start_ahead(load)
    ahead = worker._ahead
    assert ahead is not None
    os.kill(ahead.popen.pid, signal.SIGKILL)
    worker.restart()
    fourth = worker.call(faults.pid(), PLENTY_S)
    assert len({first, second, third, fourth, ahead.popen.pid}) == 5, "what was killed does not count"
    worker.start_ahead(load)
    ahead = worker._ahead
    worker.close()
    worker.start_ahead(load)
    assert ahead is not None
    assert worker._ahead is None
    assert is_gone(ahead.popen.pid)


@pytest.mark.parametrize("fault", ["slow", "no such program", "broken"])
def test_a_worker_that_does_not_start_is_the_machines_fault(fault, logs: Path, tmp_path: Path, monkeypatch) -> None:
    settings = WorkerSettings(start_timeout_s=0.0) if fault == "slow" else None
    if fault == "no such program":
        monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    if fault == "broken":
        broken = tmp_path / "broken" / "mptune" / "__init__.py"
        broken.parent.mkdir(parents=True)
        broken.write_text("raise ImportError('a broken installation')")
        monkeypatch.syspath_prepend(broken.parents[1])
    with Worker(logs, settings) as worker:
        failure = worker.call(faults.pid(), PLENTY_S)
    assert (failure.stage, failure.kind, failure.is_machine_fault) == (Stage.START, FailureKind.WORKER, True)
    if fault == "broken":
        assert "exited with status 1" in failure.message
        assert "a broken installation" in log_of(failure)


def test_an_interrupted_call_leaves_a_usable_worker(worker: Worker, tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def interrupt() -> None:
        while not pids.exists() or len(pids.read_text().split()) < 3:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            worker.call(faults.hang(pids), PLENTY_S)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert all(is_gone(int(pid)) for pid in pids.read_text().split())
    assert worker.call(faults.echo("here"), PLENTY_S) == "here"


@pytest.mark.parametrize("is_begun", [True, False])
def test_a_call_ends_at_once_where_another_thread_closes_the_worker(is_begun: bool, logs: Path, tmp_path: Path) -> None:
    worker, results, pids = Worker(logs), list[Any](), tmp_path / "pids"
    thread = threading.Thread(target=lambda: results.append(worker.call(faults.hang(pids), PLENTY_S)))
    thread.start()
    while is_begun and not pids.exists():
        time.sleep(0.01)
    pid = worker.pid
    worker.close()
    thread.join()
    assert pid is None or is_gone(pid)
    for result in (results[0], worker.call(faults.pid(), PLENTY_S)):
        assert isinstance(result, Failure)
        assert result.kind is FailureKind.WORKER
    assert not list(logs.glob("*")), "what was given up has failed in nothing: no log"


_PARENT = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, for all that it starts
from pathlib import Path
from mptune.processes import parent
from tests.engines import faults
with parent.Worker(Path("logs")) as worker:
    worker.call(faults.pid(), 120.0)
    print(worker.pid, flush=True)
"""


def start_parent(code: str, folder: Path) -> tuple[subprocess.Popen[str], int]:
    """A process that runs code with a worker; the worker's number."""
    environment = {**os.environ, "MPTUNE_TEST_MARK": str(folder)}
    command = [sys.executable, "-c", _PARENT + code]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment)
    return parent, int(parent.stdout.readline())


@pytest.mark.parametrize("with_worker", [False, True])
def test_a_parent_that_was_stopped_past_the_deadline_times_nothing_out(with_worker: bool, tmp_path: Path) -> None:
    code = f"    print(worker.call(faults.work({20 if with_worker else 10}), 6.0), flush=True)"
    parent, worker = start_parent(code, tmp_path)
    pids = [parent.pid, worker][: 1 + with_worker]
    for number, pause_s in ((signal.SIGSTOP, 7.0), (signal.SIGCONT, 0.0)):
        time.sleep(0.5)
        for pid in pids:
            os.kill(pid, number)
        time.sleep(pause_s)
    output, _ = parent.communicate(timeout=60)
    assert output.strip() == "done"


HANGS = "    worker.call(faults.hang(Path('pids'), False), {timeout_s})"
DIES_WHILE_IT_KILLS = "    parent.os.killpg = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP, None])
def test_a_parent_that_is_killed_leaves_nothing_of_its_workers_job(number: int | None, tmp_path: Path) -> None:
    """None: killed while it kills its worker."""
    code = HANGS.format(timeout_s=120.0) if number else DIES_WHILE_IT_KILLS + HANGS.format(timeout_s=5.0)
    parent, _ = start_parent(code, tmp_path)
    while not (tmp_path / "pids").exists() or len((tmp_path / "pids").read_text().split()) < 2:
        time.sleep(0.05)
    if number:
        parent.send_signal(number)
    parent.communicate(timeout=60)
    assert parent.returncode == -(number or signal.SIGKILL)
    deadline = time.monotonic() + 20.0
    while left := marked(str(tmp_path)):
        if time.monotonic() > deadline:
            for process in left:
                process.kill()
            pytest.fail(f"left: {[process.status() for process in left]}")
        time.sleep(0.05)


def marked(mark: str) -> list[psutil.Process]:
    """The living processes that ``start_parent`` has started."""
    every = [p for p in psutil.process_iter(["environ", "status"]) if p.info["status"] != psutil.STATUS_ZOMBIE]
    return [p for p in every if (p.info["environ"] or {}).get("MPTUNE_TEST_MARK") == mark]


@pytest.mark.skipif(not Path("/proc/self/oom_score_adj").exists(), reason="needs Linux")
def test_the_kernel_takes_the_worker_first(worker: Worker) -> None:
    """The parent has the record; on a device that shares its memory the kernel might choose it."""
    worker.call(faults.pid(), PLENTY_S)
    own = int(Path("/proc/self/oom_score_adj").read_text())
    assert int(Path(f"/proc/{worker.pid}/oom_score_adj").read_text()) == 1000 > own
