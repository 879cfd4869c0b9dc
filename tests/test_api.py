"""The whole way from a model to a run directory, on the fake toolchain and once for real; the run directory's rules."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import NoReturn
from unittest import mock

import numpy as np
import onnx
import pytest

import mptune
from mptune import rundir
from mptune.api import reading, searching
from mptune.choice import ChoiceLimits
from mptune.cli import main
from mptune.errors import DataError, PlanError, RunError, SettingsError, TargetError
from mptune.graph.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import PrecisionPlan
from mptune.run_json import RUN_FORMAT
from mptune.rundir import RunDirectory, open_run, read_run
from mptune.tuning.front import Front
from tests.conftest import save_cnn
from tests.fakes import Diary, FakeToolchain, Law, make_toolchain, search
from tests.graph import models

pytestmark = pytest.mark.usefixtures("opened_here")


def save_deep(folder: Path) -> None:
    """Two modules of six products, every other one with a residual: 18 groups of nodes, 12 of layers, 2 of blocks."""
    nodes = "".join(
        f"""["/blocks.{k // 6}/fc{k}/MatMul"] m{k} = MatMul(x{k}, w)
        ["/blocks.{k // 6}/fc{k + 1}/MatMul"] m{k + 1} = MatMul(m{k}, w)
        ["/blocks.{k // 6}/fc{k + 1}/Add"] x{k + 2} = Add(m{k + 1}, m{k})"""
        for k in range(0, 12, 2)
    )
    models.save(models.text(f"(float[1,8] x0) => (float[1,8] x12) {{ {nodes} }}", models.weight("w", 8, 8)), folder)


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


@pytest.mark.usefixtures("spends_budget")
def test_the_same_command_again_opens_no_toolchain_and_a_larger_budget_adds_what_is_missing(
    place: Path, searched: Front
) -> None:
    files = {p: p.stat().st_mtime_ns for p in (place / "model.mptune").rglob("*") if p.is_file()}
    toolchain = make_toolchain()
    assert search(toolchain) == searched
    assert (toolchain.opened, toolchain.calls) == (0, [])
    assert {p.name for p, t in files.items() if p.stat().st_mtime_ns != t} <= {"run.lock"}
    front = search(toolchain, budget=22)
    assert (len(toolchain.built), front.evaluations, toolchain.observed) == (10, 22, 0)


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


def test_report_needs_neither_model_nor_data_nor_lock(place: Path, searched: Front) -> None:
    (place / "model.onnx").unlink()
    (place / "data.npz").unlink()
    with open_run(place / "model.mptune"):
        assert mptune.report("model.mptune") == searched


def test_pick_writes_what_it_chooses(place: Path, searched: Front) -> None:
    run = place / "model.mptune"
    front = mptune.pick(run, plan=searched.points[0].plan.fingerprint)
    assert front.chosen == searched.points[0]
    assert json.loads((run / "front.json").read_text())["chosen"] == front.chosen.plan.fingerprint
    chosen = json.loads((run / "chosen" / "plan.json").read_text())["precision"]
    assert chosen == {g: str(p) for g, p in front.chosen.plan.precision.items()}
    assert mptune.pick(run, knee=True).chosen_reason == "the knee of the plans"
    with pytest.raises(PlanError):
        mptune.pick(run, plan="no such plan")
    with pytest.raises(SettingsError, match="exclude"):
        mptune.pick(run, knee=True, max_error=1.0)
    assert mptune.report(run).chosen_reason == "the knee of the plans", "a pick that failed changes nothing"


@pytest.mark.smoke
@pytest.mark.usefixtures("searched")
def test_apply(place: Path) -> None:
    written = mptune.apply("model.onnx", "model.mptune/chosen/plan.json", "mixed.onnx")
    chosen = onnx.load(place / "model.mptune/chosen/model.onnx")
    assert chosen.metadata_props, "what made it"
    del chosen.metadata_props[:]
    assert onnx.load(written) == chosen


def test_auto_granularity_fits_the_first_budget_and_stays(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "auto.toml").write_text('format = 1\ngranularity = "auto"\n')
    save_deep(place)
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
        ("--target", {"target": "auto"}),
        ("--engine", {"engine": "onnxruntime"}),
        ("--space", {"space": "transformer"}),
        ("metric", {"metric": "max_abs"}),
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


OTHER = {"seed": 1, "engine": "onnxruntime", "space": "transformer", "tf32": True, "data": "other.npz"}


@pytest.mark.parametrize(
    ("storage", "changes"),
    [
        *((None, changes) for changes in (OTHER, {"storage": "sqlite:///x.db"}, {})),
        ("sqlite:///x.db", {"data": "other.npz"}),
        *(pytest.param("sqlite:///x.db", c, marks=pytest.mark.slow) for c in ({"seed": 1}, {"space": "transformer"})),
    ],
)
def test_a_run_without_an_evaluation_pins_nothing(place: Path, storage: str | None, changes: dict[str, object]) -> None:
    """A first command that failed, or was interrupted before anything ran, does not block the corrected one."""
    np.savez("other.npz", x=np.random.default_rng(5).normal(size=(8, 32)).astype(np.float32))
    unavailable = mock.Mock(side_effect=TargetError("TensorRT is not installed", "pip install tensorrt"))
    with pytest.raises(TargetError):
        mptune.search("model.onnx", storage=storage, data="data.npz", engine="tensorrt", open_toolchain=unavailable)
    with pytest.raises(KeyboardInterrupt):
        search(make_toolchain(interrupt_after=0), storage=storage)
    with pytest.raises(RunError, match="no evaluation"):
        mptune.report("model.mptune", storage=storage)
    if not changes:
        save_cnn(place / "cnn.onnx")
        other = make_toolchain("cnn.onnx")
        assert search(other, "cnn.onnx", data=None, out="model.mptune", budget=4).evaluations == len(other.built) == 4
        return
    front = search(make_toolchain(device="Fake 2000"), **{"storage": storage, "budget": 4, **changes})
    assert (front.evaluations, front.device) == (4, "Fake 2000")
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


@pytest.mark.usefixtures("spends_budget")
def test_pick_keeps_what_a_search_wrote_while_it_waited(searched: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = ending_first(monkeypatch, reading, lambda: search(make_toolchain(), budget=15, max_error=1e-3))
    assert mptune.pick("model.mptune", knee=True).evaluations == 15
    choice = read_run("model.mptune")[1].choice
    assert len(ended) == 1
    assert (choice.given_limits, choice.search_limits) == (ChoiceLimits(knee=True), ChoiceLimits(max_error=1e-3))

    other = searched.points[-1].plan.fingerprint
    ended = ending_first(monkeypatch, searching, lambda: mptune.pick("model.mptune", plan=other))
    assert search(make_toolchain(), budget=18, max_error=1e-2).evaluations == 18
    file = read_run("model.mptune")[1]
    assert len(ended) == 1
    assert (file.search.budget, file.choice.plan) == (18, None)
    assert file.choice.given_limits == ChoiceLimits(max_error=1e-2), "other limits than those recorded with the pick"


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


@pytest.mark.parametrize("room", [0, 20_000, 60_000, 100_000, 200_000])
@pytest.mark.usefixtures("spends_budget")
def test_a_full_disk_is_told_and_nothing_is_lost(place: Path, small_disk: Path, room: int) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * max(0, shutil.disk_usage(small_disk).free - room))
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

    counts = []

    class Packs(Diary):
        def evaluated(self, evaluation: object, done: int, budget: int) -> None:
            with tarfile.open(mptune.export("model.mptune", place / f"{done}.tar.gz")) as archive:
                archive.extractall(place / f"unpacked{done}", filter="data")
            counts.append(mptune.report(place / f"unpacked{done}" / "model.mptune").evaluations)

    search(make_toolchain(), budget=6, listener=Packs())
    assert counts == [1, 2, 3, 4, 5, 6]


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


FAULT = IndexError("list index out of range")
FILES, CHOSEN = "mptune.reporting.run_files", "mptune.reporting.chosen"


@pytest.fixture(autouse=True)
def _here(place: Path) -> None:
    """A model and its data, as the working directory."""


def failing(error: Exception, cause: Exception | None = None) -> Callable[..., NoReturn]:
    def fail(*_: object, **__: object) -> NoReturn:
        raise error from cause

    return fail


@pytest.mark.parametrize(
    ("function", "file", "error"),
    [
        (f"{CHOSEN}.infer_script", "chosen/infer.py", FAULT),
        (f"{CHOSEN}.readme_text", "chosen/README.txt", FAULT),
        *((f"{FILES}.{name}", "report.html", FAULT) for name in ("run_outputs", "write_report")),
        (f"{FILES}.collect_check", "chosen/check.npz", DataError("no such rows")),
        (f"{FILES}.collect_check", "chosen/check.npz", RunError("the samples were changed")),
        (f"{FILES}.collect_check", "chosen/check.npz", OSError(5, "Input/output error", "samples.npz")),
    ],
)
def test_the_result_is_written_and_a_fault_after_it_is_a_warning(
    function: str, file: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(function, failing(error))
        front = search(make_toolchain())
    (warning,) = [text for text in front.warnings if file in text]
    assert f"could not be made ({type(error).__name__}: {error})" in warning
    log = Path(warning.rpartition(" ")[2])
    assert log.parent == front.run_dir / "logs"
    assert "in fail" in log.read_text()
    onnx.checker.check_model(str(front.run_dir / "chosen" / "model.onnx"))
    document = json.loads((front.run_dir / "front.json").read_text())
    plan = PrecisionPlan.from_json((front.run_dir / "chosen" / "plan.json").read_text())
    assert document["chosen"] == plan.fingerprint
    assert not (front.run_dir / file).exists()
    assert search(make_toolchain()).chosen == front.chosen
    assert (front.run_dir / "report.html").exists(), "made by the next call"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RunError("disk full: cannot write")])
def test_a_full_disk_is_an_error_and_the_result_is_there(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    full = failing(error, OSError(28, "No space left on device"))
    monkeypatch.setattr(f"{FILES}.write_report", full)
    with pytest.raises(RunError, match="disk full"):
        search(make_toolchain())
    assert Path("model.mptune/chosen/model.onnx").exists()
    assert Path("model.mptune/front.json").exists()


def test_a_page_of_an_earlier_result_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    front = search(make_toolchain())
    monkeypatch.setattr(f"{FILES}.write_report", failing(FAULT))
    picked = mptune.pick(front.run_dir, plan=front.fp32.plan.fingerprint)
    assert any("report.html could not be made" in text for text in picked.warnings)
    assert not (front.run_dir / "report.html").exists()


def test_a_scalar_input_beside_a_dynamic_axis(capsys: pytest.CaptureFixture[str]) -> None:
    graph = "(float[1,frames,8] x, float gain) => (float[1,frames,8] z) { y = MatMul(x, w) z = Mul(y, gain) }"
    models.save(models.text(graph, models.weight("w", 8, 8, scale=0.1)), Path(), "scaled.onnx")
    rows = np.random.default_rng(1).normal(size=(16, 12, 8)).astype(np.float32)
    np.savez("scaled.npz", x=rows, gain=np.full(16, 2, np.float32))
    command = ["search", "scaled.onnx", "--data", "scaled.npz", "--budget", "4", "--target", "jetson-orin-nano-8gb"]
    assert main(command) == 0
    assert "could not be made" not in capsys.readouterr().err
    assert Path("scaled.mptune/chosen/model.onnx").exists()
