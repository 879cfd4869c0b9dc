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

import psutil
import pytest

from mptune.engines.base import Failure, FailureKind, Progress, Stage
from mptune.errors import ModelError
from mptune.processes.parent import Worker
from mptune.processes.process import KEEP_BYTES
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


def log_of(failure: Failure) -> str:
    assert failure.log_path is not None
    return failure.log_path.read_text()


def assert_works(worker: Worker) -> None:
    assert worker.call(faults.Echo(("still", "here")), PLENTY_S) == ("still", "here")


def test_progress_reaches_the_parent_while_it_waits(worker: Worker) -> None:
    heard: list[Progress] = []
    worker.on_progress = heard.append
    assert worker.call(faults.Report(threads=4, steps=200), PLENTY_S) == "told"
    assert len(heard) == 800
    for name in {progress.phase for progress in heard}:
        assert [one.done for one in heard if one.phase == name] == list(range(1, 201))
    assert_works(worker)
    assert len(heard) == 800


def test_progress_does_not_break_into_an_answer(worker: Worker) -> None:
    answer = bytes(range(256)) * 2**15
    for _ in range(3):
        assert worker.call(faults.ReportOn(answer), PLENTY_S) == answer
    assert_works(worker)


def test_a_job_runs_in_another_process_and_leaves_no_log(worker: Worker, logs: Path) -> None:
    pid = worker.call(faults.Pid(), PLENTY_S)
    assert pid == worker.pid != os.getpid()
    assert worker.call(faults.Echo({"a": [1, None]}), PLENTY_S) == {"a": [1, None]}
    assert worker.call(faults.Pid(), PLENTY_S) == pid
    assert not list(logs.glob("*"))


def test_a_worker_gets_its_environment_variables_and_the_parent_does_not(logs: Path) -> None:
    with Worker(logs, environment={"MPTUNE_TEST": "of the worker"}) as worker:
        assert worker.call(faults.Variable("MPTUNE_TEST"), PLENTY_S) == "of the worker"
    assert "MPTUNE_TEST" not in os.environ


def test_what_is_printed_does_not_reach_the_parent(worker: Worker, capfd: pytest.CaptureFixture[str]) -> None:
    assert_works(worker)
    assert capfd.readouterr() == ("", "")


def test_state_lives_from_job_to_job(worker: Worker) -> None:
    counts = [worker.call(faults.Count(key), PLENTY_S) for key in (1, 1, 2, 2)]
    assert counts == [1, 1, 2, 2]


@pytest.mark.parametrize(("number", "name"), [(signal.SIGSEGV, "SIGSEGV"), (signal.SIGKILL, "SIGKILL")])
def test_a_crash_is_a_failure_that_names_the_signal(worker: Worker, number: int, name: str) -> None:
    failure = worker.call(faults.Signalled(number), PLENTY_S)
    assert isinstance(failure, Failure)
    assert failure.kind in {FailureKind.CRASH, FailureKind.OUT_OF_MEMORY}
    assert (failure.kind is FailureKind.CRASH) or number == signal.SIGKILL
    assert failure.stage is Stage.RUN
    assert name in failure.message
    assert "last words" in log_of(failure)
    assert_works(worker)


def test_a_crash_while_a_job_is_torn_down_costs_neither_its_result_nor_the_next_job(worker: Worker) -> None:
    for value in range(2):
        assert worker.call(faults.CrashInTeardown(value), PLENTY_S) == value
    assert_works(worker)


def test_an_abort_with_bad_alloc_is_out_of_memory(worker: Worker) -> None:
    failure = worker.call(faults.Abort("terminate called after throwing an instance of 'std::bad_alloc'\n"), PLENTY_S)
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.OUT_OF_MEMORY
    assert "SIGABRT" in failure.message
    assert_works(worker)


def test_a_crash_leaves_a_traceback_in_the_log(worker: Worker) -> None:
    failure = worker.call(faults.Abort(), PLENTY_S)
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.CRASH
    assert "faults.py" in log_of(failure)  # faulthandler


@pytest.mark.smoke
def test_a_hang_is_killed_with_everything_it_started(worker: Worker, tmp_path: Path) -> None:
    worker.call(faults.Pid(), PLENTY_S)
    pids = tmp_path / "pids"
    failure = worker.call(faults.Hang(pids), timeout_s=3.0)
    assert isinstance(failure, Failure)
    assert (failure.stage, failure.kind) == (Stage.TIME, FailureKind.TIMEOUT)
    assert "3 s" in failure.message
    assert failure.log_path is not None
    assert failure.log_path.exists()
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 3
    assert all(is_gone(pid) for pid in started)
    assert_works(worker)


def test_a_crash_is_noticed_though_a_grandchild_holds_its_pipes(worker: Worker, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    failure = worker.call(faults.OrphanAndCrash(pids), PLENTY_S)
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.CRASH
    assert is_gone(int(pids.read_text()))
    assert_works(worker)


def test_allocating_past_the_limit_is_out_of_memory(logs: Path) -> None:
    with Worker(logs) as worker:
        failure = worker.call(faults.Gorge(3 << 30), PLENTY_S)
        assert isinstance(failure, Failure)
        assert failure.kind is FailureKind.OUT_OF_MEMORY
        assert "MemoryError" in log_of(failure)
        assert_works(worker)


def test_a_babbling_job_cannot_fill_the_disk(worker: Worker, logs: Path) -> None:
    assert worker.call(faults.Babble(20, fails=False), PLENTY_S) == "done"
    assert not list(logs.glob("*"))
    failure = worker.call(faults.Babble(20, fails=True), PLENTY_S)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.message) == (FailureKind.ERROR, "ValueError: first line")
    log = log_of(failure)
    assert len(log) < 2 * KEEP_BYTES + 200
    assert log.startswith("the beginning\n")
    assert "bytes left out" in log
    assert "the end\n" in log
    assert log.rstrip().endswith("second line")
    assert_works(worker)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ValueError("a\nb"), FailureKind.ERROR, "ValueError: a"),
        (RuntimeError(), FailureKind.ERROR, "RuntimeError"),
        (MemoryError(), FailureKind.OUT_OF_MEMORY, "out of memory"),
        (OSError(errno.ENOSPC, "No space left on device"), FailureKind.DISK_FULL, "No space left"),
        (KeyboardInterrupt(), FailureKind.ERROR, "KeyboardInterrupt"),
    ],
)
def test_an_exception_is_a_failure(worker: Worker, error: BaseException, kind: FailureKind, words: str) -> None:
    failure = worker.call(faults.Raise(error), PLENTY_S)
    assert isinstance(failure, Failure)
    assert failure.kind is kind
    assert words in failure.message
    assert type(error).__name__ in log_of(failure)
    assert_works(worker)


def test_an_engine_error_keeps_its_kind_words_and_stage(worker: Worker) -> None:
    failure = worker.call(faults.RaiseEngineError(FailureKind.UNSUPPORTED, Stage.TIME), PLENTY_S)
    assert isinstance(failure, Failure)
    assert (failure.stage, failure.kind) == (Stage.TIME, FailureKind.UNSUPPORTED)
    assert failure.message == "in its own words"


@pytest.mark.parametrize("kind", [FailureKind.DEVICE_LOST, FailureKind.OUT_OF_MEMORY])
def test_a_worker_that_lost_its_device_or_memory_is_replaced(worker: Worker, kind: FailureKind) -> None:
    pid = worker.call(faults.Pid(), PLENTY_S)
    assert isinstance(worker.call(faults.RaiseEngineError(kind), PLENTY_S), Failure)
    assert worker.call(faults.Pid(), PLENTY_S) != pid


def test_an_ordinary_failure_keeps_the_worker(worker: Worker) -> None:
    pid = worker.call(faults.Pid(), PLENTY_S)
    assert isinstance(worker.call(faults.Raise(ValueError("x")), PLENTY_S), Failure)
    assert worker.call(faults.Pid(), PLENTY_S) == pid


def test_an_mptune_error_is_raised_in_the_parent_as_it_is(worker: Worker, logs: Path) -> None:
    with pytest.raises(ModelError) as caught:
        worker.call(faults.RaiseModelError(), PLENTY_S)
    assert (caught.value.message, caught.value.hint) == ("the model is odd", "mend it")
    assert not list(logs.glob("*"))
    assert_works(worker)


def test_a_result_that_does_not_pickle_is_a_failure(worker: Worker) -> None:
    failure = worker.call(faults.Unpicklable(), PLENTY_S)
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.ERROR
    assert "pickle" in failure.message
    assert_works(worker)


def test_a_result_that_does_not_unpickle_is_a_failure(worker: Worker) -> None:
    failure = worker.call(faults.ReturnTrap(), PLENTY_S)
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.ERROR
    assert "cannot be read" in failure.message
    assert_works(worker)


def test_a_job_that_does_not_unpickle_is_a_failure(worker: Worker) -> None:
    failure = worker.call(faults.BeTrap(faults.Trap()), PLENTY_S)
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.ERROR
    assert "not a number" in failure.message
    assert_works(worker)


def test_rubbish_on_the_pipe_is_a_failure(worker: Worker) -> None:
    failure = worker.call(faults.Garble(), PLENTY_S)
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.ERROR
    assert_works(worker)


@pytest.mark.parametrize("job", [faults.Exit(3), faults.HardExit(3)])
def test_an_exit_is_a_crash_with_its_status(worker: Worker, job: faults.Exit | faults.HardExit) -> None:
    failure = worker.call(job, PLENTY_S)
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.CRASH
    assert failure.message == "exited with status 3"
    assert_works(worker)


def test_a_worker_that_died_at_rest_is_replaced_silently(worker: Worker) -> None:
    pid = worker.call(faults.Pid(), PLENTY_S)
    os.kill(pid, signal.SIGKILL)
    psutil.Process(pid).wait(timeout=20)
    assert_works(worker)


def test_a_worker_is_replaced_after_so_many_jobs(logs: Path) -> None:
    with Worker(logs, WorkerSettings(max_jobs=2)) as worker:
        pids = [worker.call(faults.Pid(), PLENTY_S) for _ in range(4)]
    assert pids[0] == pids[1] != pids[2] == pids[3]


def test_closing_ends_the_process_and_may_be_repeated(logs: Path) -> None:
    worker = Worker(logs)
    pid = worker.call(faults.Pid(), PLENTY_S)
    worker.close()
    worker.close()
    assert worker.pid is None
    assert is_gone(pid)
    assert_works(worker)
    worker.close()


def test_a_worker_that_does_not_start_in_time_is_the_machines_fault(logs: Path) -> None:
    with Worker(logs, WorkerSettings(start_timeout_s=0.0)) as worker:
        failure = worker.call(faults.Pid(), PLENTY_S)
    assert isinstance(failure, Failure)
    assert (failure.stage, failure.kind) == (Stage.START, FailureKind.WORKER)
    assert failure.is_machine_fault


def test_a_worker_that_cannot_start_is_the_machines_fault(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    failure = Worker(logs).call(faults.Pid(), PLENTY_S)
    assert isinstance(failure, Failure)
    assert (failure.stage, failure.kind) == (Stage.START, FailureKind.WORKER)


def test_a_worker_that_ends_at_start_shows_why_in_its_log(
    logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken" / "mptune" / "__init__.py"
    broken.parent.mkdir(parents=True)
    broken.write_text("raise ImportError('a broken installation')")
    monkeypatch.syspath_prepend(broken.parents[1])
    failure = Worker(logs).call(faults.Pid(), PLENTY_S)
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.WORKER
    assert "exited with status 1" in failure.message
    assert "a broken installation" in log_of(failure)


def test_the_import_path_is_the_parents_wherever_that_stands(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "numpy.py").write_text("raise ImportError('the wrong one')")
    path = worker.call(faults.SysPath(), PLENTY_S)
    assert not isinstance(path, Failure)
    assert [p for p in sys.path if p] == [p for p in path if p in sys.path]
    assert all(Path(p).is_absolute() for p in path)


def test_it_outlives_the_thread_that_started_it_and_serves_others(worker: Worker) -> None:
    pids: list[object] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: pids.append(worker.call(faults.Pid(), PLENTY_S)))
        thread.start()
        thread.join()
    assert pids[0] == pids[1] == worker.call(faults.Pid(), PLENTY_S)


def test_calls_from_many_threads_queue_up(worker: Worker) -> None:
    results: dict[int, object] = {}

    def call(number: int) -> None:
        results[number] = worker.call(faults.Echo(number), PLENTY_S)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: number for number in range(8)}


def test_a_busy_worker_dies_with_its_parent(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("needs Linux: PR_SET_PDEATHSIG")
    pids = tmp_path / "pids"
    script = f"""
import os, signal, sys, threading, time
from pathlib import Path
from mptune.processes.parent import Worker
from tests.engines import faults
pids = Path({str(pids)!r})
worker = Worker(Path({str(tmp_path)!r}))
worker.call(faults.Pid(), 60.0)
threading.Thread(target=worker.call, args=(faults.Hang(pids), 60.0), daemon=True).start()
while not pids.exists() or len(pids.read_text().split()) < 3:
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        timeout=PLENTY_S,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    busy, *grandchildren = (int(pid) for pid in pids.read_text().split())
    try:
        assert is_gone(busy)
    finally:
        for pid in grandchildren:
            with suppress(ProcessLookupError):  # The one in the worker's group ends with the worker.
                os.kill(pid, signal.SIGKILL)


def test_an_interrupted_call_leaves_a_usable_worker(worker: Worker, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    worker.call(faults.Pid(), PLENTY_S)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 3.0)
        with pytest.raises(KeyboardInterrupt):
            worker.call(faults.Hang(pids), PLENTY_S)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
    assert all(is_gone(int(pid)) for pid in pids.read_text().split())
    assert_works(worker)


def test_a_log_that_cannot_be_written_does_not_hide_the_failure(tmp_path: Path) -> None:
    blocked = tmp_path / "logs"
    blocked.write_text("a file where the folder should be")
    with Worker(blocked) as worker:
        failure = worker.call(faults.Raise(ValueError("x")), PLENTY_S)
    assert isinstance(failure, Failure)
    assert failure.message == "ValueError: x"
    assert failure.log_path is None


_CALLS_A_JOB = """
import sys
from pathlib import Path
from mptune.processes.parent import Worker
from tests.engines import faults
with Worker(Path("logs")) as worker:
    worker.call(faults.Pid(), 120.0)
    print(worker.pid, flush=True)
    print(worker.call(faults.Work(int(sys.argv[1])), float(sys.argv[2])), flush=True)
"""


@pytest.mark.parametrize("with_worker", [False, True])
def test_a_parent_that_was_stopped_past_the_deadline_times_nothing_out(with_worker: bool, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _CALLS_A_JOB, "20" if with_worker else "10", "4"]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    pids = [parent.pid, worker] if with_worker else [parent.pid]
    time.sleep(0.5)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(5.0)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    output, _ = parent.communicate(timeout=60)
    assert output.strip() == "done"


def test_the_deadline_holds_though_a_job_reports_without_end(worker: Worker) -> None:
    worker.call(faults.Pid(), PLENTY_S)
    failure = worker.call(faults.Report(threads=1, steps=10**9), timeout_s=2.0)
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.TIMEOUT
    assert_works(worker)


_HANGS_IN_A_JOB = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, for all that it starts
from pathlib import Path
from mptune.processes.parent import Worker
from tests.engines import faults
with Worker(Path("logs")) as worker:
    worker.call(faults.Hang(Path(sys.argv[1]), apart=False), 120.0)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_a_parent_that_is_killed_leaves_nothing_of_its_workers_job(number: int, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    parent = subprocess.Popen([sys.executable, "-c", _HANGS_IN_A_JOB, str(pids)], cwd=tmp_path)
    deadline = time.monotonic() + PLENTY_S
    while not pids.exists() or len(pids.read_text().split()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    started = [int(pid) for pid in pids.read_text().split()]
    children = psutil.Process(started[0]).children(recursive=True)
    parent.send_signal(number)
    parent.wait(timeout=60)
    assert all(is_gone(pid) for pid in started)
    assert all(is_gone(child.pid) for child in children)


_DIES_WHILE_IT_KILLS = """
import os, signal, sys
from pathlib import Path
from mptune.processes import process
from mptune.processes.parent import Worker
from tests.engines import faults
process.os.killpg = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
with Worker(Path("logs")) as worker:
    worker.call(faults.Hang(Path(sys.argv[1]), apart=False), 1.0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: PR_SET_PDEATHSIG")
def test_a_parent_that_is_killed_while_it_kills_its_worker_leaves_nothing(tmp_path: Path) -> None:
    mark = {"MPTUNE_TEST_MARK": str(tmp_path)}
    command = [sys.executable, "-c", _DIES_WHILE_IT_KILLS, str(tmp_path / "pids")]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **mark}, stderr=subprocess.PIPE, timeout=PLENTY_S, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    deadline = time.monotonic() + 20.0
    while left := marked(mark):
        if time.monotonic() > deadline:
            for process in left:
                process.kill()
            pytest.fail(f"left: {[process.status() for process in left]}")
        time.sleep(0.05)


def marked(mark: dict[str, str]) -> list[psutil.Process]:
    """The living processes that have an environment variable."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and mark.items() <= process.environ().items():
                found.append(process)
    return found


def test_a_worker_that_is_killed_between_two_jobs_leaves_nothing(worker: Worker, tmp_path: Path) -> None:
    worker.call(faults.StartAndLeave(tmp_path / "pids"), PLENTY_S)
    (started,) = (int(pid) for pid in (tmp_path / "pids").read_text().split())
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    assert is_gone(started), "whatever the parent does next"
    assert_works(worker)


@pytest.mark.skipif(not Path("/proc/self/oom_score_adj").exists(), reason="needs Linux")
def test_the_kernel_takes_the_worker_first(worker: Worker) -> None:
    """The parent has the record; on a device that shares its memory the kernel might choose it."""
    assert_works(worker)
    own = int(Path("/proc/self/oom_score_adj").read_text())
    assert int(Path(f"/proc/{worker.pid}/oom_score_adj").read_text()) == 1000 > own
