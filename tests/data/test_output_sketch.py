"""Sketches of outputs: histograms, worst samples and error maps; and the file that keeps them."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image

from mptune.data import run_outputs
from mptune.data.metrics.accuracy import Reference, compare_outputs
from mptune.data.metrics.parts import find_parts
from mptune.data.metrics.row_sets import find_row_sets
from mptune.data.run_outputs import MOST_BYTES, collect_outputs, write_outputs
from mptune.graph.facts import DependentOutput

Sample = Mapping[str, np.ndarray]


def sketch(got: Sequence[Sample], wanted: Sequence[Sample], *dependent: str) -> dict[str, run_outputs.Sketch]:
    row_sets = find_row_sets([DependentOutput(name, 0, ("nms",)) for name in dependent], wanted)
    parts = find_parts(wanted)
    error = compare_outputs(got, Reference(wanted, parts), None, row_sets)
    return run_outputs.sketch_outputs(got, wanted, error, "worst_part", parts, row_sets)


def total(histogram: Mapping[str, Any]) -> int:
    return sum(histogram["counts"]) + sum(histogram[name] for name in ("below", "above", "non_finite"))


def levels(error_map: Mapping[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(error_map["levels"]), np.uint8).reshape(error_map["grid"])


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_the_worst_sample_and_columns_of_their_own_scale_come_first() -> None:
    scale = np.array([300, 300, 300, 300, 0.1], np.float32)
    wanted = [{"boxes": normal(1, 40, 5, seed=k) * scale} for k in range(3)]
    got = [{"boxes": sample["boxes"].copy()} for sample in wanted]
    got[1]["boxes"][0, 11, 4] -= 0.05
    found = sketch(got, wanted)["boxes"]
    assert found["part_count"] == 5
    worst = found["parts"][0]
    assert (worst["columns"], worst["worst_samples"][0][0]) == ([4], 1)
    assert total(worst["reference"]) == total(worst["plan"]) == total(worst["difference"]) == 120
    counts = worst["difference"]["counts"]
    assert (sum(counts[: len(counts) // 2]), counts[len(counts) // 2]) == (1, 119)
    assert abs(worst["reference"]["range"][1]) < 1
    assert all(part["error"] == 0 for part in found["parts"][1:])


@pytest.mark.parametrize("shape", [(1, 3, 100, 200), (1, 100, 200, 3), (2, 100, 200), (1, 2, 3, 100, 200)])
def test_an_image_has_a_map_of_its_worst_sample(shape: tuple[int, ...]) -> None:
    wanted = [{"flow": normal(*shape, seed=k)} for k in range(3)]
    got = [{"flow": sample["flow"].copy()} for sample in wanted]
    got[2]["flow"][(..., 50, 150, 0) if shape[-1] == 3 else (..., 50, 150)] += 2.0
    error_map = sketch(got, wanted)["flow"]["error_map"]
    assert (error_map["sample"], error_map["size"], error_map["grid"]) == (2, [100, 200], [64, 64])
    assert error_map["scale"] == pytest.approx(2.0, rel=1e-5)
    assert np.argwhere(levels(error_map)).tolist() == [[50 * 64 // 100, 150 * 64 // 200]]
    assert levels(error_map).max() == 255


@pytest.mark.parametrize(("shape", "size"), [((2, 1, 48, 64), (64, 48)), ((1, 20, 150, 3), (50, 20))])
def test_an_image_has_a_picture_of_its_first_sample(shape: tuple[int, ...], size: tuple[int, int]) -> None:
    wanted = [{"y": normal(*shape, seed=k)} for k in range(2)]
    wanted[0]["y"].flat[:2] = -9, 9  # black, and beyond the range of the rest
    got = [{"y": sample["y"].copy()} for sample in wanted]
    got[0]["y"].flat[0] = np.nan
    pictures = sketch(got, wanted)["y"]["picture"]
    reference, plan = (Image.open(io.BytesIO(base64.b64decode(pictures[name]))) for name in ("reference", "plan"))
    assert reference.size == plan.size == size
    pixels, shown = (np.asarray(picture) for picture in (reference, plan))
    assert (pixels[0, 0, 0], pixels.max(), shown[0, 0].tolist()) == (0, 255, [214, 40, 30])
    assert (pixels != shown).any(axis=2).sum() == 1
    two = [{"y": normal(1, 2, 9, 9)}]
    found = sketch(two, two)["y"]
    assert (found["error_map"] is None, found["picture"]) == (False, None), "no colours"


@pytest.mark.parametrize("shape", [(64, 1000), (1, 4, 7, 300), (1,), ()])
def test_what_is_no_image_has_no_map(shape: tuple[int, ...]) -> None:
    wanted = [{"y": normal(*shape) + np.float32(1)}]
    assert sketch([{"y": wanted[0]["y"] * np.float32(1.01)}], wanted)["y"]["error_map"] is None


def test_values_that_are_not_finite_are_counted_and_shown() -> None:
    wanted = [{"y": normal(1, 9, 9)}]
    wanted[0]["y"][0, 0, 0] = np.inf  # is there in the reference already
    got = [{"y": wanted[0]["y"].copy()}]
    got[0]["y"][0, 4, 4] = np.nan
    found = sketch(got, wanted)["y"]
    part = found["parts"][0]
    assert [part[name]["non_finite"] for name in ("reference", "plan", "difference")] == [1, 2, 1]
    assert np.argwhere(levels(found["error_map"])).tolist() == [[4, 4]]


def test_a_large_output_is_counted_in_part() -> None:
    wanted = [{"y": normal(1, 1000, 512)} for _ in range(2)]
    part = sketch([{"y": sample["y"] + np.float32(1e-4)} for sample in wanted], wanted)["y"]["parts"][0]
    assert part["every"] > part["every"] % 2 == 1, "a step of 2 would see every other column only"
    assert total(part["reference"]) <= run_outputs.MOST_VALUES


def test_rows_are_paired_before_they_are_compared() -> None:
    wanted = [{"boxes": np.arange(40, dtype=np.float32).reshape(10, 4) * 7}]
    got = [{"boxes": np.delete(wanted[0]["boxes"], 4, axis=0)[::-1].copy()}]
    found = sketch(got, wanted, "boxes")["boxes"]
    assert (found["as_rows"], found["error_map"]) == (True, None)
    assert max(found["parts"][0]["difference"]["counts"]) == 36, "all but the lost row are equal"


def test_an_output_of_another_shape_is_left_out() -> None:
    wanted = {"y": normal(1, 5), "n": normal(3, 4), "empty": normal(0, 4), "flag": np.array([True, False])}
    assert set(sketch([{**wanted, "n": normal(2, 4)}], [wanted])) == {"y", "empty", "flag"}


TYPES = st.sampled_from([np.float16, np.float32, np.int64, np.int32, np.uint8, np.bool_])


@given(arrays.arrays(TYPES, arrays.array_shapes(max_dims=4)), st.integers(0, 2**32 - 1))
@settings(max_examples=50)
def test_any_values_give_a_sketch_that_comes_back(values: np.ndarray, seed: int) -> None:
    found = sketch([{"y": np.random.default_rng(seed).permutation(values, axis=0)}], [{"y": values}])
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    for part in found["y"]["parts"]:
        assert total(part["reference"]) == total(part["plan"])
        assert part["reference"]["range"][0] < part["reference"]["range"][1]


def saved(path: Path, metric: str, outputs: dict[str, Any]) -> None:
    """As a job leaves the sketches of a plan."""
    write_outputs(path, {"metric": metric, "samples": 3, "outputs": outputs})


def test_the_file_of_a_run_keeps_to_its_limit_the_chosen_plan_first(tmp_path: Path) -> None:
    wanted = [{f"{'long ' * 100}{k}": normal(1, 1, 64, 64, seed=k) for k in range(6)}]
    found = sketch([{name: value * np.float32(1.01) for name, value in wanted[0].items()}], wanted)
    plans = [f"{k:012x}" for k in range(60)]
    for plan in plans:
        saved(tmp_path / "outputs" / f"{plan}.json", "worst_part", found)
    outputs = collect_outputs([(plan, "emulated") for plan in plans], tmp_path / "outputs", "worst_part")
    assert (len(outputs["plans"]) + len(outputs["left_out"]), outputs["count"]) == (60, 3)
    write_outputs(tmp_path / "outputs.json", outputs)
    assert MOST_BYTES * 0.9 < (tmp_path / "outputs.json").stat().st_size <= MOST_BYTES
    again = json.loads((tmp_path / "outputs.json").read_text())
    assert [*again["plans"]][:3] == plans[:3]
    assert set(again["left_out"]) == set(plans) - set(again["plans"]) != set()
    assert again["plans"][plans[0]]["source"] == "emulated"
    assert sum(each["error_map"] is not None for each in again["plans"][plans[0]]["outputs"].values()) == 4


def test_what_is_not_there_damaged_or_of_another_metric_is_passed_over(tmp_path: Path) -> None:
    found = sketch([{"y": normal(1, 5)}], [{"y": normal(1, 5, seed=1)}])
    saved(tmp_path / "good.json", "worst_part", found)
    saved(tmp_path / "other.json", "max_abs", found)
    (tmp_path / "torn.json").write_text((tmp_path / "good.json").read_text()[:100])
    (tmp_path / "list.json").write_text("[]")
    plans = [(name, "measured") for name in ("torn", "other", "list", "absent", "good", "good")]
    assert list(collect_outputs(plans, tmp_path, "worst_part")["plans"]) == ["good"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("unit", "indices", "names"),
    [
        ("sample", [4, 9, 11], ["sample 4", "sample 9", "sample 11"]),
        ("sequence", [0, 8, 16], ["sequence from sample 0", "sequence from sample 8", "sequence from sample 16"]),
        ("sample", [], ["held-out sample 0", "held-out sample 1", "held-out sample 2"]),
    ],
)
def test_samples_are_called_as_the_user_knows_them(unit: Any, indices: list[int], names: list[str], tmp_path) -> None:
    saved(tmp_path / "good.json", "worst_part", sketch([{"y": normal(1, 5)}], [{"y": normal(1, 5, seed=1)}]))
    assert collect_outputs([("good", "measured")], tmp_path, "worst_part", indices, unit)["samples"] == names
