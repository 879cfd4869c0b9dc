"""Task metrics over a whole set: built-in ones against values worked out by hand, and what surrounds them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mptune.data.metrics.accuracy import ALL_OUTPUTS, OutputError, error_interval
from mptune.data.metrics.table import METRICS, is_own, number_of, own_value, sample_functions, script_of
from mptune.data.metrics.whole_set import (
    SampleSetArrays,
    endpoint_error,
    intersection_over_union,
    mean_average_precision,
    mean_iou,
    set_values,
    together,
    top1_accuracy,
    top5_accuracy,
)
from mptune.data.scripts import law_metric, resolve_metric
from mptune.errors import DataError, SettingsError


def scores(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("shape", "axis"), [((6, 7), 1), ((6, 7, 5), 1), ((6, 5, 7), 2), ((6, 7, 4, 5), 1), ((6, 4, 5, 7), 3)]
)
def test_accuracy_on_any_axis(shape: tuple[int, ...], axis: int) -> None:
    output = scores(shape)
    labels = output.argmax(axis=axis)
    assert top1_accuracy({"y": output}, {"y": output}, {}, {"label": labels}) == 1.0
    wrong = labels.copy().reshape(-1)
    wrong[: len(wrong) // 2] = (wrong[: len(wrong) // 2] + 1) % 7
    share = 1 - (len(wrong) // 2) / len(wrong)
    accuracy = top1_accuracy({"y": output}, {"y": output}, {}, {"label": wrong.reshape(labels.shape)})
    assert accuracy == pytest.approx(share)
    order = np.argsort(-output, axis=axis)
    fifth, sixth = np.take(order, 4, axis=axis), np.take(order, 5, axis=axis)
    assert top5_accuracy({"y": output}, {"y": output}, {}, {"label": fifth}) == 1.0
    assert top5_accuracy({"y": output}, {"y": output}, {}, {"label": sixth}) == 0.0


def test_without_labels_the_references_classes_count_and_nan_is_a_miss() -> None:
    reference, output = scores((4, 3)), scores((4, 3)).copy()
    output[0, 1] = np.nan
    assert top1_accuracy({"y": output}, {"y": reference}, {}, {}) == 0.75


def test_labels_that_fit_nothing_are_refused_by_shape() -> None:
    with pytest.raises(DataError, match=r"labels of shape \(4, 2\) do not fit output 'y'"):
        top1_accuracy({"y": scores((4, 3))}, {"y": scores((4, 3))}, {}, {"label": np.zeros((4, 2), int)})
    with pytest.raises(DataError, match="label of 'y', 3, is no class of 3"):
        top1_accuracy({"y": scores((4, 3))}, {"y": scores((4, 3))}, {}, {"label": np.full(4, 3)})


def test_mean_iou_by_hand() -> None:
    wanted = np.array([[[0, 0], [1, 1]]])
    got = np.array([[[0, 1], [1, 1]]])
    assert mean_iou({"y": got}, {"y": wanted}, {}, {"y": wanted}) == pytest.approx((1 / 2 + 2 / 3) / 2)
    logits = np.moveaxis(np.eye(3, dtype=np.float32)[got], -1, 1)
    ignored = np.array([[[0, 255], [1, -1]]])
    assert mean_iou({"y": logits}, {"y": logits}, {}, {"y": ignored}) == 1.0


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_end_point_error_in_both_layouts(layout: str) -> None:
    flow = np.zeros((2, 2, 5, 6), np.float32)
    moved = flow + np.array([3.0, 4.0], np.float32)[None, :, None, None]
    if layout == "NHWC":
        flow, moved = np.moveaxis(flow, 1, -1), np.moveaxis(moved, 1, -1)
    assert endpoint_error({"f": moved}, {"f": flow}, {}, {}) == pytest.approx(5.0)
    assert endpoint_error({"f": moved}, {"f": flow}, {}, {"gt": moved}) == 0.0


BOXES = np.array([[[0, 0, 10, 10], [20, 20, 40, 40]], [[5, 5, 15, 25], [0, 0, 1, 1]]], np.float32)
TRUTH = {"boxes": BOXES, "classes": np.array([[0, 1], [1, -1]])}


def detections(shift: float = 0.0) -> dict[str, np.ndarray]:
    return {
        "boxes": BOXES + np.float32(shift),
        "scores": np.array([[0.9, 0.8], [0.7, 0.1]], np.float32),
        "classes": np.array([[0, 1], [1, 0]], np.float32),
    }


def test_average_precision_by_hand() -> None:
    found = detections()
    assert intersection_over_union(BOXES[0], BOXES[0])[0].tolist() == [1.0, 0.0]
    # The false detection of class 0 comes after the hit, so it costs nothing at any recall.
    assert mean_average_precision(found, found, {}, TRUTH) == pytest.approx(1.0)
    first = {**found, "scores": np.array([[0.1, 0.8], [0.7, 0.9]], np.float32)}
    assert mean_average_precision(first, found, {}, TRUTH) == pytest.approx((0.5 + 1.0) / 2)
    # Shifted by 1 of 10 pixels: IoU 81/119, above four thresholds; 361/439 above seven; 171/229 above five.
    expected = (4 / 10 + np.mean([1.0] * 5 + [51 / 101] * 2 + [0.0] * 3)) / 2
    assert mean_average_precision(detections(1.0), found, {}, TRUTH) == pytest.approx(expected)
    by_class = {"boxes": BOXES, "scores": np.eye(2, dtype=np.float32)[np.array([[0, 1], [1, 1]])] * 0.9}
    assert mean_average_precision(by_class, by_class, {}, {}) == pytest.approx(1.0)


def test_images_may_have_other_numbers_of_boxes() -> None:
    lists = {name: [array[:1], array[1:, :1]] for name, array in detections().items()}
    assert mean_average_precision(lists, lists, {}, TRUTH) == pytest.approx(1.0)
    with pytest.raises(DataError, match="no boxes with classes or scores"):
        mean_average_precision({"y": scores((2, 3))}, {"y": scores((2, 3))}, {}, TRUTH)


def arrays_of(rows: int) -> SampleSetArrays:
    reference = [{"y": scores((1, 4), k)} for k in range(rows)]
    outputs = [{"y": sample["y"] + 0.7 * scores((1, 4), 100 + k)} for k, sample in enumerate(reference)]
    labels = [{"label": sample["y"].argmax(axis=1)} for sample in reference]
    return SampleSetArrays(outputs, reference, reference, labels)


@pytest.mark.parametrize("rows", [1, 2, 12, 29])
def test_pseudo_values_have_the_metric_as_their_mean_and_its_standard_error(rows: int) -> None:
    metric, data = METRICS["top1_accuracy"], arrays_of(rows)

    def call(part: SampleSetArrays) -> float:
        return metric.load()(*part.arguments())

    values = set_values(metric, data, call)
    assert len(values) == rows
    assert np.mean(values) == pytest.approx(call(data))
    error = OutputError({ALL_OUTPUTS: {"top1_accuracy": values}})
    if rows == 29:
        interval = error_interval(error, "top1_accuracy")
        assert interval is not None
        share = 1.0 - call(data)
        assert 0.4 < (interval[1] - interval[0]) / (4 * math.sqrt(share * (1 - share) / rows)) < 2.5


def test_samples_become_one_array_or_a_list() -> None:
    assert together([{"a": np.zeros((1, 3))}, {"a": np.ones((2, 3))}])["a"].shape == (3, 3)
    assert isinstance(together([{"a": np.zeros((1, 3))}, {"a": np.ones((1, 4))}])["a"], list)


def test_names_of_the_table_resolve() -> None:
    for name, row in METRICS.items():
        assert not is_own(name)
        if row.kind != "element":
            metric = resolve_metric(name, has_labels=True)
            assert (metric.name, callable(metric.load())) == (name, True)
            assert metric.kind == ("sample" if name == "top1_disagreement" else "set")
            assert metric.larger_is_better == (name not in ("endpoint_error", "top1_disagreement"))
            assert list(sample_functions(row)) == ([] if row.kind == "set" else [name])
    assert resolve_metric("endpoint_error").kind == "sample", "of single samples without labels"
    with pytest.raises(SettingsError, match="sqnr_db cannot be the objective") as caught:
        resolve_metric("sqnr_db")
    assert "relative_l2" in caught.value.hint


def test_names_of_scripts_resolve(tmp_path) -> None:
    script = tmp_path / "m.py"
    script.write_text(
        "def whole(outputs, references, inputs, labels): return 0.5\ndef each(outputs, reference): return 2.0\n"
    )
    whole, each = (resolve_metric(f"{script}:{name}:max") for name in ("whole", "each"))
    assert (whole.kind, whole.larger_is_better, each.kind) == ("set", True, "sample")
    extra = sample_functions(each)
    assert [extra[name]({}, {}) for name in (each.name, own_value(each.name))] == [0.0, 2.0]
    assert script_of(f"{script}:whole:max") == script, "it is refused as the script that it is"
    assert script_of("a.py:max") is not None
    assert law_metric("map") == law_metric(f"{script}:whole") == "relative_l2"
    assert law_metric(f"{script}:each") == f"{script}:each"


def test_a_metric_that_takes_for_ever_or_leaves_is_one_error(tmp_path) -> None:
    script = tmp_path / "m.py"
    script.write_text(
        "import sys, time\n\n\ndef sleeps(*arguments):\n    try:\n        time.sleep(30)\n"
        "    except Exception:\n        pass\n"
        "\n\ndef spins(*arguments):\n    while True:\n        pass\n\n\ndef leaves(*arguments):\n    sys.exit(0)\n"
    )
    for name, words in (("sleeps", "it ran longer than 0.5 s"), ("spins", "it ran longer"), ("leaves", "SystemExit")):
        metric = resolve_metric(f"{script}:{name}", timeout_s=0.5).load()
        with pytest.raises(DataError) as caught:
            number_of("m", metric, ({}, {}))
        assert words in caught.value.message
        assert name != "leaves" or f"{script}:" in caught.value.message
        assert "\n" not in caught.value.message


top1_disagreement = sample_functions(resolve_metric("top1_disagreement"))["top1_disagreement"]
of_sample = sample_functions(resolve_metric("endpoint_error"))["endpoint_error"]


@pytest.mark.parametrize(
    ("metric", "shape", "kind"),
    [(top1_disagreement, (3,), r"shape \(rows, classes\)"), (of_sample, (1, 3, 4, 4), r"shape \(N, 2, H, W\)")],
)
def test_no_output_of_the_metrics_kind(metric, shape: tuple[int, ...], kind: str) -> None:
    with pytest.raises(DataError, match=f"no output of {kind}") as caught:
        metric({}, {"y": np.ones(shape, np.float32)})
    assert caught.value.hint


def test_top1_disagreement_is_that_of_the_worst_output_of_its_kind() -> None:
    a = np.array([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]], np.float32)
    reference = {"a": a, "b": a, "features": np.ones((1, 2, 3), np.float32), "label": np.array([[1, 2]])}
    assert top1_disagreement({**reference, "b": np.concatenate([a[:1, ::-1], a[1:]])}, reference) == 0.25
    assert top1_disagreement({**reference, "b": a[:, ::-1]}, reference) == 1.0


def test_the_end_point_error_of_a_sample_leaves_out_invalid_pixels_of_the_reference_only() -> None:
    reference = np.zeros((1, 2, 1, 2), np.float32)
    reference[0, 1, 0, 0] = np.nan
    output = np.zeros_like(reference)
    output[0, 0, 0, 1] = 2
    assert of_sample({"flow": output}, {"flow": reference}) == 2.0
    assert math.isnan(of_sample({"flow": np.full_like(reference, np.nan)}, {"flow": reference}))
    with pytest.raises(DataError, match=r"'flow' has shape .*, its target") as caught:
        of_sample({"flow": np.ones((1, 2, 3, 3))}, {"flow": np.ones((1, 2, 4, 4), np.float32)})
    assert caught.value.hint
