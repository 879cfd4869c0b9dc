"""Random numbers given as calibration data are noticed; what could be real is left alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mptune.data.calibration import load_calibration
from mptune.data.plausibility import data_findings
from mptune.graph.loading.tensors import TensorInfo
from mptune.settings import DataSettings

RNG = np.random.default_rng(3)


def image(seed: int = 0) -> np.ndarray:
    """A smooth picture with values in [0, 1)."""
    rng = np.random.default_rng(seed)
    waves = np.add.outer(np.sin(np.arange(32) / 5 + rng.random()), np.cos(np.arange(32) / 7 + rng.random()))
    return ((waves + 2) / 4)[None, None].repeat(3, 1).astype(np.float32)


@pytest.mark.parametrize(
    ("draw", "distribution"),
    [
        (lambda shape: RNG.standard_normal(shape), "standard normal"),
        (lambda shape: RNG.random(shape), "uniform"),
        (lambda shape: RNG.uniform(-1, 1, shape), "uniform"),
    ],
)
def test_drawn_numbers_look_drawn(draw: object, distribution: str) -> None:
    samples = [{"image": draw((1, 3, 32, 32)).astype(np.float32)} for _ in range(4)]  # type: ignore[operator]
    (found,) = data_findings(samples)
    assert (found.code, found.where.inputs) == ("random-data", ("image",))
    assert found.evidence["distribution"] == distribution
    assert float(found.evidence["correlation"]) < 0.05
    assert "'image'" in found.text
    assert found.cure


@pytest.mark.parametrize(
    "sample",
    [
        {"image": image()},
        {"features": RNG.standard_normal((64, 512)).astype(np.float32)},
        {"noise": RNG.standard_normal((1, 4, 32, 32)).astype(np.float32), "image": image()},
        {"tokens": RNG.integers(0, 100, (1, 64, 64))},
        {"few": RNG.standard_normal((1, 4, 4)).astype(np.float32)},
        {"black": np.zeros((1, 3, 32, 32), np.float32)},
        {"counts": RNG.poisson(1.0, (1, 3, 32, 32)).astype(np.float32)},
    ],
    ids=lambda sample: next(iter(sample)),
)
def test_what_may_be_real_is_left_alone(sample: dict[str, np.ndarray]) -> None:
    assert [found for found in data_findings([sample]) if found.code == "random-data"] == []
    assert data_findings([]) == ()


def test_calibration_warns(tmp_path: Path) -> None:
    info = TensorInfo("image", "float", ("batch", 3, 32, 32))
    np.savez(tmp_path / "drawn.npz", image=RNG.standard_normal((4, 3, 32, 32)).astype(np.float32))
    (finding,) = load_calibration(tmp_path / "drawn.npz", [info], DataSettings(), 0).findings
    assert finding.code == "random-data"
    assert "look like random numbers" in finding.text


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


def test_samples_that_equal_an_earlier_one_are_duplicates() -> None:
    samples = [{"image": image(k), "n": np.array([k])} for k in (0, 1, 0, 2, 1)]
    (finding,) = data_findings(samples)
    assert (finding.code, finding.severity, finding.where.samples) == ("duplicate-samples", "warning", (2, 4))
    assert finding.evidence == {"samples": 5, "duplicates": 2}
    assert data_findings([{"image": image(0), "n": np.array([k])} for k in range(3)]) == (), "another input differs"


def test_a_cache_that_begins_empty_is_no_constant() -> None:
    """A decoder's prompt comes with an empty cache, the steps behind it with a longer one each."""
    caches = [RNG.laplace(size=(1, 4, length, 16)).astype(np.float32) for length in (0, 30, 31)]
    assert data_findings([{"past_key": cache} for cache in caches]) == ()
    (found,) = data_findings([{"past_key": np.full_like(cache, 0.5)} for cache in caches])
    assert (found.code, found.evidence["value"]) == ("constant-data", 0.5)
