"""run.json: typed sections, all keys of them; other formats are refused."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from mptune.errors import RunError
from mptune.identity import check_same
from mptune.run_json import (
    RUN_FORMAT,
    FixedSettings,
    ModelSection,
    RunFile,
    SearchSection,
    parse_run_file,
)
from mptune.settings import DataSettings, LatencySettings, SearchSettings, ShapeRange, TensorRtSettings
from tests.tuning.factory import make_fixed_settings

PATH = Path("model.mptune/run.json")


def make_file(settings: SearchSettings | None = None) -> RunFile:
    settings = settings or SearchSettings()
    fixed = make_fixed_settings(settings, space_sha256="34", groups_sha256="56")
    return RunFile.of(settings, ModelSection(path="/m.onnx", sha256="12"), fixed, None, "m")


def to_document(file: RunFile) -> Any:
    return json.loads(json.dumps(file.model_dump(mode="json")))


def test_what_was_written_is_read() -> None:
    settings = SearchSettings(
        data=Path("data.npz"),
        shapes=(ShapeRange("x", (1, 8), (2, 8), (4, 8)),),
        tensorrt=TensorRtSettings(workspace_mb=64),
        latency=LatencySettings(max_cv=0.5),
        data_settings=DataSettings(batch=3),
    )
    file = make_file(settings)
    read = parse_run_file(to_document(file), PATH)
    assert read == file
    assert read.fixed_settings.shapes == settings.shapes
    assert read.fixed_settings.tensorrt == settings.tensorrt
    assert read.fixed_settings.latency == settings.latency


@pytest.mark.parametrize("section", ["fixed_settings", "search", "choice", None])
def test_every_key_is_known_and_there(section: str | None) -> None:
    document = to_document(make_file())
    keys = document if section is None else document[section]
    keys["of_another_version"] = 1
    with pytest.raises(RunError, match="of_another_version"):
        parse_run_file(document, PATH)


@pytest.mark.parametrize(("section", "key"), [("fixed_settings", "tensorrt"), ("search", "confirm_points")])
def test_a_key_that_is_missing_is_named(section: str, key: str) -> None:
    document = to_document(make_file())
    del document[section][key]
    with pytest.raises(RunError, match=rf"'{section}\.{key}' is missing"):
        parse_run_file(document, PATH)


@pytest.mark.parametrize("written", [RUN_FORMAT - 1, RUN_FORMAT + 1])
def test_another_format_is_refused_with_a_hint(written: int) -> None:
    named = f"another version of mptune .run format {written}, this one reads {RUN_FORMAT}"
    with pytest.raises(RunError, match=named) as caught:
        parse_run_file({"format": written, "whatever": []}, PATH)
    assert "--out DIR" in caught.value.hint
    assert "--fresh" in caught.value.hint


@pytest.mark.parametrize("document", [[], {}, {"format": RUN_FORMAT}, {"format": "two"}])
def test_what_is_no_run_file_is_refused(document: Any) -> None:
    with pytest.raises(RunError, match=r"run\.json is not a run of mptune"):
        parse_run_file(document, PATH)


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
    ("changed", "said"),
    [
        (
            SearchSettings(latency=LatencySettings(warmup_ms=1.0)),
            r"another latency warmup ms \(200.0 before",
        ),
        (SearchSettings(tensorrt=TensorRtSettings(workspace_mb=8)), r"another tensorrt workspace mb \(none before"),
        (SearchSettings(shapes=(ShapeRange("x", (1,), (1,), (1,)),)), r"other --shapes \(none before, x:1 now\)"),
    ],
)
def test_a_fixed_setting_that_differs_is_named(changed: SearchSettings, said: str) -> None:
    with pytest.raises(RunError, match=said) as caught:
        check_same(PATH.parent, make_file(), make_file(changed))
    assert "--fresh" in caught.value.hint
    check_same(PATH.parent, make_file(), make_file())


def test_other_content_of_the_space_or_other_groups_are_named_without_their_hashes() -> None:
    file = make_file()
    for key, said in (("space_sha256", "content of the search space"), ("groups_sha256", "set of layer groups")):
        other = file.fixed_settings.model_copy(update={key: "0"})
        with pytest.raises(RunError, match=f"(?m)another {said}$"):
            check_same(PATH.parent, file, file.model_copy(update={"fixed_settings": other}))
