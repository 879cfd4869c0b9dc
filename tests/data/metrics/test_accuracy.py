"""The statistics, against plain formulas and at every edge, and what few samples say of an error."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mptune.data.metrics.accuracy import RELATIVE_FLOOR, OutputError, Reference, compare_outputs, error_interval
from mptune.errors import DataError, SettingsError


def one(output, reference) -> dict[str, float]:
    error = compare_outputs([{"y": np.asarray(output)}], Reference([{"y": np.asarray(reference)}]))
    return {name: values[0] for name, values in error.per_output["y"].items()}


def test_against_plain_formulas() -> None:
    generator = np.random.default_rng(0)
    r = (1e-2 * generator.standard_normal((3, 17, 5))).astype(np.float32)
    y = (r + 1e-3 * generator.standard_normal(r.shape)).astype(np.float32)
    r64, y64 = r.astype(np.float64).ravel(), y.astype(np.float64).ravel()
    d = np.abs(y64 - r64)
    relative = np.linalg.norm(d) / np.linalg.norm(r64)
    wanted = {
        "worst_part": np.sqrt((d**2).mean()) / r64.std(),
        "relative_l2": relative,
        "max_abs": d.max(),
        "mean_abs": d.mean(),
        "median_abs": np.median(d),
        "p99_abs": sorted(d)[d.size - 1 - int(0.01 * d.size)],
        "max_rel": pytest.approx((d / np.maximum(np.abs(r64), RELATIVE_FLOOR)).max(), rel=1e-6),
        "sqnr_db": -20 * math.log10(relative),
        "non_finite": 0,
    }
    assert one(y, r) == {name: value if name == "max_rel" else pytest.approx(value) for name, value in wanted.items()}


@pytest.mark.parametrize("values", [[1.0, -2.0], [0.0, 0.0], np.zeros(0), np.zeros((3, 0, 2))])
def test_equal_and_empty_outputs_have_no_error(values) -> None:
    got = one(values, values)
    assert got.pop("sqnr_db") == math.inf
    assert set(got.values()) == {0.0}
    only = one([1.0, 0.0], [0.0, 0.0])
    assert (only["relative_l2"], only["sqnr_db"], only["max_abs"]) == (math.inf, -math.inf, 1.0)


@pytest.mark.parametrize(
    ("output", "reference", "largest"),
    [
        (np.float32(3.0), np.float32(2.0), 1.0),
        (np.array([1, 5]), np.array([1, 2]), 3.0),
        (np.array([True, False]), np.array([True, True]), 1.0),
        (np.array([0], np.uint8), np.array([255], np.uint8), 255.0),
        (np.array([60000], np.float16), np.array([-60000.0], np.float32), 120000.0),
        (np.float32([3e38, 1.0]), np.float32([-3e38, 1.0]), pytest.approx(6e38)),  # more than float32 holds
        (np.float32([1e-30, 1.0]), np.float32([3e-30, 1.0]), pytest.approx(2e-30)),
    ],
)
def test_any_type_of_number_is_widened_before_it_is_subtracted(output, reference, largest: float) -> None:
    got = one(output, reference)
    assert (got["max_abs"], got["non_finite"]) == (largest, 0)


def test_values_that_are_not_finite() -> None:
    """Those of the candidate count; elements at which the reference has one are left out."""
    got = one([np.inf, np.nan, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0])
    assert got["non_finite"] == 2
    assert all(math.isnan(got[name]) for name in ("relative_l2", "max_abs", "sqnr_db"))
    got = one([-np.inf, 1.0], [1.0, 1.0])
    assert got["non_finite"] == 1
    assert got["relative_l2"] == got["max_abs"] == got["max_rel"] == math.inf == -got["sqnr_db"]
    got = one([np.nan, 5.0, 1.0], [np.nan, -np.inf, 2.0])
    assert (got["non_finite"], got["max_abs"], got["relative_l2"]) == (0, 1.0, 0.5)


@given(st.lists(st.tuples(*[st.floats(-(2.0**100), 2.0**100, width=32)] * 2), min_size=1, max_size=20))
def test_bounds_that_always_hold(pairs) -> None:
    got = one(*np.array(pairs, np.float32).T)
    assert not any(math.isnan(v) for v in got.values())
    assert 0 <= got["median_abs"] <= got["p99_abs"] <= got["max_abs"]
    assert got["mean_abs"] <= got["max_abs"] * (1 + 1e-12)


def test_the_objective_alone_is_what_it_is_among_all_statistics() -> None:
    generator = np.random.default_rng(2)
    y, z = generator.standard_normal((3, 1, 50, 3)) * [1.0, 9.0, 90.0], generator.standard_normal((3, 1, 9))
    samples = [{"y": y[k], "z": z[k]} for k in range(3)]
    samples[1]["z"][0, 4] = np.nan
    outputs = [{name: array * (1 + 1e-3) for name, array in sample.items()} for sample in samples]
    outputs[2]["z"][0, 0] = np.inf
    reference = Reference(samples)
    whole, objective = (compare_outputs(outputs, reference, objective_only=only) for only in (False, True))
    assert [*objective.per_output["y"]] == ["relative_l2", "non_finite", *(f"worst_part[{k}]" for k in range(3))]
    assert not objective.columns
    assert objective.non_finite == whole.non_finite == 1
    for output, statistics in objective.per_output.items():
        for statistic, values in statistics.items():
            assert values == pytest.approx(whole.per_output[output][statistic], rel=1e-12, nan_ok=True)
    last = compare_outputs(outputs[2:], reference, start=2, objective_only=True)
    assert last.per_output["y"]["worst_part[1]"] == objective.per_output["y"]["worst_part[1]"][2:]
    assert repr(compare_outputs(outputs, Reference(samples), threads=2)) == repr(whole)


def test_what_cannot_be_compared() -> None:
    number, text = {"y": np.zeros(1)}, {"y": np.array(["a"])}
    with pytest.raises(DataError, match="sample 0 has no output 'y'") as caught:
        compare_outputs([{"z": np.zeros(1)}], Reference([number]))
    assert "'z'" in caught.value.hint
    with pytest.raises(DataError, match="'y' has type <U1"):
        compare_outputs([text], Reference([text]))


def test_the_mean_over_samples_then_the_largest_over_outputs() -> None:
    exact = {"a": np.array([1.0, 1.0]), "b": np.array([2.0])}
    outputs = [exact | {"a": np.array([1.0, 2.0])}, exact | {"b": np.array([8.0])}, exact | {"unknown": np.zeros(1)}]
    error = compare_outputs(outputs, Reference([exact] * 3))
    by_output = {name: statistics["max_abs"] for name, statistics in error.per_output.items()}
    assert by_output == {"a": (1.0, 0.0, 0.0), "b": (0.0, 6.0, 0.0)}
    assert (error.value("max_abs"), error.summary()["a"]["max_abs"]) == (2.0, pytest.approx(1 / 3))
    with pytest.raises(SettingsError, match="unknown metric 'relative_l1'") as caught:
        error.value("relative_l1")
    assert "relative_l2" in caught.value.hint


def test_counts_add_up_and_json_holds_numbers_that_are_not_finite() -> None:
    exact = {"a:0": np.ones(2), "b": np.ones(2)}
    outputs = [{"a:0": np.array([1, np.nan]), "b": np.array([np.inf, np.inf])}, exact]
    error = compare_outputs(outputs, Reference([exact] * 2))
    text = json.dumps(error.to_json(), allow_nan=False)
    for each in (error, OutputError.from_json(json.loads(text))):
        assert json.dumps(each.to_json()) == text
        assert (each.non_finite, each.value("non_finite")) == (3, 2.0)
        assert math.isnan(each.value("relative_l2"))
        assert each.summary()["b"]["relative_l2"] == math.inf


def test_metrics_of_single_samples_stand_under_all_outputs() -> None:
    samples = [{"y": np.array([1.0])}, {"y": np.array([3.0])}]
    got = compare_outputs(samples, Reference(samples), {"mine": lambda mine, its: (mine["y"] + its["y"])[0]})
    assert got.per_output["*"] == {"mine": (2.0, 6.0)}
    assert (got.value("mine"), got.value("relative_l2")) == (4.0, 0.0)


@pytest.mark.parametrize("function", [lambda o, r: 1 / 0, lambda o, r: None, lambda o: 1.0, lambda o, r: "x"])
def test_a_metric_that_fails_is_named(function) -> None:
    with pytest.raises(DataError, match="metric mine failed on sample 0") as caught:
        compare_outputs([{"y": np.zeros(1)}], Reference([{"y": np.zeros(1)}]), {"mine": function})
    assert "function(outputs, reference)" in caught.value.hint


OWN = "metric.py:loss"


def error_of(*outputs: list[float] | np.ndarray, metric: str = "relative_l2") -> OutputError:
    return OutputError({f"y{k}": {metric: tuple(map(float, values))} for k, values in enumerate(outputs)})


def test_the_interval_of_a_mean_is_students_and_the_worst_output_counts_in_each_resample() -> None:
    half = 3.182446 * math.sqrt(5.0 / 3.0 / 4.0)
    expected = pytest.approx((2.5 - half, 2.5 + half), rel=1e-6)
    assert error_interval(error_of([1.0, 2.0, 3.0, 4.0], metric=OWN), OWN) == expected
    # Pseudo-values of the worst of 2 and 5 / 3 without each sample: 2.5, 2.5 and 2.
    half = 4.302653 * math.sqrt(2 * (2.5 - 7 / 3) ** 2 + (2 - 7 / 3) ** 2) * 2 / math.sqrt(2 * 3)
    worst = error_of([1.0, 1.0, 4.0], [2.0, 2.0, 1.0], metric=OWN)
    assert error_interval(worst, OWN) == pytest.approx((2 - half, 2 + half), rel=1e-6)


def test_intervals_of_errors_hold_the_true_mean() -> None:
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(1000):
        values = np.exp(generator.normal(math.log(1e-3), 0.3, 12))
        low, high = error_interval(error_of(values), "relative_l2") or (math.inf, 0.0)
        held += low <= 1e-3 * math.exp(0.3**2 / 2) <= high
    assert 0.93 <= held / 1000 <= 0.97


def test_what_has_no_interval() -> None:
    for values in ([1e-3], [1e-3, math.inf]):
        assert error_interval(error_of(values), "relative_l2") is None
    assert error_interval(error_of([0.3] * 8, metric=OWN), OWN) is None, "one value stands for all samples"
