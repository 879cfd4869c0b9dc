"""Metrics over a whole set of samples, with labels: classes, boxes, dense outputs, or a user's function."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mptune.data.metrics.parts import Arrays
from mptune.data.metrics.table import METRICS, Metric
from mptune.errors import DataError

IGNORED = 255  # a class label that segmentation data sets give to pixels of no class; so do negative ones
THRESHOLDS = np.arange(0.5, 0.96, 0.05)  # of intersection over union, as COCO has them
_RECALLS = np.linspace(0.0, 1.0, 101)
_MOST_DETECTIONS = 100
_LEAST_SCORE = 0.25  # detections of the reference below this score are no labels
_SCORE, _CLASS = 4, 5  # columns of an image's detections, shape (M, 6), behind the four of the corners
_GROUPS = 8  # parts of the samples that are left out in turn, at most
_CLASS_SCORES = "class scores (floating, a batch and a class axis)"
_FROM_0 = "class numbers begin with 0"
_SHAPES = "give labels in the output's shape, class numbers without its class axis"
_NAMES = "name outputs and labels boxes [N, M, 4], scores [N, M] or [N, M, C], classes [N, M]"


def _judged(
    metric: str, outputs: Arrays, references: Arrays, labels: Arrays, fits: Callable[[np.ndarray], bool], kind: str
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Name, values and target of each output that a metric judges: the label of its name, or the only label; without
    labels the reference. ``fits`` says by the reference whether an output is of the metric's kind.
    """
    fitting = [name for name, array in references.items() if isinstance(array, np.ndarray) and fits(array)]
    if not fitting:
        hint = "use relative_l2, or your own script.py:function"
        raise DataError(f"{metric} found no output of {kind}, of one shape for all samples", hint)
    targets: Arrays = {name: array for name, array in (labels or references).items() if name in fitting}
    if len(labels) == len(fitting) == 1:
        targets = {fitting[0]: next(iter(labels.values()))}
    if not targets:
        text = f"{metric} cannot tell which output the labels {', '.join(map(repr, labels))} belong to"
        raise DataError(text, f"name them as the outputs are named: {', '.join(map(repr, fitting))}")
    for name, target in targets.items():
        output: Any = outputs[name]
        if not all(isinstance(array, np.ndarray) for array in (output, target)) or len(output) != len(target):
            text = f"{metric}: {name!r} and its target need the same rows, of one shape in all samples"
            raise DataError(text, "give one label per row, or use your own script.py:function")
        yield name, output, target


def _is_scores(array: np.ndarray) -> bool:
    return array.dtype.kind == "f" and array.ndim >= 2 and max(array.shape[1:]) > 1


def top_accuracy(
    outputs: Arrays, references: Arrays, inputs: Arrays, labels: Arrays, metric: str, kind: str = _CLASS_SCORES
) -> float:
    """Share of rows (or pixels, or tokens) whose label is among the 5 largest scores, or is the largest for ``top1``.

    The smallest over the outputs. A row with a score that is NaN or Inf is a miss.
    """
    count, shares = 5 if metric == "top5_accuracy" else 1, []
    for name, output, target in _judged(metric, outputs, references, labels, _is_scores, kind):
        scores, wanted = _scores_and_classes(metric, name, output, target)
        classes, largest = scores.shape[-1], wanted.max(initial=-1)
        if not 0 <= largest < classes:
            raise DataError(f"{metric}: the largest label of {name!r}, {largest}, is no class of {classes}", _FROM_0)
        clean = np.where(np.isfinite(scores), scores, -np.inf)
        label = np.maximum(wanted, 0)[..., None]
        score = np.take_along_axis(clean, label, axis=-1)
        # Of equal scores the one of the smaller class number comes first, as argmax has it.
        before = (clean > score) | ((clean == score) & (np.arange(classes) < label))
        hit = (before.sum(axis=-1) < min(count, classes)) & np.isfinite(scores).all(axis=-1)
        shares.append(float(hit[wanted >= 0].mean()))
    return min(shares)


def top1_disagreement(outputs: Arrays, references: Arrays, inputs: Arrays, labels: Arrays, metric: str) -> float:
    """Share of rows whose largest class differs, the largest over the floating outputs of shape (rows, classes)."""
    rows = {name: a for name, a in references.items() if isinstance(a, np.ndarray) and a.ndim == 2 and len(a)}
    return 1.0 - top_accuracy(outputs, rows, inputs, {}, metric, "shape (rows, classes)")


def _scores_and_classes(metric: str, name: str, output: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, ...]:
    """Scores with the classes on the last axis, shape (..., classes), and class numbers, shape (...).

    Labels are class numbers, shape of the output without its class axis (an axis of 1 may stand there); negative ones
    are left out. The class axis is the one whose removal gives the labels' shape. One-hot labels, and the reference
    where there are none, have the output's shape: the class axis is axis 1 of rank 4 and up, else the last.
    """
    if target.shape == output.shape:
        axis = 1 if output.ndim >= 4 or output.ndim == 2 else output.ndim - 1
        return np.moveaxis(output, axis, -1), np.moveaxis(target, axis, -1).argmax(axis=-1)
    for axis in (1, output.ndim - 1, *range(2, output.ndim - 1)):
        before, after = output.shape[:axis], output.shape[axis + 1 :]
        if target.shape in ((*before, *after), (*before, 1, *after)):
            scores = np.moveaxis(output, axis, -1)
            return scores, target.reshape(scores.shape[:-1]).astype(np.int64)
    text = f"{metric}: labels of shape {target.shape} do not fit output {name!r} of shape {output.shape}"
    raise DataError(text, _SHAPES)


def mean_iou(outputs: Arrays, references: Arrays, inputs: Arrays, labels: Arrays, metric: str) -> float:
    """Mean over the classes of intersection over union, all pixels of all samples together; the smallest output's.

    Outputs are class scores as for ``top1_accuracy``, or class numbers (integers). Labels are class numbers; negative
    ones and 255 (where it is no class) are left out. Classes that neither side has do not count. The measure is that of
    Everingham et al., The PASCAL Visual Object Classes Challenge, 2015.
    """
    values, kind = [], "class scores or numbers"
    for name, output, target in _judged(
        metric, outputs, references, labels, lambda a: a.ndim >= 2 and (a.dtype.kind in "iu" or _is_scores(a)), kind
    ):
        got, wanted = output, target
        if output.dtype.kind in "iu":
            if got.size != wanted.size:
                raise DataError(f"miou: {name!r} has shape {got.shape}, its labels {wanted.shape}", _SHAPES)
            classes = int(max(got.max(), 0)) + 1
        else:
            scores, wanted = _scores_and_classes(metric, name, output, target)
            got, classes = np.where(np.isfinite(scores).all(axis=-1), scores.argmax(axis=-1), -1), scores.shape[-1]
        got, wanted = got.reshape(-1).astype(np.int64), wanted.reshape(-1).astype(np.int64)
        valid = (wanted >= 0) & ~((wanted == IGNORED) & (classes <= IGNORED))
        if not valid.any():
            raise DataError(f"miou: no label of {name!r} is a class", _FROM_0)
        got, wanted = got[valid], wanted[valid]
        size = int(max(classes, wanted.max() + 1))
        hits = np.bincount(wanted[got == wanted], minlength=size)
        union = np.bincount(wanted, minlength=size) + np.bincount(got[got >= 0], minlength=size) - hits
        values.append(float((hits[union > 0] / union[union > 0]).mean()))
    return min(values)


def endpoint_error(outputs: Arrays, references: Arrays, inputs: Arrays, labels: Arrays, metric: str) -> float:
    """Mean Euclidean distance of flow vectors, in pixels, over all samples; the largest over the outputs.

    Flow is [N, 2, H, W] or [N, H, W, 2], each on its own side. Pixels whose target is not finite are left out (Baker et
    al., A Database and Evaluation Methodology for Optical Flow, 2011).
    """

    def axis_of_components(array: np.ndarray) -> int:
        return next((axis for axis in (1, 3) if array.ndim == 4 and array.shape[axis] == 2), 0)

    values, kind = [], "shape (N, 2, H, W) or (N, H, W, 2)"
    for name, output, target in _judged(
        metric, outputs, references, labels, lambda a: a.dtype.kind == "f" and axis_of_components(a) > 0, kind
    ):
        got, wanted = (np.moveaxis(side, axis_of_components(side), 0) for side in (output.astype(np.float64), target))
        if got.shape != wanted.shape:
            raise DataError(f"{metric}: {name!r} has shape {output.shape}, its target {target.shape}", _SHAPES)
        with np.errstate(invalid="ignore", over="ignore"):
            distance = np.hypot(*(got - wanted))[np.isfinite(wanted).all(axis=0)]
        values.append(float(distance.mean()) if distance.size else 0.0)
    return float(np.max(values))  # not max, which may lose NaN


def mean_average_precision(outputs: Arrays, references: Arrays, inputs: Arrays, labels: Arrays, metric: str) -> float:
    """Mean average precision over the classes and the IoU thresholds 0.5 to 0.95, 0 to 1, as of COCO.

    Outputs: by name, ``boxes`` [N, M, 4], ``scores`` [N, M] with ``classes`` [N, M], or ``scores`` [N, M, C]. Names
    need only contain these words. Where images differ in their number of boxes, there are lists of such arrays.
    Labels: ``boxes`` [N, G, 4] and ``classes`` [N, G]; a negative class is no box. Without labels the reference's
    detections with a score of at least 0.25 are the labels. All boxes have the form that ``map:xyxy`` or ``map:cxcywh``
    names; for ``map`` that of the outputs is recognised by the reference, that of labels by themselves.
    """
    form, exact = metric.partition(":")[2], _detections(references)
    detections = [_best(image) for image in _as_corners(_detections(outputs), form, exact)]
    if labels:
        truths = [image[image[:, _CLASS] >= 0] for image in _detections(labels, are_labels=True)]
        truths = _as_corners(truths, form, truths)
    else:
        truths = [_best(image[image[:, _SCORE] >= _LEAST_SCORE]) for image in _as_corners(exact, form, exact)]
    if len(detections) != len(truths):
        raise DataError(f"map: {len(detections)} images have detections, {len(truths)} have labels", _NAMES)
    classes = sorted({int(c) for image in truths for c in image[:, _CLASS]})
    if not classes:
        return 0.0 if any(map(len, detections)) else 1.0
    return float(np.mean([_average_precisions(detections, truths, number).mean() for number in classes]))


def _detections(arrays: Mapping[str, Any], *, are_labels: bool = False) -> list[np.ndarray]:
    """Box, score and class of each image's boxes, shape (M, 6); labels have the score 1."""

    def images(*words: str) -> list[np.ndarray] | None:
        """One array per image, of the first name that contains a word: from [N, ...], or a list of such arrays."""
        array = next((array for word in words for name, array in arrays.items() if word in name.lower()), None)
        several = array if isinstance(array, list) else [] if array is None else [array]
        return [np.asarray(image, np.float64) for part in several for image in part] if several else None

    boxes, classes = images("box"), images("class", "label", "cls")
    scores = None if are_labels else images("score", "conf", "prob")
    if boxes is None or (classes if are_labels else scores) is None:
        raise DataError(f"map found no boxes with classes or scores among {', '.join(map(repr, arrays))}", _NAMES)
    kinds = [np.zeros(len(image)) for image in boxes] if classes is None else classes
    marks = [np.ones(len(image)) for image in boxes] if scores is None else scores
    detections = []
    for corner, mark, kind in itertools.zip_longest(boxes, marks, kinds, fillvalue=np.zeros(0)):
        if mark.ndim == 2:  # a score for each class: each is a detection
            kind = np.tile(np.arange(mark.shape[1]), len(corner))
            corner, mark = np.repeat(corner, mark.shape[1], 0), mark.reshape(-1)
        if corner.ndim != 2 or corner.shape[-1] != 4 or not len(corner) == len(mark) == len(kind):
            text = f"map: an image has boxes {corner.shape}, scores {mark.shape} and classes {kind.shape}"
            raise DataError(text, _NAMES)
        detections.append(np.column_stack([corner, mark, kind]))
    return detections


def _as_corners(images: list[np.ndarray], form: str, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Images with their boxes as corners; without a form they are of the form of the boxes in ``like``."""
    boxes = np.concatenate(like)[:, :4]
    is_ordered = (boxes[:, 2:] >= boxes[:, :2]).all(axis=1)
    # Centre and size: too many were no corners, and no size is negative.
    is_centred = len(boxes) and is_ordered.mean() < 0.95 and (boxes[:, 2:] >= 0).all()
    if form == "xyxy" or not (form or is_centred):
        return images
    # x - w / 2, y - h / 2, x + w / 2, y + h / 2
    return [np.column_stack([i[:, :2] - i[:, 2:4] / 2, i[:, :2] + i[:, 2:4] / 2, i[:, 4:]]) for i in images]


def _best(image: np.ndarray) -> np.ndarray:
    """The detections of an image with the best scores, in their order."""
    image = image[np.isfinite(image[:, : _SCORE + 1]).all(axis=1)]
    return image[np.argsort(-image[:, _SCORE], kind="stable")[:_MOST_DETECTIONS]]


def intersection_over_union(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """IoU of boxes (x1, y1, x2, y2), shapes (n, 4) and (m, 4) -> (n, m); 0 where both are empty."""
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    shared = np.maximum(np.minimum(a[:, None, 2:], b[None, :, 2:]) - low, 0.0).prod(axis=-1)
    areas = [np.maximum(boxes[:, 2:] - boxes[:, :2], 0.0).prod(axis=-1) for boxes in (a, b)]
    union = areas[0][:, None] + areas[1][None, :] - shared
    overlaps: np.ndarray = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    return overlaps


def _average_precisions(detections: Sequence[np.ndarray], truths: Sequence[np.ndarray], number: int) -> np.ndarray:
    """Average precision of one class at each threshold, shape (thresholds,)."""
    hits, scores, total = [], [], 0
    for image, truth in zip(detections, truths, strict=True):
        image, truth = image[image[:, _CLASS] == number], truth[truth[:, _CLASS] == number]
        overlaps = intersection_over_union(image[:, :4], truth[:, :4])
        # The detections, best score first, that are matched to a box which no better one has: (detections, thresholds).
        is_hit = np.zeros((len(image), len(THRESHOLDS)), dtype=bool)
        free = np.ones((len(THRESHOLDS), len(truth)), dtype=bool)
        for row, overlap in enumerate(overlaps if len(truth) else ()):
            candidates = np.where(free & (overlap >= THRESHOLDS[:, None] - 1e-10), overlap, -1.0)
            is_hit[row] = candidates.max(axis=1) >= 0.0
            free[is_hit[row], candidates.argmax(axis=1)[is_hit[row]]] = False
        hits.append(is_hit)
        scores.append(image[:, _SCORE])
        total += len(truth)
    order = np.argsort(-np.concatenate(scores), kind="stable")
    true = np.concatenate(hits)[order].cumsum(axis=0)  # (detections, thresholds)
    precision = true / np.arange(1, len(true) + 1)[:, None]
    # The best precision from each recall on, 0 behind the last detection.
    precision = np.concatenate([np.maximum.accumulate(precision[::-1], axis=0)[::-1], np.zeros((1, len(THRESHOLDS)))])
    firsts = [np.searchsorted(recall, _RECALLS - 1e-12, side="left") for recall in (true / total).T]
    return np.array([precision[first, k].mean() for k, first in enumerate(firsts)])


def together(samples: Sequence[Arrays]) -> dict[str, Any]:
    """All samples as one: name -> rows along axis 0, or a list of arrays where they cannot be concatenated."""
    joined: dict[str, Any] = {}
    for name in samples[0] if samples else ():
        arrays = [np.atleast_1d(sample[name]) for sample in samples]
        joined[name] = arrays if len({array.shape[1:] for array in arrays}) > 1 else np.concatenate(arrays)
    return joined


def set_values(
    metric: Metric, data: Sequence[Sequence[Arrays]], call: Callable[[Sequence[dict[str, Any]]], float]
) -> tuple[float, ...]:
    """The metric's own value, as ``call`` computes it, as one number per sample whose mean it is.

    ``data`` are the samples of each argument of a set metric; ``call`` gets them ``together``. Groups of samples are
    left out in turn (the jackknife), so scaled that the standard error of the mean over the samples is the one over the
    groups. A user's function is called once: its value stands for all samples.
    """

    def value(members: Iterable[int]) -> float:
        return call([together([samples[k] for k in members]) for samples in data])

    count = len(data[0])
    whole, groups = value(range(count)), min(count, _GROUPS)
    if metric.name not in METRICS or groups < 2 or not math.isfinite(whole):
        return (whole,) * count
    without = np.array([value([k for k in range(count) if k % groups != group]) for group in range(groups)])
    if not np.isfinite(without).all():
        return (whole,) * count
    scale = math.sqrt((count - 1) / (groups - 1)) * (groups - 1)
    values = scale * (without.mean() - without[np.arange(count) % groups])
    return tuple((whole + values - values.mean()).tolist())
