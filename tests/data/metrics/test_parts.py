"""The parts of the outputs, against plain formulas, in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mptune.data.metrics import parts as module
from mptune.data.metrics.accuracy import OutputError, Reference, compare_outputs
from mptune.data.metrics.parts import cover_held_out, find_parts, load_parts, save_parts
from mptune.finding import OutputColumns

Samples = list[dict[str, np.ndarray]]
RNG = np.random.default_rng(0)
BOXES = np.array([300.0, 300.0, 80.0, 80.0, 0.2])


def detections(samples: int, rows: int = 40) -> list[np.ndarray]:
    return [(BOXES * (1 + 0.3 * RNG.standard_normal((1, rows, 5)))).astype(np.float32) for _ in range(samples)]


def noisy(reference: list[np.ndarray], size: np.ndarray) -> list[np.ndarray]:
    return [array + size * RNG.standard_normal(array.shape) for array in reference]


def of(arrays: list[np.ndarray]) -> Samples:
    return [{"y": array} for array in arrays]


def compared(outputs: Samples, reference: Samples, parts: Any = None) -> OutputError:
    return compare_outputs(outputs, Reference(reference, parts))


def by_columns(error: OutputError) -> dict[Any, float]:
    return {part.columns: value for part, value in error.by_part("worst_part").items()}


def test_each_column_is_a_part_where_scales_differ() -> None:
    reference = detections(3)
    outputs = noisy(reference, np.array([0.02, 0.02, 0.02, 0.02, 0.01]))
    error = compared(of(outputs), of(reference))
    wide = np.concatenate(reference).astype(np.float64)  # (samples, rows, columns)
    apart = np.concatenate(outputs) - wide
    wanted = np.sqrt((apart**2).mean(axis=1)) / wide.std(axis=(0, 1))
    columns = error.columns["y"]
    for k in range(5):
        assert error.per_output["y"][f"worst_part[{k}]"] == pytest.approx(wanted[:, k])
    relative = np.linalg.norm(apart, axis=1) / np.linalg.norm(wide, axis=1)
    assert columns["worst_part"] == pytest.approx(wanted.mean(axis=0), rel=1e-3)
    assert columns["relative_l2"] == pytest.approx(relative.mean(axis=0), rel=1e-3)
    assert columns["max_abs"] == pytest.approx(abs(apart).max(axis=(0, 1)), rel=1e-3)
    assert error.value("worst_part") == pytest.approx(max(columns["worst_part"]), rel=1e-3)
    assert error.deciding_part("worst_part") == OutputColumns("y", (4,))
    assert error.value("worst_part") > 10 * error.value("relative_l2")
    assert error.summary()["y"]["worst_part"] == error.value("worst_part")


def test_an_output_of_one_scale_is_one_part_and_outputs_can_be_left_out() -> None:
    reference = [RNG.standard_normal((2, 7)) for _ in range(3)]
    pairs = [{"y": array, "z": array} for array in reference]
    error = compared([{"y": array + 0.01, "z": array + 1.0} for array in reference], pairs)
    wanted = 0.01 / np.concatenate(reference).std()
    assert error.deciding_part("worst_part") == OutputColumns("z")
    assert error.without(["z"]).value("worst_part") == pytest.approx(wanted)


AXES = {
    0: [(5, 40), (5,)],
    1: [(1, 5, 40), (1, 5, 4, 4), (1, 4, 40, 40, 2), (1, 5), (40, 5)],
    2: [(1, 40, 5), (1, 6, 6)],
    None: [(1,), ()],
}


@pytest.mark.parametrize(("axis", "shape"), [(axis, shape) for axis, shapes in AXES.items() for shape in shapes])
def test_columns_lie_on_the_shorter_axis_that_is_not_the_batch(axis: int | None, shape: tuple[int, ...]) -> None:
    assert find_parts(of([RNG.standard_normal(shape)] * 2), [frozenset({1})] * 2)["y"].axis == axis


def test_columns_whose_number_changes_are_none() -> None:
    assert find_parts(of([np.zeros((1, n)) for n in (3, 4)]))["y"].axis is None


SCALES = np.array([80.0, 60.0, 40.0, 40.0, 0.2, 0.1, 0.1])
"""Of a detector's columns: a box in pixels, then scores."""


@pytest.mark.parametrize("shape", [(1, 12, 12, 7), (1, 3, 8, 8, 7), (1, 1, 5, 7), (1, 5, 7), (5, 7)])
@pytest.mark.parametrize("samples", [1, 3])
def test_columns_of_two_kinds_on_the_last_axis_are_parts(shape: tuple[int, ...], samples: int) -> None:
    generator = np.random.default_rng(0)  # of its own: five values a column have the scales of some draws only
    arrays = [generator.standard_normal(shape) * SCALES for _ in range(samples)]
    found = find_parts(of(arrays), [frozenset({1})] * samples)["y"]
    assert (found.axis, found.is_split, len(found.ranges)) == (len(shape) - 1, True, 7)
    wrong = [array + np.eye(7)[5] for array in arrays]  # the scores are nonsense, the boxes exact
    assert compared(of(wrong), of(arrays), {"y": found}).value("worst_part") > 5.0


def test_rows_of_several_levels_are_no_columns() -> None:
    of_level = np.repeat([1.0, 0.2, 0.02], [60, 20, 10])[:, None]
    found = find_parts(of([RNG.standard_normal((1, 90, 4)) * of_level]), [frozenset({1})])["y"]
    assert (found.axis, found.is_split) == (2, False)


@pytest.mark.parametrize("axis", [2, 3])
@pytest.mark.parametrize("profile", ["gliding", "bordered", "both"])
def test_an_image_has_no_columns_along_height_or_width(axis: int, profile: str) -> None:
    along = np.geomspace(1.0, 300.0, 64)
    if profile != "gliding":
        along[:4] = along[-4:] = 0.0
    shape = [1, 1, 1, 1]
    shape[axis] = 64
    values = RNG.standard_normal((1, 3, 64, 64)) * along.reshape(shape)
    if profile == "both":
        values *= np.where(np.arange(64) < 20, 100.0, 1.0)[:, None] * np.where(np.arange(64) < 20, 100.0, 1.0)
    found = find_parts(of([values]), [frozenset({1})])["y"]
    assert (found.axis, found.is_split) == (1, False)


def test_constant_columns_are_divided_by_their_size_or_by_nothing() -> None:
    reference = np.zeros((1, 100, 4), np.float32)
    reference[..., 0] = RNG.standard_normal(100)
    reference[..., 1] = 50.0
    reference[..., 3] = 1000.0
    reference[0, ::2, 3] = np.nextafter(np.float32(1000), np.float32(2000))
    assert by_columns(compared(of([reference + 0.5]), of([reference]))) == {
        (0,): pytest.approx(0.5 / reference[..., 0].std(), rel=1e-4),
        (1,): pytest.approx(0.01),
        (2,): pytest.approx(0.5),
        (3,): pytest.approx(5e-4, rel=1e-3),
    }


def test_what_was_seen_over_all_samples_decides_for_others(tmp_path: Path) -> None:
    found = find_parts(of(detections(4)))
    save_parts(tmp_path / "parts.json", found)
    assert load_parts(tmp_path / "parts.json") == found
    held_out = detections(1)
    error = compared(of([array + 1.0 for array in held_out]), of(held_out), found)
    assert error.columns["y"]["worst_part"] == pytest.approx([1.0 / scale for scale in found["y"].scales], rel=1e-3)
    assert load_parts(tmp_path / "none.json") is None


@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e3])
def test_a_column_that_is_zero_in_all_search_samples_is_measured_by_those_that_have_it(unit: float) -> None:
    """Off by a tenth is a tenth in any unit, and zeros everywhere stay absolute."""
    searched = of([np.array([[1.0, 0.0, 0.0]]), np.array([[3.0, 0.0, 0.0]])])
    held_out = of([np.array([[1.0, unit, 0.0]]), np.array([[3.0, -unit, 0.0]])])
    parts = [find_parts(samples)["y"] for samples in (searched, held_out)]
    covering = cover_held_out({"y": parts[0]}, held_out)
    assert (covering["y"].axis, covering["y"].is_split) == (1, True)
    assert covering["y"].whole == max(part.whole for part in parts)
    assert covering["y"].scales == pytest.approx((1.0, unit, 0.0))
    off = of([sample["y"] + np.array([0.0, 0.1 * unit, 0.01]) for sample in held_out])
    error = compared(off, held_out, covering)
    assert by_columns(error) == {(0,): 0.0, (1,): pytest.approx(0.1), (2,): pytest.approx(0.01)}
    assert error.columns["y"]["worst_part"] == pytest.approx([0.0, 0.1, 0.01])


@pytest.mark.parametrize("boxes", [False, True], ids=["alone", "beside boxes in pixels"])
def test_a_class_near_zero_does_not_decide(boxes: bool) -> None:
    """Off by 5e-7 where a class is near 1e-6: half its own scale, and nothing on the scale of the probabilities."""
    powers = np.exp(RNG.standard_normal((4, 1, 50, 6)) + np.array([8.0, 7.0, 3.0, 2.0, -6.0, -9.0]))
    probabilities = powers / powers.sum(axis=-1, keepdims=True)
    left = 300.0 * RNG.standard_normal((4, 1, 50, 6 if boxes else 0))
    reference = of(list(np.concatenate([left, probabilities], axis=-1)))
    found = find_parts(reference)["y"]
    assert found.scales[-1] == pytest.approx(module.LEAST_SHARE * probabilities.std(), rel=1e-5)
    assert found.scales[-6] == pytest.approx(probabilities[..., 0].std(), rel=1e-5)
    assert found.is_split
    off = of([sample["y"] + 5e-7 * np.eye(sample["y"].shape[-1])[-1] for sample in reference])
    assert compared(off, reference).value("worst_part") < 1e-3
    if boxes:
        assert found.scales[:6] == pytest.approx(left.std(axis=(0, 1, 2)), rel=1e-5)


def test_held_out_samples_of_other_shapes_and_none_at_all() -> None:
    found = find_parts(of(detections(2)))
    assert cover_held_out(found, []) == found
    other = of([array[..., :3] * 100.0 for array in detections(2)])
    covering = cover_held_out(found, other)["y"]
    assert covering.scales == found["y"].scales
    assert covering.whole == pytest.approx(find_parts(other)["y"].whole)
    assert covering.whole > found["y"].whole


@pytest.mark.parametrize(("tiny", "error"), [(1e-30, 0.0), (1e-12, 0.0), (1e-6, 1.0), (1e-4, 1.0)])
def test_a_class_that_is_never_given_does_not_count_when_it_becomes_zero(tiny: float, error: float) -> None:
    reference = np.abs(RNG.standard_normal((1, 40, 3))) * [0.5, 0.4, tiny]
    reference[..., 2] -= reference[..., 2].mean()
    output = reference * [1.0, 1.0, 0.0]
    found = compared(of([output]), of([reference])).value("worst_part")
    assert found == pytest.approx(error, abs=1e-3)


@pytest.mark.parametrize("scales", [[1e-9, 4e-10, 1e-12], [0.0, 1e-9, 0.0]])
def test_small_columns_count_where_all_are_small(scales: list[float]) -> None:
    reference = RNG.standard_normal((1, 40, 3)) * np.array(scales)
    smallest = min(range(3), key=lambda k: scales[k] or 1.0)
    output = reference * np.where(np.arange(3) == smallest, 0.0, 1.0)
    assert compared(of([output]), of([reference])).value("worst_part") == pytest.approx(1.0, rel=0.1)


def test_chunks_do_not_change_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = detections(3)
    pair = of(noisy(reference, np.full(5, 0.1))), of(reference)
    whole = compared(*pair)
    monkeypatch.setattr(module, "_CHUNK", 16)
    for name, values in compared(*pair).per_output["y"].items():
        assert values == pytest.approx(whole.per_output["y"][name], rel=1e-9)


def test_very_many_columns_share_parts_and_keep_their_own_scales() -> None:
    reference = RNG.standard_normal((50, 3000)) * np.geomspace(1e-3, 1e3, 3000)
    error = compared(of([reference * 1.01]), of([reference]))
    assert len(error.by_part("worst_part")) == module.MOST_PARTS
    assert error.value("worst_part") == pytest.approx(0.01, rel=0.2)
    assert not error.columns, "more than are stored one by one"


def test_nan_stays_and_columns_survive_json() -> None:
    reference = detections(2)
    outputs = [array.copy() for array in reference]
    outputs[1][0, 0, 2] = np.nan
    error = compared(of(outputs), of(reference))
    assert np.isnan(error.value("worst_part"))
    again = OutputError.from_json(json.loads(json.dumps(error.to_json(), allow_nan=False)))
    assert str(again.columns) == str(error.columns)
    # Of a reference, what is not finite does not count.
    finite = find_parts(of(reference))["y"]
    reference[0] = np.append(reference[0], np.full((1, 1, 5), np.nan), axis=1)
    assert find_parts(of(reference))["y"] == finite
