"""What is said about a front that is less than a trade-off; whole searches that end so are in test_degenerate.py."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mptune.engines.base import Failure, FailureKind, Stage
from mptune.tuning.evaluation import ORIGIN_FP16, ORIGIN_FP32, ORIGIN_SAMPLER, Evaluation
from mptune.tuning.explanation import Explanation, GroupWorth
from mptune.tuning.reasons.advice import Outcome, findings
from tests.tuning.factory import make_evaluation

FP32 = make_evaluation(10.0, 1e-7, width=0.1, origin=ORIGIN_FP32)
SEED = make_evaluation(5.0, 1e-3, width=0.1, origin=ORIGIN_FP16, number=2)
FOUND = make_evaluation(4.0, 2e-3, width=0.1, origin=ORIGIN_SAMPLER, number=3)


def advice(
    points: Sequence[Evaluation],
    evaluations: Sequence[Evaluation] = (),
    failures: Sequence[Failure] = (),
    fp32: Evaluation = FP32,
    free: int = 0,
    pinned: int = 0,
    plan_count: int | None = None,
) -> str:
    groups = [GroupWorth(f"g{k}", "n", "matmul", None, None, None, None, 0, 1, "FP16") for k in range(free)]
    groups += [
        GroupWorth(f"p{k}", "n", "quantised", None, None, None, None, 0, 1, "FP32: pinned", True) for k in range(pinned)
    ]
    explanation = Explanation(groups=tuple(groups))
    outcome = Outcome(points, fp32, evaluations or points, failures, explanation, plan_count=plan_count)
    return "\n".join(findings(outcome))


def test_a_gain_that_is_beyond_noise_and_little_is_called_little() -> None:
    fp32 = make_evaluation(10.0, 1e-7, width=1e-4, origin=ORIGIN_FP32)
    close = make_evaluation(9.997, 1e-3, width=1e-4, number=1)
    assert "the fastest plan saves 0.03 % of all-FP32's latency" in advice([close, fp32], fp32=fp32)
    fast = make_evaluation(9.0, 1e-3, width=1e-4, number=2)
    assert advice([fast, close, fp32], fp32=fp32) == ""


def test_seeds_alone_do_not_show_whether_fp16_pays() -> None:
    slow = make_evaluation(9.9, 1e-3, width=0.1, number=1, origin=ORIGIN_FP16)
    text = advice([FP32], [FP32, slow], free=4)
    assert "does not pay" not in text
    assert "whether FP16 pays on this target is not shown" in text
    assert "nothing was searched" in text
    assert "FP16 does not pay" in advice([FP32], [FP32, slow], free=1), "there are no other plans"
    assert "FP16 does not pay" not in advice([FP32], [FP32, slow], free=1, plan_count=3), "there is one with BF16"


def test_few_free_groups_do_not_show_whether_fp16_pays() -> None:
    slow = make_evaluation(9.9, 1e-3, width=0.1, number=1)
    text = advice([FP32], [FP32, slow], free=1, pinned=67)
    assert "does not pay" not in text
    assert "only 1 of 68 layer groups may be FP16" in text
    assert "FP16 does not pay on this target" in advice([FP32], [FP32, slow], free=4, pinned=3)


def test_failures_never_read_as_fp16_that_does_not_pay() -> None:
    failures = [Failure(Stage.RUN, FailureKind.CRASH, "boom")] * 3
    slow = make_evaluation(12.0, 1e-3, number=5)
    text = advice([FP32], [FP32, slow], failures=failures)
    assert "does not pay" not in text
    assert "3 of 4 plans with FP16 in them gave no outputs" in text
    assert "run, crash: boom" in text
    assert "does not pay" in advice([FP32], [FP32, slow])


def test_plans_beyond_a_tolerance_are_no_reason_to_call_fp16_slow() -> None:
    outcome = Outcome([FP32], FP32, [FP32, SEED, FOUND], [], Explanation(), limits="y=1e-06")
    text = "\n".join(findings(outcome))
    assert "does not pay" not in text
    assert "no plan is faster than all-FP32 beyond noise; whether FP16 pays" in text
    assert "2 of 2 plans are faster and not within y=1e-06" in text
    assert f"{FOUND.plan.fingerprint} the most (2.50x, error 2.0e-03)" in text


def test_plans_that_give_nan_are_no_reason_to_call_fp16_slow() -> None:
    slow = make_evaluation(12.0, 1e-3, width=0.1, number=5)
    broken = make_evaluation(4.0, float("nan"), width=0.1, number=6)
    late = make_evaluation(4.0, 1e-3, width=0.1, number=7, held_out=float("nan"))
    text = advice([FP32], [FP32, slow, broken])
    assert "does not pay" not in text
    assert "1 of 2 plans with FP16 in them gave NaN or Inf" in text
    assert "gave NaN or Inf on the held-out samples" in advice([FP32], [FP32, slow, late])


def test_a_gain_that_intervals_leave_open_is_not_ruled_out() -> None:
    fp32 = make_evaluation(10.0, 1e-7, width=0.4, origin=ORIGIN_FP32)
    close = make_evaluation(9.8, 1e-3, width=0.4, number=5)
    text = advice([fp32], [fp32, close], fp32=fp32)
    assert "does not pay" not in text
    assert "may hide a gain of up to 10%" in text
    exact = make_evaluation(9.99, 1e-3, width=0.02, number=5)
    assert "noise hides no gain above" in advice([FP32], [FP32, exact])


def test_the_precisions_are_those_of_the_search() -> None:
    slow = make_evaluation(12.0, 1e-3, width=0.1, number=5)
    text = "\n".join(findings(Outcome([FP32], FP32, [FP32, slow], [], Explanation(), reduced="BF16")))
    assert "BF16 does not pay on this target" in text
    assert "FP16" not in text


def test_what_ended_a_search_is_not_called_its_budget() -> None:
    groups = tuple(GroupWorth(f"g{k}", "n", "matmul", None, None, None, None, 0, 1, "FP16") for k in range(8))
    explanation = Explanation(groups=groups)
    (text,) = findings(Outcome([SEED, FP32], FP32, [FP32, SEED], [], explanation, is_cut_short=True))
    assert "the search ended before its budget" in text
    assert "larger --budget" not in text
    (only,) = findings(Outcome([FP32], FP32, [FP32], [], explanation, is_cut_short=True))
    assert only == "only all-FP32 was evaluated: the same command goes on"


def test_plans_of_the_sampler_that_failed_were_searched() -> None:
    failures = [Failure(Stage.BUILD, FailureKind.ERROR, "no kernel")] * 3
    groups = tuple(GroupWorth(f"g{k}", "n", "matmul", None, None, None, None, 0, 1, "FP16") for k in range(8))
    outcome = Outcome([SEED, FP32], FP32, [FP32, SEED], failures, Explanation(groups=groups), sampled_failures=2)
    assert "nothing was searched" not in "\n".join(findings(outcome))


def test_failures_are_counted_beside_a_front_that_is_faster() -> None:
    failures = [Failure(Stage.RUN, FailureKind.ERROR, "output 'boxes' has rank 3, the reference 2")] * 16
    text = advice([FOUND, SEED, FP32], failures=failures)
    assert "16 of 18 plans with FP16 in them gave no outputs and are not judged" in text
    assert "run, error: output 'boxes' has rank 3" in text


def test_what_is_lost_in_noise_is_not_called_a_loss() -> None:
    fp32 = make_evaluation(10.0, 1e-7, width=3.0, origin=ORIGIN_FP32)
    slow = make_evaluation(9.0, 1e-3, width=3.0, number=5)
    text = advice([fp32], [fp32, slow], fp32=fp32)
    assert "does not pay" not in text
    assert "whether FP16 pays on this target is not shown" in text


@pytest.mark.parametrize(("width", "is_noisy"), [(0.4, False), (0.7, True)])
def test_a_noisy_baseline(width: float, is_noisy: bool) -> None:
    fp32 = make_evaluation(10.0, 1e-7, width=width, origin=ORIGIN_FP32)
    assert ("cannot be distinguished" in advice([FOUND, fp32], fp32=fp32)) is is_noisy


def test_a_group_whose_values_cost_much_of_what_fp16_would_save_is_named() -> None:
    def told(gain_ms: float, finding: str | None) -> str:
        free = GroupWorth("g0", "n", "matmul", 1e-3, 1.0, 0.0, 1e-3, 1, 1, "FP16")
        pinned = GroupWorth("g1", "n", "matmul", None, gain_ms, None, None, 0, 1, "FP32: pinned", True, finding)
        explanation = Explanation(groups=(free, pinned))
        return "\n".join(findings(Outcome([SEED, FP32], FP32, [FP32, SEED], [], explanation, frees="--option")))

    text = told(0.5, "overflow")
    assert "g1 is kept in FP32 for the values there, which costs 0.5 ms of the 1.5 ms" in text
    assert "with --option may free more" in text
    assert "g1" not in told(0.04, "overflow"), "less than 5 %"
    assert "g1" not in told(0.5, None), "the search space pins it"
