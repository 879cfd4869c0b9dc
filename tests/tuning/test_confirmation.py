"""Rankings: Kendall's tau, and the pairs that differ beyond noise."""

from __future__ import annotations

import pytest

from mptune.tuning.confirmation import Agreement, error_agreement, latency_agreement
from tests.tuning.factory import make_evaluation


def of_latencies(predicted: list[float], measured: list[float], width: float = 0.1) -> Agreement:
    before, after = (
        [make_evaluation(ms, 1e-3, number=n, width=w) for n, ms in enumerate(run)]
        for run, w in ((predicted, 0.0), (measured, width))
    )
    return latency_agreement(list(zip(before, after, strict=True)))


def test_latencies_within_the_noise_are_not_judged() -> None:
    """Plans 1 and 2 have changed places, but their intervals overlap; plan 4 is far off."""
    exact = of_latencies([1, 2, 3, 4], [10, 11.05, 11, 20])
    assert (exact.plans, exact.pairs, exact.agreeing) == (4, 5, 5)
    assert exact.kendall_tau == pytest.approx(4 / 6)
    assert exact.verdict == "held"


def test_a_tie_in_the_prediction_is_no_agreement() -> None:
    assert of_latencies([1, 1, 2], [10, 11, 12]).agreeing == 2
    for few in ([1, 1, 1], [1], []):
        assert of_latencies(few, few, 0.0).kendall_tau is None


@pytest.mark.parametrize(
    ("before", "after", "pairs", "agreeing"),
    [
        ([1e-3, 2e-3, 4e-3], [2.02e-3, 2e-3, 1e-2], 2, 2),  # two are less than a tenth apart
        ([0.0, 1e-9], [2e-8, 1e-8], 0, 0),  # below what FP32 resolves all are equal
    ],
)
def test_errors_are_held_out_ones(before: list[float], after: list[float], pairs: int, agreeing: int) -> None:
    plans = [[make_evaluation(1.0, 9.0, held_out=error) for error in pair] for pair in zip(before, after, strict=True)]
    agreement = error_agreement(plans)
    assert (agreement.plans, agreement.pairs, agreement.agreeing) == (len(before), pairs, agreeing)
    assert (agreement.kendall_tau is None) == (pairs == 0)


@pytest.mark.parametrize(
    ("plans", "pairs", "agreeing", "words"),
    [(5, 10, 10, "held"), (5, 10, 9, "held"), (5, 10, 8, "did not hold: rely on"), (2, 1, 1, "cannot be judged")],
)
def test_verdicts(plans: int, pairs: int, agreeing: int, words: str) -> None:
    verdict = Agreement(0.5, plans, pairs, agreeing).verdict
    assert verdict.startswith(words)
    assert (verdict == "held") is (words == "held")
