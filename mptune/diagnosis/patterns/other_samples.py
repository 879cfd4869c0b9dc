"""Outputs that have nothing to do with their reference sample by sample, as those of other inputs have not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_FEWEST = 8
"""Of fewer samples, no correlation is told from chance."""
_ORDERS = 200
"""Random orders of the samples, that show which correlation chance gives."""
_STANDARD_ERRORS = 3.0
_MOST_RELATED = 0.5
"""A correlation that cannot be ruled out is below this."""
_MOST_APART = 2.0
"""Squared distance of two sets' means, by what their spread alone makes; and factor between their spreads."""


@dataclass(frozen=True)
class Unrelated:
    """What was found.

    Attributes:
        correlation: of the samples' deviations from their mean with those of the reference.
        chance: standard deviation of the same in random orders of the samples.
        is_alike: mean and spread are the reference's, as far as so many samples show.
    """

    correlation: float
    chance: float
    is_alike: bool


def unrelated(got: np.ndarray, wanted: np.ndarray) -> Unrelated | None:
    """Whether outputs have nothing to do with their reference; None where they have, or where too little shows it.

    Args:
        got: of each sample, (samples, ...), finite.
        wanted: the same of the reference.
    """
    count = len(wanted)
    if count < _FEWEST:
        return None
    a, b = (np.asarray(each, np.float64).reshape(count, -1) for each in (got, wanted))
    ours, theirs = a - a.mean(axis=0), b - b.mean(axis=0)
    sizes = float(np.linalg.norm(ours)), float(np.linalg.norm(theirs))
    if min(sizes) <= 1e-3 * float(np.linalg.norm(b)):
        return None
    products = ours @ theirs.T / (sizes[0] * sizes[1])
    rng = np.random.default_rng(0)
    drawn = [float(products[np.arange(count), rng.permutation(count)].sum()) for _ in range(_ORDERS)]
    correlation, chance = float(np.trace(products)), float(np.std(drawn))
    if abs(correlation) > _STANDARD_ERRORS * chance or abs(correlation) + _STANDARD_ERRORS * chance > _MOST_RELATED:
        return None
    expected = (sizes[0] ** 2 + sizes[1] ** 2) / (count * (count - 1))
    apart = float(((a.mean(axis=0) - b.mean(axis=0)) ** 2).sum())
    ratio = max(sizes) / min(sizes)
    return Unrelated(correlation, chance, apart <= _MOST_APART * expected and ratio <= _MOST_APART)
