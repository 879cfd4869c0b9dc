"""Mean average precision of detections, matched to labels or to the reference's detections by their overlap.

As COCO has it: average precision at 101 recalls, the mean over the classes that labels have and over IoU thresholds of
0.50, 0.55, ..., 0.95 (Lin et al., Microsoft COCO, 2014; the evaluation at cocodataset.org/#detection-eval), at most 100
detections of an image. COCO's own package needs files in its format and a compiler, so this is code of our own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mptune.errors import DataError

THRESHOLDS = np.arange(0.5, 0.96, 0.05)
_RECALLS = np.linspace(0.0, 1.0, 101)
_MOST = 100
_SURE = 0.25
"""Detections of the reference below this score are no labels."""

_NAMES = "name outputs and labels boxes [N, M, 4] (x1, y1, x2, y2), scores [N, M] or [N, M, C], classes [N, M]"


@dataclass(frozen=True)
class _Image:
    """Boxes (M, 4), scores (M,), classes (M,) of one image."""

    boxes: np.ndarray
    scores: np.ndarray
    classes: np.ndarray


def mean_average_precision(
    outputs: Mapping[str, Any], references: Mapping[str, Any], inputs: Mapping[str, Any], labels: Mapping[str, Any]
) -> float:
    """Mean average precision, 0 to 1; see the module.

    Outputs: by name, ``boxes`` [N, M, 4] as corners, ``scores`` [N, M] with ``classes`` [N, M], or ``scores``
    [N, M, C]; or one tensor [N, M, 6] of corners, score and class. Names need only contain these words. Arrays may also
    be lists with one image's each. Labels: ``boxes`` [N, G, 4] and ``classes`` [N, G]; a negative class is no box.
    Without labels the reference's detections with a score of at least 0.25 are the labels.
    """
    found = _detections(outputs, "output")
    if labels:
        wanted = _truths(labels)
    else:
        wanted = [_only(image, image.scores >= _SURE) for image in _detections(references, "output")]
    if len(found) != len(wanted):
        raise DataError(f"map: {len(found)} images have detections, {len(wanted)} have labels", _NAMES)
    found = [_top(_only(image, np.isfinite(image.scores) & np.isfinite(image.boxes).all(axis=-1))) for image in found]
    numbers = sorted({int(c) for image in wanted for c in image.classes})
    if not numbers:
        return 0.0 if any(len(image.scores) for image in found) else 1.0
    return float(np.mean([_average_precisions(found, wanted, number).mean() for number in numbers]))


def _only(image: _Image, kept: np.ndarray) -> _Image:
    return _Image(image.boxes[kept], image.scores[kept], image.classes[kept])


def _top(image: _Image) -> _Image:
    order = np.argsort(-image.scores, kind="stable")[:_MOST]
    return _Image(image.boxes[order], image.scores[order], image.classes[order])


def _named(arrays: Mapping[str, Any], words: Sequence[str]) -> Any:
    return next((array for word in words for name, array in arrays.items() if word in name.lower()), None)


def _images(array: Any, rank: int) -> list[np.ndarray]:
    """One array per image: from [N, ...], or from a list of arrays with or without a batch axis."""
    several = array if isinstance(array, list) else [array]
    parts = [part for one in several for part in (one if one.ndim == rank + 1 else [one])]
    return [np.asarray(part, dtype=np.float64) for part in parts]


def _detections(arrays: Mapping[str, Any], what: str) -> list[_Image]:
    boxes, scores = _named(arrays, ("box",)), _named(arrays, ("score", "conf", "prob"))
    if boxes is not None and scores is not None:
        classes = _named(arrays, ("class", "label", "cls"))
        return _checked(_separate(boxes, scores, classes))
    whole = [a for a in arrays.values() if (a[0] if isinstance(a, list) else a).shape[-1:] == (6,)]
    if len(whole) != 1:
        raise DataError(f"map found no boxes with scores among the {what}s {', '.join(map(repr, arrays))}", _NAMES)
    return _checked([_Image(image[:, :4], image[:, 4], image[:, 5]) for image in _images(whole[0], 2)])


def _separate(boxes: Any, scores: Any, classes: Any) -> list[_Image]:
    places = _images(boxes, 2)
    rank = (scores[0].ndim if isinstance(scores, list) else scores.ndim - 1) if classes is None else 1
    sure = _images(scores, min(rank, 2))
    kinds = [np.zeros(len(place)) for place in places] if classes is None else _images(classes, 1)
    if not len(places) == len(sure) == len(kinds):
        raise DataError("map: boxes, scores and classes are of different numbers of images", _NAMES)
    images = []
    for place, score, kind in zip(places, sure, kinds, strict=True):
        if score.ndim == 2:  # a score for each class: each is a detection
            count = score.shape[1]
            images.append(_Image(np.repeat(place, count, 0), score.reshape(-1), np.tile(np.arange(count), len(place))))
        else:
            images.append(_Image(place, score, kind))
    return images


def _checked(images: list[_Image]) -> list[_Image]:
    for image in images:
        if image.boxes.ndim != 2 or image.boxes.shape[-1:] != (4,):
            raise DataError(f"map: the boxes of an image have shape {image.boxes.shape}, not [M, 4]", _NAMES)
        if not len(image.boxes) == len(image.scores) == len(image.classes):
            lengths = f"{len(image.boxes)} boxes, {len(image.scores)} scores and {len(image.classes)} classes"
            raise DataError(f"map: an image has {lengths}", _NAMES)
    return images


def _truths(labels: Mapping[str, Any]) -> list[_Image]:
    boxes, classes = _named(labels, ("box",)), _named(labels, ("class", "label", "cls"))
    if boxes is None or classes is None:
        raise DataError(f"map: the labels are {', '.join(map(repr, labels))}", _NAMES)
    places, kinds = _images(boxes, 2), _images(classes, 1)
    if len(places) != len(kinds):
        raise DataError(f"map: {len(places)} images have boxes, {len(kinds)} have classes", _NAMES)
    images = _checked([_Image(p, np.ones(len(p)), k) for p, k in zip(places, kinds, strict=True)])
    return [_only(image, image.classes >= 0) for image in images]


def intersection_over_union(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """IoU of boxes (x1, y1, x2, y2), shapes (n, 4) and (m, 4) -> (n, m); 0 where both are empty."""
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    size = np.maximum(np.minimum(a[:, None, 2:], b[None, :, 2:]) - low, 0.0)
    shared = size[..., 0] * size[..., 1]
    areas = [np.maximum(x[:, 2] - x[:, 0], 0.0) * np.maximum(x[:, 3] - x[:, 1], 0.0) for x in (a, b)]
    union = areas[0][:, None] + areas[1][None, :] - shared
    overlaps: np.ndarray = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    return overlaps


def _average_precisions(found: Sequence[_Image], wanted: Sequence[_Image], number: int) -> np.ndarray:
    """Average precision of one class at each threshold, shape (thresholds,)."""
    scores, hits, total = [], [], 0
    for got, truth in zip(found, wanted, strict=True):
        mine, theirs = _only(got, got.classes == number), _only(truth, truth.classes == number)
        total += len(theirs.classes)
        scores.append(mine.scores)
        hits.append(_matched(intersection_over_union(mine.boxes, theirs.boxes)))
    order = np.argsort(-np.concatenate(scores), kind="stable")
    correct = np.concatenate(hits)[order]  # (detections, thresholds)
    true = correct.cumsum(axis=0)
    precision = true / np.arange(1, len(true) + 1)[:, None]
    precision = np.maximum.accumulate(precision[::-1], axis=0)[::-1]
    values = np.zeros(len(THRESHOLDS))
    for k in range(len(THRESHOLDS)):
        first = np.searchsorted(true[:, k] / total, _RECALLS - 1e-12, side="left")
        values[k] = (
            np.where(first < len(true), precision[np.minimum(first, len(true) - 1), k], 0.0).mean()
            if len(true)
            else 0.0
        )
    return values


def _matched(overlaps: np.ndarray) -> np.ndarray:
    """Which detections, best score first, are matched to a box that is free: shape (detections, thresholds)."""
    hits = np.zeros((len(overlaps), len(THRESHOLDS)), dtype=bool)
    for k, threshold in enumerate(THRESHOLDS):
        free = np.ones(overlaps.shape[1], dtype=bool)
        for row, overlap in enumerate(overlaps):
            candidates = np.where(free & (overlap >= threshold - 1e-10), overlap, -1.0)
            if candidates.size and candidates.max() >= 0.0:
                free[int(candidates.argmax())] = False
                hits[row, k] = True
    return hits
