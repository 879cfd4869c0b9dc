"""Settings, and run.json, which holds them: what is refused, and what must be equal for a run to go on."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mptune.errors import RunError, SettingsError
from mptune.json_form import JsonForm, decode_float, encode_float
from mptune.run_json import RUN_FORMAT, FixedSettings, ModelSection, RunFile, SearchSection, check_same, read_run_file
from mptune.settings import DataSettings, LatencySettings, SearchSettings, ShapeRange, TensorRtSettings
from tests.tuning.factory import make_fixed_settings, make_run_file

PATH = Path("model.mptune/run.json")


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


def test_no_other_run_is_named_as_the_one_that_is_confirmed(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="confirms"):
        read({**make_file().model_dump(mode="json"), "confirms": "../../../outside"}, tmp_path)


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
        (SearchSettings(latency=LatencySettings(warmup_ms=1.0)), r"another latency warmup ms \(200.0 before"),
        (SearchSettings(tensorrt=TensorRtSettings(workspace_mb=8)), r"another tensorrt workspace mb \(none before"),
        (SearchSettings(shapes=(ShapeRange("x", (1,), (1,), (1,)),)), r"other --shapes \(none before, x:1 now\)"),
    ],
)
def test_a_fixed_setting_that_differs_is_named(changed: SearchSettings, words: str) -> None:
    with pytest.raises(RunError, match=words) as caught:
        check_same(PATH.parent, make_file(), make_file(changed))
    assert "--fresh" in caught.value.hint
    check_same(PATH.parent, make_file(), make_file())


def test_hashes_are_not_shown() -> None:
    file = make_file()
    for key, words in (("space_sha256", "the space"), ("groups_sha256", "the groups")):
        other = file.fixed_settings.model_copy(update={key: "0"})
        with pytest.raises(RunError, match=f"(?m)another version of {words}$"):
            check_same(PATH.parent, file, file.model_copy(update={"fixed_settings": other}))


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
