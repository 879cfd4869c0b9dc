"""Hosts that differ from the one of the search: refused, or searched on for themselves, with a front of their own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tarfile
import threading
from dataclasses import dataclass
from pathlib import Path

import optuna
import pytest
from typer.testing import CliRunner

import mptune
from mptune.cli import app
from mptune.engines.base import MissingKernel
from mptune.engines.environment import Environment
from mptune.engines.workload import Workload
from mptune.errors import RunError
from mptune.rundir import read_run
from mptune.tuning.record.storage import open_storage
from mptune.tuning.runs.result import read_record
from tests.fakes import Diary, FakeToolchain, Law
from tests.test_joining import Opener, evaluated, search, until

pytestmark = pytest.mark.usefixtures("opened_here")

BUDGET = 6


def evaluated_in(place: Path, storage: str) -> list[str]:
    directory, file = read_run(place)
    with contextlib.closing(read_record(directory, file, storage)) as record:
        return [evaluation.plan.fingerprint for evaluation in record.evaluations()]


class VersionedToolchain(FakeToolchain):
    """A fake one of another version of ONNX Runtime."""

    version = "1.99"

    def environment(self) -> Environment:
        return Environment(versions={"onnxruntime": self.version}, os="none", cpu="none", cpu_count=1)


@dataclass(frozen=True)
class VersionedOpener(Opener):
    """Opens fake toolchains of one version."""

    version: str = "1.99"

    def __call__(self, workload: Workload, settings: object) -> FakeToolchain:
        toolchain = VersionedToolchain(Law([group.id for group in workload.groups]), noise=0.0, device=self.device)
        toolchain.version = self.version
        return toolchain


@pytest.fixture(scope="module")
def finished(mlp_path: Path, mlp_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished search on the device "Fake 1000"; copy it."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "diaries").mkdir()
    search(mlp_path, mlp_data, folder / "run.mptune", Opener(folder / "diaries", 0.0), budget=BUDGET)
    return folder


@pytest.fixture
def prepared(finished: Path, tmp_path: Path) -> Path:
    """The run of a copy of it."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run.mptune"


def other(tmp_path: Path, device: str = "Fake 2000", delay_s: float = 0.0) -> Opener:
    folder = tmp_path / f"diaries of {device}"
    folder.mkdir(exist_ok=True)
    return Opener(folder, delay_s, device=device)


def work(place: Path, opener: Opener, **options: object) -> mptune.Front | None:
    return mptune.worker(place, open_toolchain=opener, wait_s=0.0, **options)  # type: ignore[arg-type]


def test_another_device_or_version_is_refused_in_one_line(prepared: Path, tmp_path: Path) -> None:
    for opener in (other(tmp_path), VersionedOpener(tmp_path / "diaries")):
        with pytest.raises(RunError, match="differs from the one that the search was prepared on") as raised:
            work(prepared, opener)
        assert "\n" not in raised.value.message
        assert "allow_mixed=True" in raised.value.hint
    assert not (prepared / "devices").exists()


def test_another_device_is_refused_before_the_first_evaluation_too(
    mlp_path: Path, mlp_data: Path, tmp_path: Path
) -> None:
    place, folder = tmp_path / "run.mptune", tmp_path / "diaries"
    folder.mkdir()
    toolchain_fails = Opener(folder, 0.0)

    class Stops(Opener):
        def __call__(self, workload: Workload, settings: object) -> FakeToolchain:
            toolchain = super().__call__(workload, settings)
            toolchain.interrupt_after = 0
            return toolchain

    with pytest.raises(KeyboardInterrupt):
        search(mlp_path, mlp_data, place, Stops(folder, 0.0), budget=BUDGET)
    with pytest.raises(RunError, match="another target"):
        work(place, other(tmp_path))
    work(place, toolchain_fails)
    assert len(evaluated(place)) == BUDGET


def test_a_device_that_may_differ_has_a_front_of_its_own(prepared: Path, tmp_path: Path) -> None:
    before = evaluated(prepared)
    diary = Diary()
    front = work(prepared, other(tmp_path), allow_mixed=True, listener=diary)
    assert front is not None
    place = prepared / "devices" / "fake-2000-fake"
    assert front.run_dir == place
    assert front.device == "Fake 2000"
    assert front.fp32.held_out is not None, "the front is confirmed"
    assert len(evaluated(place)) == front.evaluations == BUDGET
    assert evaluated(prepared) == before
    assert any(str(place) in text for text in diary.stages)

    storage, _ = open_storage(None, prepared / "study.journal", repair=False)
    names = {name.partition("/")[0] for name in optuna.get_all_study_names(storage)}
    assert names == {"run", "run@fake-2000-fake"}
    assert not (place / "study.journal").exists()
    assert (place / "chosen" / "model.onnx").exists()
    assert (place / "weights" / "fp16.bin").stat().st_ino == (prepared / "weights" / "fp16.bin").stat().st_ino

    report = mptune.report(prepared)
    assert [(one.run_dir, one.device, one.engine) for one in report.other_devices] == [(place, "Fake 2000", "fake")]
    assert report.device == "Fake 1000"
    assert report.to_json()["other_devices"] == [{"run_dir": str(place), "device": "Fake 2000", "engine": "fake"}]
    shown = CliRunner().invoke(app, ["report", str(prepared)]).output
    assert f"Fake 2000 (fake): mptune report {place}" in shown


def test_a_front_of_another_device_is_a_run_directory(prepared: Path, tmp_path: Path) -> None:
    work(prepared, other(tmp_path), allow_mixed=True)
    place = prepared / "devices" / "fake-2000-fake"
    for which in ("search", "held_out"):  # the fake toolchain computes no reference
        shutil.copy(place / "data" / f"{which}.npz", place / "data" / f"{which}_reference.npz")
    front = mptune.report(place)
    assert front.fp16 is not None
    assert mptune.pick(place, plan=front.fp16.plan.fingerprint).chosen == front.fp16
    found = mptune.confirm(place, open_toolchain=other(tmp_path, "Fake 3000"))
    assert found.front.run_dir.parent == place / "confirmed"
    archive = mptune.export(place, tmp_path / "out.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "unpacked", filter="data")
    assert len(evaluated(tmp_path / "unpacked" / "fake-2000-fake")) == BUDGET
    model = Path(read_run(prepared)[1].model.path)
    with pytest.raises(RunError, match="front of another device"):
        search(model, tmp_path / "none.npz", place, other(tmp_path))


def test_the_same_worker_again_measures_nothing(prepared: Path, tmp_path: Path) -> None:
    opener = other(tmp_path)
    first = work(prepared, opener, allow_mixed=True)
    built = opener.built()
    second = work(prepared, opener, allow_mixed=True)
    assert opener.built() == built
    assert first is not None
    assert second is not None
    assert second.to_json() == first.to_json()


def test_an_interrupted_front_of_another_device_goes_on(prepared: Path, tmp_path: Path) -> None:
    class Stops(Opener):
        def __call__(self, workload: Workload, settings: object) -> FakeToolchain:
            toolchain = super().__call__(workload, settings)
            toolchain.interrupt_after = 3
            return toolchain

    opener = other(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        work(prepared, Stops(opener.folder, 0.0, opener.device), allow_mixed=True)
    place = prepared / "devices" / "fake-2000-fake"
    assert len(evaluated(place)) == 3
    front = work(prepared, opener, allow_mixed=True)
    assert front is not None
    built = [plan for plans in opener.built().values() for plan in plans]
    assert sorted(built) == sorted(set(built))
    assert len(evaluated(place)) == BUDGET


def test_two_workers_of_one_device_share_its_front(prepared: Path, tmp_path: Path) -> None:
    opener, fronts = other(tmp_path, delay_s=0.15), []

    def join() -> None:
        until(lambda: any(opener.built().values()))
        second = Opener(tmp_path / "second", 0.15, device="Fake 2000")
        second.folder.mkdir()
        fronts.append(mptune.worker(prepared, open_toolchain=second, allow_mixed=True))

    joining = threading.Thread(target=join)
    joining.start()
    fronts.append(work(prepared, opener, allow_mixed=True))
    joining.join()
    plans = evaluated(prepared / "devices" / "fake-2000-fake")
    assert len(plans) == len(set(plans)) == BUDGET
    assert any(Opener(tmp_path / "second").built().values())
    assert sum(front is not None for front in fronts) == 1, "one of them confirms"


def test_other_versions_of_one_device_have_fronts_of_their_own(prepared: Path, tmp_path: Path) -> None:
    for version in ("1.98", "1.99"):
        front = work(prepared, VersionedOpener(tmp_path / "diaries", version=version), allow_mixed=True)
        assert front is not None
    names = sorted(path.name for path in (prepared / "devices").iterdir())
    assert len(names) == 2
    assert all(name.startswith("fake-1000-fake-") for name in names)
    assert len(mptune.report(prepared).other_devices) == 2


def test_a_host_that_is_the_same_shares_the_search_also_where_others_are_allowed(
    prepared: Path, tmp_path: Path
) -> None:
    assert work(prepared, Opener(tmp_path / "diaries", 0.0), allow_mixed=True) is None
    assert not (prepared / "devices").exists()


def test_each_device_is_asked_for_its_own_missing_kernels(prepared: Path, tmp_path: Path) -> None:
    group = json.loads((prepared / "chosen" / "plan.json").read_text())
    node = next(iter(group["nodes"]))

    class Lacks(Opener):
        def __call__(self, workload: Workload, settings: object) -> FakeToolchain:
            toolchain = super().__call__(workload, settings)
            toolchain.kernel_answers = ((MissingKernel(node, "MatMul", "Fake", "CPU"),),)
            return toolchain

    opener = other(tmp_path)
    front = work(prepared, Lacks(opener.folder, 0.0, opener.device), allow_mixed=True)
    assert front is not None
    assert [finding.code for finding in front.findings].count("no-fp16-kernel") == 1
    (pinned,) = next(finding for finding in front.findings if finding.code == "no-fp16-kernel").where.groups
    assert all(pinned not in point.plan.fp16_groups for point in front.points)
    assert not [finding for finding in mptune.report(prepared).findings if finding.code == "no-fp16-kernel"]


@pytest.mark.parametrize("way", ["../..", "../../..", "/", "."])
def test_a_front_of_another_device_names_no_foreign_run(prepared: Path, tmp_path: Path, way: str) -> None:
    document = json.loads((prepared / "run.json").read_text())
    (prepared / "run.json").write_text(json.dumps({**document, "accompanies": way}))
    with pytest.raises(RunError, match="only the run around it is believed"):
        mptune.report(prepared)


class ByGpu(Opener):
    """Each GPU is another device."""

    def __call__(self, workload: Workload, settings: object) -> FakeToolchain:
        toolchain = super().__call__(workload, settings)
        toolchain.device = f"GPU {os.environ['CUDA_VISIBLE_DEVICES']}"
        return toolchain


@pytest.mark.slow
def test_a_search_keeps_the_fronts_of_its_gpus_apart_where_they_differ(
    mlp_path: Path, mlp_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    folder, place, diary = tmp_path / "diaries", tmp_path / "run.mptune", Diary()
    folder.mkdir()
    opener = ByGpu(folder, 0.0)
    front = search(mlp_path, mlp_data, place, opener, gpus=(0, 1), budget=2, listener=diary)
    assert any("GPU 1 stopped: this host differs" in text for text in diary.warnings)
    assert front.other_devices == ()
    front = search(mlp_path, mlp_data, place, opener, gpus=(0, 1), budget=4, allow_mixed=True)
    assert [one.device for one in front.other_devices] == ["GPU 1"]
    assert len(evaluated(place)) == len(evaluated(front.other_devices[0].run_dir)) == 4


def test_two_searches_of_one_study_need_one_device(mlp_path: Path, mlp_data: Path, tmp_path: Path) -> None:
    """Each on its own host, with a run directory of its own, and one database."""
    storage = f"sqlite:///{tmp_path}/x.db"
    places = [tmp_path / host / "run.mptune" for host in "ab"]
    search(mlp_path, mlp_data, places[0], other(tmp_path, "Fake 1000"), budget=3, storage=storage)
    with pytest.raises(RunError, match=r"another target .*Fake 1000 there.*Fake 2000 here") as refused:
        search(mlp_path, mlp_data, places[1], other(tmp_path), budget=6, storage=storage)
    assert "mptune worker RUN --allow-mixed" in refused.value.hint
    search(mlp_path, mlp_data, places[1], other(tmp_path, "Fake 1000"), budget=6, storage=storage)
    assert len(evaluated_in(places[0], storage)) == 6
