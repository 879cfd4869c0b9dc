"""The choice: within the limits, the fastest beyond the margins, and exact where that is free; all-FP32 wins ties."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mptune.choice import Choice, ChoiceLimits
from mptune.settings import SearchSettings
from mptune.targets.target import EngineMemory
from mptune.tuning.choosing import MARGIN, choose, could_be_chosen, is_as_fast, knee
from mptune.tuning.dominance import faster_beyond_noise, shared_errors
from mptune.tuning.evaluation import ORIGIN_FP32, Evaluation
from mptune.tuning.plan_limits import PlanLimits
from mptune.tuning.texts import choice_text
from tests.tuning.factory import make_error, make_evaluation

METRICS = ("relative_l2",)


def positive(least: float, largest: float) -> st.SearchStrategy[float]:
    """Of nine digits, half of them of few values, so that there are ties."""
    values = st.floats(least, largest).map(lambda value: float(f"{value:.8e}"))
    return values | st.sampled_from([least, math.sqrt(least * largest), largest])


@st.composite
def searches(draw: st.DrawFn) -> list[Evaluation]:
    """All-FP32 and other plans: close latencies with noise, held-out errors of some, memory of some."""
    is_measured = draw(st.booleans())
    evaluations = []
    for number in range(draw(st.integers(1, 10))):
        held_out = draw(st.none() | positive(1e-8, 0.1) | st.just(math.nan)) if number else 1e-8
        evaluation = make_evaluation(
            draw(st.floats(9.7, 10.3) | st.floats(2.0, 12.0)),
            draw(positive(1e-8, 0.1) | st.just(math.nan)) if number else 1e-8,
            width=draw(st.sampled_from([0.01, 0.1, 1.0])) if is_measured else 0.0,
            held_out=held_out,
            number=number,
        )
        size = draw(st.none() | st.integers(1, 9))
        memory = None if size is None else EngineMemory(None, 0, size, "predicted")
        evaluations.append(replace(evaluation, memory=memory))
    return evaluations


ASKED = st.builds(
    Choice,
    max_error=st.none() | positive(1e-8, 0.1),
    max_latency_ms=st.none() | st.floats(2.0, 12.0),
    max_memory_bytes=st.none() | st.integers(1, 9),
    limits=st.sampled_from([(), ("relative_l2<=1e-3",)]),
    tolerance=st.sampled_from([(), ("y=1e-3",)]),
    knee=st.booleans(),
)


def tf32_of(evaluations: list[Evaluation], factor: float | None) -> Evaluation | None:
    """All-FP32 with TF32, faster by a factor."""
    fp32 = evaluations[0]
    if factor is None:
        return None
    latency = fp32.latency.scaled(1.0 / factor)
    return replace(fp32, latency=latency, error=make_error(5e-4), held_out=make_error(5e-4))


def is_clearly_faster(one: Evaluation, other: Evaluation) -> bool:
    """Beyond noise and margin."""
    least_ms = one.latency.median_ms * (1.0 + MARGIN[one.latency.source])
    return faster_beyond_noise(one, other) and other.latency.median_ms > least_ms


@given(searches(), ASKED, st.none() | st.floats(1.0, 3.0))
def test_the_chosen_plan_meets_the_limits_and_none_that_does_is_faster(
    evaluations: list[Evaluation], asked: Choice, factor: float | None
) -> None:
    fp32, tf32 = evaluations[0], tf32_of(evaluations, factor)
    limits = PlanLimits(asked, METRICS)
    sound = [e for e in evaluations if e.is_finite]
    meeting = [e for e in sound if limits.excess(e) <= 1.0]
    choice = choose(evaluations, asked, METRICS, tf32)
    chosen = next(e for e in evaluations if e.plan.fingerprint == choice.chosen)
    assert chosen in sound
    if not meeting:
        assert choice.unmet is not None
        assert choice.nearest == choice.chosen
        assert limits.excess(chosen) == min(map(limits.excess, sound))
        return
    assert chosen in meeting
    assert choice.unmet is choice.nearest is None
    assert choice.given_limits == asked.given_limits

    def loses_to_tf32(evaluation: Evaluation) -> bool:
        if tf32 is None or not faster_beyond_noise(tf32, evaluation):
            return False
        before, after = shared_errors(tf32, evaluation)
        return after > before

    if fp32 in meeting and chosen is not fp32:
        assert is_clearly_faster(chosen, fp32), "all-FP32 wins ties"
        assert not loses_to_tf32(chosen)
    if limits.wants_knee:
        assert choice.kind == "knee"
        return
    rivals = [e for e in meeting if e is fp32 or not loses_to_tf32(e)]
    if not limits.is_error_limited:
        worth = [e for e in rivals if e is fp32 or fp32 not in meeting or is_clearly_faster(e, fp32)]
        for e in worth if chosen in worth else []:
            if e.held_out is None:
                assert chosen.error_value <= e.error_value
            elif chosen.held_out is not None:
                assert max(chosen.error_value, chosen.judged_error) <= max(e.error_value, e.judged_error)
        return
    assert not [e for e in rivals if is_clearly_faster(e, chosen)]
    if choice.passed_over is None and chosen.latency.source == "predicted":
        within = [e for e in rivals if e.latency.median_ms <= 1.02 * chosen.latency.median_ms and e is not fp32]
        worth = [e for e in within if fp32 not in meeting or is_clearly_faster(e, fp32)]
        for e in worth if chosen is not fp32 else []:
            before, after = shared_errors(chosen, e)
            assert before < 1.5 * after * (1 + 1e-12), "exactness within the margin is free"
    if choice.passed_over is not None:
        fastest = next(e for e in meeting if e.plan.fingerprint == choice.passed_over)
        before, after = shared_errors(fastest, chosen)
        assert 1.5 * after <= before * (1 + 1e-12)
        assert is_as_fast(chosen, fastest)


def point(number: int, ms: float, error: float, **changes: object) -> Evaluation:
    return replace(make_evaluation(ms, error, width=0.001, number=number), **changes)  # type: ignore[arg-type]


FP32 = make_evaluation(10.0, 1e-7, width=0.001, origin=ORIGIN_FP32)
UNET_PREDICTED = ((6.0, 1e-7), (3.768, 4.0e-3), (3.773, 2.5e-3))
SEGFORMER = (FP32, point(1, 7.2, 1.1e-5), point(2, 4.85, 1.3e-3), point(3, 4.0, 0.25))


def chosen_of(evaluations: tuple[Evaluation, ...], metric: str = "relative_l2", **asked: object) -> tuple[int, str]:
    """The number of the plan that is chosen, and the kind of the choice."""
    choice = choose(evaluations, Choice(**asked), (metric,))
    return next(e.number for e in evaluations if e.plan.fingerprint == choice.chosen), choice.kind


def test_of_predicted_latencies_within_the_margin_the_exact_plan_is_chosen() -> None:
    fp32, fast, exact = (make_evaluation(ms, e, number=n) for n, (ms, e) in enumerate(UNET_PREDICTED))
    assert chosen_of((fp32, fast, exact)) == (2, "default")


def test_without_limits_the_metric_has_one() -> None:
    assert chosen_of(SEGFORMER) == (2, "default")
    assert chosen_of(SEGFORMER, max_error=1e-4) == (1, "limits")
    assert chosen_of(SEGFORMER, limits=("relative_l2<=1",)) == (3, "limits"), "a limit on the objective replaces it"
    assert chosen_of(SEGFORMER, tolerance=("y=1",)) == (3, "limits"), "a tolerance replaces it for its part"
    assert chosen_of(SEGFORMER, max_latency_ms=4.5) == (3, "limits"), "alone it asks for the smallest error"
    assert chosen_of(SEGFORMER, max_latency_ms=8.0) == (1, "limits")
    assert chosen_of(SEGFORMER, max_latency_ms=8.0, max_error=1e-2) == (2, "limits")
    sized = [replace(e, memory=EngineMemory(None, 0, 10 - e.number, "predicted")) for e in SEGFORMER]
    assert chosen_of(tuple(sized), max_memory_bytes=9) == (2, "limits"), "the default holds beside it"
    assert choose(sized, Choice(max_memory_bytes=9), METRICS).limit_values == {"max_memory_bytes": 9, "max_error": 0.01}
    unmet = choose(sized, Choice(max_memory_bytes=7), METRICS).unmet
    assert unmet == ChoiceLimits(max_memory_bytes=7, max_error=0.01)


def test_metrics_in_a_unit_of_their_own_have_the_knee() -> None:
    own = tuple(replace(e, metric="m.py:f", error=make_error_of("m.py:f", e.error_value)) for e in SEGFORMER)
    assert chosen_of(own, "m.py:f") == (2, "knee")
    assert chosen_of(own, "m.py:f", max_error=1.0) == (3, "limits")
    assert chosen_of(SEGFORMER, knee=True) == (2, "knee")


def make_error_of(metric: str, value: float):  # type: ignore[no-untyped-def]
    error = make_error(value)
    return replace(error, per_output={"y": {**error.per_output["y"], metric: (value, value)}})


def test_the_knee_avoids_all_fp32_and_errors_that_nobody_wants() -> None:
    broken, good = point(1, 1.0, 0.5), point(2, 6.0, 1e-3)
    assert knee([broken, good, FP32]) == good
    assert knee([broken, FP32]) == broken
    assert knee([FP32]) == FP32


def test_what_is_not_on_the_front_can_be_chosen() -> None:
    """Significance leaves the more exact of two plans that are equally fast within wide noise."""
    exact, fast = (make_evaluation(ms, error, width=0.3, number=n) for n, ms, error in ((1, 1.9, 3e-4), (2, 1.7, 4e-3)))
    assert chosen_of((FP32, exact, fast)) == (2, "default")


@pytest.mark.parametrize(
    ("ms", "error", "number"),
    [(5.04, 1e-3, 2), (5.06, 1e-3, 1), (5.04, 2.1e-3, 1)],
    ids=["free", "too slow", "not much more exact"],
)
def test_exactness_that_is_free(ms: float, error: float, number: int) -> None:
    fast, exact = (make_evaluation(*pair, width=0.1, number=n) for n, pair in ((1, (5.0, 3e-3)), (2, (ms, error))))
    choice = choose((FP32, fast, exact), Choice(), METRICS)
    assert choice.chosen == (fast, exact)[number - 1].plan.fingerprint
    assert choice.passed_over == (fast.plan.fingerprint if number == 2 else None)
    apart = [replace(e, latency=replace(e.latency, ci95_ms=(e.latency.median_ms,) * 2)) for e in (FP32, fast, exact)]
    assert choose(apart, Choice(), METRICS).chosen == fast.plan.fingerprint, "it is significantly slower"


def test_all_fp32_wins_ties() -> None:
    for ms, number in ((9.95, 0), (9.8, 1)):
        assert chosen_of((FP32, point(1, ms, 1e-3))) == (number, "default")
    noisy = make_evaluation(9.0, 1e-3, width=2.0, number=1)
    assert chosen_of((FP32, noisy)) == (0, "default")


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


def test_limits_hold_on_the_held_out_samples_too() -> None:
    lucky = make_evaluation(2.0, 1e-4, held_out=1e-2, number=1)
    sound = make_evaluation(4.0, 2e-4, held_out=2e-4, number=2)
    assert chosen_of((FP32, lucky, sound), max_error=1e-3) == (2, "limits")


def test_what_could_be_chosen_is_what_noise_leaves_open() -> None:
    plans = [make_evaluation(ms, 1e-3, width=0.2, number=n) for n, ms in ((1, 4.0), (2, 4.1), (3, 6.0))]
    beyond = make_evaluation(4.0, 0.5, width=0.2, number=4)
    named = could_be_chosen((FP32, *plans, beyond), Choice(), METRICS)
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
