"""Sets of rows: pairs by overlap, class and distance, whatever the order; rows without a partner count."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from mptune.data.metrics.accuracy import OutputError, Reference, compare_outputs
from mptune.data.metrics.row_sets import find_row_sets
from mptune.graph.facts import DependentOutput

NMS = ("nms",)
Sample = dict[str, np.ndarray]
Dependent = tuple[DependentOutput, ...]


def detections(count: int, seed: int = 0, classes: int = 3) -> Sample:
    """Boxes that do not overlap much, scores that fall, labels."""
    random = np.random.default_rng(seed)
    cells = random.permutation(400)[:count]
    centres = np.stack([cells % 20, cells // 20], axis=1) * 30.0 + random.uniform(0, 10, (count, 2))
    half = random.uniform(6, 15, (count, 2))
    return {
        "boxes": np.concatenate([centres - half, centres + half], axis=1).astype(np.float32),
        "scores": np.sort(random.uniform(0.3, 0.99, count))[::-1].astype(np.float32),
        "labels": random.integers(0, classes, count),
    }


def outputs(axis: int, *names: str) -> Dependent:
    return tuple(DependentOutput(name, axis, NMS) for name in names)


DETECTED = outputs(0, "boxes", "scores", "labels")


def error(got: Sample, wanted: Sample, dependent: Dependent = DETECTED, *more: Sample) -> OutputError:
    """Of one sample; ``more`` samples are equal to the reference."""
    reference = [wanted, *more]
    return compare_outputs([got, *more], Reference(reference), None, find_row_sets(dependent, reference))


def statistic(of: OutputError, output: str, name: str) -> float:
    return of.summary()[output][name]


def pairing(of: OutputError, output: str) -> tuple[float, float]:
    """How many rows have no partner, and the error of those that have."""
    return statistic(of, output, "unmatched_rows"), statistic(of, output, "matched_relative_l2")


def reordered(sample: Sample, order: np.ndarray) -> Sample:
    return {name: array[order] for name, array in sample.items()}


def test_small_shifts_are_their_own_size_whatever_the_order() -> None:
    wanted = detections(50)
    moved = {**wanted, "boxes": wanted["boxes"] + 0.1, "scores": wanted["scores"] * 0.999}
    found = error(reordered(moved, np.arange(50)[::-1]), wanted)
    straight = compare_outputs([moved], Reference([wanted]))
    for output, name in itertools.product(wanted, ("relative_l2", "max_abs")):
        assert statistic(found, output, name) == pytest.approx(statistic(straight, output, name))


def test_a_lost_row_counts_by_its_score_and_moves_no_other() -> None:
    wanted = detections(100)
    got = reordered(wanted, np.delete(np.arange(100), 40))
    found = error(got, wanted)
    assert pairing(found, "boxes") == (1, 0)
    scores = wanted["scores"].astype(float)
    assert statistic(found, "scores", "relative_l2") == pytest.approx(scores[40] / np.linalg.norm(scores), rel=1e-6)
    assert statistic(found, "boxes", "relative_l2") < 0.2
    low = error(reordered(wanted, np.delete(np.arange(100), 99)), wanted)
    assert statistic(low, "labels", "relative_l2") < statistic(found, "labels", "relative_l2"), "a lower score"
    added = error(wanted, got)
    assert added.unmatched_rows == found.unmatched_rows == 3, "of each output one"
    assert statistic(added, "scores", "max_abs") == pytest.approx(statistic(found, "scores", "max_abs"))


@pytest.mark.parametrize(("output", "change"), [("labels", 1), ("boxes", 500)])
def test_another_class_or_place_is_another_box(output: str, change: int) -> None:
    wanted = detections(40)
    got = {**wanted, output: wanted[output].copy()}
    got[output][5] += change
    assert pairing(error(got, wanted), "boxes") == (2, 0)


@pytest.mark.parametrize("shape", ["none", "lost all", "first one"])
def test_no_detections_in_a_sample(shape: str) -> None:
    several, none = detections(5, seed=2), {n: a[:0] for n, a in detections(5).items()}
    wanted, got = {"none": (none, none), "lost all": (several, none), "first one": (none, several)}[shape]
    found = error(got, wanted, DETECTED, detections(20, seed=3))
    for statistics in found.per_output.values():
        first = statistics["relative_l2"][0], statistics["unmatched_rows"][0]
        assert first == ((0.0, 0) if shape == "none" else (1.0, 5))
    assert math.isfinite(found.value("relative_l2"))
    assert found.non_finite == 0


def test_nan_stays_nan_and_boxes_without_an_area_find_themselves() -> None:
    wanted = detections(30)
    got = {**wanted, "boxes": wanted["boxes"].copy()}
    got["boxes"][3] = np.nan
    found = error(got, wanted)
    assert found.non_finite == 4
    assert math.isnan(found.value("relative_l2"))
    wanted["boxes"][4, 2:] = wanted["boxes"][4, :2]
    assert error(reordered(wanted, np.arange(30)[::-1]), wanted).unmatched_rows == 0


def test_rows_in_one_output_with_image_class_and_score() -> None:
    """(image, x1, y1, x2, y2, class, score): the same boxes of another image are other boxes."""
    boxes = detections(25, seed=4)
    columns = [np.column_stack([np.full(25, k), boxes["boxes"], boxes["labels"], boxes["scores"]]) for k in range(2)]
    wanted = {"rows": np.concatenate(columns).astype(np.float32)}
    dependent = outputs(0, "rows")
    assert error({"rows": wanted["rows"][::-1]}, wanted, dependent).value("relative_l2") == 0
    assert pairing(error({"rows": np.delete(wanted["rows"], 3, axis=0)}, wanted, dependent), "rows") == (1, 0)
    (rows,) = find_row_sets(dependent, [wanted])
    assert (rows.keys, rows.score) == ((0, 1, 6), 7), "behind the column with the set"


def test_rows_beside_a_batch_axis_stay_in_their_image() -> None:
    wanted = {"boxes": np.stack([detections(12, seed=k)["boxes"] for k in (5, 6)])}
    dependent = outputs(1, "boxes")
    assert error({"boxes": wanted["boxes"][:, ::-1]}, wanted, dependent).value("relative_l2") == 0
    assert error({"boxes": wanted["boxes"][::-1]}, wanted, dependent).value("relative_l2") > 0.5
    assert error({"boxes": wanted["boxes"][:, 1:]}, wanted, dependent).unmatched_rows == 2


def test_selected_positions_pair_by_position() -> None:
    random = np.random.default_rng(8)
    where = np.stack(np.nonzero(random.random((20, 20)) > 0.7))
    wanted = {"where": where, "features": random.normal(size=(where.shape[1], 5)).astype(np.float32)}
    dependent = (DependentOutput("where", 1, ("nz",), (), True), DependentOutput("features", 0, ("nz",)))
    less = {"where": where[:, 1:], "features": wanted["features"][1:]}
    found = error(less, wanted, dependent)
    assert pairing(found, "features") == pairing(found, "where") == (1, 0)


def test_box_indices_alone_pair_by_equality() -> None:
    rows = np.array([[0, 1, 7], [0, 0, 3], [1, 2, 9]])
    dependent = (DependentOutput("selected", 0, NMS, (2,)),)
    assert error({"selected": rows[::-1]}, {"selected": rows}, dependent).value("relative_l2") == 0
    other = np.array([[0, 1, 7], [0, 0, 4], [1, 2, 9]])
    assert error({"selected": other}, {"selected": rows}, dependent).unmatched_rows == 2


def test_rows_without_boxes_pair_by_the_nearest() -> None:
    rows, noise = np.random.default_rng(9).normal(size=(2, 300, 6)).astype(np.float32)
    got = {"y": np.delete(rows + 1e-3 * noise, [10, 200], axis=0)[::-1]}
    assert pairing(error(got, {"y": rows}, outputs(0, "y")), "y") == (2, pytest.approx(1e-3, rel=0.1))


def test_scores_that_are_all_one_are_no_class() -> None:
    wanted, got = ({"rows": np.insert(detections(6)["boxes"], 4, score, axis=1)} for score in (1.0, 0.9995))
    assert error(got, wanted, outputs(0, "rows")).unmatched_rows == 0


def test_what_topk_selects_is_paired_alike_and_other_candidates_are_left_out() -> None:
    selected = tuple(DependentOutput(name, 0, ("topk",), is_selection=True) for name in detections(1))
    wanted = detections(40)
    got = reordered({**wanted, "scores": wanted["scores"] * np.float32(1.001)}, np.roll(np.arange(40), 1))
    got["labels"][3] += 7
    for foreign, rows in ((1, slice(0)), (2, slice(7, 8)), (25, slice(0, 25))):
        got["boxes"][rows] += 100
        found = error(got, wanted, selected)
        assert found.value("foreign_rows") == foreign / 40
        assert (found.value("worst_part") < 0.01) == (foreign < 20), "more are no other candidates: the plan is wrong"
    got["boxes"][0] = np.nan
    assert error(got, wanted, selected).non_finite == 4


def test_outputs_selected_apart_and_those_that_part_in_a_plan_are_paired_alone() -> None:
    wanted = {"a": np.arange(4.0), "b": np.arange(6.0)}
    dependent = (DependentOutput("a", 0, ("one",)), DependentOutput("b", 0, ("two",)))
    assert len(find_row_sets(dependent, [wanted])) == 2
    found = error({**wanted, "a": np.arange(3.0)}, wanted, dependent)
    assert [pairing(found, name) for name in "ab"] == [(1, 0), (0, 0)]
    together = detections(10)
    parted = error({**together, "scores": together["scores"][:9]}, together)
    assert [pairing(parted, name) for name in ("scores", "boxes")] == [(1, 0), (0, 0)]
