"""Jobs that crash, hang, leak, lie or print without end: each is a failure, and the next one finds a worker."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from mptune.engines.base import Failure, FailureKind, Progress, Stage
from mptune.errors import ModelError
from mptune.processes.child import Job
from mptune.processes.parent import KEEP_BYTES, Worker, run_once
from mptune.settings import WorkerSettings
from tests.engines import faults

PLENTY_S = 120.0


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    return tmp_path / "logs"


@pytest.fixture
def worker(logs: Path) -> Iterator[Worker]:
    with Worker(logs) as worker:
        yield worker


def is_gone(pid: int) -> bool:
    """Whether a process has ended (a zombie that nobody reaps has)."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return True
        process.wait(timeout=20)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def fail(worker: Worker, job: Job[Any], timeout_s: float = PLENTY_S) -> Failure:
    """The failure of a job, after which another one works."""
    failure = worker.call(job, timeout_s)
    assert isinstance(failure, Failure)
    assert worker.call(faults.Echo(("still", "here")), PLENTY_S) == ("still", "here")
    return failure


def log_of(failure: Failure) -> str:
    assert failure.log_path is not None
    return failure.log_path.read_text()


# -- jobs that go well -----------------------------------------------------------------------------------------------


def test_a_job_runs_in_another_process_and_leaves_no_log_and_no_output(
    worker: Worker, logs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pid = worker.call(faults.Pid(), PLENTY_S)
    assert pid == worker.pid != os.getpid()
    assert worker.call(faults.Echo({"a": [1, None]}), PLENTY_S) == {"a": [1, None]}
    assert worker.call(faults.Babble(20, fails=False), PLENTY_S) == "done"
    assert [worker.call(faults.Count(key), PLENTY_S) for key in (1, 1, 2, 2)] == [1, 1, 2, 2]
    assert worker.call(faults.Pid(), PLENTY_S) == pid
    assert not list(logs.glob("*"))
    assert capfd.readouterr() == ("", "")


def test_progress_reaches_the_parent_and_does_not_break_into_an_answer(worker: Worker) -> None:
    heard: list[Progress] = []
    worker.on_progress = heard.append
    assert worker.call(faults.Report(threads=4, steps=200), PLENTY_S) == "told"
    assert len(heard) == 800
    for name in {progress.phase for progress in heard}:
        assert [progress.done for progress in heard if progress.phase == name] == list(range(1, 201))
    answer = bytes(range(256)) * 2**15
    for _ in range(3):
        assert worker.call(faults.ReportOn(answer), PLENTY_S) == answer


def test_a_job_asks_the_parent_however_large_the_question_and_long_the_answer(worker: Worker) -> None:
    def answer(question: bytes) -> int:
        if not question:
            raise ModelError("the question is odd", "mend it")
        time.sleep(5.0)
        return len(question)

    worker.on_question = answer
    worker.call(faults.Pid(), PLENTY_S)
    assert worker.call(faults.Ask(bytes(1 << 22)), 4.5) == 1 << 22
    with pytest.raises(ModelError, match="the question is odd"):
        worker.call(faults.Ask(b""), PLENTY_S)


def test_a_worker_gets_its_environment_variables_and_the_import_path_of_its_parent(
    logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "numpy.py").write_text("raise ImportError('the wrong one')")
    with Worker(logs, environment={"MPTUNE_TEST": "of the worker"}) as worker:
        assert worker.call(faults.Variable("MPTUNE_TEST"), PLENTY_S) == "of the worker"
        path = worker.call(faults.SysPath(), PLENTY_S)
    assert "MPTUNE_TEST" not in os.environ
    assert not isinstance(path, Failure)
    assert [entry for entry in sys.path if entry] == [entry for entry in path if entry in sys.path]
    assert all(Path(entry).is_absolute() for entry in path)


def test_calls_from_many_threads_queue_up_and_the_process_outlives_the_first(worker: Worker) -> None:
    results: dict[int, object] = {}
    first = threading.Thread(target=lambda: results.update({-1: worker.call(faults.Pid(), PLENTY_S)}))
    first.start()
    first.join()
    call = lambda number: results.update({number: worker.call(faults.Echo(number), PLENTY_S)})  # noqa: E731
    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {-1: worker.pid, **{number: number for number in range(8)}}


# -- jobs that fail --------------------------------------------------------------------------------------------------

ENDS = [
    (faults.Signalled(signal.SIGSEGV), FailureKind.CRASH, "SIGSEGV", "last words"),
    (faults.Signalled(signal.SIGKILL), FailureKind.OUT_OF_MEMORY, "SIGKILL", "last words"),
    (faults.Abort("terminate called after throwing 'std::bad_alloc'\n"), FailureKind.OUT_OF_MEMORY, "SIGABRT", ""),
    (faults.Abort(), FailureKind.CRASH, "SIGABRT", "faults.py"),  # faulthandler
    (faults.Exit(3), FailureKind.CRASH, "exited with status 3", ""),
    (faults.HardExit(3), FailureKind.CRASH, "exited with status 3", ""),
    (faults.CloseAll(), FailureKind.CRASH, "exited with status 1", ""),
    (faults.Gorge(3 << 30), FailureKind.OUT_OF_MEMORY, "out of memory", "MemoryError"),
    (faults.Raise(ValueError("a\nb")), FailureKind.ERROR, "ValueError: a", "ValueError"),
    (faults.Raise(RuntimeError()), FailureKind.ERROR, "RuntimeError", "RuntimeError"),
    (faults.Raise(MemoryError()), FailureKind.OUT_OF_MEMORY, "out of memory", "MemoryError"),
    (faults.Raise(OSError(errno.ENOSPC, "No space left on device")), FailureKind.DISK_FULL, "No space left", "OSError"),
    (faults.Raise(KeyboardInterrupt()), FailureKind.ERROR, "KeyboardInterrupt", "KeyboardInterrupt"),
    (faults.RaiseEngineError(FailureKind.UNSUPPORTED), FailureKind.UNSUPPORTED, "in its own words", ""),
    (faults.Unpicklable(), FailureKind.ERROR, "pickle", ""),
    (faults.ReturnTrap(), FailureKind.ERROR, "cannot be read", ""),
    (faults.BeTrap(faults.Trap()), FailureKind.ERROR, "not a number", ""),
    (faults.Garble(), FailureKind.ERROR, "cannot be read", ""),
    (faults.Fork(), FailureKind.ERROR, "RuntimeError: in the parent", "ValueError: in the child"),
]


@pytest.mark.parametrize(("job", "kind", "words", "logged"), ENDS)
def test_a_failure_names_its_cause_and_has_a_log(
    worker: Worker, job: Job[Any], kind: FailureKind, words: str, logged: str
) -> None:
    failure = fail(worker, job)
    assert failure.kind is kind
    assert words in failure.message
    assert "\n" not in failure.message
    assert logged in log_of(failure)


def test_a_failure_names_the_stage_that_was_entered(worker: Worker) -> None:
    assert fail(worker, faults.RaiseEngineError(FailureKind.UNSUPPORTED, Stage.TIME)).stage is Stage.TIME
    assert fail(worker, faults.Signalled(signal.SIGSEGV, Stage.RUN)).stage is Stage.RUN
    assert fail(worker, faults.Raise(ValueError("x"))).stage is Stage.BUILD


def test_an_mptune_error_is_raised_in_the_parent_as_it_is(worker: Worker, logs: Path) -> None:
    with pytest.raises(ModelError) as caught:
        worker.call(faults.RaiseModelError(), PLENTY_S)
    assert (caught.value.message, caught.value.hint) == ("the model is odd", "mend it")
    assert not list(logs.glob("*"))


@pytest.mark.smoke
def test_a_hang_is_killed_with_everything_it_started_and_the_log_shows_where_it_stood(
    worker: Worker, tmp_path: Path
) -> None:
    worker.call(faults.Pid(), PLENTY_S)
    failure = fail(worker, faults.Hang(tmp_path / "pids"), timeout_s=3.0)
    assert (failure.stage, failure.kind, failure.message) == (Stage.TIME, FailureKind.TIMEOUT, "no result after 3 s")
    assert "faults.py" in log_of(failure)
    started = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(started) == 3
    assert all(is_gone(pid) for pid in started)


def test_the_deadline_holds_though_a_job_reports_without_end(worker: Worker) -> None:
    assert fail(worker, faults.Report(threads=1, steps=10**9), timeout_s=2.0).kind is FailureKind.TIMEOUT


def test_a_crash_is_noticed_though_a_grandchild_holds_all_descriptors(worker: Worker, tmp_path: Path) -> None:
    assert fail(worker, faults.OrphanAndCrash(tmp_path / "orphan")).kind is FailureKind.CRASH
    assert is_gone(int((tmp_path / "orphan").read_text()))
    try:
        assert fail(worker, faults.ForkAndCrash(tmp_path / "fork")).kind is FailureKind.CRASH
    finally:
        os.kill(int((tmp_path / "fork").read_text()), signal.SIGKILL)


def test_the_log_of_a_babbling_job_holds_its_beginning_and_its_end(worker: Worker) -> None:
    failure = fail(worker, faults.Babble(100, fails=True))
    assert (failure.kind, failure.message) == (FailureKind.ERROR, "ValueError: first line")
    log = log_of(failure)
    assert len(log) < 2 * KEEP_BYTES + 200
    assert log.startswith("the beginning\n")
    assert "bytes left out" in log
    assert "the end\n" in log
    assert log.rstrip().endswith("second line")


def test_a_log_that_cannot_be_written_does_not_hide_the_failure(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    with Worker(tmp_path / "logs") as worker:
        failure = fail(worker, faults.Raise(ValueError("x")))
    assert (failure.message, failure.log_path) == ("ValueError: x", None)


# -- when a process is replaced --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "is_replaced"),
    [(FailureKind.DEVICE_LOST, True), (FailureKind.OUT_OF_MEMORY, True), (FailureKind.UNSUPPORTED, False)],
)
def test_a_worker_that_lost_its_device_or_memory_is_replaced(
    worker: Worker, kind: FailureKind, is_replaced: bool
) -> None:
    pid = worker.call(faults.Pid(), PLENTY_S)
    fail(worker, faults.RaiseEngineError(kind))
    assert (worker.call(faults.Pid(), PLENTY_S) != pid) == is_replaced


def test_a_crash_or_hang_while_a_job_is_torn_down_costs_neither_its_result_nor_the_next_job(logs: Path) -> None:
    with Worker(logs, WorkerSettings(start_timeout_s=10.0)) as worker:
        for value, job in enumerate((faults.CrashInTeardown, faults.CrashInTeardown, faults.HangInTeardown)):
            assert worker.call(job(value), PLENTY_S) == value
        assert worker.call(faults.Echo("here"), PLENTY_S) == "here"
    assert not list(logs.glob("*"))


def test_a_worker_that_was_killed_between_two_jobs_leaves_nothing_and_is_replaced(
    worker: Worker, tmp_path: Path
) -> None:
    worker.call(faults.StartAndLeave(tmp_path / "pids"), PLENTY_S)
    pid = worker.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert is_gone(int((tmp_path / "pids").read_text())), "whatever the parent does next"
    assert worker.call(faults.Pid(), PLENTY_S) != pid


def test_a_process_ends_after_its_most_jobs_at_a_restart_and_at_the_close(logs: Path) -> None:
    worker = Worker(logs, WorkerSettings(max_jobs=2))
    worker.restart()
    assert worker.pid is None, "before any job it starts nothing"
    pids = [worker.call(faults.Pid(), PLENTY_S) for _ in range(3)]
    assert pids[0] == pids[1] != pids[2]
    worker.restart()
    worker.restart()
    pids.append(worker.call(faults.Pid(), PLENTY_S))
    assert pids[3] == worker.pid != pids[2]
    assert not any(psutil.pid_exists(pid) for pid in pids[:3]), "they have ended before the next job begins"
    worker.close()
    worker.close()
    assert worker.pid is None
    assert is_gone(pids[3])


def test_a_job_in_a_worker_of_its_own_gives_its_result_or_why_it_failed() -> None:
    pid = run_once(faults.Pid(), PLENTY_S)
    assert isinstance(pid, int)
    assert is_gone(pid)
    assert run_once(faults.Exit(3), PLENTY_S) == "exited with status 3"


# -- a worker that does not start ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["slow", "no such program", "broken"])
def test_a_worker_that_does_not_start_is_the_machines_fault(
    fault: str, logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = WorkerSettings(start_timeout_s=0.0) if fault == "slow" else None
    if fault == "no such program":
        monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    if fault == "broken":
        broken = tmp_path / "broken" / "mptune" / "__init__.py"
        broken.parent.mkdir(parents=True)
        broken.write_text("raise ImportError('a broken installation')")
        monkeypatch.syspath_prepend(broken.parents[1])
    with Worker(logs, settings) as worker:
        failure = worker.call(faults.Pid(), PLENTY_S)
    assert isinstance(failure, Failure)
    assert (failure.stage, failure.kind) == (Stage.START, FailureKind.WORKER)
    assert failure.is_machine_fault
    if fault == "broken":
        assert "exited with status 1" in failure.message
        assert "a broken installation" in log_of(failure)


# -- a parent that is interrupted, stopped or killed -----------------------------------------------------------------


def test_an_interrupted_call_leaves_a_usable_worker(worker: Worker, tmp_path: Path) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    worker.call(faults.Pid(), PLENTY_S)
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 3.0)
        with pytest.raises(KeyboardInterrupt):
            worker.call(faults.Hang(tmp_path / "pids"), PLENTY_S)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
    assert all(is_gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())
    assert worker.call(faults.Echo("here"), PLENTY_S) == "here"


@pytest.mark.parametrize("is_begun", [True, False])
def test_a_call_ends_at_once_where_another_thread_closes_the_worker(is_begun: bool, logs: Path, tmp_path: Path) -> None:
    worker, results, pids = Worker(logs), list[Any](), tmp_path / "pids"
    thread = threading.Thread(target=lambda: results.append(worker.call(faults.Hang(pids), PLENTY_S)))
    thread.start()
    while is_begun and not pids.exists():
        time.sleep(0.01)
    pid = worker.pid
    worker.close()
    thread.join()
    assert pid is None or is_gone(pid)
    for result in (results[0], worker.call(faults.Pid(), PLENTY_S)):
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
    worker.call(faults.Pid(), 120.0)
    print(worker.pid, flush=True)
"""


def start_parent(code: str, folder: Path) -> tuple[subprocess.Popen[str], int]:
    """A process that runs code with a worker; the worker's number."""
    environment = {**os.environ, "MPTUNE_TEST_MARK": str(folder)}
    command = [sys.executable, "-c", _PARENT + code]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment)
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


@pytest.mark.parametrize("with_worker", [False, True])
def test_a_parent_that_was_stopped_past_the_deadline_times_nothing_out(with_worker: bool, tmp_path: Path) -> None:
    code = f"    print(worker.call(faults.Work({20 if with_worker else 10}), 4.0), flush=True)"
    parent, worker = start_parent(code, tmp_path)
    pids = [parent.pid, worker] if with_worker else [parent.pid]
    time.sleep(0.5)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(5.0)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    output, _ = parent.communicate(timeout=60)
    assert output.strip() == "done"


HANGS = "    worker.call(faults.Hang(Path('pids'), apart=False), {timeout_s})"
DIES_WHILE_IT_KILLS = "    parent.os.killpg = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP, None])
def test_a_parent_that_is_killed_leaves_nothing_of_its_workers_job(number: int | None, tmp_path: Path) -> None:
    """None: killed while it kills its worker."""
    code = HANGS.format(timeout_s=120.0) if number else DIES_WHILE_IT_KILLS + HANGS.format(timeout_s=1.0)
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
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("MPTUNE_TEST_MARK") == mark:
                processes.append(process)
    return processes


@pytest.mark.skipif(not Path("/proc/self/oom_score_adj").exists(), reason="needs Linux")
def test_the_kernel_takes_the_worker_first(worker: Worker) -> None:
    """The parent has the record; on a device that shares its memory the kernel might choose it."""
    worker.call(faults.Pid(), PLENTY_S)
    own = int(Path("/proc/self/oom_score_adj").read_text())
    assert int(Path(f"/proc/{worker.pid}/oom_score_adj").read_text()) == 1000 > own
