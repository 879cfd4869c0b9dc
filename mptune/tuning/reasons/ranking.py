"""Whether two rankings of the same plans agree: Kendall's tau, and the pairs that differ beyond noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from mptune.json_form import JsonForm
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.fronts.dominance import faster_beyond_noise
from mptune.tuning.fronts.hypervolume import ERROR_FLOOR

HELD, HELD_MOSTLY = 0.9, 0.75
"""From these shares of the pairs on a ranking held, and held in the main."""

FEWEST_PAIRS = 3
"""Of fewer pairs nothing can be said."""

ERRORS_APART = 1.1
"""Errors with a smaller ratio count as equal: emulated and measured errors of one plan differ this much."""

Pair = tuple[Evaluation, Evaluation]
"""The same plan as the search saw it, and as it was measured now."""


@dataclass(frozen=True)
class Agreement(JsonForm):
    """How a ranking of plans held: of the pairs that differ beyond noise as measured, so many agree."""

    kendall_tau: float | None
    """Kendall's tau-b, -1 to 1; None where one side does not rank at all."""
    plans: int
    pairs: int
    agreeing: int

    @property
    def verdict(self) -> str:
        """In plain words, to follow "the ranking"."""
        if self.pairs < FEWEST_PAIRS:
            return "cannot be judged: too few plans differ beyond noise"
        share = self.agreeing / self.pairs
        if share >= HELD:
            return "held"
        if share >= HELD_MOSTLY:
            return "held in the main: between neighbours go by what was measured"
        return "did not hold: go by what was measured"

    def to_json(self) -> dict[str, Any]:
        """All fields and the verdict."""
        return {**super().to_json(), "verdict": self.verdict}


def latency_agreement(pairs: Sequence[Pair]) -> Agreement:
    """Of the medians. Only pairs of plans whose measured latencies differ beyond noise are judged."""
    return _agreement(
        pairs, lambda e: e.latency.median_ms, lambda a, b: faster_beyond_noise(a, b) or faster_beyond_noise(b, a)
    )


def error_agreement(pairs: Sequence[Pair]) -> Agreement:
    """Of the errors that choices go by. Only pairs whose measured errors differ by a tenth or more are judged."""

    def error(evaluation: Evaluation) -> float:
        return max(evaluation.judged_error, ERROR_FLOOR)

    def apart(first: Evaluation, other: Evaluation) -> bool:
        low, high = sorted((error(first), error(other)))
        return high >= ERRORS_APART * low

    return _agreement(pairs, error, apart)


def _agreement(
    pairs: Sequence[Pair], value: Callable[[Evaluation], float], apart: Callable[[Evaluation, Evaluation], bool]
) -> Agreement:
    judged = [
        (value(a[0]) - value(b[0])) * (value(a[1]) - value(b[1])) > 0
        for a, b in combinations(pairs, 2)
        if apart(a[1], b[1])
    ]
    tau = kendall_tau([value(searched) for searched, _ in pairs], [value(measured) for _, measured in pairs])
    return Agreement(tau, len(pairs), len(judged), sum(judged))


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Kendall's tau-b, -1 to 1; None where all values of one side are equal."""
    from scipy.stats import kendalltau  # slow to import

    tau = float(kendalltau(first, second).statistic) if len(first) > 1 else math.nan
    return None if math.isnan(tau) else tau
