"""Constants, copies and samples of one size are noticed; what could be meant is left alone."""

from __future__ import annotations

import numpy as np

from mptune.data.plausibility import data_findings, size_findings
from mptune.graph.loading.tensors import TensorInfo
from mptune.settings import ShapeRange

RNG = np.random.default_rng(3)


def image(seed: int = 0) -> np.ndarray:
    """A smooth picture with values in [0, 1)."""
    rng = np.random.default_rng(seed)
    waves = np.add.outer(np.sin(np.arange(32) / 5 + rng.random()), np.cos(np.arange(32) / 7 + rng.random()))
    return ((waves + 2) / 4)[None, None].repeat(3, 1).astype(np.float32)


def test_an_input_that_is_the_same_everywhere_is_constant() -> None:
    grey = {"image": np.full((1, 3, 32, 32), 0.5, np.float32)}
    (finding,) = (f for f in data_findings([grey, grey]) if f.code == "constant-data")
    assert (finding.severity, finding.where.inputs) == ("warning", ("image",))
    assert finding.evidence == {"value": 0.5, "samples": 2}
    for sound in (
        [{"image": image(0)}],
        [{"image": image(0), "state": np.zeros((1, 3, 32, 32), np.float32)}],
        [{"image": np.full((1, 3, 32, 32), 0.1 * k, np.float32)} for k in range(3)],
        [{"step": np.full((1,), 0.5, np.float32)}],
    ):
        assert data_findings(sound) == ()


def test_a_cache_that_begins_empty_is_no_constant() -> None:
    """A decoder's prompt comes with an empty cache, the steps behind it with a longer one each."""
    caches = [RNG.laplace(size=(1, 4, length, 16)).astype(np.float32) for length in (0, 30, 31)]
    assert data_findings([{"past_key": cache} for cache in caches]) == ()
    (found,) = data_findings([{"past_key": np.full_like(cache, 0.5)} for cache in caches])
    assert (found.code, found.evidence["value"]) == ("constant-data", 0.5)


def tensor(name: str, *shape: int | str | None) -> TensorInfo:
    return TensorInfo(name, "float", shape)


def fed(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def test_samples_of_one_size_leave_the_others_untried() -> None:
    image, mask = tensor("image", "n", 3, "h", None), tensor("mask", "n", "h")
    sample = fed(image=(1, 3, 8, 9), mask=(1, 8))
    (finding,) = size_findings([sample, sample], [image, mask])
    assert (finding.code, finding.where.inputs) == ("one-size-tried", ("image", "mask"))
    assert finding.evidence == {"size": "image 1x3x8x9, mask 1x8"}
    larger = fed(image=(1, 3, 16, 9), mask=(1, 16))
    assert size_findings([sample, larger], [image, mask]) == ()


def test_rows_of_a_batch_and_fixed_axes_are_no_size() -> None:
    assert size_findings([fed(x=(4, 8)), fed(x=(2, 8))], [tensor("x", "n", 8)]) == ()
    assert size_findings([fed(x=(4, 4))], [tensor("x", "n", "n")]) == (), "the batch under its own name"
    rows = [fed(x=(4, 8), y=(4, 2)), fed(x=(2, 8), y=(2, 2))]
    assert len(size_findings(rows, [tensor("x", "n", "t"), tensor("y", "n", 2)])) == 1


def test_shapes_that_allow_one_size_leave_nothing_untried() -> None:
    inputs, samples = [tensor("x", "n", "t"), tensor("mask", "n", "t")], [fed(x=(1, 8), mask=(1, 8))]
    one, several = ShapeRange.parse("x:1x8"), ShapeRange.parse("x:1x4,1x8,1x16")
    assert size_findings(samples, inputs, [one]) == ()
    assert len(size_findings(samples, inputs, [several])) == 1
