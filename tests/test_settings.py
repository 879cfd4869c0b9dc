from __future__ import annotations

import pytest

from mptune.errors import SettingsError
from mptune.settings import SearchSettings, ShapeRange, TensorRtSettings


def test_shapes_are_read() -> None:
    assert ShapeRange.parse("x:1x3x8x8,2x3x8x8,4x3x8x8") == ShapeRange("x", (1, 3, 8, 8), (2, 3, 8, 8), (4, 3, 8, 8))
    assert ShapeRange.parse("input:0:7") == ShapeRange("input:0", (7,), (7,), (7,))


@pytest.mark.parametrize("text", ["", "x", "x:", ":1x2", "x:1x2,3x4", "x:1xa", "x:1x2,,3x4", "x:1x-1", "x:1 x 2"])
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="is not understood") as caught:
        ShapeRange.parse(text)
    assert "x:1x3x224x224" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "words"), [("x:1,2x2,3", "differ in rank"), ("x:2,1,3", "ascending"), ("x:1,4,3", "asc")]
)
def test_what_is_no_range_is_refused(text: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        ShapeRange.parse(text)


def test_an_input_has_one_range() -> None:
    with pytest.raises(SettingsError, match="names input 'x' twice"):
        SearchSettings(shapes=(ShapeRange.parse("x:1"), ShapeRange.parse("x:2")))


@pytest.mark.parametrize("settings", [{"workspace_mb": 0}, {"optimization_level": 6}, {"optimization_level": -1}])
def test_builder_settings_that_cannot_be_meant_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(SettingsError):
        TensorRtSettings(**settings)  # type: ignore[arg-type]
