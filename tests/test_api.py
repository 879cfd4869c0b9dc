"""The whole way from a model to a run directory, on the fake toolchain and once for real; the run directory's rules."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import ClassVar, NoReturn

import numpy as np
import onnx
import pytest

import mptune
from mptune import rundir
from mptune.api import reading, searching
from mptune.choice import ChoiceLimits
from mptune.errors import (
    PlanError,
    RunError,
    SettingsError,
    TargetError,
)
from mptune.graph.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.run_json import RUN_FORMAT
from mptune.rundir import RunDirectory, open_run, read_run
from mptune.settings import DataSettings
from mptune.tuning.front import Front
from tests.conftest import save_cnn
from tests.fakes import Diary, FakeToolchain, Law, make_toolchain, search
from tests.graph import models

pytestmark = pytest.mark.usefixtures("opened_here")


def save_deep(path: Path) -> None:
    """Two modules of six products, every other one with a residual: 18 groups of nodes, 12 of layers, 2 of blocks."""
    nodes, x = [], "x"
    for k in range(12):
        scope = f"/blocks.{k // 6}/fc{k}"
        nodes.append(models.node("MatMul", [x, "w"], f"m{k}", f"{scope}/MatMul"))
        if k % 2:
            nodes.append(models.node("Add", [f"m{k}", x], f"r{k}", f"{scope}/Add"))
        x = nodes[-1].output[0]
    proto = models.model(nodes, [models.value("x", [1, 8])], [models.value(x, [1, 8])], [models.weight("w", 8, 8)])
    path.write_bytes(proto.SerializeToString())


@pytest.mark.smoke
def test_a_search_leaves_a_whole_run_directory(place: Path) -> None:
    toolchain, diary = make_toolchain(), Diary()
    front = search(toolchain, listener=diary)
    run = place / "model.mptune"
    assert front.run_dir.resolve() == run
    assert {p.name for p in run.iterdir()} == {
        "run.json", "run.lock", "study.journal", "weights", "front.json", "report.html", "chosen", "engines", "logs",
        "data", "outputs.json",
    }  # fmt: skip
    assert json.loads((run / "front.json").read_text()) == front.to_json()
    assert {p.name for p in (run / "chosen").iterdir()} >= {"model.onnx", "plan.json", "infer.py", "README.txt"}
    assert not (run / "chosen" / "build.sh").exists(), "TensorRT builds nothing for a CPU"
    onnx.checker.check_model(run / "chosen" / "model.onnx", full_check=True)
    assert front.chosen is not None
    assert json.loads((run / "chosen" / "plan.json").read_text())["precision"] == {
        g: str(p) for g, p in front.chosen.plan.precision.items()
    }
    assert (toolchain.opened, toolchain.closed, toolchain.observed) == (1, 1, 1)
    assert front.evaluations == len(toolchain.built) == 12
    assert front.fp32.latency.median_ms == pytest.approx(10.0, rel=1e-2)
    assert all(p.remeasured and not p.confirmed for p in front.points)
    assert diary.stages[:2] == ["computing the reference outputs", "observing the ranges of values"]
    document = json.loads((run / "run.json").read_text())
    assert document["format"] == RUN_FORMAT
    assert document["model"]["sha256"] == front.model_sha256
    assert document["target"]["device"] == "Fake 1000"
    assert document["environment"]["versions"] == {"fake": "1.0"}
    assert document["data"]["samples"] == 8


def test_the_same_command_again_opens_no_toolchain(place: Path, searched: Front) -> None:
    files = {p: p.stat().st_mtime_ns for p in (place / "model.mptune").rglob("*") if p.is_file()}
    toolchain = make_toolchain()
    assert search(toolchain) == searched
    assert (toolchain.opened, toolchain.calls, toolchain.observed) == (0, [], 0)
    changed = {p.name for p, t in files.items() if p.stat().st_mtime_ns != t}
    assert changed <= {"run.lock"}


@pytest.mark.usefixtures("searched")
@pytest.mark.usefixtures("spends_budget")
def test_a_larger_budget_adds_exactly_ten() -> None:
    more = make_toolchain()
    front = search(more, budget=22)
    assert len(more.built) == 10
    assert front.evaluations == 22
    assert more.observed == 0


def test_an_exhausted_space_opens_no_toolchain(place: Path) -> None:
    Path("small.onnx").write_bytes(models.mlp().SerializeToString())
    first = make_toolchain("small.onnx")
    groups = len(first.law.groups)
    front = search(first, "small.onnx", data=None, budget=2**groups + 5, sampler="tpe")
    assert front.evaluations == len(first.built) == 2**groups
    again = make_toolchain("small.onnx")
    assert search(again, "small.onnx", data=None, budget=2**groups + 5) == front
    assert again.opened == 0


def test_ctrl_c_and_on(place: Path) -> None:
    interrupted = make_toolchain(interrupt_after=5)
    with pytest.raises(KeyboardInterrupt):
        search(interrupted)
    assert interrupted.closed == 1
    rest = make_toolchain()
    front = search(rest)
    assert front.evaluations == 12
    assert len(rest.built) == 7
    assert not set(rest.built) & set(interrupted.built)


KILLED = """
import sys
from pathlib import Path
from tests.fakes import make_toolchain, search
print(search(make_toolchain(delay_s=0.02, diary=Path("diary")), budget=30, sampler="tpe").evaluations)
"""


@pytest.mark.slow
def test_kill_9_in_the_middle_of_a_search(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parent.parent), prepend=os.pathsep)
    command, diary = [sys.executable, "-c", KILLED], place / "diary"
    for kill_at in (4, 12):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while process.poll() is None and (not diary.exists() or len(diary.read_text().splitlines()) < kill_at):
            time.sleep(0.002)
        assert process.poll() is None, "the search ended before it could be killed"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "30\n", done.stderr
    built = [f for f, which in map(json.loads, diary.read_text().splitlines()) if which == "search"]
    assert len(set(built)) == 30
    assert len(built) <= 32, "only what was in work when a kill came is built again"
    assert mptune.report("model.mptune").evaluations == 30


def test_report_needs_neither_model_nor_data_nor_lock(place: Path, searched: Front) -> None:
    (place / "model.onnx").unlink()
    (place / "data.npz").unlink()
    with open_run(place / "model.mptune"):
        assert mptune.report("model.mptune") == searched


@pytest.mark.usefixtures("searched")
def test_pick(place: Path) -> None:
    run = place / "model.mptune"
    before = mptune.report(run).chosen
    front = mptune.pick(run, max_error=1e-20)
    assert not front.limits_met
    assert front.choice.nearest == front.fp32.plan.fingerprint
    assert front.chosen == before
    exact = mptune.pick(run, max_latency_ms=1000.0)
    assert exact.chosen == front.fp32
    fastest = mptune.pick(run, plan=front.points[0].plan.fingerprint)
    assert fastest.chosen == front.points[0]
    assert json.loads((run / "front.json").read_text())["chosen"] == front.points[0].plan.fingerprint
    chosen = json.loads((run / "chosen" / "plan.json").read_text())["precision"]
    assert chosen == {g: str(p) for g, p in front.points[0].plan.precision.items()}
    assert mptune.report(run) == fastest
    assert mptune.pick(run, knee=True).chosen_reason == "the knee of the plans"
    with pytest.raises(PlanError):
        mptune.pick(run, plan="no such plan")
    with pytest.raises(SettingsError, match="exclude"):
        mptune.pick(run, knee=True, max_error=1.0)
    assert mptune.report(run).chosen_reason == "the knee of the plans", "a pick that failed changes nothing"


@pytest.mark.smoke
def test_apply(place: Path, searched: Front) -> None:
    written = mptune.apply("model.onnx", "model.mptune/chosen/plan.json", "mixed.onnx")
    chosen = onnx.load(place / "model.mptune/chosen/model.onnx")
    assert chosen.metadata_props, "what made it"
    del chosen.metadata_props[:]
    assert onnx.load(written) == chosen
    with pytest.raises(PlanError, match="not those of"):
        mptune.apply("model.onnx", replace(searched.fp32.plan, precision={}), "other.onnx")
    assert not (place / "other.onnx").exists()


def test_auto_granularity_fits_the_first_budget_and_stays(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger budget resumes the run: the groups stay those that were measured."""
    (place / "auto.toml").write_text('format = 1\ngranularity = "auto"\n')
    save_deep(place / "model.onnx")
    model = load_model("model.onnx")
    sizes = [len(find_groups(model, g)) for g in ("op", "fusion", "block")]
    assert sizes == [18, 12, 2]

    def toolchain(count: int) -> FakeToolchain:
        return FakeToolchain(Law([f"g{k:03d}" for k in range(count)]))

    first = search(toolchain(12), space="auto.toml", budget=6, data=None)
    assert len(first.fp32.plan.precision) == 12
    assert json.loads((place / "model.mptune/run.json").read_text())["fixed_settings"]["granularity"] == "fusion"
    more = search(toolchain(12), space="auto.toml", budget=9, data=None)
    assert (len(more.fp32.plan.precision), more.evaluations) == (12, 9), "9 alone would have allowed 18"
    assert mptune.pick("model.mptune", knee=True).evaluations == 9
    monkeypatch.setattr("mptune.graph.groups.MOST_GROUPS", 11)
    coarse = search(toolchain(2), space="auto.toml", budget=4, data=None, out=place / "coarse.mptune")
    assert len(coarse.fp32.plan.precision) == 2


# -- settings and the run directory ------------------------------------------------------------------------------


def test_settings_that_change_what_is_measured_cannot_change(place: Path, searched: Front) -> None:
    np.savez("other.npz", x=np.zeros((4, 32), np.float32))
    changed: list[tuple[str, dict[str, object]]] = [
        ("--seed", {"seed": 1}),
        ("--target", {"target": "auto"}),
        ("--engine", {"engine": "onnxruntime"}),
        ("--space", {"space": "transformer"}),
        ("--tf32", {"tf32": True}),
        ("metric", {"metric": "max_abs"}),
        ("--batch", {"data_settings": DataSettings(batch=2)}),
        ("version of the data", {"data": "other.npz"}),
        ("version of the data", {"data": None}),
        ("storage", {"storage": "sqlite:///x.db"}),
    ]
    toolchain = make_toolchain()
    for named, changes in changed:
        with pytest.raises(RunError, match=f"other {named}") as caught:
            search(toolchain, **changes)
        assert "--fresh" in caught.value.hint
        assert "--out" in caught.value.hint
    save_cnn(place / "cnn.onnx")
    with pytest.raises(RunError, match="another model"):
        search(make_toolchain("cnn.onnx"), "cnn.onnx", data=None, out="model.mptune")
    assert toolchain.opened == 0
    assert search(toolchain) == searched
    with pytest.raises(RunError, match=r"Fake 1000 before, .*Fake 2000 now"):
        search(make_toolchain(device="Fake 2000"), budget=13)


@pytest.mark.parametrize(
    ("storage", "changes"),
    [
        (None, {"seed": 1, "engine": "onnxruntime", "space": "transformer", "tf32": True, "data": "other.npz"}),
        (None, {"storage": "sqlite:///x.db"}),
        (None, {}),
        ("sqlite:///x.db", {"data": "other.npz"}),
        *(pytest.param("sqlite:///x.db", c, marks=pytest.mark.slow) for c in ({"seed": 1}, {"space": "transformer"})),
    ],
)
def test_a_run_without_an_evaluation_pins_nothing(place: Path, storage: str | None, changes: dict[str, object]) -> None:
    """A first command that failed, or was interrupted before anything ran, does not block the corrected one."""

    def unavailable(context: object) -> NoReturn:
        raise TargetError("TensorRT is not installed", "pip install tensorrt")

    rng = np.random.default_rng(5)
    np.savez("other.npz", x=rng.normal(size=(8, 32)).astype(np.float32))
    failing = {"data": "data.npz", "engine": "tensorrt", "target": "cpu", "open_toolchain": unavailable}
    with pytest.raises(TargetError):
        mptune.search("model.onnx", storage=storage, **failing)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        search(make_toolchain(interrupt_after=0), storage=storage)
    with pytest.raises(RunError, match="no evaluation"):
        mptune.report("model.mptune", storage=storage)
    if not changes:
        save_cnn(place / "cnn.onnx")
        other = make_toolchain("cnn.onnx")
        assert search(other, "cnn.onnx", data=None, out="model.mptune", budget=4).evaluations == len(other.built) == 4
        return
    front = search(make_toolchain(device="Fake 2000"), **{"storage": storage, **changes})
    assert front.evaluations == 12
    assert front.device == "Fake 2000"
    assert json.loads((place / "model.mptune/run.json").read_text())["target"]["device"] == "Fake 2000"


def test_a_run_in_a_database_with_an_evaluation_is_pinned_also_where_another_database_is_named(place: Path) -> None:
    first, second = (f"sqlite:///{place}/{name}.db" for name in "xy")
    front = search(make_toolchain(), storage=first, budget=4)
    for changes in ({"storage": second}, {"storage": first, "seed": 1}):
        with pytest.raises(RunError, match="another"):
            search(make_toolchain(), budget=4, **changes)
    again = make_toolchain()
    assert search(again, storage=first, budget=4) == mptune.report("model.mptune", storage=first) == front
    assert again.opened == 0
    assert not (place / "model.mptune/study.journal").exists()


def test_a_plan_that_another_process_has_in_work_pins_a_database(place: Path) -> None:
    storage = f"sqlite:///{place}/x.db"
    others: list[str] = []

    class Asks(FakeToolchain):
        def evaluate(self, plan, which="search", *, profile=False):  # type: ignore[no-untyped-def]
            if not others:
                shutil.copytree("model.mptune", "copy/model.mptune")
                with pytest.raises(RunError) as caught:
                    search(make_toolchain(), storage=storage, budget=4, seed=1, out="copy/model.mptune")
                others.append(caught.value.message)
            return super().evaluate(plan, which, profile=profile)

    front = search(Asks(make_toolchain().law), storage=storage, budget=4)
    assert "another --seed" in others[0]
    assert front.evaluations == 4


@pytest.mark.usefixtures("searched")
def test_fresh_moves_the_old_run_aside(place: Path) -> None:
    old = {p.name for p in (place / "model.mptune").iterdir()}
    for number in (1, 2):
        toolchain = make_toolchain()
        search(toolchain, fresh=True, seed=number)
        assert len(toolchain.built) == 12
        assert {p.name for p in (place / f"model.mptune.old-{number}").iterdir()} - {"workers.lock"} == old
    assert mptune.report("model.mptune.old-1").evaluations == 12


def test_a_run_directory_in_use_is_refused_with_the_pid(place: Path) -> None:
    with open_run(place / "model.mptune"), pytest.raises(RunError, match=rf"in use .*\(pid {os.getpid()}\)"):
        search(make_toolchain())
    with open_run(place / "model.mptune"), pytest.raises(RunError, match="in use"):
        search(make_toolchain(), fresh=True)
    assert not (place / "model.mptune.old-1").exists()


def ending_first(monkeypatch: pytest.MonkeyPatch, module: ModuleType, end: Callable[[], object]) -> list[object]:
    """Let ``end`` happen between a call of the module and its lock, as another process might; gives what it gave."""
    real, ended = rundir.open_run, list[object]()

    @contextmanager
    def later(path: Path, **options: bool) -> Iterator[RunDirectory]:
        monkeypatch.setattr(module, "open_run", real)
        ended.append(end())
        with real(path, **options) as run:
            yield run

    monkeypatch.setattr(module, "open_run", later)
    return ended


@pytest.mark.usefixtures("searched")
def test_pick_keeps_what_a_search_wrote_while_it_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = ending_first(monkeypatch, reading, lambda: search(make_toolchain(), budget=15, max_error=1e-3))
    front = mptune.pick("model.mptune", knee=True)
    file = read_run("model.mptune")[1]
    assert len(ended) == 1
    assert front.evaluations == file.search.budget == 15
    assert file.choice.given_limits == ChoiceLimits(knee=True)
    assert file.choice.search_limits == ChoiceLimits(max_error=1e-3)


def test_a_search_keeps_what_pick_wrote_while_it_waited(searched: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    other = searched.points[-1].plan.fingerprint
    ended = ending_first(monkeypatch, searching, lambda: mptune.pick("model.mptune", plan=other))
    front = search(make_toolchain(), budget=15, max_error=1e-3)
    file = read_run("model.mptune")[1]
    assert len(ended) == 1
    assert front.evaluations == file.search.budget == 15
    assert file.choice.given_limits == ChoiceLimits(max_error=1e-3), "other limits than those recorded with the pick"
    assert file.choice.plan is None


def test_what_is_in_the_way_is_refused(place: Path) -> None:
    (place / "model.mptune").mkdir()
    (place / "model.mptune/thesis.tex").write_text("my only copy")
    for fresh in (False, True):
        with pytest.raises(RunError, match=r"holds other files \(thesis.tex\)"):
            search(make_toolchain(), fresh=fresh)
    assert [p.name for p in (place / "model.mptune").iterdir()] == ["thesis.tex"]
    for out in ("data.npz", "model.onnx/run"):
        with pytest.raises(RunError, match=r"cannot write|is a file"):
            search(make_toolchain(), out=out)


# -- a full disk ---------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr.strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=False)


def test_a_read_only_file_system_is_told(place: Path, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(RunError, match=r"cannot write .*Read-only") as caught:
        search(make_toolchain(), out=small_disk / "run")
    assert "--out" in caught.value.hint


def free_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free


@pytest.mark.parametrize("room", [0, 20_000, 60_000, 100_000, 200_000])
@pytest.mark.usefixtures("spends_budget")
def test_a_full_disk_is_told_and_nothing_is_lost(place: Path, small_disk: Path, room: int) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * max(0, free_bytes(small_disk) - room))
    first = make_toolchain()
    with pytest.raises(RunError, match=r"[Dd]isk full|No space") as caught:
        search(first, out=small_disk / "run", budget=300)
    assert "space" in caught.value.hint
    ballast.unlink()
    rest = make_toolchain()
    front = search(rest, out=small_disk / "run", budget=20)
    assert front.evaluations >= 20 or front.evaluations == 2 ** len(first.law.groups)
    assert len(set(first.built) & set(rest.built)) <= 1, "only the evaluation that could not be written is repeated"


def test_a_run_is_packed_while_a_search_writes_it(place: Path) -> None:
    """So that other hosts can join it; the archive holds a record of one moment, each file whole."""

    class Packs(Diary):
        counts_packed: ClassVar[list[int]] = []

        def evaluated(self, evaluation: object, done: int, budget: int) -> None:
            super().evaluated(evaluation, done, budget)
            out = place / f"{done}.tar.gz"
            mptune.export("model.mptune", out)
            with tarfile.open(out) as archive:
                archive.extractall(place / f"unpacked{done}", filter="data")
            self.counts_packed.append(mptune.report(place / f"unpacked{done}" / "model.mptune").evaluations)

    front = search(make_toolchain(), budget=6, listener=Packs())
    assert front.evaluations == 6
    assert Packs.counts_packed == [1, 2, 3, 4, 5, 6]


@pytest.mark.usefixtures("searched")
def test_a_line_that_is_being_written_is_left_out_of_the_archive(place: Path) -> None:
    journal = place / "model.mptune/study.journal"
    before = journal.read_bytes()
    journal.write_bytes(before + before.splitlines(keepends=True)[-1][:9])
    with tarfile.open(mptune.export("model.mptune", place / "out.tar.gz")) as archive:
        packed = archive.extractfile("model.mptune/study.journal")
        assert packed is not None
        assert packed.read().endswith(b"}\n")
    assert journal.read_bytes() != before, "the run itself is not touched"
