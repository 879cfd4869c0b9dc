"""Folders of images: what is declared is what the model gets, and nothing is guessed."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import mptune
from mptune.data.calibration import load_calibration
from mptune.data.samples import CalibrationSet, split_indices
from mptune.errors import DataError
from mptune.graph.loading.tensors import TensorInfo
from mptune.settings import DataSettings
from tests.graph import models

PIXELS = np.random.default_rng(3).integers(0, 256, (6, 20, 30, 3), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "val"
    (place / "cats").mkdir(parents=True)
    for k, pixels in enumerate(PIXELS):
        Image.fromarray(pixels).save(place / ("cats" if k % 2 else ".") / f"{k}.png")
    return place


def load(folder: Path, declared: str, shape: tuple[Any, ...] = (1, 3, 20, 30), batch: int = 1) -> CalibrationSet:
    """``folder`` may be a declaration's path, too."""
    (folder if folder.suffix else folder / "preprocess.toml").write_text(declared)
    return load_calibration(folder, (TensorInfo("image", "float", shape),), DataSettings(batch=batch), 0)


def image_of(data: CalibrationSet, number: int = 0) -> np.ndarray:
    return np.asarray(data.samples[number]["image"])


FILES = [0, 2, 4, 1, 3, 5]
"""The images in the order of their paths: ``0.png``, ``2.png``, ..., ``cats/1.png``, ..."""


def test_pixels_are_scaled_and_normalised_as_declared(folder: Path) -> None:
    data = load(folder, 'resize = "none"\nmean = [0.5, 0.4, 0.3]\nstd = [0.2, 0.3, 0.4]')
    for number, k in enumerate(FILES):
        wanted = (PIXELS[k] / 255 - [0.5, 0.4, 0.3]) / [0.2, 0.3, 0.4]
        np.testing.assert_allclose(image_of(data, number)[0], wanted.transpose(2, 0, 1), rtol=1e-5, atol=1e-6)


def test_colour_order_layout_and_scale(folder: Path) -> None:
    data = load(folder, 'resize = "none"\ncolour = "BGR"\nscale = 1.0', ("batch", 20, 30, 3))
    np.testing.assert_array_equal(image_of(data)[0], PIXELS[0][..., ::-1])
    grey = image_of(load(folder, 'resize = "none"\ncolour = "GREY"\nscale = 1.0', (1, 1, 20, 30)))
    np.testing.assert_allclose(grey[0, 0], PIXELS[0] @ [0.299, 0.587, 0.114], atol=1)  # ITU-R 601


def test_rows_of_a_batch_and_a_declaration_elsewhere(folder: Path) -> None:
    assert image_of(load(folder, 'resize = "none"', (2, 3, 20, 30)), 1).shape == (2, 3, 20, 30)
    declared = 'folder = "val"\nresize = "none"'
    data = load(folder.with_name("mine.toml"), declared, ("batch", 3, 20, 30), batch=4)
    assert len(data.samples) == 1
    assert data.warnings == ("2 images are left over: one sample takes 4",)


@pytest.mark.parametrize("resize", ["stretch", "crop", "letterbox"])
def test_every_way_of_resizing_gives_the_size(resize: str, folder: Path) -> None:
    for size in ((8, 8), (40, 10), (10, 64)):
        data = load(folder, f'size = {list(size)}\nresize = "{resize}"\npad = 114\nscale = 1', (1, 3, "h", "w"))
        assert image_of(data).shape == (1, 3, *size)
    is_grey = (image_of(data) == 114).all(axis=(0, 1, 2))  # 10x64 of 20x30: the sides are
    assert is_grey.sum() == (64 - 15 if resize == "letterbox" else 0)


def test_the_shorter_side_is_scaled_before_the_middle_is_cut(folder: Path) -> None:
    data = load(folder, 'size = [10, 10]\nresize = "crop"\nshorter = 20\nscale = 1', (1, 3, 10, 10))
    np.testing.assert_array_equal(image_of(data)[0], PIXELS[0][5:15, 10:20].transpose(2, 0, 1))


def test_images_are_read_when_they_are_needed(folder: Path) -> None:
    data = load(folder, 'resize = "none"')
    search, held_out = (part[0] for part in split_indices(6, 0, 0.25, 1))
    other = next(number for number in range(6) if number not in (search, held_out))
    (damaged,) = folder.rglob(f"{FILES[other]}.png")
    damaged.write_bytes(b"\x89PNG damaged")
    assert [len(part.samples) for part in data.split(0, 0.25, 1)] == [1, 1]
    with pytest.raises(DataError, match=rf"{damaged.name} cannot be read as an image"):
        list(data.samples)


def test_a_hash_stands_for_the_files_and_the_declaration(folder: Path) -> None:
    first, again, bgr = (load(folder, f'resize = "none"{more}').sha256() for more in ("", "", '\ncolour = "BGR"'))
    assert first == again != bgr
    Image.fromarray(PIXELS[2]).save(folder / "0.png")
    other = load(folder, 'resize = "none"')
    assert other.sha256() != first
    assert [f.where.samples for f in other.findings if f.code == "duplicate-samples"] == [(1,)]


@pytest.mark.parametrize(
    ("declared", "shape", "says"),
    [
        ('resize = "none"\nsize = [4, 4]', (1, 3, 4, 4), "it is 20x30, 4x4 is declared"),
        ('resize = "shrink"', (1, 3, 4, 4), "resize"),
        ("colours = 3", (1, 3, 4, 4), "colours"),
        ("std = [0.0]", (1, 3, 4, 4), "greater than 0"),
        ("mean = [0.1, 0.2]", (1, 3, 4, 4), "mean has 2 numbers"),
        ("size = [8, 8]", (1, 5, 4, 4), "which axis holds the 3 channels"),
        ("", (1, 3, "h", "w"), "which size images have"),
        ("size = [8, 8]", (1, 3, 4, 4), "image"),
        ("", (1, 3), "of rank 4"),
        ('input = "x"', (1, 3, 4, 4), "one input x of rank 4"),
        ('folder = "nowhere"', (1, 3, 4, 4), "nowhere holds 0 images"),
        ("size = [", (1, 3, 4, 4), "not TOML"),
    ],
)
def test_a_declaration_that_does_not_fit(declared: str, shape: tuple[Any, ...], says: str, folder: Path) -> None:
    with pytest.raises(DataError) as caught:
        load(folder, declared, shape)
    assert says in f"{caught.value.message} {caught.value.hint}"
    assert caught.value.hint


def test_the_script_of_a_run_reads_images_as_the_search_did(folder: Path, tmp_path: Path, monkeypatch) -> None:
    graph = "(float[1,3,8,12] image) => (float[1,4,1,1] y) { c = Conv(image, w) y = GlobalAveragePool(c) }"
    model = models.save(models.text(graph, models.weight("w", 4, 3, 3, 3)), tmp_path)
    data = load(folder, 'size = [8, 12]\nresize = "crop"\ncolour = "BGR"\nmean = [0.5]', (1, 3, 8, 12))
    mptune.search(model, data=folder, out=tmp_path / "run", budget=2, target="jetson-orin-nano-8gb", progress=False)
    for name in ("NVIDIA_TF32_OVERRIDE", "ORT_DISABLE_TELEMETRY"):  # which the script sets
        monkeypatch.setenv(name, "1")
    infer = runpy.run_path(str(tmp_path / "run/chosen/infer.py"), run_name="infer")
    session = infer["open_session"](tmp_path / "run/chosen/model.onnx", "cpu")
    for k, file in enumerate(infer["image_files"](folder)):
        np.testing.assert_array_equal(infer["read_feeds"](session, file)["image"], image_of(data, k))
    assert infer["read_feeds"](session, folder)["image"].shape == (6, 3, 8, 12)
