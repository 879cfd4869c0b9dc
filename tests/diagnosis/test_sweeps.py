"""Errors at other declared sizes: what depends on the size is found, and a sound twin is silent."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import mptune
from mptune.cli import main
from mptune.diagnosis.sizes import resized, sized_samples, sweep
from mptune.finding import Finding
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.loading.tensors import TensorInfo
from mptune.graph.plan import Precision
from mptune.settings import ShapeRange
from tests.zoo.sizes import LARGEST, SIZE, data, pooled

RANGE = ShapeRange("image", (1, 3, 8, 8), (1, 3, SIZE, SIZE), (2, 3, LARGEST, LARGEST))


def swept(by: str, folder: Path, shapes: tuple[ShapeRange, ...] = (RANGE,)) -> tuple[Finding, ...]:
    onnx.save(pooled(by), folder / "model.onnx")
    loaded = load_model(folder / "model.onnx")
    groups = GroupedModel(loaded, find_groups(loaded))
    samples = [{"image": image[None]} for image in data()["image"]]
    found, warnings = sweep(groups, groups.uniform(Precision.FP16), samples, shapes)
    assert warnings == ()
    return found


def test_an_error_that_grows_with_the_size_is_named(tmp_path: Path) -> None:
    (finding,) = swept("ReduceSum", tmp_path)
    assert (finding.code, finding.severity) == ("size-dependent", "warning")
    assert finding.evidence["error"] == "inf"
    assert finding.evidence["size"] == f"image 2x3x{LARGEST}x{LARGEST}"
    assert 0 < float(finding.evidence["error_at_size_of_data"]) < 1
    assert finding.where.inputs == ("image",)


def test_a_sound_twin_is_silent(tmp_path: Path) -> None:
    assert swept("ReduceMean", tmp_path) == ()


def test_one_size_is_no_range(tmp_path: Path) -> None:
    onnx.save(pooled("ReduceSum"), tmp_path / "model.onnx")
    loaded = load_model(tmp_path / "model.onnx")
    groups = GroupedModel(loaded, find_groups(loaded))
    one = ShapeRange("image", *[(1, 3, 64, 64)] * 3)
    samples = [{"image": image[None]} for image in sized(64)["image"]]
    assert sweep(groups, groups.uniform(Precision.FP16), samples, (one,)) == ((), ())


@pytest.mark.slow
def test_a_search_names_it(tmp_path: Path) -> None:
    onnx.save(pooled("ReduceSum"), tmp_path / "model.onnx")
    shapes = f"image:1x3x8x8,1x3x{SIZE}x{SIZE},1x3x{LARGEST}x{LARGEST}"
    given = {"data": data(), "shapes": shapes, "out": tmp_path / "run", "budget": 3, "target": "jetson-orin-nano-8gb"}
    front = mptune.search(tmp_path / "model.onnx", max_latency_ms=1e-6, **given)
    assert front.chosen is not None
    assert front.chosen.plan.fp16_groups
    (finding,) = [f for f in front.findings if f.code == "size-dependent"]
    assert front.chosen.plan.fingerprint in finding.text
    again = mptune.search(tmp_path / "model.onnx", max_latency_ms=1e-6, **given)
    assert again.findings == front.findings


def sized(size: int, brightness: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(size)
    shades = brightness * rng.uniform(0.2, 1, (3, 3, 1, 1))
    return {"image": (shades * rng.uniform(0.9, 1, (3, 3, size, size))).astype(np.float32)}


@pytest.mark.slow
def test_data_of_a_further_size_show_it_on_their_own_samples(tmp_path: Path) -> None:
    onnx.save(pooled("ReduceSum"), tmp_path / "model.onnx")
    for name, size in (("usual", SIZE), ("large", LARGEST)):
        np.savez(tmp_path / f"{name}.npz", **sized(size))
    words = ["search", str(tmp_path / "model.onnx"), "--out", str(tmp_path / "run"), "--target", "jetson-orin-nano-8gb"]
    words += ["--data", str(tmp_path / "large.npz"), "--data", str(tmp_path / "usual.npz")]
    words += ["--shapes", f"image:1x3x8x8,1x3x{SIZE}x{SIZE},1x3x{LARGEST}x{LARGEST}"]
    assert main([*words, "--budget", "2", "--max-latency-ms", "1e-6"]) == 3
    front = json.loads((tmp_path / "run" / "front.json").read_text())
    (finding,) = [f for f in front["findings"] if f["code"] == "size-dependent"]
    assert finding["evidence"]["size_of_data"] == f"image 1x3x{SIZE}x{SIZE}", "the usual size is searched on"
    assert finding["evidence"]["size"] == f"image 1x3x{LARGEST}x{LARGEST}"
    assert "(on samples of that size)" in finding["text"]


def swept_with(folder: Path, by: str, given: list[list[dict[str, np.ndarray]]]) -> tuple[Finding, ...]:
    """Without ``--shapes``."""
    onnx.save(pooled(by), folder / "model.onnx")
    loaded = load_model(folder / "model.onnx")
    groups = GroupedModel(loaded, find_groups(loaded))
    samples = [{"image": image[None]} for image in sized(SIZE, 600.0)["image"]]
    found, warnings = sweep(groups, groups.uniform(Precision.FP16), samples, (), given=given)
    assert warnings == ()
    return found


@pytest.mark.parametrize("by", ["ReduceSum", "ReduceMean"])
def test_axes_of_any_size_are_tried_at_half_and_twice_the_size(by: str, tmp_path: Path) -> None:
    found = swept_with(tmp_path, by, [])
    assert [f.evidence["size"] for f in found] == ([f"image 1x3x{2 * SIZE}x{2 * SIZE}"] if by == "ReduceSum" else [])
    for finding in found:
        assert "a size that the model's inputs allow" in finding.text


def test_given_sizes_stand_in_for_those_that_are_possible(tmp_path: Path) -> None:
    small = [{"image": image[None]} for image in sized(SIZE // 2, 600.0)["image"]]
    assert swept_with(tmp_path, "ReduceSum", [small]) == ()


@pytest.mark.parametrize(
    ("second", "shapes", "message"),
    [
        (SIZE, [], "hold samples of one size"),
        (LARGEST, [f"image:1x3x8x8,1x3x{SIZE}x{SIZE},1x3x{SIZE}x{SIZE}"], "beyond --shapes"),
    ],
)
def test_data_sets_that_are_not_one_for_each_size(
    second: int, shapes: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(pooled("ReduceSum"), tmp_path / "model.onnx")
    np.savez(tmp_path / "one.npz", **sized(SIZE))
    np.savez(tmp_path / "two.npz", **sized(second))
    words = ["search", str(tmp_path / "model.onnx"), "--out", str(tmp_path / "run")]
    words += [word for name in ("one", "two") for word in ("--data", str(tmp_path / f"{name}.npz"))]
    assert main([*words, *(word for one in shapes for word in ("--shapes", one))]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "hint: " in error


def test_compare_takes_a_data_set_for_each_size(tmp_path: Path) -> None:
    onnx.save(pooled("ReduceMean"), tmp_path / "model.onnx")
    paths = [tmp_path / f"{size}.npz" for size in (8, SIZE)]
    for path in paths:
        np.savez(path, **sized(int(path.stem)))
    found = mptune.compare(tmp_path / "model.onnx", tmp_path / "model.onnx", data=paths)
    assert found.agrees
    assert found.samples == 6


SAMPLES = [{"image": np.full((1, 1, 2, 2), k, np.float32), "mask": np.full((1, 2), k)} for k in range(3)]
DIMS = {"image": ("n", 1, "h", 2), "mask": ("n", "h")}


def test_sizes_are_the_ends_and_the_usual_one_without_that_of_the_data() -> None:
    shapes = ShapeRange("image", (1, 1, 1, 2), (1, 1, 2, 2), (4, 1, 8, 2))
    inputs = [TensorInfo(name, "float", dims) for name, dims in DIMS.items()]
    found = [(one.origin, one.sizes["image"]) for one in sized_samples(SAMPLES, inputs, [shapes], ())]
    assert found == [("samples", (1, 1, 2, 2)), ("declared", (1, 1, 1, 2)), ("declared", (4, 1, 8, 2))]


def test_inputs_that_share_a_dimension_are_resized_alike_and_a_batch_has_different_rows() -> None:
    feed = resized(SAMPLES, 1, {"image": (4, 1, 6, 2)}, DIMS)
    assert feed["image"].shape == (4, 1, 6, 2)
    assert feed["mask"].shape == (4, 6)
    assert [float(row.mean()) for row in feed["image"]] == [1, 2, 0, 1]
    assert feed["mask"][:, 0].tolist() == [1, 2, 0, 1]


def test_sizes_that_nobody_named_stay_within_memory() -> None:
    image = TensorInfo("image", "float", ("n", 3, "h", "w"))
    found = {}
    for size in (512, 1024):
        feed = {"image": np.broadcast_to(np.float32(0.5), (1, 3, size, size))}
        found[size] = [one.sizes["image"][2] for one in sized_samples([feed], [image], (), ())]
    assert found == {512: [512, 256, 1024], 1024: [1024, 512]}


@pytest.mark.parametrize("size", [1, 3, 5, 10])
def test_the_nearest_value_is_taken(size: int) -> None:
    sample = {"x": np.arange(5, dtype=np.float32)[None]}
    found = resized([sample], 0, {"x": (1, size)}, {"x": (1, "t")})["x"]
    nearest = [min(range(5), key=lambda old: abs((old + 0.5) / 5 - (k + 0.5) / size)) for k in range(size)]
    assert np.abs(found[0] - nearest).max() <= 1
    assert (np.diff(found[0]) >= 0).all()
