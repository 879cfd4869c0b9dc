"""LayerProfiles are summed up as statistics says, and neighbourhoods are told apart."""

from __future__ import annotations

import numpy as np
import pytest

from mptune.tuning.sampler.cuts.boundaries import Boundary, Crossings
from mptune.tuning.sampler.layer_profiles import LayerProfiles, Neighbourhoods
from mptune.tuning.sampler.posterior import Prior

CHAIN = (Boundary.among((0, 1)), Boundary.among((1, 2)), Boundary.among((2,), "fp32"))


def chain(groups: int, boundaries: tuple[Boundary, ...] = ()) -> Prior:
    return Prior(tuple(f"g{k}" for k in range(groups)), boundaries=boundaries)


def sides(boundaries: tuple[Boundary, ...], plans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Groups x plans, and which boundaries are crossed."""
    halves = np.ascontiguousarray(plans.T)
    return halves, Crossings(chain(len(halves)).columns, boundaries).of(halves)


def test_neighbourhoods_are_told_apart_by_a_groups_own_precision_and_its_crossed_boundaries() -> None:
    plans = (np.arange(8)[:, None] >> np.arange(3) & 1).astype(bool)
    neighbourhoods = Neighbourhoods(CHAIN, 3)
    codes = neighbourhoods.codes(*sides(CHAIN, plans))
    assert codes.shape == (3, 8)
    assert codes.min() >= 0
    assert codes.max() < neighbourhoods.size
    for group, alike in ((0, plans[:, :2]), (1, plans), (2, plans[:, 1:])):
        for one in range(8):
            for other in range(8):
                same = codes[group, one] == codes[group, other]
                assert same == (alike[one] == alike[other]).all(), (group, one, other)
    assert not set(codes[0]) & set(codes[1])


def test_more_boundaries_than_there_are_numbers_for() -> None:
    boundaries = tuple(Boundary.among((0, i)) for i in range(1, 40))
    plans = np.random.default_rng(0).random((50, 40)) < 0.5
    neighbourhoods = Neighbourhoods(boundaries, 40)
    assert neighbourhoods.codes(*sides(boundaries, plans)).max() < neighbourhoods.size < 10_000


def test_gains_are_differences_of_means() -> None:
    plans = np.array([[False, False], [True, True], [False, True]])
    profiles = LayerProfiles(chain(2), plans, np.array([[4.0, 8.0], [1.0, 5.0], [2.0, np.nan]]))
    assert profiles.gains_ms.tolist() == [2.0, 3.0]
    assert profiles.sd_ms[0] > 0


def test_two_precisions_of_a_group_tell_of_each_other() -> None:
    """One group in FP16 (column 0) and BF16 (column 1), and another one (column 2)."""
    plans = np.array([[False, False, False], [True, False, True]])
    prior = Prior(("a", "a", "b"), precisions=("fp16", "bf16", "fp16"))
    fp32_ms, fp16_ms = [4.0, 4.0, 8.0], [1.0, 1.0, 5.0]
    alone = LayerProfiles(prior, plans, np.array([fp32_ms, fp16_ms]))
    assert alone.gains_ms.tolist() == [3.0, 3.0, 3.0], "BF16 was not profiled, and gains what FP16 does"
    assert alone.sd_ms[1] > alone.sd_ms[0]
    plans = np.vstack([plans, [[False, True, False]]])
    both = LayerProfiles(prior, plans, np.array([fp32_ms, fp16_ms, [2.0, 2.0, 8.0]]))
    assert 2.0 < both.gains_ms[1] < both.gains_ms[0] < 3.0
    assert both.sd_ms[1] < alone.sd_ms[1]
    assert both.sd_ms[0] < alone.sd_ms[0]


@pytest.mark.parametrize("noise", [0.001, 0.1])
def test_what_neighbours_change_is_kept_where_it_is_more_than_noise(noise: float) -> None:
    rng = np.random.default_rng(0)
    plans = rng.random((200, 3)) < 0.5
    change = 0.1 * (plans[:, 0] != plans[:, 1])
    group_ms = np.ones((200, 3)) + rng.normal(0.0, noise, (200, 3))
    group_ms[:, 0] += change
    profiles = LayerProfiles(chain(3, CHAIN), plans, group_ms)
    found = profiles.excess_ms(*sides(CHAIN, plans))
    assert np.ptp(found) == pytest.approx(0.1, abs=0.05)
    assert np.corrcoef(found, change)[0, 1] > 0.9
    none = LayerProfiles(chain(3, CHAIN), plans, np.ones((200, 3)) + rng.normal(0.0, noise, (200, 3)))
    assert np.abs(none.excess_ms(*sides(CHAIN, plans))).max() < noise


def test_groups_of_microseconds_do_not_make_the_others_noise() -> None:
    rng = np.random.default_rng(1)
    plans = rng.random((100, 3)) < 0.5
    group_ms = np.array([1.0, 1.0, 0.001]) * (1.0 + rng.normal(0.0, [0.01, 0.01, 0.5], (100, 3)))
    assert LayerProfiles(chain(3, CHAIN), plans, group_ms).sd_ms[:2].max() < 0.01


@pytest.mark.parametrize(("neighbours", "noise"), [(0.2, 0.02), (0.0, 0.1), (0.1, 0.1)])
def test_the_variances_of_noise_and_neighbours_are_estimated(neighbours: float, noise: float) -> None:
    """Many groups of one size in a chain, of which each neighbourhood has an effect of its own."""
    rng = np.random.default_rng(2)
    groups, engines = 200, 150
    boundaries = tuple(Boundary.among((i, i + 1)) for i in range(groups - 1))
    plans = rng.random((engines, groups)) < 0.5
    codes = Neighbourhoods(boundaries, groups).codes(*sides(boundaries, plans))
    effects = rng.normal(0.0, neighbours, codes.max() + 1)[codes].T
    profiles = LayerProfiles(chain(groups, boundaries), plans, 1.0 + effects + rng.normal(0.0, noise, effects.shape))
    shares = profiles.sd_ms**2 / (1 / plans.sum(axis=0) + 1 / (~plans).sum(axis=0))
    # An effect is one against the mean of its cell, of four neighbourhoods.
    assert np.median(shares) == pytest.approx(noise**2 + neighbours**2, rel=0.12)
