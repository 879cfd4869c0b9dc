"""Ways to feed samples otherwise: each gives what its words say, and fitted numbers are those that were planted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from mptune.diagnosis.causes.feeds.change import Feed, FeedChange
from mptune.diagnosis.causes.feeds.changes import feed_changes, further_changes, input_groups
from mptune.diagnosis.causes.feeds.entries import rounded_changes
from mptune.diagnosis.causes.feeds.fitted import Family, families, fit
from mptune.diagnosis.causes.feeds.geometry import Placement, placements

RNG = np.random.default_rng(3)
IMAGES = [{"image": RNG.uniform(0, 1, (1, 3, 16, 16)).astype(np.float32)} for _ in range(4)]


def ways(feeds: Sequence[Feed]) -> dict[str, FeedChange]:
    every = (*feed_changes(feeds), *further_changes(feeds), *rounded_changes(feeds, input_groups(feeds)))
    return {way.words: way for way in every}


def fed(way: FeedChange, k: int = 0) -> Feed:
    found = way.feed(k)
    assert found is not None
    return found


def caches() -> list[Feed]:
    """Caches of two inputs, tokens and their mask, padded at the end."""
    feeds: list[Feed] = []
    for count in (3, 5, 4):
        mask = (np.arange(6) < count).astype(np.int64)[None]
        ids = RNG.integers(1, 50, (1, 6)) * mask
        key, value = RNG.standard_normal((2, 1, 2, 5, 4)).astype(np.float32)
        feeds.append({"ids": ids, "mask": mask, "key": key, "value": value})
    return feeds


def test_inputs_of_one_shape_are_changed_alone_and_together() -> None:
    feeds = caches()
    groups = input_groups(feeds)
    assert ("key", "value") in groups
    assert ("key",) in groups
    many = [{f"cache{k}": feeds[0]["key"] for k in range(6)}]
    assert input_groups(many) == [tuple(f"cache{k}" for k in range(6))]


def test_entries_of_caches_masks_and_sequences() -> None:
    feeds = caches()
    found, first = ways(feeds), feeds[0]
    both = fed(found["for inputs 'key', 'value' one entry further on along axis 2, with zero at its end"])
    for name in ("key", "value"):
        np.testing.assert_array_equal(both[name][:, :, 1:], first[name][:, :, :-1])
        assert not both[name][:, :, 0].any()
    last = fed(found["for inputs 'key', 'value' with zero in the last entry of axis 2"])
    assert not last["key"][:, :, -1].any()
    np.testing.assert_array_equal(last["key"][:, :, :-1], first["key"][:, :, :-1])
    more = fed(found["for input 'mask' with one more entry let through after the others"])
    np.testing.assert_array_equal(more["mask"], [[1, 1, 1, 1, 0, 0]])
    fewer = fed(found["for input 'mask' without the last entry that is let through"])
    np.testing.assert_array_equal(fewer["mask"], [[1, 1, 0, 0, 0, 0]])
    left = fed(found["with what 'mask' lets through at the other end, in 'ids', 'mask'"])
    np.testing.assert_array_equal(left["mask"], [[0, 0, 0, 1, 1, 1]])
    np.testing.assert_array_equal(left["ids"][0, 3:], first["ids"][0, :3])
    plus = fed(found["for input 'ids' plus 1, zeros kept"])
    np.testing.assert_array_equal(plus["ids"], first["ids"] + (first["ids"] > 0))
    whose = fed(found["with the sample before's values in the inputs 'key', 'value'"], 1)
    np.testing.assert_array_equal(whose["value"], first["value"])
    assert found["with the sample before's values in the inputs 'key', 'value'"].feed(0) is None


def test_inputs_in_fewer_digits() -> None:
    found = ways(caches())
    first = caches()[0]["key"]
    assert any(words.startswith("for inputs 'key', 'value' rounded to INT8") for words in found)
    coarse = fed(found["for input 'key' rounded to FP8 (E4M3)"])["key"]
    assert coarse.shape == first.shape
    exact = np.array([1.0, 1.0625, 1.1, -3.3, 0.0], np.float32)
    way = ways([{"x": exact[None]}, {"x": 2 * exact[None]}])["for input 'x' rounded to FP8 (E4M3)"]
    np.testing.assert_allclose(fed(way)["x"][0], [1.0, 1.0, 1.125, -3.25, 0.0])


def test_a_letterbox_keeps_the_image_and_fills_the_rest() -> None:
    image = IMAGES[0]["image"]
    half = Placement((0.5, 1.0), fill=("black", (0.0, 0.1, 0.2)))
    placed = half.change(1)(image)
    assert not placed[:, 0, :4].any()
    np.testing.assert_allclose(placed[:, 2, 12:], 0.2)
    np.testing.assert_allclose(placed[:, :, 4:12], (image[:, :, 0::2] + image[:, :, 1::2]) / 2, rtol=1e-5)
    assert "8 x 16 of 16 x 16 pixels (letterbox), its corner at row 4, column 0, black around it" in half.words(16, 16)
    np.testing.assert_allclose(Placement((1.0, 1.0), (0.0, 3.0)).change(1)(image)[..., 3:], image[..., :-3], rtol=1e-5)
    last = np.moveaxis(image, 1, 3)
    np.testing.assert_allclose(np.moveaxis(half.change(3)(last), 3, 1), placed, rtol=1e-6)
    assert len({place.words(16, 16) for place in placements([image])}) > 20


def test_bars_of_a_letterbox_are_seen() -> None:
    barred = [{"image": np.pad(feed["image"][:, :, 4:12], ((0, 0), (0, 0), (4, 4), (0, 0)))} for feed in IMAGES]
    found = ways(barred)
    spread = fed(found["for input 'image' without its bars above and below, scaled to the frame"])["image"]
    image = barred[0]["image"]
    np.testing.assert_allclose(spread[:, :, 1], 0.75 * image[:, :, 4] + 0.25 * image[:, :, 5], rtol=1e-4)
    np.testing.assert_allclose(spread[:, :, 14], 0.25 * image[:, :, 10] + 0.75 * image[:, :, 11], rtol=1e-4)
    grey = fed(found["for input 'image' with 0.447 (grey, 114 of 255) in its bars above and below"])["image"]
    np.testing.assert_allclose(grey[:, :, :4], 114 / 255, rtol=1e-6)
    assert not any("bars" in words for words in ways(IMAGES))


def _fitted(family: Family, feeds: Sequence[Feed], planted: Sequence[np.ndarray]) -> np.ndarray | None:
    """Fits a model whose output is smooth, and not linear, in its input."""
    weights = RNG.standard_normal((feeds[0][family.inputs[0]].size, 40)) / 8

    def output(x: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.tanh(x.astype(np.float64).ravel() @ weights)
        return found

    def residuals(tried: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        name = family.inputs[0]
        return [
            np.concatenate([output(fed(family.way(feeds, numbers), k)[name]) - output(planted[k]) for k in range(3)])
            for numbers in tried
        ]

    before = np.concatenate([output(feeds[k][family.inputs[0]]) - output(planted[k]) for k in range(3)])
    return fit(family, residuals, residuals, float(np.linalg.norm(before)))


@pytest.mark.parametrize(("gain", "offset"), [(0.5, 0.1), (2.2, -0.3)])
def test_gains_and_offsets_are_found(gain: float, offset: float) -> None:
    feeds = [{"x": RNG.standard_normal((1, 3)).astype(np.float32)} for _ in range(4)]
    gains, offsets = np.array([gain, 1.0, 0.8]), np.array([offset, 0.0, 0.2])
    _, family = families(feeds, input_groups(feeds))  # of the whole input, and of each feature
    numbers = _fitted(family, feeds, [feed["x"] * gains + offsets for feed in feeds])
    assert numbers is not None
    found = fed(family.way(feeds, numbers))["x"]
    np.testing.assert_allclose(found, feeds[0]["x"] * gains + offsets, atol=1e-3)
    assert f"{gain:g} x" in family.words(numbers)


def test_a_place_between_the_usual_ones_is_found() -> None:
    yy, xx = np.mgrid[0:16, 0:16] / 16
    waves = [np.stack([np.sin(3 * yy + c) * np.cos(4 * xx + k) for c in range(3)])[None] for k in range(4)]
    feeds = [{"image": (0.5 + 0.4 * wave).astype(np.float32)} for wave in waves]
    planted = Placement((0.7, 1.0), fill=("zeros", (0.0, 0.0, 0.0)))
    family = next(iter(families(feeds, input_groups(feeds))))
    numbers = _fitted(family, feeds, [planted.change(1)(feed["image"]) for feed in feeds])
    assert numbers is not None
    np.testing.assert_allclose(numbers[:2], planted.scale, atol=0.02)


def test_nothing_is_fitted_to_too_few_values() -> None:
    feeds = [{"x": RNG.standard_normal((1, 3)).astype(np.float32)} for _ in range(4)]
    few = [np.zeros(5) for _ in range(20)]
    for family in families(feeds, input_groups(feeds)):
        assert fit(family, lambda tried: few[: len(tried)], lambda tried: few[: len(tried)], 1.0) is None
