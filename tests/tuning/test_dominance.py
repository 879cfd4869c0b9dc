"""Who is dominated where figures are known to intervals only; neighbours; the hypervolume after each evaluation."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.latency import Latency
from mptune.engines.spread import SessionSpread
from mptune.tuning.dominance import faster_beyond_noise, hypervolume, hypervolumes, neighbours, pareto, shared_errors
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.texts import compared
from tests.engines.test_spread import Machine
from tests.tuning.factory import make_error, make_evaluation, make_front


def with_errors(evaluation: Evaluation, errors: list[float] | np.ndarray) -> Evaluation:
    count = len(errors)
    values = {"relative_l2": tuple(map(float, errors)), "non_finite": (0.0,) * count}
    return replace(evaluation, error=OutputError({"y": values}))


def test_a_more_exact_plan_displaces_one_that_is_not_significantly_faster() -> None:
    exact, other = (make_evaluation(ms, e, width=0.1, number=n) for n, (ms, e) in enumerate(((5.0, 1e-3), (4.9, 2e-3))))
    assert pareto([other, exact]) == (exact,)
    fast = make_evaluation(4.7, 2e-3, width=0.1, number=2)
    assert pareto([exact, other, fast]) == (fast, exact)


def test_the_same_plan_twice_is_never_ranked() -> None:
    """A simulated front of three plans, each measured in two sessions: 0 of 20 pairs of sessions are both on it."""
    ranked = 0
    for seed in range(20):
        machine = Machine(seed)
        spread = SessionSpread(machine.begin())
        generator = np.random.default_rng(seed)
        points = []
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
        ranked += len(front) != 3 or len({point.plan for point in front}) != 3
        for one, same in pairwise(points):
            if one.plan == same.plan:
                ranked += faster_beyond_noise(one, same) or faster_beyond_noise(same, one)
    assert ranked == 0


FAST, CHOSEN, SLOW, SLOWEST = (
    with_errors(make_evaluation(ms, 1.0, number=number), [error, 1.1 * error, 0.9 * error])
    for number, (ms, error) in enumerate(((2.0, 4e-3), (3.0, 2e-3), (5.0, 1e-3), (9.0, 1e-6)))
)
FRONT = (FAST, CHOSEN, SLOW, SLOWEST)


def test_one_on_either_side() -> None:
    faster, exacter = neighbours(FRONT, CHOSEN)
    assert (faster.role, faster.evaluation) == ("faster", FAST)
    assert (exacter.role, exacter.evaluation) == ("more exact", SLOW)
    front = make_front(FRONT, SLOWEST, chosen=CHOSEN)
    shown = front.to_json()["choice"]["neighbours"]
    assert [each["latency_ms_delta"] for each in shown] == [-1.0, 2.0]
    assert [each["error_ratio"] for each in shown] == [pytest.approx(2.0), pytest.approx(0.5)]


def test_ends_have_one_neighbour_and_a_front_of_one_has_none() -> None:
    assert [one.evaluation for one in neighbours(FRONT, FAST)] == [CHOSEN]
    assert [one.evaluation for one in neighbours(FRONT, SLOWEST)] == [SLOW]
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
    fast, chosen, slow, point = (
        with_errors(make_evaluation(at_ms, 1.0, width=0.03, number=number), [e, 1.1 * e, 0.9 * e])
        for number, (at_ms, e) in enumerate(((2.0, 4e-3), (3.0, 2e-3), (5.0, 1e-3), (ms, error)))
    )
    front = sorted((fast, chosen, slow, point), key=lambda point: point.latency.median_ms)
    beside = {each.role: each.evaluation for each in neighbours(front, chosen)}
    assert beside == {"faster": fast, "more exact": slow} | ({} if role is None else {role: point})


def test_a_plan_against_the_chosen_one_in_words() -> None:
    for before, after, text in (
        (1e-3, 4.8e-2, "error 48 times larger"),
        (0.0, 3.1e-4, "error from 0 to 3.1e-04"),
        (1e-3, 1.05e-3, "the same error within 10 %"),
    ):
        one, other = (make_evaluation(1.0, error, number=n) for n, error in enumerate((before, after)))
        assert compared(other, one) == f"the same latency, {text}"
    assert compared(FAST, CHOSEN) == "1.000 ms less (33 %), error 2 times larger"
    chosen, near = (make_evaluation(ms, error, width=0.03) for ms, error in ((3.0, 2e-3), (3.02, 1e-3)))
    assert compared(near, chosen) == "the same latency within noise, error 2 times smaller"
    broken = replace(CHOSEN, error=make_error(float("nan")), latency=Latency.predicted(1.5))
    assert compared(broken, CHOSEN).endswith("ms less (50 %), outputs not finite")


def test_held_out_samples_count_where_both_have_met_them() -> None:
    remeasured = [replace(point, held_out=make_error(error)) for point, error in ((FAST, 8e-3), (CHOSEN, 2e-3))]
    assert shared_errors(*remeasured) == (pytest.approx(8e-3), pytest.approx(2e-3))
    assert shared_errors(remeasured[0], CHOSEN) == (pytest.approx(4e-3), pytest.approx(2e-3))


def test_the_hypervolume_after_each_evaluation() -> None:
    random, fp32 = np.random.default_rng(3), make_evaluation(10.0, 1e-7, number=0)
    plans = [make_evaluation(random.uniform(4, 12), 10 ** random.uniform(-6, -1), number=n) for n in range(1, 60)]
    evaluations = [fp32, *plans]
    evaluations[20] = replace(evaluations[20], error=make_error(math.nan))
    volumes = hypervolumes(evaluations, fp32, 3e-2)
    for count in (1, 2, 20, 21, 60):
        assert volumes[count - 1] == pytest.approx(hypervolume(evaluations[:count], fp32, 3e-2), abs=1e-12)
    assert list(volumes) == sorted(volumes)
    confirmed = [replace(e, held_out=make_error(1e-2)) for e in evaluations]
    assert hypervolumes(confirmed, fp32, 3e-2) == volumes, "few plans have held-out errors"
    assert hypervolumes(evaluations, make_evaluation(10.0, 0.5), 3e-2) == (0.0,) * 60, "past the reference"
