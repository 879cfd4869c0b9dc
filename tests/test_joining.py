"""Several workers and hosts on one search: by a journal, or a database where their identity is equal."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest

import mptune
from mptune.engines.context import RunContext
from mptune.engines.environment import Environment
from mptune.errors import RunError
from mptune.rundir import has_workers, joined_run, open_run, read_run
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.front import Front
from mptune.tuning.result import read_record
from tests.conftest import save_mlp
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
        law = Law([group.id for group in context.grouped.groups])
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
    """Searches a model in a run directory, with an opener, for the knee: within a limit it ends before its budget."""

    def run(place: Path, opener: Opener, **options: object) -> Front:
        options = {"open_toolchain": opener, "confirm_rounds": 1, "knee": True, **options}
        return mptune.search(mlp_path, data=mlp_data, out=place, **options)

    return run


def evaluations_of(place: Path, storage: str | None = None) -> tuple[Evaluation, ...]:
    with contextlib.closing(read_record(*read_run(place), storage)) as record:
        assert record.spent == len(record.evaluations())
        # A worker that is killed right after it asked has not named itself on the trial.
        assert not any(trial.user_attrs for trial in record.running())
        return record.evaluations()


def evaluated(place: Path, storage: str | None = None) -> list[str]:
    return [evaluation.plan.fingerprint for evaluation in evaluations_of(place, storage)]


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


SPACES = Path(mptune.__file__).parent.parent / "search_spaces"
ROWS = np.random.default_rng(3).normal(size=(12, 32)).astype(np.float32)


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/x.db"


def search_on(tmp_path: Path, host: str, storage: str, **changed: Any) -> Front:
    """A search in HOST/run.mptune."""
    diaries = tmp_path / "diaries"
    diaries.mkdir(exist_ok=True)
    model = save_mlp(tmp_path / "model.onnx") if not (tmp_path / "model.onnx").exists() else tmp_path / "model.onnx"
    options = {"data": ROWS, "budget": 3, "confirm_rounds": 1, "open_toolchain": Opener(diaries, 0.0), **changed}
    return mptune.search(options.pop("model", model), out=tmp_path / host / "run.mptune", storage=storage, **options)


def study(tmp_path: Path, host: str) -> str:
    return read_run(tmp_path / host / "run.mptune")[1].study


def check_two_hosts(tmp_path: Path, storage: str) -> None:
    """An equal search shares, another one is refused, and a fresh one leaves what is there alone."""
    search_on(tmp_path, "a", storage, budget=1)
    before = evaluated(tmp_path / "a" / "run.mptune", storage)
    search_on(tmp_path, "b", storage, budget=3, max_error=0.5, timeout_s=600.0)
    shared = evaluated(tmp_path / "b" / "run.mptune", storage)
    assert shared[:1] == before
    assert len(shared) == 3
    assert evaluated(tmp_path / "a" / "run.mptune", storage) == shared

    with pytest.raises(RunError, match="another version of the data") as refused:
        search_on(tmp_path, "c", storage, data=ROWS + 1)
    assert "\n" not in refused.value.message
    assert "the same version of the data" in refused.value.hint
    assert search_on(tmp_path, "c", storage, data=ROWS + 1, budget=1, fresh=True).evaluations == 1
    assert search_on(tmp_path, "c", storage, data=ROWS + 1, budget=2).evaluations == 2, "and goes on with it"

    search_on(tmp_path, "b", storage, budget=2, fresh=True)
    assert len(evaluated(tmp_path / "b" / "run.mptune", storage)) == 2
    for kept in ("a/run.mptune", "b/run.mptune.old-1"):
        assert evaluated(tmp_path / kept, storage) == shared
    assert mptune.report(tmp_path / "b" / "run.mptune.old-1", storage=storage).evaluations == 3
    search_on(tmp_path, "d", storage, budget=2)
    assert study(tmp_path, "d") == study(tmp_path, "a") == "run"
    assert study(tmp_path, "b").startswith("run 2"), "named with the time"


def test_two_hosts_with_one_database(tmp_path: Path, storage: str) -> None:
    check_two_hosts(tmp_path, storage)


def test_what_names_an_equal_search_space_does_not_count(tmp_path: Path, storage: str) -> None:
    shutil.copy(SPACES / "default.toml", tmp_path / "mine.toml")
    search_on(tmp_path, "a", storage, budget=1)
    with pytest.raises(RunError, match=r"another target .*Fake 1000 there.*Fake 2000 here") as refused:
        search_on(tmp_path, "b", storage, open_toolchain=Opener(tmp_path / "diaries", 0.0, device="Fake 2000"))
    assert "give this run another name" in refused.value.hint
    search_on(tmp_path, "b", storage, budget=4, space=tmp_path / "mine.toml")
    assert study(tmp_path, "a") == study(tmp_path, "b"), "nor does the budget, by which the granularity was fitted"


def test_a_fresh_search_that_was_interrupted_stays_a_new_one(tmp_path: Path, storage: str) -> None:
    search_on(tmp_path, "a", storage, budget=1)

    def stops(*_: object) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search_on(tmp_path, "a", storage, fresh=True, open_toolchain=stops)
    search_on(tmp_path, "a", storage, budget=2)
    assert len(evaluated(tmp_path / "a" / "run.mptune", storage)) == 2
    assert len(evaluated(tmp_path / "a" / "run.mptune.old-1", storage)) == 1


def test_a_script_under_the_same_name_is_the_same_script(tmp_path: Path, storage: str) -> None:
    script = tmp_path / "score.py"
    script.write_text("def score(outputs, reference):\n    return 0.5\n")
    own, alone = f"{script}:score", {"data": ROWS, "target": "jetson-orin-nano-8gb", "out": tmp_path / "run.mptune"}
    metric = ["relative_l2", own]
    search_on(tmp_path, "a", storage, budget=1, metric=metric)
    mptune.search(tmp_path / "model.onnx", metric=own, budget=2, **alone)
    script.write_text("def score(outputs, reference):\n    return 0.25\n")
    for again in (
        lambda: search_on(tmp_path, "a", storage, budget=3, metric=metric),
        lambda: mptune.search(tmp_path / "model.onnx", metric=own, budget=3, **alone),
    ):
        with pytest.raises(RunError, match=r"the metric .*score.py:score is not what it was"):
            again()
    for named, words in ((None, "is not run unless you name it"), (own, "is not what it was")):
        with pytest.raises(RunError, match=words):
            mptune.worker(tmp_path / "a/run.mptune", metric=named, storage=storage, open_toolchain=Opener(tmp_path))


def test_a_profile_with_other_figures_is_another_target(tmp_path: Path, storage: str) -> None:
    profile = SPACES / "targets" / "jetson-orin-nano-8gb.toml"
    mine = {"model": save_mlp(tmp_path / "model.onnx"), "data": ROWS, "budget": 2, "target": tmp_path / "mine.toml"}
    (tmp_path / "mine.toml").write_text(profile.read_text())
    mptune.search(out=tmp_path / "run.mptune", **mine)
    bandwidth = next(line for line in profile.read_text().splitlines() if line.startswith("bandwidth_gbps"))
    (tmp_path / "mine.toml").write_text(profile.read_text().replace(bandwidth, "bandwidth_gbps = 33.0", 1))
    with pytest.raises(RunError, match="another version of the profile"):
        mptune.search(out=tmp_path / "run.mptune", **{**mine, "budget": 3})
