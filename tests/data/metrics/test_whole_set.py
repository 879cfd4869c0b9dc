"""Task metrics over a whole set: built-in ones against values worked out by hand, and what surrounds them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from mptune.data.metrics import whole_set
from mptune.data.metrics.accuracy import ALL_OUTPUTS, OutputError, error_interval
from mptune.data.metrics.table import METRICS, number_of, own_value, sample_functions, script_of
from mptune.data.metrics.whole_set import set_values, together
from mptune.data.scripts import law_metric, resolve_metric
from mptune.errors import DataError, SettingsError

Arrays = Mapping[str, Any]

top1_accuracy, top5_accuracy, top1_disagreement, endpoint_error, average_precision, mean_iou = (
    METRICS[name].load()
    for name in ("top1_accuracy", "top5_accuracy", "top1_disagreement", "endpoint_error", "map", "miou")
)


def scores(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("shape", "axis"), [((6, 7), 1), ((6, 7, 5), 1), ((6, 5, 7), 2), ((6, 7, 4, 5), 1), ((6, 4, 5, 7), 3)]
)
def test_accuracy_on_any_axis(shape: tuple[int, ...], axis: int) -> None:
    output = scores(shape)
    labels, order = output.argmax(axis=axis), np.argsort(-output, axis=axis)
    half = np.arange(labels.size).reshape(labels.shape) < labels.size // 2
    for accuracy, label, wanted in (
        (top1_accuracy, labels, 1.0),
        (top1_accuracy, (labels + half) % 7, 1.0 - half.mean()),
        (top5_accuracy, np.take(order, 4, axis=axis), 1.0),
        (top5_accuracy, np.take(order, 5, axis=axis), 0.0),
    ):
        assert accuracy({"y": output}, {"y": output}, {}, {"label": label}) == pytest.approx(wanted)


def channels_last(array: np.ndarray) -> np.ndarray:
    return np.moveaxis(array, 1, -1)


def detections(shift: float = 0.0, scores: Any = ((0.9, 0.8), (0.7, 0.1))) -> dict[str, np.ndarray]:
    kinds = np.array([[0, 1], [1, 0]], np.float32)
    return {"boxes": BOXES + np.float32(shift), "scores": np.array(scores, np.float32), "classes": kinds}


Y, ONE_NAN = scores((4, 3)), scores((4, 3))
ONE_NAN[0, 1] = np.nan
KINDS = np.array([[[0, 1], [1, 1]]])
LOGITS = np.moveaxis(np.eye(3, dtype=np.float32)[KINDS], -1, 1)
ONE_PIXEL = np.array([[[[0.0, 0.0]], [[np.nan, 0.0]]]], np.float32)  # the other one is invalid
FLOW = np.zeros((2, 2, 5, 6), np.float32)
MOVED = FLOW + np.array([3.0, 4.0], np.float32)[:, None, None]
BOXES = np.array([[[0, 0, 10, 10], [20, 20, 40, 40]], [[5, 5, 15, 25], [0, 0, 1, 1]]], np.float32)
TRUTH = {"boxes": BOXES, "classes": np.array([[0, 1], [1, -1]])}
BY_CLASS = {"boxes": BOXES, "scores": np.eye(2, dtype=np.float32)[[[0, 1], [1, 1]]] * 0.9}
CENTRES = np.concatenate([(BOXES[..., :2] + BOXES[..., 2:]) / 2, BOXES[..., 2:] - BOXES[..., :2]], axis=-1)
CENTRED = {**detections(), "boxes": CENTRES}
# Images with other numbers of boxes.
LISTS = {name: [array[:1], array[1:, :1]] for name, array in detections().items()}


@pytest.mark.parametrize(
    ("metric", "outputs", "reference", "labels", "value"),
    [
        (top1_accuracy, {"y": ONE_NAN}, {"y": Y}, {}, 0.75),
        (mean_iou, {"y": KINDS}, {"y": KINDS}, {"y": np.array([[[0, 0], [1, 1]]])}, (1 / 2 + 2 / 3) / 2),
        (mean_iou, {"y": LOGITS}, {"y": LOGITS}, {"y": np.array([[[0, 255], [1, -1]]])}, 1.0),
        (endpoint_error, {"f": MOVED}, {"f": FLOW}, {}, 5.0),
        (endpoint_error, {"f": MOVED}, {"f": FLOW}, {"gt": MOVED}, 0.0),
        (endpoint_error, {"f": channels_last(MOVED)}, {"f": channels_last(FLOW)}, {}, 5.0),
        (endpoint_error, {"f": channels_last(MOVED)}, {"f": channels_last(FLOW)}, {"gt": channels_last(MOVED)}, 0.0),
        (endpoint_error, {"f": np.array([[[[0.0, 2.0]], [[0.0, 0.0]]]])}, {"f": ONE_PIXEL}, {}, 2.0),
        (endpoint_error, {"f": np.full_like(ONE_PIXEL, np.nan)}, {"f": ONE_PIXEL}, {}, math.nan),
        # The false detection of class 0 comes after the hit, so it costs nothing at any recall.
        (average_precision, detections(), detections(), TRUTH, 1.0),
        (average_precision, detections(0, ((0.1, 0.8), (0.7, 0.9))), detections(), TRUTH, (0.5 + 1.0) / 2),
        # Shifted by 1 of 10 pixels: IoU 81/119, above four thresholds; 361/439 above seven; 171/229 above five.
        (average_precision, detections(1.0), detections(), TRUTH, (4 / 10 + (5 + 2 * 51 / 101) / 10) / 2),
        (average_precision, BY_CLASS, BY_CLASS, {}, 1.0),
        (average_precision, LISTS, LISTS, TRUTH, 1.0),
        (average_precision, CENTRED, CENTRED, {}, 1.0),
        (average_precision, CENTRED, CENTRED, TRUTH, 1.0),
    ],
)
def test_values_by_hand(metric, outputs: Arrays, reference: Arrays, labels: Arrays, value: float) -> None:
    assert metric(outputs, reference, {}, labels) == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize(
    ("metric", "output", "labels", "words"),
    [
        (top1_accuracy, Y, {"label": np.zeros((4, 2), int)}, r"labels of shape \(4, 2\) do not fit output 'y'"),
        (top1_accuracy, Y, {"label": np.full(4, 3)}, "label of 'y', 3, is no class of 3"),
        (average_precision, Y, TRUTH, "no boxes with classes or scores"),
        (top1_disagreement, Y[0], {}, r"no output of shape \(rows, classes\)"),
        (endpoint_error, FLOW[0], {}, r"no output of shape \(N, 2, H, W\)"),
        (endpoint_error, FLOW, {"flow": FLOW[..., 1:]}, "'y' has shape .*, its target"),
    ],
)
def test_what_does_not_fit_is_refused_by_shape(metric, output: np.ndarray, labels: Arrays, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        metric({"y": output}, {"y": output}, {}, labels)
    assert caught.value.hint


def test_boxes_that_do_not_overlap() -> None:
    assert whole_set.intersection_over_union(BOXES[0], BOXES[0])[0].tolist() == [1.0, 0.0]


def arrays_of(rows: int) -> tuple[list[Arrays], ...]:
    reference = [{"y": scores((1, 4), k)} for k in range(rows)]
    outputs = [{"y": sample["y"] + 0.7 * scores((1, 4), 100 + k)} for k, sample in enumerate(reference)]
    labels = [{"label": sample["y"].argmax(axis=1)} for sample in reference]
    return outputs, reference, reference, labels


@pytest.mark.parametrize("rows", [1, 2, 12, 29])
def test_pseudo_values_have_the_metric_as_their_mean_and_its_standard_error(rows: int) -> None:
    metric, data = METRICS["top1_accuracy"], arrays_of(rows)
    values = set_values(metric, data, lambda arguments: metric.load()(*arguments))
    assert len(values) == rows
    assert np.mean(values) == pytest.approx(top1_accuracy(*map(together, data)))
    error = OutputError({ALL_OUTPUTS: {"top1_accuracy": values}})
    if rows == 29:
        interval = error_interval(error, "top1_accuracy")
        assert interval is not None
        share = 1.0 - float(np.mean(values))
        assert 0.4 < (interval[1] - interval[0]) / (4 * math.sqrt(share * (1 - share) / rows)) < 2.5


def test_samples_become_one_array_or_a_list() -> None:
    assert together([{"a": np.zeros((1, 3))}, {"a": np.ones((2, 3))}])["a"].shape == (3, 3)
    assert isinstance(together([{"a": np.zeros((1, 3))}, {"a": np.ones((1, 4))}])["a"], list)


def test_names_of_the_table_resolve() -> None:
    for name in (name for name, row in METRICS.items() if row.kind != "element"):
        metric = resolve_metric(name, has_labels=True)
        assert callable(metric.load())
        assert metric.kind == ("sample" if name == "top1_disagreement" else "set")
    assert resolve_metric("endpoint_error").kind == "sample", "of single samples without labels"
    with pytest.raises(SettingsError, match="sqnr_db cannot be the objective") as caught:
        resolve_metric("sqnr_db")
    assert "relative_l2" in caught.value.hint


def test_names_of_scripts_resolve(tmp_path) -> None:
    script = tmp_path / "m.py"
    script.write_text(
        "def whole(outputs, references, inputs, labels): return 0.5\ndef each(outputs, reference): return 2.0"
    )
    whole, each = (resolve_metric(f"{script}:{name}:max") for name in ("whole", "each"))
    assert (whole.kind, whole.larger_is_better, each.kind) == ("set", True, "sample")
    extra = sample_functions(each)
    assert [extra[name]({}, {}) for name in (each.name, own_value(each.name))] == [0.0, 2.0]
    assert script_of(f"{script}:whole:max") == script, "it is refused as the script that it is"
    assert law_metric("map") == law_metric(f"{script}:whole") == "relative_l2"
    assert law_metric(f"{script}:each") == f"{script}:each"


def test_a_metric_that_takes_for_ever_or_leaves_is_one_error(tmp_path) -> None:
    script = tmp_path / "m.py"
    script.write_text(
        "import sys, time\ndef sleeps(*arguments):\n    try: time.sleep(30)\n    except Exception: pass\n"
        "def spins(*arguments):\n    while True: pass\n\ndef leaves(*arguments): sys.exit(0)\n"
    )
    late = "it ran longer than 0.5 s"
    for name, words in (("sleeps", late), ("spins", late), ("leaves", f"SystemExit: 0 ({script}:")):
        metric = resolve_metric(f"{script}:{name}", timeout_s=0.5).load()
        with pytest.raises(DataError) as caught:
            number_of("m", metric, ({}, {}))
        assert words in caught.value.message
        assert "\n" not in caught.value.message


def test_top1_disagreement_is_that_of_the_worst_output_of_its_kind() -> None:
    top1_disagreement = sample_functions(resolve_metric("top1_disagreement"))["top1_disagreement"]
    a = np.array([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]], np.float32)
    reference = {"a": a, "b": a, "features": np.ones((1, 2, 3), np.float32), "label": np.array([[1, 2]])}
    assert top1_disagreement({**reference, "b": np.concatenate([a[:1, ::-1], a[1:]])}, reference) == 0.25
    assert top1_disagreement({**reference, "b": a[:, ::-1]}, reference) == 1.0
