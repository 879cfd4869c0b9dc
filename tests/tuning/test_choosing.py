"""The choice: within the limits, the fastest beyond the margins, and exact where that is free; all-FP32 wins ties."""

from __future__ import annotations

from dataclasses import replace
from operator import lt

import pytest
from hypothesis import given, strategies as st

from mptune.choice import Choice, ChoiceLimits
from mptune.data.metrics.accuracy import OutputError
from mptune.engines.latency import MARGIN
from mptune.settings import SearchSettings
from mptune.targets.target import EngineMemory
from mptune.tuning.choosing import choose, could_be_chosen, is_as_fast, knee
from mptune.tuning.dominance import faster_beyond_noise, shared_errors
from mptune.tuning.evaluation import ORIGIN_FP32, Evaluation
from mptune.tuning.plan_limits import PlanLimits
from mptune.tuning.texts import choice_text
from tests.tuning.factory import make_error, make_evaluation, positive, searches

METRICS = ("relative_l2",)

ASKED = st.builds(
    Choice,
    max_error=st.none() | positive(1e-8, 0.1),
    max_latency_ms=st.none() | st.floats(2.0, 12.0),
    max_memory_bytes=st.none() | st.integers(1, 9),
    limits=st.sampled_from([(), ("relative_l2<=1e-3",)]),
    tolerance=st.sampled_from([(), ("y=1e-3",)]),
    knee=st.booleans(),
)


def is_clearly_faster(one: Evaluation, other: Evaluation) -> bool:
    """Beyond noise and margin."""
    least_ms = one.latency.median_ms * (1.0 + MARGIN[one.latency.source])
    return faster_beyond_noise(one, other) and other.latency.median_ms > least_ms


@given(searches(), ASKED, st.none() | st.floats(1.0, 3.0))
def test_the_chosen_plan_meets_the_limits_and_none_that_does_is_faster(
    evaluations: list[Evaluation], asked: Choice, factor: float | None
) -> None:
    """With ``factor``, all-FP32 is that much faster with TF32."""
    fp32, limits, tf32 = evaluations[0], PlanLimits(asked, METRICS), None
    if factor is not None:
        tf32 = replace(fp32, latency=fp32.latency.scaled(1 / factor), error=make_error(5e-4), held_out=make_error(5e-4))
    choice = choose(evaluations, asked, METRICS, tf32)
    chosen = next(e for e in evaluations if e.plan.fingerprint == choice.chosen)
    sound = [e for e in evaluations if e.is_finite]
    meeting = [e for e in sound if limits.excess(e) <= 1.0]
    if not meeting:
        assert choice.unmet is not None
        assert choice.nearest == choice.chosen
        assert limits.excess(chosen) == min(map(limits.excess, sound))
        return
    assert chosen in meeting
    assert choice.unmet is choice.nearest is None
    assert choice.given_limits == asked.given_limits
    beaten = [e for e in meeting if tf32 and faster_beyond_noise(tf32, e) and lt(*shared_errors(tf32, e))]
    if fp32 in meeting and chosen is not fp32:
        assert is_clearly_faster(chosen, fp32), "all-FP32 wins ties"
        assert chosen not in beaten
    if limits.wants_knee:
        assert choice.kind == "knee"
        return
    rivals = [e for e in meeting if e is fp32 or e not in beaten]
    worth = [e for e in rivals if e is fp32 or fp32 not in meeting or is_clearly_faster(e, fp32)]
    if not limits.is_error_limited:
        for e in worth if chosen in worth else []:
            if e.held_out is None:
                assert chosen.error_value <= e.error_value
            elif chosen.held_out is not None:
                assert max(chosen.error_value, chosen.judged_error) <= max(e.error_value, e.judged_error)
        return
    assert not [e for e in rivals if is_clearly_faster(e, chosen)]
    if choice.passed_over is not None:
        fastest = next(e for e in meeting if e.plan.fingerprint == choice.passed_over)
        before, after = shared_errors(fastest, chosen)
        assert 1.5 * after <= before * (1 + 1e-12)
        assert is_as_fast(chosen, fastest)
    elif chosen.latency.source == "predicted" and chosen is not fp32:
        for e in worth:
            if e is not fp32 and e.latency.median_ms <= 1.02 * chosen.latency.median_ms:
                before, after = shared_errors(chosen, e)
                assert before < 1.5 * after * (1 + 1e-12), "exactness within the margin is free"


def point(number: int, ms: float, error: float, width: float = 0.001, **changes: object) -> Evaluation:
    return replace(make_evaluation(ms, error, width=width, number=number), **changes)


def in_unit_of_its_own(evaluation: Evaluation) -> Evaluation:
    statistics = {**evaluation.error.per_output["y"], "m.py:f": (evaluation.error_value,) * 2}
    return replace(evaluation, metric="m.py:f", error=OutputError({"y": statistics}))


FP32 = make_evaluation(10.0, 1e-7, width=0.001, origin=ORIGIN_FP32)
UNET_PREDICTED = tuple(point(n, *pair, 0.0) for n, pair in enumerate([(6.0, 1e-7), (3.768, 4.0e-3), (3.773, 2.5e-3)]))
SEGFORMER = (FP32, point(1, 7.2, 1.1e-5), point(2, 4.85, 1.3e-3), point(3, 4.0, 0.25))
SIZED = tuple(replace(e, memory=EngineMemory(None, 0, 10 - e.number, "predicted")) for e in SEGFORMER)
OWN = tuple(map(in_unit_of_its_own, SEGFORMER))
NOISY = (FP32, point(1, 1.9, 3e-4, 0.3), point(2, 1.7, 4e-3, 0.3))
LUCKY = (FP32, point(1, 2.0, 1e-4, held_out=make_error(1e-2)), point(2, 4.0, 2e-4, held_out=make_error(2e-4)))


@pytest.mark.parametrize(
    ("plans", "asked", "number", "kind"),
    [
        (UNET_PREDICTED, {}, 2, "default"),  # of predicted latencies within the margin, the exact plan
        (SEGFORMER, {}, 2, "default"),
        (SEGFORMER, {"max_error": 1e-4}, 1, "limits"),
        (SEGFORMER, {"limits": ("relative_l2<=1",)}, 3, "limits"),  # one on the objective replaces the default
        (SEGFORMER, {"tolerance": ("y=1",)}, 3, "limits"),  # a tolerance replaces it for its part
        (SEGFORMER, {"max_latency_ms": 4.5}, 3, "limits"),  # alone it asks for the smallest error
        (SEGFORMER, {"max_latency_ms": 8.0}, 1, "limits"),
        (SEGFORMER, {"max_latency_ms": 8.0, "max_error": 1e-2}, 2, "limits"),
        (SEGFORMER, {"knee": True}, 2, "knee"),
        (SIZED, {"max_memory_bytes": 9}, 2, "limits"),  # the default holds beside it
        (OWN, {}, 2, "knee"),
        (OWN, {"max_error": 1.0}, 3, "limits"),
        (NOISY, {}, 2, "default"),  # which is not on the front: the more exact one is as fast within wide noise
        ((FP32, point(1, 9.95, 1e-3)), {}, 0, "default"),  # all-FP32 wins ties
        ((FP32, point(1, 9.8, 1e-3)), {}, 1, "default"),
        ((FP32, point(1, 9.0, 1e-3, 2.0)), {}, 0, "default"),
        (LUCKY, {"max_error": 1e-3}, 2, "limits"),  # limits hold on the held-out samples too
    ],
)
def test_what_is_chosen(plans: tuple[Evaluation, ...], asked: dict[str, object], number: int, kind: str) -> None:
    choice = choose(plans, Choice(**asked), (plans[0].metric,))
    assert choice.kind == kind
    assert [e.number for e in plans if e.plan.fingerprint == choice.chosen] == [number]


def test_limits_that_were_not_given_are_named() -> None:
    assert choose(SIZED, Choice(max_memory_bytes=9), METRICS).limit_values == {"max_memory_bytes": 9, "max_error": 0.01}
    unmet = choose(SIZED, Choice(max_memory_bytes=7), METRICS).unmet
    assert unmet == ChoiceLimits(max_memory_bytes=7, max_error=0.01)


def test_the_knee_avoids_all_fp32_and_errors_that_nobody_wants() -> None:
    broken, good = point(1, 1.0, 0.5), point(2, 6.0, 1e-3)
    assert knee([broken, good, FP32]) == good
    assert knee([broken, FP32]) == broken
    assert knee([FP32]) == FP32


@pytest.mark.parametrize(
    ("ms", "error", "number"),
    [(5.04, 1e-3, 2), (5.06, 1e-3, 1), (5.04, 2.1e-3, 1)],
    ids=["free", "too slow", "not much more exact"],
)
def test_exactness_that_is_free(ms: float, error: float, number: int) -> None:
    fast, exact = point(1, 5.0, 3e-3, 0.1), point(2, ms, error, 0.1)
    choice = choose((FP32, fast, exact), Choice(), METRICS)
    assert choice.chosen == (fast, exact)[number - 1].plan.fingerprint
    assert choice.passed_over == (fast.plan.fingerprint if number == 2 else None)
    apart = [replace(e, latency=replace(e.latency, ci95_ms=(e.latency.median_ms,) * 2)) for e in (FP32, fast, exact)]
    assert choose(apart, Choice(), METRICS).chosen == fast.plan.fingerprint, "it is significantly slower"


def test_a_plan_that_is_slower_and_less_exact_than_tf32_is_not_chosen() -> None:
    tf32 = replace(FP32, latency=FP32.latency.scaled(0.6), error=make_error(5e-4))
    plans = (FP32, point(1, 7.0, 1e-3))
    choice = choose(plans, Choice(), METRICS, tf32)
    assert choice.chosen == FP32.plan.fingerprint
    assert "are slower and less exact than TF32" in choice_text(choice, METRICS[0], FP32.plan)
    slow = choose((FP32, point(1, 9.99, 1e-3)), Choice(), METRICS, tf32)
    assert "FP16 gains nothing here" in choice_text(slow, METRICS[0], FP32.plan)
    for other in (point(2, 7.0, 1e-4), point(2, 5.0, 1e-3)):
        assert choose((*plans, other), Choice(), METRICS, tf32).chosen == other.plan.fingerprint


def test_what_could_be_chosen_is_what_noise_leaves_open() -> None:
    plans = [point(n, ms, 1e-3, 0.2) for n, ms in ((1, 4.0), (2, 4.1), (3, 6.0))]
    named = could_be_chosen((FP32, *plans, point(4, 4.0, 0.5, 0.2)), Choice(), METRICS)
    assert [e.number for e in named] == [1, 2]
    assert could_be_chosen((), Choice(), METRICS) == ()
    slower = could_be_chosen((FP32, *plans[:2], point(5, 4.2, 1e-5)), Choice(max_latency_ms=4.05), METRICS)
    assert [e.number for e in slower] == [1], "5 is too slow for certain, 2 no more exact"


def test_a_choice_stands_until_limits_are_given_that_differ() -> None:
    first = choose(SEGFORMER, Choice.from_settings(SearchSettings(max_error=1e-4)), METRICS)
    again = first.asked_again(Choice())
    assert (again.max_error, again.chosen, again.replaced) == (1e-4, None, first.chosen)
    assert first.asked_again(Choice(max_error=1e-2)).max_error == 1e-2
    picked = first.model_copy(update={"plan": "abc", "max_error": None, "search_limits": first.given_limits})
    assert picked.asked_again(Choice(max_error=1e-4)).plan == "abc", "as before the pick"
    assert picked.asked_again(Choice(knee=True)).plan is None
