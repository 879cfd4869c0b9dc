"""Constants and copies given as calibration data are noticed; what could be meant is left alone."""

from __future__ import annotations

import numpy as np

from mptune.data.plausibility import data_findings

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
