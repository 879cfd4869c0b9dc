"""``open_run``: everything about a run directory from one object; and a choice by memory."""

from __future__ import annotations

import inspect
import math
import shutil
from pathlib import Path

import onnx
import pytest

import mptune
from mptune.cli import main
from mptune.resources import demo_model
from mptune.settings import LatencySettings
from mptune.tuning.front import Front
from tests.conftest import searched_folder
from tests.fakes import make_toolchain, search

pytestmark = pytest.mark.usefixtures("opened_here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, mlp_data: Path) -> Path:
    return searched_folder(tmp_path_factory.mktemp("run"), mlp_data, lambda: search(make_toolchain(fails=["g001"])))


@pytest.fixture
def run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> mptune.Run:
    """A copy of a search of 12 plans on the fake toolchain, in the working directory."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return mptune.open_run("model.mptune")


def test_a_run_is_read_from_its_directory(run: mptune.Run) -> None:
    assert repr(run) == "Run('model.mptune')"
    assert run.front == run.report() == mptune.report("model.mptune")
    assert len(run.evaluations) == run.front.evaluations - run.front.failures
    assert {p.plan for p in run.front.points} <= {e.plan for e in run.evaluations}


def test_the_study_is_a_copy(run: mptune.Run) -> None:
    journal = run.path / "study.journal"
    before = journal.read_bytes()
    study = run.study
    assert len(study.trials) == 12
    (fp32,) = [t for t in study.trials if t.values and t.values[0] == pytest.approx(10.0, rel=1e-2)]
    assert fp32.values[1] == pytest.approx(run.front.fp32.error_value)
    assert study.best_trials
    study.enqueue_trial({})
    study.set_user_attr("mine", 1)
    assert journal.read_bytes() == before
    assert len(run.study.trials) == 12


def test_a_run_picks_confirms_and_exports(run: mptune.Run, tmp_path: Path) -> None:
    slowest = run.front.points[-1]
    assert run.pick(plan=slowest.plan.fingerprint).chosen == slowest
    assert run.front.chosen == slowest
    confirmed = run.confirm(open_toolchain=make_toolchain(fails=["g001"]).open)
    assert isinstance(confirmed, mptune.Confirmation)
    (device,) = (run.path / "confirmed").iterdir()
    assert mptune.open_run(device).front == confirmed.front
    assert run.export(tmp_path / "run.tar.gz").stat().st_size > 0
    with pytest.raises(mptune.RunError, match="exists already"):
        run.export(tmp_path / "run.tar.gz")
    assert run.export(tmp_path / "run.tar.gz", force=True).exists()


def test_the_methods_take_what_the_functions_take() -> None:
    for name in ("report", "pick", "confirm", "export"):
        of_function = inspect.signature(getattr(mptune, name))
        first, *others = of_function.parameters.values()
        assert first.name == "run"
        method = getattr(mptune.Run("somewhere"), name)
        assert list(inspect.signature(method).parameters.values()) == others
        assert method.__doc__ == getattr(mptune, name).__doc__


def test_pick_keeps_the_limit_of_the_run(run: mptune.Run) -> None:
    front = run.front
    limit = f"{front.metric}<={front.points[1].judged_error:g}"
    by_limit = run.pick(limits=limit)
    assert by_limit.chosen_reason == f"the fastest with {limit}"
    assert by_limit.chosen == front.points[1] != front.points[0]
    generous_ms = 2 * front.points[-1].latency.median_ms
    assert run.pick(max_latency_ms=generous_ms).chosen_reason.endswith(f" and {limit}")
    assert run.pick(max_error=1.0).chosen == front.points[1], "the fastest of all is beyond the limit"
    assert run.pick(knee=True).chosen_reason == f"the knee of the plans with {limit}"
    assert run.pick(plan=front.points[0].plan.fingerprint).chosen == front.points[0]
    assert run.pick(max_error=1.0, limits=()).chosen == front.points[0], "another one is given: none"
    with pytest.raises(mptune.SettingsError, match="limits= map>=3: the metrics are"):
        run.pick(limits="map>=3")


def test_tolerance_and_ignore_of_a_run(run: mptune.Run) -> None:
    (output,) = {name for e in run.evaluations for name in e.counted.per_output}
    error = run.front.points[1].judged_error
    front = run.report(tolerance=[f"{output}={error:g}"])
    assert front.chosen == run.front.chosen, "what lies in chosen/"
    picked = run.pick(tolerance=[f"{output}={error:g}"]).choice
    assert f"would choose {picked.chosen}, the fastest with {output}={error:g}" in front.chosen_reason
    assert not run.report(tolerance=[f"{output}=1e-20"]).limits_met
    assert run.pick(knee=True, ignore=[]).limits_met
    with pytest.raises(mptune.SettingsError, match="nothing"):
        run.report(ignore=["nothing"])


QUICK = LatencySettings(warmup_ms=0.0, duration_ms=1.0, min_iterations=3)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Front:
    model, data = demo_model()
    out = tmp_path_factory.mktemp("memory") / "run"
    return mptune.search(model, data=data, out=out, budget=4, target="cpu", confirm_rounds=1, latency=QUICK)


def test_every_point_has_its_memory(front: Front) -> None:
    document = front.to_json()
    fp32, fp16 = document["baseline"]["fp32"], document["baseline"]["fp16"]
    for point in (fp32, fp16, *document["points"]):
        assert point["memory_source"] == "predicted"  # ONNX Runtime does not say
        assert point["engine_bytes"] is None
        assert fp16["weight_bytes"] <= point["weight_bytes"] <= fp32["weight_bytes"]
        assert fp16["context_bytes"] <= point["context_bytes"] <= fp32["context_bytes"]
    constants = onnx.load(demo_model()[0]).graph.initializer
    floats = [constant for constant in constants if constant.data_type == onnx.TensorProto.FLOAT]
    # the initializers, and a few small constants that nodes hold
    assert fp32["weight_bytes"] == pytest.approx(sum(4 * math.prod(constant.dims) for constant in floats), rel=1e-3)


def test_the_plan_that_a_limit_chooses(front: Front, capsys: pytest.CaptureFixture[str]) -> None:
    most = front.fp16.memory.total_bytes
    picked = mptune.pick(front.run_dir, max_memory_bytes=most, max_error=0.1)
    assert picked.limits_met, "though it is off the front"
    assert picked.chosen.memory.total_bytes <= most
    for size, code, words in (
        (str(most), 3, "no plan has"),  # within 1 % nothing is so small
        ("5kB", 3, "no plan has error <= 0.01 and memory <= 0.005 MB; the nearest is "),
        ("much", 2, "Invalid value for '--max-memory': 'much' is not a size"),
    ):
        assert main(["pick", str(front.run_dir), "--max-memory", size]) == code
        assert words in "".join(capsys.readouterr())
