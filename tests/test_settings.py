"""Shapes, builder settings and limits as text and numbers."""

from __future__ import annotations

import pytest

from mptune.errors import SettingsError
from mptune.settings import SearchSettings, ShapeRange, TensorRtSettings


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
