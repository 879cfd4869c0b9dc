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
) -> str:
    groups = [GroupWorth(f"g{k}", "n", "matmul", None, None, None, None, 0, 1, "FP16") for k in range(free)]
    groups += [
        GroupWorth(f"p{k}", "n", "quantised", None, None, None, None, 0, 1, "FP32: pinned", True) for k in range(pinned)
    ]
    return "\n".join(
        findings(Outcome(points, fp32, evaluations or points, failures, Explanation(groups=tuple(groups))))
    )


def test_a_front_that_beats_nobody_says_so() -> None:
    slow = make_evaluation(9.9, 1e-3, width=0.1, number=1)
    assert "FP16 does not pay on this target" in advice([FP32], [FP32, slow])


def test_seeds_alone_do_not_show_whether_fp16_pays() -> None:
    slow = make_evaluation(9.9, 1e-3, width=0.1, number=1, origin=ORIGIN_FP16)
    text = advice([FP32], [FP32, slow], free=4)
    assert "does not pay" not in text
    assert "whether FP16 pays on this target is not shown" in text
    assert "nothing was searched" in text
    assert "FP16 does not pay" in advice([FP32], [FP32, slow], free=1), "there are no other plans"


def test_few_free_groups_do_not_show_whether_fp16_pays() -> None:
    slow = make_evaluation(9.9, 1e-3, width=0.1, number=1)
    text = advice([FP32], [FP32, slow], free=1, pinned=67)
    assert "does not pay" not in text
    assert "only 1 of 68 layer groups may be FP16" in text
    assert "FP16 does not pay on this target" in advice([FP32], [FP32, slow], free=4, pinned=3)


def test_a_front_of_seeds_says_so_unless_there_is_no_more() -> None:
    beaten = make_evaluation(7.0, 2e-3, width=0.1, number=4)
    assert "only seeds" in advice([SEED, FP32], [FP32, SEED, beaten])
    assert "only seeds" in advice([SEED, FP32], [FP32, SEED, beaten], free=8)
    assert advice([SEED, FP32], [FP32, SEED, beaten], free=1) == ""
    assert advice([FOUND, SEED, FP32]) == ""


def test_a_budget_that_went_to_the_seeds() -> None:
    assert "nothing was searched" in advice([SEED, FP32], free=8)
    assert advice([SEED, FP32], free=1) == "", "both plans were tried"
    assert advice([SEED, FP32]) == "", "a run that does not know its groups says nothing about them"
    assert "only all-FP32 was evaluated" in advice([FP32])


def test_the_first_failure_is_told_where_nothing_ran() -> None:
    failures = [Failure(Stage.BUILD, FailureKind.ERROR, "no kernel"), Failure(Stage.RUN, FailureKind.CRASH, "boom")]
    assert "no plan with FP16 in it gave finite outputs" in advice([FP32], failures=failures)
    assert "2 of 2 plans with FP16 in them gave no outputs" in advice([FP32], failures=failures)
    assert "build, error: no kernel" in advice([FP32], failures=failures)
    broken = make_evaluation(1.0, float("nan"), number=5)
    assert "finite outputs" in advice([FP32], [FP32, broken])


def test_failures_never_read_as_fp16_that_does_not_pay() -> None:
    failures = [Failure(Stage.RUN, FailureKind.CRASH, "boom")] * 3
    slow = make_evaluation(12.0, 1e-3, number=5)
    text = advice([FP32], [FP32, slow], failures=failures)
    assert "does not pay" not in text
    assert "3 of 4 plans with FP16 in them gave no outputs" in text
    assert "run, crash: boom" in text
    assert "does not pay" in advice([FP32], [FP32, slow])


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
    assert "whether FP16 pays is not shown" in text


@pytest.mark.parametrize(("width", "is_noisy"), [(0.4, False), (0.7, True)])
def test_a_noisy_baseline(width: float, is_noisy: bool) -> None:
    fp32 = make_evaluation(10.0, 1e-7, width=width, origin=ORIGIN_FP32)
    assert ("cannot be distinguished" in advice([FOUND, fp32], fp32=fp32)) is is_noisy
