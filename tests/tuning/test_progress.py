"""The hypervolume after each evaluation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from mptune.tuning.dominance import hypervolume, hypervolumes
from tests.tuning.factory import make_error, make_evaluation


def test_it_is_that_of_the_evaluations_so_far() -> None:
    random = np.random.default_rng(3)
    fp32 = make_evaluation(10.0, 1e-7, number=0)
    made = [fp32]
    for number in range(1, 60):
        made.append(make_evaluation(random.uniform(4, 12), 10 ** random.uniform(-6, -1), number=number))
    made[20] = replace(made[20], error=make_error(math.nan))
    found = hypervolumes(made, fp32, 3e-2)
    for count in (1, 2, 20, 21, 60):
        assert found[count - 1] == pytest.approx(hypervolume(made[:count], fp32, 3e-2), abs=1e-12)
    assert list(found) == sorted(found)
    assert 0 < found[-1] < 1


def test_held_out_errors_do_not_count_as_few_plans_have_them() -> None:
    fp32 = make_evaluation(10.0, 0.0, number=0)
    plan = make_evaluation(5.0, 1e-3, number=1)
    confirmed = replace(plan, held_out=make_error(1e-2))
    assert hypervolumes([fp32, confirmed], fp32, 3e-2) == hypervolumes([fp32, plan], fp32, 3e-2)


def test_a_baseline_past_the_reference_leaves_no_area() -> None:
    fp32 = make_evaluation(10.0, 0.5, number=0)
    assert hypervolumes([fp32, make_evaluation(5.0, 1e-3, number=1)], fp32, 3e-2) == (0.0, 0.0)
