"""Under tolerances the sampler judges errors by what they are of their limits, for whole plans and groups alone."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import mptune
from mptune.data.metrics.accuracy import OutputError, Reference, compare_outputs
from mptune.finding import OutputColumns
from mptune.settings import SearchSettings, Tolerance
from mptune.tuning.dominance import REFERENCE_ERROR
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.knowledge import Sensitivity, make_prior
from mptune.tuning.plan_limits import excess, part_errors, searched_as, searched_error, stored, suffices
from tests.graph.models import constant, model, node, value
from tests.tuning.conftest import make_small_space
from tests.tuning.factory import make_evaluation

COLUMNS = np.array([200.0, 200.0, 200.0, 200.0, 1.0])


def outputs(noise: np.ndarray, samples: int = 6, of: slice = slice(None)) -> OutputError:
    """``boxes`` [1, 8, 5], of which the last column is a score, and ``mask`` [1, 8], with noise on both."""
    rng = np.random.default_rng(0)
    exact = [
        {"boxes": rng.standard_normal((1, 8, 5)) * COLUMNS, "mask": rng.standard_normal((1, 8))} for _ in range(samples)
    ]
    half = [
        {"boxes": one["boxes"] + rng.standard_normal((1, 8, 5)) * noise[:5], "mask": one["mask"] + noise[5]}
        for one in exact
    ]
    start = of.start or 0
    return compare_outputs(half[of], Reference(exact), start=start)


NOISE = np.array([0.2, 0.2, 0.2, 0.2, 0.01, 1e-4])


def limited(*texts: str) -> SearchSettings:
    return SearchSettings(tolerance=tuple(map(Tolerance.parse, texts)))


def make_evaluation_of(error: OutputError, metric: str = "worst_part") -> Evaluation:
    return replace(make_evaluation(1.0, 1e-3), error=error, metric=metric)


TEXTS = ["boxes=0.05", "boxes=abs:2", "boxes[4]=0.05", "boxes[4]=abs:0.1", "boxes[0:4]=abs:2", "mask=abs:0.001"]


@pytest.mark.parametrize("metric", ["worst_part", "relative_l2"])
@pytest.mark.parametrize("text", TEXTS)
def test_at_a_limit_the_error_is_that_past_which_a_plan_is_worth_nothing(text: str, metric: str) -> None:
    error, settings = outputs(NOISE), limited(text)
    ratio = excess(make_evaluation_of(error, metric), Tolerance.parse(text))
    parts = part_errors(error, metric, settings)
    assert max(v for part, v in parts.items() if part.startswith(text)) == pytest.approx(ratio * REFERENCE_ERROR)
    first, second = (
        stored(outputs(NOISE, 6, rows), metric, settings) for rows in (slice(0, 3), slice(3, 6))
    )  # columns and statistics of parts of the samples add up
    both = OutputError.from_json(json.loads(json.dumps(first.with_samples_of(second).to_json())))
    assert suffices(both, metric, settings)
    assert searched_error(both, metric, settings) == pytest.approx(searched_error(error, metric, settings), rel=2e-3)


def test_what_no_tolerance_is_about_stays_as_it_is() -> None:
    error = outputs(NOISE)
    mask = error.by_part("worst_part")[OutputColumns("mask", None)]
    assert searched_error(error, "worst_part", limited("boxes=1e6")) == pytest.approx(mask)
    assert searched_error(error, "worst_part", SearchSettings(max_error=1e-9)) == error.value("worst_part")
    assert searched_error(outputs(NOISE * math.nan), "worst_part", limited("boxes=1")) == math.inf
    ignoring = SearchSettings(ignore=("boxes",))
    assert searched_error(error, "worst_part", ignoring) == pytest.approx(mask)


def test_a_statistic_that_sees_all_outputs_at_once_is_one_part() -> None:
    error = OutputError({"*": {"mine.py:f": (1.0, 3.0)}, "y": {"non_finite": (0.0, 0.0)}})
    assert part_errors(error, "mine.py:f", SearchSettings()) == {"mine.py:f": 2.0}


def test_what_the_file_lacks_is_taken_again() -> None:
    error = outputs(NOISE)
    plain = stored(error, "worst_part", limited())
    assert suffices(plain, "worst_part", limited("boxes=0.1", "boxes=abs:1"))
    assert not plain.columns, "which may be a thousand of each output"
    columns = limited("boxes[4]=abs:0.1")
    assert not suffices(plain, "worst_part", columns)
    assert suffices(stored(error, "worst_part", columns), "worst_part", columns)
    assert len({searched_as("worst_part", limited(text)) for text in ("boxes=0.1", "boxes=0.2", "boxes=abs:0.1")}) == 3


def test_the_sampler_sees_each_group_against_the_limits() -> None:
    space = make_small_space(2)
    boxes, mask = outputs(NOISE * [1, 1, 1, 1, 1, 0]), outputs(NOISE * [0, 0, 0, 0, 0, 1])
    first, second = space.free
    settings = limited("boxes[4]=abs:0.001", "boxes[0:4]=0.5")
    known = Sensitivity("worst_part", dict.fromkeys(space.free, 9.0), {first: boxes, second: mask})
    prior = make_prior(space, known, None, exact=True, settings=settings)
    assert prior.log_square_errors is not None
    ratio = max(excess(make_evaluation_of(boxes), limit) for limit in settings.tolerance)
    assert math.exp(prior.log_square_errors[0] / 2) == pytest.approx(ratio * REFERENCE_ERROR)
    assert math.exp(prior.log_square_errors[1] / 2) == pytest.approx(mask.value("worst_part"))
    assert prior.part_shares is not None


BLOCKS, WIDTH, ROWS = 8, 128, 32


def two_branches() -> onnx.ModelProto:
    """``a`` is exact in FP16, and ``b`` is 6 % off, which its user allows."""
    rng = np.random.default_rng(0)
    nodes, constants, terms, x = [], [constant("scale", 150.0)], [], "x"

    def weight(name: str) -> str:
        constants.append(constant(name, rng.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)))
        return name

    for k in range(BLOCKS):
        y = f"a{k}" if k < BLOCKS - 1 else "a"
        nodes += [node("MatMul", [x, weight(f"wa{k}")], f"a{k}m", f"a{k}.fc"), node("Tanh", [f"a{k}m"], y, f"a{k}.act")]
        x = y
    for k in range(BLOCKS):
        nodes.append(node("MatMul", ["x", weight(f"wb{k}")], f"b{k}m", f"b{k}.fc"))
        nodes.append(node("Mul", [f"b{k}m", "scale"], f"b{k}s", f"b{k}.scale"))
        nodes.append(node("Sin", [f"b{k}s"], f"b{k}n", f"b{k}.sin"))
        terms.append(f"b{k}n")
    nodes.append(node("Sum", terms, "b", "b.sum"))
    shape = [1, ROWS, WIDTH]
    return model(nodes, [value("x", shape)], [value("a", shape), value("b", shape)], constants)


@pytest.mark.slow
def test_a_search_finds_plans_within_tolerances_that_lie_past_what_is_worth_anything_without(tmp_path: Path) -> None:
    onnx.save(two_branches(), tmp_path / "model.onnx")
    data = {"x": np.random.default_rng(1).standard_normal((12, ROWS, WIDTH)).astype(np.float32)}
    tolerance = ["b=abs:12", "a=6e-4"]
    given = {"data": data, "budget": 14, "target": "jetson-orin-nano-8gb", "out": tmp_path / "run"}
    front = mptune.search(tmp_path / "model.onnx", tolerance=tolerance, **given)  # type: ignore[arg-type]
    assert front.limits_met
    assert front.chosen is not None
    errors = front.chosen.counted.by_part("worst_part")
    assert errors[OutputColumns("b", None)] > REFERENCE_ERROR
    assert 0 < errors[OutputColumns("a", None)] <= 6e-4, "some of a is in FP16, too"
    assert len(front.chosen.plan.fp16_groups) > BLOCKS, "all of b, and some of a"
