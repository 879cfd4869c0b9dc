"""A run: ``open_run``, its choices, and run.json with its settings, which decides what may go on."""

from __future__ import annotations

import inspect
import json
import math
import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st

import mptune
from mptune.cli import main
from mptune.errors import RunError, SettingsError
from mptune.json_form import JsonForm, decode_float, encode_float
from mptune.resources import small_model
from mptune.run_json import RUN_FORMAT, FixedSettings, ModelSection, RunFile, SearchSection, check_same, read_run_file
from mptune.settings import DataSettings, LatencySettings, SearchSettings, ShapeRange, TensorRtSettings
from mptune.tuning.front import Front
from tests.conftest import searched_folder
from tests.fakes import make_toolchain, search
from tests.tuning.factory import make_fixed_settings, make_run_file

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
    model, data = small_model("digits")
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
    constants = onnx.load(small_model("digits")[0]).graph.initializer
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


def make_file(settings: SearchSettings | None = None) -> RunFile:
    settings = settings or SearchSettings()
    fixed = make_fixed_settings(settings, space_sha256="34", groups_sha256="56")
    return make_run_file(settings, ModelSection(path="/m.onnx", sha256="12"), fixed)


def read(document: Any, folder: Path) -> RunFile | None:
    (folder / "run.json").write_text(json.dumps(document))
    return read_run_file(folder / "run.json")


def test_what_was_written_is_read(tmp_path: Path) -> None:
    settings = SearchSettings(
        data=Path("data.npz"),
        shapes=(ShapeRange("x", (1, 8), (2, 8), (4, 8)),),
        tensorrt=TensorRtSettings(workspace_mb=64),
        latency=LatencySettings(max_cv=0.5),
        data_settings=DataSettings(batch=3),
    )
    file = make_file(settings)
    again = read(file.model_dump(mode="json"), tmp_path)
    assert again == file
    fixed = again.fixed_settings
    assert (fixed.shapes, fixed.tensorrt, fixed.latency) == (settings.shapes, settings.tensorrt, settings.latency)
    assert read_run_file(tmp_path / "none.json") is None


@pytest.mark.parametrize("section", ["fixed_settings", "search", "choice", None])
def test_every_key_is_known_and_there(section: str | None, tmp_path: Path) -> None:
    document = make_file().model_dump(mode="json")
    keys = document if section is None else document[section]
    keys["of_another_version"] = 1
    with pytest.raises(RunError, match="of_another_version"):
        read(document, tmp_path)
    del keys["of_another_version"]
    if section != "choice":  # a record of defaults
        removed = {"fixed_settings": "tensorrt", "search": "confirm_points", None: "study"}[section]
        del keys[removed]
        with pytest.raises(RunError, match=rf"{removed}: Field required"):
            read(document, tmp_path)


@pytest.mark.parametrize("written", [RUN_FORMAT - 1, RUN_FORMAT + 1])
def test_another_format_is_refused_with_a_hint(written: int, tmp_path: Path) -> None:
    named = f"another version of mptune .run format {written}, this one reads {RUN_FORMAT}"
    with pytest.raises(RunError, match=named) as caught:
        read({"format": written, "whatever": []}, tmp_path)
    assert "--out DIR" in caught.value.hint
    assert "--fresh" in caught.value.hint
    for document in ([], {}, {"format": RUN_FORMAT}, {"format": "two"}):
        with pytest.raises(RunError, match=r"run\.json is damaged"):
            read(document, tmp_path)


NOT_KEPT = {
    *("out", "storage", "fresh", "gpus", "worker", "rollout", "metric_function"),
    *("data_settings", "labels", "limits", "knee"),  # as their fields, by a hash, in the choice
}


def test_every_setting_may_change_in_a_run_or_may_not() -> None:
    fixed, free = set(FixedSettings.model_fields), set(SearchSection.model_fields)
    assert not fixed & free
    named = {one.name for one in fields(SearchSettings)}
    assert named - fixed - free == NOT_KEPT
    assert {one.name for one in fields(DataSettings)} <= fixed


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (SearchSettings(seed=3), r"another --seed \(0 before, 3 now\)"),
        (SearchSettings(metric="max_abs"), r"another metric \(worst_part before, max_abs now\)"),
        (SearchSettings(tf32=True), r"another --tf32 \(off before, on now\)"),
        (SearchSettings(precisions=("fp32", "bf16")), r"another --precisions \(fp32 fp16 before, fp32 bf16 now\)"),
        (SearchSettings(data_settings=DataSettings(batch=2)), r"another --batch \(1 before, 2 now\)"),
        (SearchSettings(data_settings=DataSettings(held_out_fraction=0.5)), r"another held out fraction \(0.25 before"),
        (SearchSettings(latency=LatencySettings(warmup_ms=1.0)), r"another latency warmup ms \(100.0 before"),
        (SearchSettings(tensorrt=TensorRtSettings(workspace_mb=8)), r"another tensorrt workspace mb \(none before"),
        (SearchSettings(shapes=(ShapeRange("x", (1,), (1,), (1,)),)), r"other --shapes \(none before, x:1 now\)"),
    ],
)
def test_a_fixed_setting_that_differs_is_named(changed: SearchSettings, words: str) -> None:
    with pytest.raises(RunError, match=words) as caught:
        check_same(Path("model.mptune"), make_file(), make_file(changed))
    assert "--fresh" in caught.value.hint
    check_same(Path("model.mptune"), make_file(), make_file())


def test_hashes_are_not_shown() -> None:
    file = make_file()
    hashes = {"space_sha256": "the space", "groups_sha256": "the groups", "labels_sha256": "the labels"}
    for key, words in hashes.items():
        other = file.model_copy(update={"fixed_settings": file.fixed_settings.model_copy(update={key: "0"})})
        with pytest.raises(RunError, match=f"(?m)another version of {words}$"):
            check_same(Path("model.mptune"), file, other)


@dataclass(frozen=True)
class Named(JsonForm):
    name: str
    value: float


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_every_float_survives_standard_json(value: float) -> None:
    text = json.dumps(Named("x", value).to_json(), allow_nan=False)
    read = Named.from_json(json.loads(text)).value
    for back in (read, decode_float(encode_float(value))):
        assert back == value or (math.isnan(back) and math.isnan(value))


def test_numpy_scalars_become_plain_floats() -> None:
    assert type(encode_float(np.float32(0.5))) is type(decode_float(3)) is float
    assert encode_float(np.float64("-inf")) == "-inf"


@pytest.mark.parametrize("document", [None, [], {"name": "x"}, {"name": 1, "value": 1.0}, {"name": "x", "value": []}])
def test_what_has_another_form_is_refused(document: object) -> None:
    with pytest.raises(ValueError, match="validation error"):
        Named.from_json(document)


def test_shapes_are_read() -> None:
    assert ShapeRange.parse("x:1x3x8x8,2x3x8x8,4x3x8x8") == ShapeRange("x", (1, 3, 8, 8), (2, 3, 8, 8), (4, 3, 8, 8))
    assert ShapeRange.parse("input:0:7") == ShapeRange("input:0", (7,), (7,), (7,))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((text, "is not understood") for text in ("", "x", "x:", ":1x2", "x:1x2,3x4", "x:1xa", "x:1x-1", "x:1 x 2")),
        ("x:1x2,,3x4", "is not understood"),
        ("x:1,2x2,3", "differ in rank"),
        *((text, "ascending") for text in ("x:2,1,3", "x:1,4,3")),
    ],
)
def test_what_is_no_range_of_shapes_is_refused(text: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        ShapeRange.parse(text)
    assert words != "is not understood" or "x:1x3x224x224" in caught.value.hint


def test_an_input_has_one_range() -> None:
    with pytest.raises(SettingsError, match="names input 'x' twice"):
        SearchSettings(shapes=(ShapeRange.parse("x:1"), ShapeRange.parse("x:2")))


@pytest.mark.parametrize("settings", [{"workspace_mb": 0}, {"optimization_level": 6}, {"optimization_level": -1}])
def test_builder_settings_that_cannot_be_meant_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(SettingsError, match=f"is {next(iter(settings.values()))}"):
        TensorRtSettings(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "limit"), [("1%", 0.01), ("0.5 %", 0.005), ("1e-2", 0.01), (0.01, 0.01)])
def test_a_limit_on_the_error_may_be_a_percentage(text: str | float, limit: float) -> None:
    assert SearchSettings(max_error=text).max_error == pytest.approx(limit)  # type: ignore[arg-type]
