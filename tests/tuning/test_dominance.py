"""Who is dominated where figures are known to intervals only; neighbours; the hypervolume after each evaluation."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.latency import Latency
from mptune.engines.spread import SessionSpread
from mptune.tuning.dominance import faster_beyond_noise, hypervolume, hypervolumes, neighbours, pareto, shared_errors
from mptune.tuning.evaluation import ORIGIN_FP32, Evaluation
from mptune.tuning.texts import compared
from tests.engines.test_spread import Machine
from tests.tuning.factory import make_error, make_evaluation, make_front, searches

FP32 = make_evaluation(10.0, 1e-7, origin=ORIGIN_FP32)


@given(searches(), st.randoms())
def test_nothing_on_the_front_is_dominated_and_all_else_is(evaluations: list[Evaluation], random: Random) -> None:
    front = pareto(evaluations)
    assert all(point.is_finite for point in front)
    for faster, slower in pairwise(front):
        assert faster.latency.median_ms < slower.latency.median_ms
        assert faster.judged_error > slower.judged_error
        assert faster_beyond_noise(faster, slower)
    for plan in (e for e in evaluations if e.is_finite and e not in front):
        assert any(p.judged_error <= plan.judged_error and not faster_beyond_noise(plan, p) for p in front)
    assert pareto(front) == front
    assert pareto(random.sample(evaluations, len(evaluations))) == front


@pytest.mark.parametrize(
    ("points", "width", "front"),
    [
        (((4.9, 2e-3), (5.0, 1e-3)), 0.1, [1]),  # a more exact plan displaces one that is not significantly faster
        (((5.0, 1e-3), (4.9, 2e-3), (4.7, 2e-3)), 0.1, [2, 0]),
        (((1.0, 3e-3), (1.7, 2e-3), (2.4, 1e-3)), 0.4, [0, 2]),  # one that is dropped drops no other
    ],
)
def test_fronts_by_hand(points: tuple[tuple[float, float], ...], width: float, front: list[int]) -> None:
    evaluations = [make_evaluation(ms, error, width=width, number=n) for n, (ms, error) in enumerate(points)]
    assert [point.number for point in pareto(evaluations)] == front


def with_errors(evaluation: Evaluation, errors: list[float] | np.ndarray) -> Evaluation:
    values = {"relative_l2": tuple(map(float, errors)), "non_finite": (0.0,) * len(errors)}
    return replace(evaluation, error=OutputError({"y": values}))


def test_the_same_plan_twice_is_never_ranked() -> None:
    """A simulated front of three plans, each measured in two sessions: 0 of 20 pairs of sessions are both on it."""
    for seed in range(20):
        machine, generator, points = Machine(seed), np.random.default_rng(seed), []
        spread = SessionSpread(machine.begin())
        for number, (log_ratio, error) in enumerate(((0.0, 1e-5), (-0.3, 1e-3), (-0.7, 1e-2))):
            samples = error * np.exp(generator.normal(0.0, 0.2, 6))
            for again in range(2):
                estimate = spread.estimate([machine.session(log_ratio)])
                ms = 10.0 * math.exp(estimate.log_ratio)
                low, high = (10.0 * bound for bound in estimate.interval())
                point = make_evaluation(ms, error, width=1.0, number=10 * number + again, bits=number)
                point = replace(point, latency=replace(point.latency, ci95_ms=(low, high), degrees=estimate.degrees))
                points.append(with_errors(point, samples))
        front = pareto(points)
        assert len(front) == len({point.plan for point in front}) == 3
        for first, second in zip(points[::2], points[1::2], strict=True):
            assert not faster_beyond_noise(first, second)
            assert not faster_beyond_noise(second, first)


def around(number: int, ms: float, error: float, width: float = 0.0) -> Evaluation:
    return with_errors(make_evaluation(ms, 1.0, number=number, width=width), [error, 1.1 * error, 0.9 * error])


FIGURES = ((2.0, 4e-3), (3.0, 2e-3), (5.0, 1e-3), (9.0, 1e-6))
FRONT = FAST, CHOSEN, SLOW, SLOWEST = tuple(around(number, *figures) for number, figures in enumerate(FIGURES))


def test_one_on_either_side_and_at_the_ends_of_a_front_one() -> None:
    faster, exacter = neighbours(FRONT, CHOSEN)
    assert (faster.role, faster.evaluation) == ("faster", FAST)
    assert (exacter.role, exacter.evaluation) == ("more exact", SLOW)
    shown = make_front(FRONT, SLOWEST, chosen=CHOSEN).to_json()["choice"]["neighbours"]
    assert [each["latency_ms_delta"] for each in shown] == [-1.0, 2.0]
    assert [each["error_ratio"] for each in shown] == [pytest.approx(2.0), pytest.approx(0.5)]
    for chosen, beside in ((FAST, CHOSEN), (SLOWEST, SLOW)):
        assert [each.evaluation for each in neighbours(FRONT, chosen)] == [beside]
    assert neighbours((CHOSEN,), CHOSEN) == ()


@pytest.mark.parametrize(
    ("ms", "error", "role"),
    [
        (2.95, 2.02e-3, None),  # 1.7 % faster, within noise
        (2.9, 2.02e-3, "faster"),
        (3.05, 1e-3, None),  # more exact, within noise of the latency
        (3.1, 1.9e-3, None),  # 1.05 times more exact
        (3.1, 1.7e-3, "more exact"),
    ],
)
def test_what_buys_nothing_is_no_neighbour(ms: float, error: float, role: str | None) -> None:
    points = [around(number, *each, width=0.03) for number, each in enumerate((*FIGURES[:3], (ms, error)))]
    fast, chosen, slow, point = points
    front = sorted(points, key=lambda point: point.latency.median_ms)
    beside = {each.role: each.evaluation for each in neighbours(front, chosen)}
    assert beside == {"faster": fast, "more exact": slow} | ({} if role is None else {role: point})


BROKEN = replace(CHOSEN, error=make_error(math.nan), latency=Latency.predicted(1.5))
NEAR = around(0, 3.0, 2e-3, 0.03)


@pytest.mark.parametrize(
    ("plan", "chosen", "text"),
    [
        (around(1, 1.0, 4.8e-2), around(0, 1.0, 1e-3), "the same latency, error 48 times larger"),
        (around(1, 1.0, 3.1e-4), around(0, 1.0, 0.0), "the same latency, error from 0 to 3.1e-04"),
        (around(1, 1.0, 1.05e-3), around(0, 1.0, 1e-3), "the same latency, the same error within 10 %"),
        (FAST, CHOSEN, "1.000 ms less (33 %), error 2 times larger"),
        (around(1, 3.02, 1e-3, 0.03), NEAR, "the same latency within noise, error 2 times smaller"),
        (BROKEN, CHOSEN, "1.500 ms less (50 %), outputs not finite"),
    ],
)
def test_a_plan_against_the_chosen_one_in_words(plan: Evaluation, chosen: Evaluation, text: str) -> None:
    assert compared(plan, chosen) == text


def test_held_out_samples_count_where_both_have_met_them() -> None:
    remeasured = [replace(point, held_out=make_error(error)) for point, error in ((FAST, 8e-3), (CHOSEN, 2e-3))]
    assert shared_errors(*remeasured) == (pytest.approx(8e-3), pytest.approx(2e-3))
    assert shared_errors(remeasured[0], CHOSEN) == (pytest.approx(4e-3), pytest.approx(2e-3))


@given(searches(), st.floats(0.1, 9.9), st.floats(1e-7, 1e-2))
def test_another_point_never_lowers_the_hypervolume(evaluations: list[Evaluation], ms: float, error: float) -> None:
    more = [*evaluations, make_evaluation(ms, error, number=99)]
    assert hypervolume(more, FP32) >= hypervolume(evaluations, FP32) - 1e-12


MIDDLE = math.sqrt(3e-2 * 1e-7)


@pytest.mark.parametrize(
    ("points", "volume"),
    [
        (((10.0, 1e-7),), 0.0),
        (((5.0, 1e-7),), 0.5),
        (((5.0, MIDDLE),), 0.25),
        (((5.0, 1e-7), (2.5, MIDDLE)), 0.5 + 0.25 * 0.5),
        (((1.0, 4e-2), (12.0, 1e-7)), 0.0),
        (((5.0, 1e-9),), 0.5),  # nothing is more exact than FP32
    ],
)
def test_hypervolume_by_hand(points: tuple[tuple[float, float], ...], volume: float) -> None:
    evaluations = [make_evaluation(ms, error, number=number) for number, (ms, error) in enumerate(points)]
    assert hypervolume(evaluations, FP32) == pytest.approx(volume)
    assert hypervolume(evaluations, make_evaluation(10.0, 5e-2)) == 0.0, "past the reference"


def test_the_hypervolume_after_each_evaluation() -> None:
    random = np.random.default_rng(3)
    plans = [make_evaluation(random.uniform(4, 12), 10 ** random.uniform(-6, -1), number=n) for n in range(1, 60)]
    evaluations = [FP32, *plans]
    evaluations[20] = replace(evaluations[20], error=make_error(math.nan))
    volumes = hypervolumes(evaluations, FP32, 3e-2)
    for count in (1, 2, 20, 21, 60):
        assert volumes[count - 1] == pytest.approx(hypervolume(evaluations[:count], FP32, 3e-2), abs=1e-12)
    assert list(volumes) == sorted(volumes)
    confirmed = [replace(e, held_out=make_error(1e-2)) for e in evaluations]
    assert hypervolumes(confirmed, FP32, 3e-2) == volumes, "few plans have held-out errors"
    assert hypervolumes(evaluations, make_evaluation(10.0, 0.5), 3e-2) == (0.0,) * 60, "past the reference"
