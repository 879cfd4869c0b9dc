"""Metrics over a whole set of samples, with labels: classes, boxes, dense outputs, or a user's function."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from mptune.data.metrics.table import METRICS, Metric
from mptune.errors import DataError


def pairs(
    metric: str,
    outputs: Mapping[str, Any],
    references: Mapping[str, Any],
    labels: Mapping[str, Any],
    fits: Callable[[np.ndarray], bool],
    wanted: str,
    *,
    is_dense: bool = False,
) -> list[tuple[str, np.ndarray, np.ndarray, bool]]:
    """The outputs that a metric judges: name, output, target, and whether the target is a label.

    A label belongs to the output of its name. One label for one output that fits needs no name in common. Without
    labels every output that fits is judged against the reference.

    ``fits`` says by the reference whether an output is of the metric's kind, ``wanted`` is that kind in words. Where
    ``is_dense``, a label is as large as its output: one without its name that is not belongs to another metric, and the
    reference is the target.
    """
    fitting = [name for name, array in references.items() if isinstance(array, np.ndarray) and fits(array)]
    if not fitting:
        raise DataError(
            f"{metric} found no output of {wanted}, of one shape for all samples",
            "use relative_l2, or your own script.py:function",
        )
    if is_dense and not any(name in labels for name in fitting):
        sizes = {np.size(references[name]) for name in fitting}
        labels = {name: label for name, label in labels.items() if np.size(label) in sizes}
    if labels:
        named = [(name, name) for name in fitting if name in labels]
        if not named and len(labels) == 1 and len(fitting) == 1:
            named = [(fitting[0], next(iter(labels)))]
        if not named:
            raise DataError(
                f"{metric} cannot tell which output the labels {', '.join(map(repr, labels))} belong to",
                f"name them as the outputs are named: {', '.join(map(repr, fitting))}",
            )
        found = [(name, outputs[name], labels[label], True) for name, label in named]
    else:
        found = [(name, outputs[name], references[name], False) for name in fitting]
    for name, output, target, _ in found:
        if not isinstance(output, np.ndarray) or not isinstance(target, np.ndarray):
            raise DataError(f"{metric}: the shapes of {name!r} vary between samples", "use your own script.py:function")
        if len(output) != len(target):
            raise DataError(f"{metric}: {name!r} has {len(output)} rows, its target {len(target)}", "give one per row")
    return found


def same_shape(metric: str, name: str, output: np.ndarray, target: np.ndarray) -> None:
    """Refuse what cannot be compared element by element."""
    if output.shape != target.shape:
        raise DataError(
            f"{metric}: output {name!r} has shape {output.shape}, its target {target.shape}",
            "give labels of the output's shape, or your own script.py:function",
        )


IGNORED = 255
"""A class label that segmentation data sets give to pixels of no class; so do negative ones."""


def top1_accuracy(
    outputs: Mapping[str, Any], references: Mapping[str, Any], inputs: Mapping[str, Any], labels: Mapping[str, Any]
) -> float:
    """Share of rows (or pixels, or tokens) whose largest score is that of the label; the smallest over the outputs."""
    return min(_hits("top1_accuracy", 1, outputs, references, labels))


def top1_disagreement(
    outputs: Mapping[str, Any], references: Mapping[str, Any], inputs: Mapping[str, Any], labels: Mapping[str, Any]
) -> float:
    """Share of rows whose largest class differs, the largest over the floating outputs of shape (rows, classes)."""

    def fits(array: np.ndarray) -> bool:
        return array.ndim == 2 and len(array) > 0 and _is_scores(array)

    shares = _hits("top1_disagreement", 1, outputs, references, labels, fits, "shape (rows, classes)")
    return 1.0 - min(shares)


def top5_accuracy(
    outputs: Mapping[str, Any], references: Mapping[str, Any], inputs: Mapping[str, Any], labels: Mapping[str, Any]
) -> float:
    """Share of rows (or pixels, or tokens) whose label is among the 5 largest scores; as ``top1_accuracy``."""
    return min(_hits("top5_accuracy", 5, outputs, references, labels))


def _is_scores(array: np.ndarray) -> bool:
    return array.dtype.kind == "f" and array.ndim >= 2 and max(array.shape[1:]) > 1


def _hits(
    metric: str,
    count: int,
    outputs: Mapping[str, Any],
    references: Mapping[str, Any],
    labels: Mapping[str, Any],
    fits: Callable[[np.ndarray], bool] = _is_scores,
    kind: str = "class scores (floating, a batch and a class axis)",
) -> list[float]:
    """The accuracy of each output.

    Labels are class numbers, shape of the output without its class axis (an axis of 1 may stand there), or one-hot,
    shape of the output. Negative labels are left out. The class axis is the one whose removal gives the labels' shape;
    without labels, which then are the reference's largest classes, it is axis 1 of outputs of rank 4 and up, else the
    last. A score that is NaN or Inf makes its row a miss.
    """
    shares = []
    for name, output, target, is_label in pairs(metric, outputs, references, labels, fits, kind):
        scores, wanted = _scores_and_classes(metric, name, output, target, is_label)
        valid = wanted >= 0
        kept = min(count, scores.shape[-1])
        if is_label and valid.any() and wanted.max() >= scores.shape[-1]:
            raise DataError(
                f"{metric}: label {int(wanted.max())} of {name!r} is no class of {scores.shape[-1]}",
                "class numbers begin with 0",
            )
        finite = np.isfinite(scores).all(axis=-1)
        clean = np.where(np.isfinite(scores), scores, -np.inf)
        of_label = np.take_along_axis(clean, np.maximum(wanted, 0)[..., None], axis=-1)
        numbers = np.arange(scores.shape[-1])
        # Of equal scores the one of the smaller class number comes first, as argmax has it.
        before = (clean > of_label) | ((clean == of_label) & (numbers < np.maximum(wanted, 0)[..., None]))
        hit = (before.sum(axis=-1) < kept) & finite
        if not valid.any():
            raise DataError(f"{metric}: every label of {name!r} is negative", "class numbers begin with 0")
        shares.append(float(hit[valid].mean()))
    return shares


def _scores_and_classes(
    metric: str, name: str, output: np.ndarray, target: np.ndarray, is_label: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Scores with the classes on the last axis, shape (..., classes), and class numbers, shape (...)."""
    if not is_label or target.shape == output.shape:
        axis = 1 if output.ndim >= 4 or output.ndim == 2 else output.ndim - 1
        return np.moveaxis(output, axis, -1), np.moveaxis(target, axis, -1).argmax(axis=-1)
    for axis in (1, output.ndim - 1, *range(2, output.ndim - 1)):
        without = output.shape[:axis] + output.shape[axis + 1 :]
        with_one = (*output.shape[:axis], 1, *output.shape[axis + 1 :])
        if target.shape in (without, with_one):
            scores = np.moveaxis(output, axis, -1)
            return scores, target.reshape(scores.shape[:-1]).astype(np.int64)
    raise DataError(
        f"{metric}: labels of shape {target.shape} do not fit output {name!r} of shape {output.shape}",
        "give class numbers in the output's shape without its class axis",
    )


def mean_iou(
    outputs: Mapping[str, Any], references: Mapping[str, Any], inputs: Mapping[str, Any], labels: Mapping[str, Any]
) -> float:
    """Mean over the classes of intersection over union, all pixels of all samples together; the smallest output's.

    Outputs are class scores as for ``top1_accuracy``, or class numbers (integers). Labels are class numbers; negative
    ones and 255 (where it is no class) are left out. Classes that neither side has do not count. The measure is that of
    Everingham et al., The PASCAL Visual Object Classes Challenge, 2015.
    """
    found = []

    def fits(array: np.ndarray) -> bool:
        return array.ndim >= 2 and (array.dtype.kind in "iu" or _is_scores(array))

    for name, output, target, is_label in pairs("miou", outputs, references, labels, fits, "class scores or numbers"):
        if output.dtype.kind in "iu":
            if output.size != target.size:
                raise DataError(f"miou: {name!r} has shape {output.shape}, its labels {target.shape}", "give one each")
            got, wanted, classes = output.reshape(-1), target.reshape(-1), int(max(output.max(), 0)) + 1
        else:
            scores, wanted = _scores_and_classes("miou", name, output, target, is_label)
            got = np.where(np.isfinite(scores).all(axis=-1), scores.argmax(axis=-1), -1).reshape(-1)
            wanted, classes = wanted.reshape(-1), scores.shape[-1]
        valid = (wanted >= 0) & ~((wanted == IGNORED) & (classes <= IGNORED))
        got, wanted = got[valid].astype(np.int64), wanted[valid].astype(np.int64)
        if not len(wanted):
            raise DataError(f"miou: no label of {name!r} is a class", "class numbers begin with 0")
        size = int(max(classes, wanted.max() + 1))
        hits = np.bincount(wanted[got == wanted], minlength=size)
        union = np.bincount(wanted, minlength=size) + np.bincount(got[got >= 0], minlength=size) - hits
        found.append(float((hits[union > 0] / union[union > 0]).mean()))
    return min(found)


MOST_DB = 120.0
"""PSNR of images that are equal: noise below 1e-12 of the squared peak counts as this much."""

_SIGMA, _TRUNCATE, _K1, _K2 = 1.5, 3.5, 0.01, 0.03
"""SSIM's window (11 pixels wide) and constants, as in the paper."""


def flow_axis(array: np.ndarray) -> int | None:
    """The axis of the two components of optical flow, [N, 2, H, W] or [N, H, W, 2]; None where it is none."""
    if array.dtype.kind != "f" or array.ndim != 4:
        return None
    return 1 if array.shape[1] == 2 else 3 if array.shape[3] == 2 else None


def endpoint_error(
    outputs: Mapping[str, Any], references: Mapping[str, Any], inputs: Mapping[str, Any], labels: Mapping[str, Any]
) -> float:
    """Mean Euclidean distance of flow vectors, in pixels, over all samples; the largest over the outputs.

    Flow is [N, 2, H, W] or [N, H, W, 2], each on its own side. Pixels whose target is not finite are left out (Baker et
    al., A Database and Evaluation Methodology for Optical Flow, 2011).
    """
    means = []

    def fits(array: np.ndarray) -> bool:
        return flow_axis(array) is not None

    for name, output, target, _ in pairs(
        "endpoint_error", outputs, references, labels, fits, "shape (N, 2, H, W) or (N, H, W, 2)", is_dense=True
    ):
        got = np.moveaxis(output, flow_axis(output) or 1, 1).astype(np.float64)
        axis = flow_axis(target.astype(np.float64))
        wanted = target if axis is None else np.moveaxis(target, axis, 1)
        same_shape("endpoint_error", name, got, wanted)
        valid = np.isfinite(wanted).all(axis=1)
        with np.errstate(invalid="ignore", over="ignore"):
            distance = np.hypot(*np.moveaxis(got - wanted, 1, 0))[valid]
        means.append(float(distance.mean()) if distance.size else 0.0)
    return float(np.max(means))


def cosine_similarity(
    outputs: Mapping[str, Any], references: Mapping[str, Any], inputs: Mapping[str, Any], labels: Mapping[str, Any]
) -> float:
    """Mean over the rows of the cosine between an embedding (the last axis) and its target; the smallest output's.

    Two rows of zeros have cosine 1, a row of zeros and another one 0.
    """
    means = []
    for name, output, target, _ in pairs(
        "cosine", outputs, references, labels, _is_rows, "embeddings [N, ..., D]", is_dense=True
    ):
        same_shape("cosine", name, output, target)
        a, b = output.astype(np.float64), target.astype(np.float64)
        norms = np.linalg.norm(a, axis=-1), np.linalg.norm(b, axis=-1)
        product, both = (a * b).sum(axis=-1), norms[0] * norms[1]
        zero = (norms[0] == 0) & (norms[1] == 0)
        values = np.where(zero, 1.0, np.divide(product, both, out=np.zeros_like(product), where=both != 0))
        means.append(float(values.mean()))
    return float(np.min(means))


def _is_rows(array: np.ndarray) -> bool:
    return array.dtype.kind == "f" and array.ndim >= 2 and array.shape[-1] > 1


def _is_image(array: np.ndarray) -> bool:
    return array.dtype.kind == "f" and array.ndim == 4


def _peaks(target: np.ndarray) -> float:
    """The range of the pixel values: 1 or 255 where the target lies within those, else what it spans."""
    low, high = float(np.nanmin(target)), float(np.nanmax(target))
    if low >= 0.0 and high <= 1.0:
        return 1.0
    if low >= 0.0 and 2.0 < high <= 255.0:
        return 255.0
    return max(high - low, 1e-12)


def psnr(
    outputs: Mapping[str, Any], references: Mapping[str, Any], inputs: Mapping[str, Any], labels: Mapping[str, Any]
) -> float:
    """Peak signal to noise ratio in dB, the mean over the images, at most 120; the smallest over the outputs.

    Images are [N, C, H, W] or [N, H, W, C]. The peak is 1 or 255 where the target's values lie in 0..1 or 0..255, else
    the range of its values.
    """

    def decibels(output: np.ndarray, target: np.ndarray) -> float:
        noise = ((output - target) ** 2).reshape(len(output), -1).mean(axis=1) / _peaks(target) ** 2
        return float(np.mean(-10.0 * np.log10(np.maximum(noise, 10.0 ** (-MOST_DB / 10.0)))))

    return _least("psnr", outputs, references, labels, decibels)


def ssim(
    outputs: Mapping[str, Any], references: Mapping[str, Any], inputs: Mapping[str, Any], labels: Mapping[str, Any]
) -> float:
    """Structural similarity, the mean over pixels, channels and images; the smallest over the outputs.

    Gaussian window with a standard deviation of 1.5 pixels, constants 0.01 and 0.03 (Wang et al., Image Quality
    Assessment: From Error Visibility to Structural Similarity, IEEE TIP 13, 2004, equation 13). Images and peak as for
    ``psnr``; channels are the axis of 1 to 4, axis 1 where both are.
    """
    return _least("ssim", outputs, references, labels, _ssim)


def _least(
    name: str,
    outputs: Mapping[str, Any],
    references: Mapping[str, Any],
    labels: Mapping[str, Any],
    similarity: Callable[[np.ndarray, np.ndarray], float],
) -> float:
    """The smallest similarity of an output that holds images, in FP64, and its target."""
    found = []
    for output_name, output, target, _ in pairs(
        name, outputs, references, labels, _is_image, "images [N, C, H, W]", is_dense=True
    ):
        same_shape(name, output_name, output, target)
        found.append(similarity(output.astype(np.float64), target.astype(np.float64)))
    return float(np.min(found))


def _ssim(x: np.ndarray, y: np.ndarray) -> float:
    from scipy.ndimage import gaussian_filter  # slow to import, and few searches need it

    last = y.shape[1] > 4 >= y.shape[3]
    sigma = (0.0, _SIGMA, _SIGMA, 0.0) if last else (0.0, 0.0, _SIGMA, _SIGMA)
    peak = _peaks(y)

    def mean(values: np.ndarray) -> np.ndarray:
        return np.asarray(gaussian_filter(values, sigma, truncate=_TRUNCATE))

    mx, my = mean(x), mean(y)
    vx, vy, cov = mean(x * x) - mx * mx, mean(y * y) - my * my, mean(x * y) - mx * my
    c1, c2 = (_K1 * peak) ** 2, (_K2 * peak) ** 2
    return float((((2 * mx * my + c1) * (2 * cov + c2)) / ((mx * mx + my * my + c1) * (vx + vy + c2))).mean())


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


Arrays: TypeAlias = Mapping[str, np.ndarray]

SetFunction: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]], float]
"""``function(outputs, references, inputs, labels) -> float`` over all samples: each maps names to an array with the
samples' rows concatenated along axis 0, or to a list with an array per sample where their shapes differ."""

_GROUPS = 8
"""Parts of the samples that are left out in turn, at most."""


def own_value(spec: str) -> str:
    """The statistic under which a set metric's own value stands, beside its error."""
    return f"{spec}:value"


def takes_whole_set(function: Callable[..., Any]) -> bool:
    """Whether a function asks for ``(outputs, references, inputs, labels)``: four arguments that must be given."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) >= 4 and len([p for p in positional if p.default is p.empty]) >= 3


def together(samples: Sequence[Arrays]) -> dict[str, Any]:
    """All samples as one: name -> rows along axis 0, or a list of arrays where they cannot be concatenated."""
    names = samples[0].keys() if samples else ()
    return {name: _joined([np.asarray(sample[name]) for sample in samples]) for name in names}


def _joined(arrays: list[np.ndarray]) -> np.ndarray | list[np.ndarray]:
    if any(array.ndim == 0 for array in arrays):
        return np.stack(arrays) if len({array.shape for array in arrays}) == 1 else arrays
    if len({array.shape[1:] for array in arrays}) > 1:
        return arrays
    return np.concatenate(arrays)


@dataclass(frozen=True)
class SampleSetArrays:
    """What a set metric is computed from, sample by sample; labels are empty dictionaries where there are none."""

    outputs: Sequence[Arrays]
    references: Sequence[Arrays]
    inputs: Sequence[Arrays]
    labels: Sequence[Arrays]

    def of_reference(self) -> SampleSetArrays:
        """The same with the reference in the place of the outputs."""
        return SampleSetArrays(self.references, self.references, self.inputs, self.labels)

    def without(self, left_out: range) -> SampleSetArrays:
        """The same without some samples."""
        kept = [k for k in range(len(self.outputs)) if k not in left_out]
        return SampleSetArrays(*([part[k] for k in kept] for part in self.parts))

    @property
    def parts(self) -> tuple[Sequence[Arrays], ...]:
        """The four arguments of a set metric, sample by sample."""
        return self.outputs, self.references, self.inputs, self.labels

    def arguments(self) -> tuple[dict[str, Any], ...]:
        """The four arguments of a set metric."""
        return tuple(together(part) for part in self.parts)


def set_values(metric: Metric, data: SampleSetArrays, call: Callable[[SampleSetArrays], float]) -> tuple[float, ...]:
    """The metric's own value, as ``call`` computes it, as one number per sample whose mean it is."""
    count = len(data.outputs)
    whole = call(data)
    groups = min(count, _GROUPS)
    if metric.name not in METRICS or groups < 2 or not math.isfinite(whole):
        return (whole,) * count
    without = np.array([call(data.without(range(group, count, groups))) for group in range(groups)])
    if not np.isfinite(without).all():
        return (whole,) * count
    # So scaled that the standard error of the mean over the samples is the one over the groups.
    scale = math.sqrt((count - 1) / (groups - 1)) * (groups - 1)
    values = np.array([scale * (without.mean() - without[k % groups]) for k in range(count)])
    return tuple(float(value) for value in whole + values - values.mean())


def errors_of(
    metric: Metric, data: SampleSetArrays, call: Callable[[SampleSetArrays], float], reference: Sequence[float] = ()
) -> dict[str, tuple[float, ...]]:
    """The statistics of one set metric: its error and its own value, one number per sample.

    ``reference`` are the ``set_values`` of the reference, where the metric is larger for better plans.
    """
    values = set_values(metric, data, call)
    if not metric.larger_is_better:
        return {metric.name: values, own_value(metric.name): values}
    if len(reference) != len(values):
        raise DataError(f"the metric {metric.name} has no value of the reference", "start the run again with --fresh")
    differences = tuple(wanted - value for wanted, value in zip(reference, values, strict=True))
    return {metric.name: differences, own_value(metric.name): values}
