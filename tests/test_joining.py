"""Several workers on one search: of one host by a journal, started by the search or joined from elsewhere."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

import mptune
from mptune.engines.context import RunContext
from mptune.engines.environment import Environment
from mptune.errors import RunError
from mptune.rundir import has_workers, joined_run, open_run, read_run
from mptune.tuning.front import Front
from mptune.tuning.result import read_record
from tests.fakes import Diary, FakeToolchain, Law

pytestmark = pytest.mark.usefixtures("opened_here")

BUDGET = 14
Search, Patch = Callable[..., Front], pytest.MonkeyPatch


@dataclass(frozen=True)
class Opener:
    """Opens a fake toolchain in any process; each keeps a diary of its own in ``folder`` and waits at ``gate``."""

    folder: Path
    delay_s: float = 0.1
    device: str = "Fake 1000"
    gate: Path | None = None

    def __call__(self, context: RunContext) -> FakeToolchain:
        law = Law([group.id for group in context.groups])
        diary = self.folder / f"diary.{os.getpid()}"
        fake = FakeToolchain(law, noise=0.0, delay_s=self.delay_s, diary=diary, gate=self.gate, device=self.device)
        return fake.open(context)

    def built(self) -> dict[int, list[str]]:
        """Process id -> fingerprints whose evaluation on the search samples it has begun."""
        found = {}
        for diary in self.folder.glob("diary.*"):
            lines = [json.loads(line) for line in diary.read_text().splitlines()]
            found[int(diary.suffix[1:])] = [fingerprint for fingerprint, which in lines if which == "search"]
        return found


@dataclass(frozen=True)
class VersionedOpener(Opener):
    """Opens fake toolchains with a version of ONNX Runtime."""

    version: str = "1.98"

    def __call__(self, context: RunContext) -> FakeToolchain:
        toolchain = super().__call__(context)
        environment = Environment(versions={"onnxruntime": self.version}, os="none", cpu="none", cpu_count=1)
        toolchain.environment = lambda: environment  # type: ignore[method-assign]
        return toolchain


PROGRAM = """
import functools, sys
from pathlib import Path
from mptune.api import deploying
from mptune.cli import main
from tests.test_joining import {kind}
deploying.worker = functools.partial(deploying.worker, open_toolchain={opener})
sys.exit(main())
"""


def start_workers_with(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``mptune worker``, as a search starts it, open fake toolchains."""
    words = {"kind": type(opener).__name__, "opener": repr(opener).replace("PosixPath", "Path")}
    monkeypatch.setattr("mptune.tuning.worker.PROGRAM", (sys.executable, "-c", PROGRAM.format(**words)))


@pytest.fixture(autouse=True)
def _no_gpu_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers get GPUs 0 and 1 from what is visible. Nothing runs on them."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def opener(tmp_path: Path) -> Opener:
    folder = tmp_path / "diaries"
    folder.mkdir()
    return Opener(folder)


@pytest.fixture
def search(mlp_path: Path, mlp_data: Path) -> Search:
    """Searches a model in a run directory, with an opener."""

    def run(place: Path, opener: Opener, **options: object) -> Front:
        return mptune.search(mlp_path, data=mlp_data, out=place, open_toolchain=opener, confirm_rounds=1, **options)

    return run


def evaluated(place: Path) -> list[str]:
    record = read_record(*read_run(place))
    plans = [evaluation.plan.fingerprint for evaluation in record.evaluations()]
    assert record.spent == len(plans)
    assert not record.running()
    record.close()
    return plans


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_search_shares_its_budget_among_its_workers(
    search: Search, tmp_path: Path, opener: Opener, monkeypatch: Patch
) -> None:
    place, diary, gate = tmp_path / "shared.mptune", Diary(), tmp_path / "both have begun"
    start_workers_with(Opener(opener.folder, gate=gate), monkeypatch)

    def open_gate() -> None:
        until(lambda: sum(map(bool, opener.built().values())) == 2)
        gate.touch()

    waiting = threading.Thread(target=open_gate)
    waiting.start()
    front = search(place, opener, budget=BUDGET, gpus=(0, 1), listener=diary)
    waiting.join()
    plans = evaluated(place)
    assert len(plans) == len(set(plans)) == BUDGET
    shares = [built for built in opener.built().values() if built]
    assert len(shares) == 2, "the search itself builds nothing"
    assert sorted(plan for built in shares for plan in built) == sorted(plans), "no plan is built twice"
    assert sorted(diary.counts) == [(done, BUDGET) for done in range(1, BUDGET + 1)]
    assert front.fp32.held_out is not None, "the front is confirmed in the end"
    alone = search(tmp_path / "alone.mptune", Opener(opener.folder, 0.0), budget=BUDGET)
    assert front.hypervolume >= 0.97 * alone.hypervolume, "as good a front as one worker's"
    assert (place / "chosen" / "model.onnx").exists()
    assert not psutil.Process().children(recursive=True)


def test_the_plan_of_a_worker_that_is_killed_goes_back(
    search: Search, tmp_path: Path, opener: Opener, monkeypatch: Patch
) -> None:
    place, diary = tmp_path / "killed.mptune", Diary()
    start_workers_with(opener, monkeypatch)

    def kill_one() -> None:
        until(lambda: sum(map(len, opener.built().values())) >= 4)
        os.kill(max(opener.built(), key=lambda pid: len(opener.built()[pid])), signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    search(place, opener, budget=BUDGET, gpus=(0, 1), listener=diary)
    killer.join()
    plans = evaluated(place)
    assert len(plans) == len(set(plans)) == BUDGET
    (told,) = (text for text in diary.warnings if "the worker on GPU" in text)
    assert "ended with exit status -9: see" in told
    begun = [plan for built in opener.built().values() for plan in built]
    assert len(begun) - len(set(begun)) <= 1, "only the plan that was in work is built again"


def test_a_directory_that_workers_use_is_not_moved_aside(search: Search, tmp_path: Path, opener: Opener) -> None:
    place = tmp_path / "run.mptune"
    search(place, opener, budget=2)
    joined, refused = joined_run(read_run(place)[0]), pytest.raises(RunError, match="in use by another")
    with joined, refused, open_run(place, fresh=True):
        pass
    with open_run(place, fresh=True):
        pass


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_worker_waits_for_a_search_with_work(
    search: Search, tmp_path: Path, opener: Opener, is_prepared: bool
) -> None:
    """It starts before the search, or between one that prepares with a budget of 1 and the one with the real budget."""
    place, other, diary = tmp_path / "run.mptune", Opener(tmp_path / "other"), Diary()
    other.folder.mkdir()
    if is_prepared:
        search(place, opener, budget=1)
    joining = threading.Thread(
        target=mptune.worker, args=(place,), kwargs={"open_toolchain": other, "listener": diary, "wait_s": 60.0}
    )
    joining.start()
    waiting = "for the search to have work" if is_prepared else "run.json"
    until(lambda: any(waiting in text for text in diary.stages))
    search(place, opener, budget=BUDGET)
    joining.join()
    plans = evaluated(place)
    assert len(plans) == len(set(plans)) == BUDGET
    assert any(other.built().values())
    assert not has_workers(read_run(place)[0])


def test_a_worker_does_not_wait_for_ever_and_shares_the_time_limit(
    search: Search, tmp_path: Path, opener: Opener
) -> None:
    place, diary = tmp_path / "run.mptune", Diary()
    search(place, opener, budget=2, timeout_s=3600.0)
    started = time.monotonic()
    mptune.worker(place, open_toolchain=opener, listener=diary, wait_s=1.0)
    assert 1.0 <= time.monotonic() - started < 30.0
    assert "waiting up to 1 s for the search to have work" in diary.stages
    assert "nothing to do: the search's budget of 2 plans is spent" in diary.stages
    record = read_record(*read_run(place))
    assert abs(record.note("started") - time.time()) < 600.0
    record.set_note("budget", BUDGET)
    record.set_note("started", time.time() - 3601.0)
    record.close()
    mptune.worker(place, open_toolchain=opener, listener=diary, wait_s=0.0)
    assert "stopped: the time is over" in diary.stages
    assert len(evaluated(place)) == 2


def test_another_device_or_version_is_refused(search: Search, tmp_path: Path, opener: Opener) -> None:
    place, folder = tmp_path / "run.mptune", opener.folder
    search(place, VersionedOpener(folder), budget=2)
    other_version, other_device = (VersionedOpener(folder, version="1.99"), Opener(folder, device="Fake 2000"))
    for other, named in ((other_device, "another target"), (other_version, r"onnxruntime \(1.98 there, 1.99 here\)")):
        with pytest.raises(RunError, match=f"differs from the one that the search was prepared on.*{named}") as raised:
            mptune.worker(place, open_toolchain=other, wait_s=0.0)
        assert "\n" not in raised.value.message
        assert "run directory of its own" in raised.value.hint
    assert len(evaluated(place)) == 2


def test_workers_that_all_stop_are_an_error(search: Search, tmp_path: Path, opener: Opener, monkeypatch: Patch) -> None:
    place, diary = tmp_path / "run.mptune", Diary()
    start_workers_with(Opener(opener.folder, device="Fake 2000"), monkeypatch)
    with pytest.raises(RunError, match=r"GPU [01] ended with exit status 1: see .*worker-gpu[01].log"):
        search(place, opener, gpus=(0, 1), budget=4, listener=diary)
    assert sorted(text[:22] for text in diary.warnings) == [f"the worker on GPU {gpu} ended"[:22] for gpu in (0, 1)]
    assert "this host differs" in (place / "logs" / "worker-gpu0.log").read_text()
    front = search(place, opener, budget=4)
    assert front.evaluations == 4, "the same command goes on"
