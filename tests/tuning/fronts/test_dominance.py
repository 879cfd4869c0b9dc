"""Who is dominated where latency and error are known to intervals only; the same plan twice is never ranked."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.timing.spread import SessionSpread
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.front import pareto
from mptune.tuning.fronts.dominance import faster_beyond_noise, in_doubt
from tests.engines.timing.test_spread import Machine
from tests.tuning.factory import make_evaluation


def with_errors(evaluation: Evaluation, errors: list[float] | np.ndarray) -> Evaluation:
    count = len(errors)
    values = {"relative_l2": tuple(map(float, errors)), "non_finite": (0.0,) * count}
    return replace(evaluation, error=OutputError({"y": values}))


def test_a_faster_plan_displaces_one_that_is_not_significantly_more_exact() -> None:
    slow = with_errors(make_evaluation(5.0, 1.0, width=0.1, number=1), [1.0e-3, 2.0e-3, 1.5e-3, 1.1e-3])
    fast = with_errors(make_evaluation(4.0, 1.0, width=0.1, number=2), [1.6e-3, 1.2e-3, 1.1e-3, 1.9e-3])
    assert slow.error_value < fast.error_value
    assert pareto([slow, fast]) == (fast,)


def test_a_more_exact_plan_displaces_one_that_is_not_significantly_faster() -> None:
    exact = with_errors(make_evaluation(5.0, 1.0, width=0.1, number=1), [1.0e-3, 1.1e-3, 1.2e-3, 1.1e-3])
    other = with_errors(make_evaluation(4.9, 1.0, width=0.1, number=2), [2.0e-3, 2.3e-3, 2.2e-3, 2.2e-3])
    assert pareto([other, exact]) == (exact,)


def test_a_plan_that_breaks_one_sample_displaces_none_that_does_not() -> None:
    """The broken sample makes the error so uncertain that no difference from it is significant."""
    sound = with_errors(make_evaluation(5.0, 1.0, width=0.1, number=1), [1.0e-4] * 64)
    breaks = with_errors(make_evaluation(4.0, 1.0, width=0.1, number=2), [1.0e-4] * 63 + [1.0])
    assert pareto([sound, breaks]) == (breaks, sound)
    fp32 = with_errors(make_evaluation(6.0, 1.0, width=0.1, number=0), [0.0] * 64)
    once = with_errors(make_evaluation(4.0, 1.0, width=0.1, number=2), [0.0] * 63 + [1e-2])
    assert pareto([fp32, once]) == (once, fp32)


def test_both_stay_where_each_is_significantly_better_in_one() -> None:
    exact = with_errors(make_evaluation(5.0, 1.0, width=0.1, number=1), [1.0e-3, 1.1e-3, 1.2e-3, 1.1e-3])
    fast = with_errors(make_evaluation(4.0, 1.0, width=0.1, number=2), [2.0e-3, 2.3e-3, 2.2e-3, 2.2e-3])
    assert pareto([exact, fast]) == (fast, exact)


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


def test_a_thousand_plans_are_judged_together() -> None:
    generator = np.random.default_rng(0)
    plans = []
    for number, ms in enumerate(generator.uniform(1.0, 10.0, 1000)):
        samples = 1e-3 / ms * np.exp(generator.normal(0.0, 0.1, 64))
        plans.append(with_errors(make_evaluation(ms, 1.0, width=0.01, number=number), samples))
    front = pareto(plans)
    assert 2 <= len(front) < 1000
    assert pareto(front) == front


def test_places_are_in_doubt_where_intervals_overlap_and_something_hangs_on_it() -> None:
    apart, one, other = (make_evaluation(ms, e, width=0.1, number=n) for n, (ms, e) in enumerate(DOUBTFUL))
    behind = [make_evaluation(ms, 1e-2, width=0.1, number=n) for n, ms in ((8, 5.0), (9, 5.05))]
    assert in_doubt([apart, one, other, *behind]) == (one, other), "those behind are dominated, whichever is faster"
    assert in_doubt([apart, one]) == ()
    assert in_doubt([apart, one], max_latency_ms=2.05) == (one,)
    assert in_doubt([apart, one], max_latency_ms=2.5) == ()
    same = make_evaluation(2.0, 1e-3, number=5)
    assert in_doubt([same, make_evaluation(2.1, 1e-4, number=6)]) == (), "predicted latencies have no width"


DOUBTFUL = ((1.0, 1e-2), (2.0, 1e-3), (2.15, 1e-4))
