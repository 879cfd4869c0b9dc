"""``confirm`` and ``export``: a search that was predicted, taken elsewhere without its model, and measured there."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import optuna
import pytest

import mptune
from mptune.cli import main
from mptune.engines.base import Failure, Measurement
from mptune.engines.context import RunContext
from mptune.engines.environment import Environment
from mptune.errors import BaselineError, DataError, EndedEarlyError, RunError, SettingsError, TargetError
from mptune.graph.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.weights import WeightBank
from mptune.reporting.terminal.front import print_confirmation
from mptune.settings import LatencySettings
from mptune.targets.detect import JetsonState, PowerMode
from mptune.tuning.confirmation import Confirmation
from mptune.tuning.front import Front
from tests.conftest import searched_folder
from tests.fakes import FAST, Diary, FakeToolchain, Law, search

pytestmark = pytest.mark.usefixtures("opened_here")

QUICK = LatencySettings(warmup_ms=1.0, duration_ms=2.0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, mlp_data: Path) -> Path:
    """A folder with model.onnx, data.npz, and model.mptune, in which that model was searched."""
    return searched_folder(tmp_path_factory.mktemp("base"), mlp_data, predict)


@pytest.fixture
def place(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it as the working directory."""
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    run_json = tmp_path / "model.mptune" / "run.json"
    run_json.write_text(run_json.read_text().replace(str(base), str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def searched(place: Path) -> Front:
    return mptune.report("model.mptune")


@pytest.fixture
def fake(place: Path) -> FakeToolchain:
    """A device that obeys the same law at twice the latency, with held-out errors a little larger."""
    return FakeToolchain(law(base_ms=20.0, boundary_ms=0.04), held_out_factor=1.3)


def law(**options: float | Mapping[str, float]) -> Law:
    return Law([g.id for g in find_groups(load_model("model.onnx"))], **options)  # type: ignore[arg-type]


def predict(run: str = "model.mptune", **settings: object) -> Front:
    """A search on a fake that predicts for a device elsewhere."""
    sources = {"latency_source": "predicted", "error_source": "emulated"}
    fake = FakeToolchain(law(), device="Elsewhere", name="emulation", **sources)
    wanted = {"data": "data.npz", "budget": 12, "target": "h200", "latency": FAST, "out": Path(run), **settings}
    return mptune.search("model.onnx", open_toolchain=fake.open, **wanted)


def confirm(fake: FakeToolchain, run: str = "model.mptune", **options: object) -> Confirmation:
    return mptune.confirm(run, open_toolchain=fake.open, **options)  # type: ignore[arg-type]


HERE = Path("model.mptune/confirmed/fake-1000-fake")


def test_every_plan_of_the_front_and_every_seed_is_measured(searched: Front, fake: FakeToolchain) -> None:
    confirmation = confirm(fake)
    wanted = {p.plan.fingerprint for p in (*searched.points, searched.fp32, searched.fp16)}
    assert wanted <= {plan.searched.plan.fingerprint for plan in confirmation.plans}
    seeds = {str(plan.searched.origin) for plan in confirmation.plans if plan.searched.origin.kind == "seed"}
    assert {"seed: all-fp32", "seed: all-fp16", "seed: norm and softmax in FP32"} <= seeds
    for before, now in ((plan.searched, plan.measured) for plan in confirmation.plans):
        assert (before.latency.source, before.error_source) == ("predicted", "emulated")
        assert (now.latency.source, now.error_source, now.remeasured) == ("measured", "measured", True)
        assert (before.confirmed, now.confirmed) == (False, True), "a search confirms nothing"
        assert now.latency.median_ms == pytest.approx(fake.law.latency_ms(before.plan), rel=1e-2)
        assert now.held_out_value == pytest.approx(1.3 * fake.law.error(before.plan))
    medians, plans = [plan.measured.latency.median_ms for plan in confirmation.plans], len(confirmation.plans)
    assert medians == sorted(medians)
    assert len(fake.calls) == 4 * plans, "once each, then three rounds"
    assert fake.calls[:1] == [(searched.fp32.plan.fingerprint, "search", 0)]
    rounds = [(process, which) for _, which, process in fake.calls[plans:]]
    assert rounds == [(process, "held_out") for process in (1, 2, 3) for _ in range(plans)]


def test_size_and_time_end_it(fake: FakeToolchain) -> None:
    for limit, words in (({"max_disk_bytes": 10}, "all-FP32 was not measured yet"), ({"timeout_s": 1e-6}, "time is")):
        with pytest.raises(EndedEarlyError, match=words):
            confirm(fake, **limit)
    assert not fake.calls
    with pytest.raises(SettingsError, match="max_disk_bytes= is 0"):
        confirm(fake, max_disk_bytes=0)


def test_findings_about_the_data_go_with_the_run_and_the_target_is_here(place: Path) -> None:
    searched = predict(data=None, fresh=True)
    assert [finding.code for finding in searched.findings] == ["random-data", "target-not-here"]
    diary = Diary()
    confirmation = confirm(FakeToolchain(law()), listener=diary)
    assert [finding.code for finding in confirmation.front.findings] == ["random-data"]
    assert sum("random inputs" in text for text in diary.warnings) == 1
    document = json.loads((HERE / "front.json").read_text())
    assert document["findings"] == [finding.to_json() for finding in searched.findings[:1]]
    assert not any("random inputs" in text for text in document["warnings"])
    assert mptune.report(HERE).findings == confirmation.front.findings


def test_a_prediction_that_holds_and_one_that_does_not(fake: FakeToolchain) -> None:
    confirmation = confirm(fake)
    assert (confirmation.latency.kendall_tau, confirmation.error.kendall_tau) == pytest.approx((1.0, 1.0))
    assert confirmation.latency.verdict == confirmation.error.verdict == "held"
    gains = {group: -gain for group, gain in law().gains.items()}
    confirmation = confirm(FakeToolchain(law(gains=gains), device="Contrary"))
    assert confirmation.latency.kendall_tau < 0
    assert (confirmation.latency.verdict[:12], confirmation.error.verdict) == ("did not hold", "held")


def test_a_confirmation_is_a_run_directory_of_its_own(fake: FakeToolchain) -> None:
    before = Path("model.mptune/front.json").read_bytes()
    confirmation = confirm(fake)
    front = confirmation.front
    document = json.loads((HERE / "front.json").read_text())
    assert document == confirmation.to_json()
    assert document["points"] == front.to_json()["points"]
    assert document["agreement"]["latency"]["kendall_tau"] == pytest.approx(1.0)
    assert document["search"]["latency_source"] == "predicted"
    assert (HERE / "chosen" / "model.onnx").exists()
    assert Path("model.mptune/front.json").read_bytes() == before, "the prediction stays"
    assert not list((HERE / "data").glob("*.npz")), "samples were lent"
    assert mptune.report(HERE) == front
    other = next(p.plan.fingerprint for p in front.points if front.chosen is None or p.plan != front.chosen.plan)
    mptune.pick(HERE, plan=other)
    after = json.loads((HERE / "front.json").read_text())
    assert (after["chosen"], after["agreement"]) == (other, document["agreement"])
    assert "Kendall&#39;s tau 1.00" in (HERE / "report.html").read_text()
    for call in (mptune.confirm, mptune.export):
        with pytest.raises(RunError, match="is a confirmation already"):
            call(HERE)


def test_it_goes_on_where_it_was_and_measures_nothing_twice(fake: FakeToolchain) -> None:
    calls = []
    for count in (5, 17):
        interrupted = replace(fake, interrupt_after=count, calls=[])
        with pytest.raises(KeyboardInterrupt):
            confirm(interrupted)
        assert not (HERE / "front.json").exists()
        calls += interrupted.calls
    rest = replace(fake, calls=[])
    confirmation = confirm(rest)
    calls += rest.calls
    assert len(calls) == 4 * len(confirmation.plans)
    once = sorted(plan for plan, which, _ in calls if which == "search")
    assert once == sorted(plan.searched.plan.fingerprint for plan in confirmation.plans)
    again = replace(fake, calls=[])
    assert confirm(again) == confirmation
    assert again.calls == []


def test_a_search_that_went_on_is_confirmed_further_and_another_one_anew(fake: FakeToolchain) -> None:
    first = confirm(fake)
    predict(budget=30)
    more = replace(fake, calls=[])
    plans = confirm(more).plans
    new = {p.searched.plan.fingerprint for p in plans} - {p.searched.plan.fingerprint for p in first.plans}
    assert {fingerprint for fingerprint, _, _ in more.calls} == new
    assert all(plan.measured is not None for plan in plans)
    predict(seed=5, fresh=True)
    shutil.move("model.mptune.old-1/confirmed", "model.mptune/confirmed")
    again = replace(fake, calls=[])
    confirm(again)
    assert again.calls
    assert Path(f"{HERE}.old-1", "front.json").exists(), "moved aside"


def test_a_plan_that_fails_on_the_device_is_told(
    searched: Front, fake: FakeToolchain, capsys: pytest.CaptureFixture[str]
) -> None:
    half = next(p for p in searched.points if p.plan.fp16_groups).plan.fp16_groups[0]
    sick = next(g for g in fake.law.groups if g != half)
    confirmation = confirm(replace(fake, fails=(half,), non_finite=(sick,)))
    failed = {plan.searched.plan: plan.failure for plan in confirmation.plans if plan.measured is None}
    assert any("no kernel for this" in text for text in failed.values())
    assert not {point.plan for point in confirmation.front.points} & failed.keys()
    print_confirmation(confirmation)
    assert "(all-fp16): build, error: no kernel for this" in " ".join(capsys.readouterr().out.split())


def test_a_broken_baseline_stops_it(fake: FakeToolchain) -> None:
    with pytest.raises(BaselineError, match="is off by"):
        confirm(replace(fake, law=replace(fake.law, fp32_error=0.5)))


def test_what_only_predicts_confirms_nothing(fake: FakeToolchain) -> None:
    with pytest.raises(TargetError, match="cannot be measured here") as caught:
        confirm(replace(fake, latency_source="predicted"))
    assert "--target cpu" in caught.value.hint
    assert not Path("model.mptune/confirmed").exists()
    with pytest.raises(TargetError, match="H100 SXM cannot be measured here"):
        mptune.confirm("model.mptune", target="h100")


@pytest.mark.parametrize("profile", [True, False])
def test_the_cpu_does_not_stand_in_for_a_gpu(
    fake: FakeToolchain, monkeypatch: pytest.MonkeyPatch, profile: bool
) -> None:
    """A GPU that is not found, as in a container without NVIDIA's runtime, must not give a CPU's figures."""
    monkeypatch.setattr("mptune.tuning.confirm.detect_gpus", lambda: ())
    monkeypatch.setattr("mptune.tuning.confirm.choose.refuse_hidden_gpu", lambda otherwise: None)
    if not profile:  # the search's was a file that is not here
        gone = mock.Mock(side_effect=TargetError("gone", "find it"))
        monkeypatch.setattr("mptune.tuning.confirm.load_target", gone)
    with pytest.raises(TargetError, match="no GPU was found, and the search was for") as caught:
        mptune.confirm("model.mptune")
    assert "--target cpu measures on this CPU" in caught.value.hint
    assert not Path("model.mptune/confirmed").exists()


class Builds(FakeToolchain):
    """Leaves an engine file of every plan, as TensorRT's toolchain does."""

    def open(self, context: RunContext) -> FakeToolchain:
        self.engines = context.engines_dir
        return super().open(context)

    def evaluate(self, plan: PrecisionPlan, *args: Any, **options: Any) -> Measurement | Failure:
        path = self.engines / f"{plan.fingerprint}.engine"
        path.write_text(plan.fingerprint)
        return replace(super().evaluate(plan, *args, **options), engine_path=path)


def test_the_engine_that_was_measured_ships(searched: Front) -> None:
    front = confirm(Builds(law())).front
    shipped = HERE / "chosen" / "model.engine"
    assert shipped.read_text() == front.chosen.plan.fingerprint
    readme = (HERE / "chosen" / "README.txt").read_text()
    assert "nvtx_verbosity = trt.ProfilingVerbosity.NONE" in readme
    assert "model.engine the engine that was measured" in readme
    kept = {p.plan.fingerprint for p in (*front.points, front.fp32, front.fp16) if p is not None}
    assert {path.stem for path in (HERE / "engines").glob("*.engine")} == kept, "dominated ones are deleted"
    other = next(p for p in front.points if p.plan != front.chosen.plan)
    Path("model.mptune").rename("moved.mptune")
    moved = Path("moved.mptune") / HERE.relative_to("model.mptune")
    mptune.pick(moved, plan=other.plan.fingerprint)
    assert (moved / "chosen" / "model.engine").read_text() == other.plan.fingerprint
    last = front.points[-1].plan.fingerprint
    (moved / "engines" / f"{last}.engine").unlink()
    mptune.pick(moved, plan=last)
    assert not (moved / "chosen" / "model.engine").exists(), "never the engine of another plan"
    assert "model.engine" not in (moved / "chosen" / "README.txt").read_text().partition("What it is")[0]


class OnJetson(FakeToolchain):
    """Measures on an Orin Nano in some power mode."""

    mode = PowerMode("25W", gpu_mhz=918.0)

    def environment(self) -> Environment:
        return replace(super().environment(), jetson=JetsonState("Jetson Orin Nano", "p3767-0003", mode=self.mode))


def test_power_modes(place: Path) -> None:
    """Each has a confirmation of its own; modes of one name may differ, as users edit nvpmodel's file."""

    def warnings(toolchain: FakeToolchain) -> list[str]:
        front = confirm(toolchain, run="here.mptune").front
        return [text for text in front.warnings if "power mode" in text]

    fast, slow = OnJetson(law(), drifts=(1.0,)), OnJetson(law(base_ms=20.0))
    search(fast, budget=8, out=Path("here.mptune"))
    slow.mode = PowerMode("15W", gpu_mhz=918.0)
    assert warnings(fast) == []
    (text,) = warnings(slow)
    assert "the search measured in power mode 25W (GPU up to 918 MHz), and this is 15W" in text
    names = ["fake-1000-fake-15w", "fake-1000-fake-25w"]
    assert sorted(path.name for path in Path("here.mptune/confirmed").iterdir()) == names
    front = mptune.report(f"here.mptune/confirmed/{names[0]}")
    assert front.fp32.latency.median_ms == pytest.approx(20.0, rel=1e-2), "not corrected to the other mode"
    fast.mode = PowerMode("25W", gpu_mhz=612.0)
    (text,) = (text for text in warnings(fast) if "began in power mode" in text)
    assert "25W (GPU up to 918 MHz), and this is 25W (GPU up to 612 MHz): latencies of both cannot be compared" in text
    fast.mode = OnJetson.mode
    assert text in warnings(fast), "what was measured meanwhile is still there"


def test_limits_of_the_search_are_held_against_what_was_measured(place: Path) -> None:
    searched = predict(max_latency_ms=6.0)
    assert searched.limits_met
    assert sum("6 ms is compared with predictions" in text for text in searched.warnings) == 1
    slow = FakeToolchain(law(base_ms=20.0))
    confirmation = confirm(slow)
    assert not confirmation.front.limits_met
    assert confirmation.front.chosen is not None
    assert not any("compared with predictions" in text for text in confirmation.front.warnings)


class TestDamage:
    def test_no_model_and_no_copy(self, fake: FakeToolchain) -> None:
        Path("model.mptune/weights/model.onnx").unlink()
        Path("model.onnx").rename("elsewhere.onnx")
        with pytest.raises(RunError, match="holds no copy of its model") as caught:
            confirm(fake)
        assert "mptune export" in caught.value.hint
        for name in ("model.onnx", "fp32.bin"):
            Path("model.mptune/weights", name).unlink(missing_ok=True)
            with pytest.raises(RunError, match=rf"weights/{name} is missing"):
                mptune.export("model.mptune")
        assert not Path("model.mptune.tar.gz").exists()

    def test_a_run_without_a_baseline(self, place: Path) -> None:
        fake = FakeToolchain(law(), interrupt_after=0)
        with pytest.raises(KeyboardInterrupt):
            search(fake, fresh=True)
        for call in (lambda: confirm(fake), lambda: mptune.export("model.mptune")):
            with pytest.raises(RunError, match="no evaluation"):
                call()


class TestExport:
    def test_it_holds_what_confirm_needs_and_no_more(self, searched: Front) -> None:
        Path("model.mptune/engines/x.engine").write_text("large")
        Path("model.mptune/data/timing-cuda.json").write_text("{}")
        assert mptune.export("model.mptune") == Path("model.mptune.tar.gz")
        with tarfile.open("model.mptune.tar.gz") as archive:
            names = set(archive.getnames())
        assert names >= {
            f"model.mptune/{name}"
            for name in ("run.json", "study.journal", "weights/fp32.bin", "weights/model.onnx", "data/held_out.npz")
        }
        assert not [n for n in names if "engine" in n or "timing" in n or "chosen" in n or "logs" in n or ".lock" in n]

    def test_a_metric_of_the_users_own_goes_along_by_hand(
        self, place: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Path("mine.py").write_text("def worst(outputs, reference):\n    return abs(outputs['y']).max()\n")
        mptune.search("model.onnx", data="data.npz", metric="mine.py:worst", budget=3, target="h200", fresh=True)
        assert main(["export", "model.mptune"]) == 0
        out, err = capsys.readouterr()
        assert out == "model.mptune.tar.gz\n"
        assert err.startswith("warning: the metric mine.py:worst is a Python function or script of yours")
        Path("mine.py").unlink()
        with pytest.raises(DataError, match=r"mine\.py"):
            confirm(FakeToolchain(law()), metric="mine.py:worst")

    def test_a_script_that_only_the_run_names_is_not_run(
        self, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        script = "from pathlib import Path\nPath('ran').touch()\ndef worst(outputs, reference):\n    return 0.0\n"
        run_json = Path("model.mptune/run.json")
        before = json.loads(run_json.read_text())
        for where, says in (("model.mptune/evil.py", "is never run"), ("evil.py", "is not run unless you name it")):
            Path(where).write_text(script)
            before["search"]["metric"] = f"{where}:worst"
            run_json.write_text(json.dumps(before))
            assert main(["confirm", "model.mptune", "--target", "cpu"]) == 1
            error, hint = capsys.readouterr().err.splitlines()
            assert says in error
            assert hint.startswith("hint: ")
            assert not Path("ran").exists()
        assert "`mptune confirm model.mptune --metric evil.py:worst`" in hint
        assert main(["confirm", "model.mptune", "--metric", "evil.py:worst"]) == 1  # the record has no such metric
        assert Path("ran").exists()
        Path("ran").unlink()
        for command in (["confirm", "model.mptune"], ["worker", "model.mptune"], ["search", "model.onnx"]):
            capsys.readouterr()
            assert main(command) == 1
            assert "--metric evil.py:worst`" in capsys.readouterr().err
            assert not Path("ran").exists(), "it was named in another call"
        assert main(["confirm", "model.mptune", "--metric", "relative_l2"]) == 2
        assert main(["search", "model.onnx", "--out", "model.mptune", "--metric", "model.mptune/evil.py:worst"]) == 1
        assert "is never run" in capsys.readouterr().err

    def test_a_study_in_a_database_becomes_a_journal(self, place: Path) -> None:
        url, verbosity = "sqlite:///study.db", optuna.logging.get_verbosity()
        front = predict(storage=url, fresh=True)
        mptune.export("model.mptune", "out.tar.gz", storage=url)
        Path("study.db").unlink()
        extract("out.tar.gz", "far")
        far = mptune.report("far/model.mptune")
        assert [p.plan for p in far.points] == [p.plan for p in front.points]
        confirm(FakeToolchain(law()), run="far/model.mptune")
        assert optuna.logging.get_verbosity() == verbosity


def extract(archive: str, folder: str) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")


def test_from_a_prediction_to_what_onnx_runtime_measures(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole way as a person goes it, with ONNX Runtime on this CPU as the device and the model deleted."""
    wanted = {"data": "data.npz", "budget": 8, "target": "h200", "latency": QUICK, "confirm_rounds": 1, "fresh": True}
    front = mptune.search("model.onnx", **wanted)  # type: ignore[arg-type]
    assert front.fp32.latency.source == "predicted"
    assert any("`mptune confirm`" in finding.cure for finding in front.findings)
    assert main(["export", "model.mptune", "-o", "run.tar.gz"]) == 0
    Path("model.onnx").unlink()
    shutil.rmtree("model.mptune")
    extract("run.tar.gz", "device")
    capsys.readouterr()
    assert main(["confirm", "device/model.mptune", "--target", "cpu"]) == 0
    out, err = capsys.readouterr()
    for words in (
        "pred. ms",
        "emul. err",
        "latency: Kendall's tau ",
        "the predicted ranking ",
        "the emulated ranking ",
    ):
        assert words in out
    assert "the search predicted h200, and this is cpu" in err
    (home,) = Path("device/model.mptune/confirmed").iterdir()
    document = json.loads((home / "front.json").read_text())
    assert document["target"]["engine"] == "onnxruntime"
    assert document["points"]
    for point in document["points"]:
        assert (point["latency"]["source"], point["error"]["source"]) == ("measured", "measured")
        assert point["error"]["held_out"] is not None
        assert point["remeasured"] is point["confirmed"] is True
    assert all(plan["measured"] is not None for plan in document["plans"])
    assert main(["confirm", "device/model.mptune", "--target", "cpu", "--json"]) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out), "measuring" in err) == (document, False), "all of it is recorded"
    assert not any("--budget" in text for text in document["warnings"])
    assert main(["pick", str(home), "--max-latency-ms", "1e-6"]) == 3
    assert main(["report", str(home)]) == 3
    assert main(["confirm", "device/model.mptune", "--target", "cpu"]) == 0, "its own choice again"
    bank = WeightBank.write(load_model(home / "chosen" / "model.onnx"), place / "bank")
    assert bank.places[Precision.FP32]
