"""The front: dominance beyond noise, the knee, the choice, the hypervolume, front.json."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mptune.targets.target import EngineMemory
from mptune.tuning.evaluation import ORIGIN_FP32, Evaluation
from mptune.tuning.explanation import Explanation, GroupWorth, Kept
from mptune.tuning.front import choose, hypervolume, knee, pareto
from mptune.tuning.fronts.dominance import compare_samples, faster_beyond_noise
from tests.tuning import factory
from tests.tuning.factory import make_evaluation

FP32 = make_evaluation(10.0, 1e-7, origin=ORIGIN_FP32)


def positive(least: float, largest: float) -> st.SearchStrategy[float]:
    """Of nine digits: what differs in the last bit alone is smaller by one rule, and equal by another."""
    return st.floats(least, largest).map(lambda value: float(f"{value:.8e}"))


@st.composite
def evaluation_lists(draw: st.DrawFn) -> list[Evaluation]:
    rows = draw(
        st.lists(
            st.tuples(
                st.floats(0.1, 20.0),
                st.one_of(positive(1e-9, 1.0), st.sampled_from([1e-4, 1e-3, math.nan, math.inf])),
                st.sampled_from([0.0, 0.01, 0.1, 1.0]),
                st.one_of(st.none(), positive(1e-9, 1.0)),
            ),
            max_size=12,
        )
    )
    return [
        make_evaluation(ms, error, width=width, held_out=held_out, number=i)
        for i, (ms, error, width, held_out) in enumerate(rows)
    ]


@given(evaluation_lists())
def test_nothing_on_the_front_is_dominated(evaluations: list[Evaluation]) -> None:
    front = pareto(evaluations)
    assert all(point.is_finite for point in front)
    for faster, slower in pairwise(front):
        assert faster.latency.median_ms < slower.latency.median_ms
        assert faster.judged_error > slower.judged_error
        assert faster_beyond_noise(faster, slower)


def more_exact_beyond_noise(one: Evaluation, other: Evaluation) -> bool:
    """By all samples that both have met, and by the error that they are judged by."""
    difference = compare_samples(one, other)
    assert difference is not None
    return one.judged_error < other.judged_error and difference.is_significant and difference.value < 1.0


def beats_or_equals(one: Evaluation, other: Evaluation) -> bool:
    """Significantly better in one of latency and error and not worse in the other, or no different in either."""
    is_faster, is_slower = faster_beyond_noise(one, other), faster_beyond_noise(other, one)
    is_exacter, is_less_exact = more_exact_beyond_noise(one, other), more_exact_beyond_noise(other, one)
    is_better = (is_faster and not is_less_exact) or (is_exacter and not is_slower)
    return is_better or not (is_faster or is_slower or is_exacter or is_less_exact)


@given(evaluation_lists())
def test_everything_off_the_front_is_beaten_by_something_on_it(evaluations: list[Evaluation]) -> None:
    finite = [e for e in evaluations if e.is_finite]
    beaten = list(pareto(evaluations))
    for one in beaten:  # grows: a plan of a circle may be beaten by another plan of that circle
        beaten += [other for other in finite if other not in beaten and beats_or_equals(one, other)]
    assert len(beaten) == len(finite)


@given(evaluation_lists(), st.randoms())
def test_the_front_is_stable(evaluations: list[Evaluation], random: object) -> None:
    front = pareto(evaluations)
    assert pareto(front) == front
    shuffled = list(evaluations)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert pareto(shuffled) == front


def test_a_dropped_point_drops_no_other() -> None:
    a = make_evaluation(1.0, 3e-3, width=0.4, number=1)
    b = make_evaluation(1.7, 2e-3, width=0.4, number=2)
    c = make_evaluation(2.4, 1e-3, width=0.4, number=3)
    assert pareto([a, b, c]) == (a, c), "b is not faster than c beyond noise; a is"


@given(evaluation_lists())
def test_hypervolume_is_a_share(evaluations: list[Evaluation]) -> None:
    volume = hypervolume(evaluations, FP32)
    assert 0.0 <= volume <= 1.0


@given(evaluation_lists(), st.floats(0.1, 9.9), st.floats(1e-7, 1e-2))
def test_another_point_never_lowers_the_hypervolume(evaluations: list[Evaluation], ms: float, error: float) -> None:
    more = [*evaluations, make_evaluation(ms, error, number=99)]
    assert hypervolume(more, FP32) >= hypervolume(evaluations, FP32) - 1e-12


def test_hypervolume_by_hand() -> None:
    assert hypervolume([FP32], FP32) == 0.0
    assert hypervolume([make_evaluation(5.0, 1e-7)], FP32) == pytest.approx(0.5)
    middle = math.sqrt(3e-2 * 1e-7)
    assert hypervolume([make_evaluation(5.0, middle)], FP32) == pytest.approx(0.25)
    both = [make_evaluation(5.0, 1e-7, number=1), make_evaluation(2.5, middle, number=2)]
    assert hypervolume(both, FP32) == pytest.approx(0.5 + 0.25 * 0.5)
    assert hypervolume([make_evaluation(1.0, 4e-2), make_evaluation(12.0, 1e-7)], FP32) == 0.0
    assert hypervolume([make_evaluation(5.0, 1e-9)], FP32) == pytest.approx(0.5), "nothing is more exact than FP32"
    assert hypervolume([make_evaluation(5.0, 1e-3)], make_evaluation(10.0, 5e-2)) == 0.0


def test_the_knee_lies_farthest_below_the_chord() -> None:
    points = [
        make_evaluation(5.0, 1e-2, number=1),
        make_evaluation(5.5, 1e-5, number=2),
        make_evaluation(9.0, 1e-6, number=3),
        FP32,
    ]
    assert knee(points) == points[1]


def test_the_knee_avoids_errors_that_nobody_wants() -> None:
    broken, good = make_evaluation(1.0, 0.5, number=1), make_evaluation(6.0, 1e-3, number=2)
    assert knee([broken, good, FP32]) == good
    assert knee([broken]) == broken
    assert knee([]) is None


def test_without_a_knee_the_choice_is_explained_and_of_random_inputs_it_is_not_the_largest_error() -> None:
    latencies, errors = (5.0, 7.0, 8.0), (1e-2, 4e-3, 1e-3)
    points = [make_evaluation(*pair, number=n) for n, pair in enumerate(zip(latencies, errors, strict=True), 1)]
    no_knee = "the front has no knee: no plan lies below the line between its ends"
    assert choose([*points, FP32]) == (points[0], f"the fastest plan; {no_knee}", True)
    expected = (points[1], f"the plan nearest to both ends, for random inputs; {no_knee}", True)
    assert choose([*points, FP32], is_random=True) == expected


@given(evaluation_lists())
def test_the_knee_is_a_point(evaluations: list[Evaluation]) -> None:
    front = pareto(evaluations)
    assert knee(front) in front if front else knee(front) is None


@given(evaluation_lists(), positive(1e-9, 1.0))
def test_the_fastest_within_an_error(evaluations: list[Evaluation], limit: float) -> None:
    front = pareto(evaluations)
    chosen, reason, met = choose(front, max_error=limit)
    fitting = [p for p in front if max(p.error_value, p.judged_error) <= limit]
    assert met is bool(fitting)
    if fitting:
        assert chosen == min(fitting, key=lambda p: p.latency.median_ms)
    elif front:
        assert chosen == min(front, key=lambda p: max(p.error_value, p.judged_error))
        assert "nearest" in reason
    else:
        assert chosen is None


@given(evaluation_lists(), st.floats(0.1, 20.0))
def test_the_most_exact_within_a_latency(evaluations: list[Evaluation], limit: float) -> None:
    front = pareto(evaluations)
    chosen, _, met = choose(front, max_latency_ms=limit)
    fitting = [p for p in front if p.latency.median_ms <= limit]
    assert met is bool(fitting)
    if front:
        assert chosen == (min(fitting, key=lambda p: p.judged_error) if fitting else front[0])


def test_both_limits() -> None:
    points = [make_evaluation(2.0, 1e-2, number=1), make_evaluation(4.0, 1e-3, number=2), FP32]
    assert choose(points, max_error=2e-3, max_latency_ms=5.0)[::2] == (points[1], True)
    assert choose(points, max_error=5e-4, max_latency_ms=3.0)[::2] == (points[1], False)
    assert choose((), max_error=1.0) == (None, "no plan is feasible", False)
    assert choose(()) == (None, "no plan is feasible", True)


def test_choice_goes_by_the_held_out_error() -> None:
    lucky = make_evaluation(2.0, 1e-4, held_out=1e-2, number=1)
    sound = make_evaluation(4.0, 2e-4, held_out=2e-4, number=2)
    assert choose([lucky, sound], max_error=1e-3)[0] == sound


make_front = partial(factory.make_front, points=(make_evaluation(5.0, 1e-3, held_out=2e-3, number=3), FP32), fp32=FP32)


def test_front_json_has_every_key_and_is_standard_json() -> None:
    document = json.loads(json.dumps(make_front().to_json(), allow_nan=False))
    assert set(document) == {
        "format", "model", "target", "metric", "baseline", "points", "chosen", "choice",
        "evaluations", "failures", "hypervolume", "findings", "warnings",
    }  # fmt: skip
    assert set(document["model"]) == {"path", "sha256"}
    assert set(document["target"]) == {"name", "engine", "device"}
    assert set(document["baseline"]) == {"fp32", "fp16"}
    for point in (*document["points"], *document["baseline"].values()):
        assert set(point) == {
            "plan", "origin", "latency", "error", "speedup", "fp16_groups", "bf16_groups", "fp32_groups", "fp32",
            "engine", "remeasured", "confirmed", "engine_bytes", "context_bytes", "weight_bytes", "memory_source",
            "metrics",
        }  # fmt: skip
        assert set(point["latency"]) == {"median_ms", "p90_ms", "p99_ms", "ci95_ms", "cv", "source"}
        assert set(point["error"]) == {
            "value",
            "metric",
            "source",
            "emulated",
            "held_out",
            "ci95",
            "part",
            "per_output",
        }
    assert document["baseline"]["fp16"]["error"]["value"] == "nan"
    assert document["baseline"]["fp32"]["error"]["held_out"] is None
    assert document["points"][0]["error"]["held_out"] == pytest.approx(2e-3)
    assert document["points"][0]["error"]["per_output"] == {"y": {"relative_l2": 1e-3, "non_finite": 0.0}}
    assert document["points"][0]["fp16_groups"] + document["points"][0]["fp32_groups"] == 10
    assert document["chosen"] == document["points"][0]["plan"]


def test_front_json_says_why_groups_are_fp32() -> None:
    kept = Kept(GroupWorth("g002", "norm", "norm", finding="overflow", pinned="it reached 1e6"), "finding", 0.25)
    plan = make_front().points[0].plan.fingerprint
    document = make_front(explanation=Explanation({plan: (kept,)})).to_json()
    assert document["points"][0]["fp32"] == [{"group": "g002", "reason": "finding", "finding": "overflow"}]
    assert document["points"][1]["fp32"] == [], "nothing is known of it"


@given(evaluation_lists())
def test_an_evaluation_survives_its_json(evaluations: list[Evaluation]) -> None:
    for evaluation in evaluations:
        text = json.dumps(evaluation.to_json(), allow_nan=False)
        again = Evaluation.from_json(json.loads(text))
        assert again.to_json() == evaluation.to_json()
        assert again.plan == evaluation.plan
        assert again.is_finite == evaluation.is_finite


def test_a_memory_limit_leaves_points_out() -> None:
    def point(number: int, ms: float, error: float, size: int | None) -> Evaluation:
        memory = None if size is None else EngineMemory(None, 0, size, "predicted")
        return replace(make_evaluation(ms, error, number=number), memory=memory)

    points = (point(1, 1.0, 1e-2, 100), point(2, 2.0, 1e-4, 150), point(3, 3.0, 1e-6, 200), point(4, 4.0, 1e-7, None))
    assert choose(points, None, None, 160) == (points[0], "the knee of the points with memory <= 0.00016 MB", True)
    assert choose(points, 1e-3, None, 160)[0] is points[1]
    assert choose(points, None, 10.0, 160)[0] is points[1]
    nearest, reason, is_met = choose(points, None, None, 50)
    assert (nearest, is_met) == (points[0], False)
    assert "no plan has memory" in reason
    _, reason, is_met = choose(points[3:], None, None, 160)
    assert (reason.partition(",")[0], is_met) == ("what memory plans take is not known", False)
