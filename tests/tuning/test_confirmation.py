"""Rankings: Kendall's tau, and the pairs that differ beyond noise."""

from __future__ import annotations

import pytest

from mptune.tuning.confirmation import Agreement, error_agreement, latency_agreement
from tests.tuning.factory import make_evaluation


def pairs(predicted: list[float], measured: list[float], width: float = 0.0, held_out: bool = False):
    """The latencies, or with ``held_out`` the errors, of the same plans in two runs."""
    made = []
    for number, (a, b) in enumerate(zip(predicted, measured, strict=True)):
        if held_out:
            made.append((make_evaluation(1.0, 9.0, held_out=a), make_evaluation(1.0, 9.0, held_out=b)))
        else:
            made.append((make_evaluation(a, 1e-3, number=number), make_evaluation(b, 1e-3, number=number, width=width)))
    return made


def test_latencies_within_the_noise_are_not_judged() -> None:
    """Plans 1 and 2 have changed places, but their intervals overlap; plan 4 is far off."""
    exact = latency_agreement(pairs([1, 2, 3, 4], [10, 11.05, 11, 20], width=0.1))
    assert (exact.plans, exact.pairs, exact.agreeing) == (4, 5, 5)
    assert exact.kendall_tau == pytest.approx(4 / 6)
    assert exact.verdict == "held"


def test_a_tie_in_the_prediction_is_no_agreement() -> None:
    assert latency_agreement(pairs([1, 1, 2], [10, 11, 12], width=0.1)).agreeing == 2
    for few in ([1, 1, 1], [1], []):
        assert latency_agreement(pairs(few, few)).kendall_tau is None


def test_errors_are_held_out_ones_and_a_tenth_apart() -> None:
    found = error_agreement(pairs([1e-3, 2e-3, 4e-3], [2.02e-3, 2e-3, 1e-2], held_out=True))
    assert (found.plans, found.pairs, found.agreeing) == (3, 2, 2)


def test_errors_below_what_fp32_resolves_are_equal() -> None:
    found = error_agreement(pairs([0.0, 1e-9], [2e-8, 1e-8], held_out=True))
    assert (found.kendall_tau, found.pairs) == (None, 0)


@pytest.mark.parametrize(("agreeing", "words"), [(10, "held"), (9, "held"), (8, "did not hold: rely on")])
def test_verdicts(agreeing: int, words: str) -> None:
    verdict = Agreement(0.5, 5, 10, agreeing).verdict
    assert verdict.startswith(words)
    assert (verdict == "held") is (words == "held")


def test_few_pairs_say_nothing() -> None:
    assert Agreement(1.0, 2, 1, 1).verdict.startswith("cannot be judged")
    assert Agreement(None, 2, 0, 0).to_json()["kendall_tau"] is None
