"""Metrics of classification and segmentation: top-1 and top-5 accuracy on any axis, mean intersection over union."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mptune.data.metrics.sets.targets_of import pairs
from mptune.errors import DataError

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
