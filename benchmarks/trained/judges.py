"""The task's own judge of each kind of network: whether a result is the FP32 model's result, and how far it is off."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from scipy import ndimage

Outputs = Mapping[str, np.ndarray]
Judge = Callable[[Sequence[Outputs], Sequence[Outputs]], "Verdict"]

BOX_PX, MOS, CENTS, SIMILARITY = 2.0, 0.05, 5.0, 0.01
"""How far a result may be off."""


@dataclass(frozen=True)
class Verdict:
    """Whether every sample's task result is kept, and a few words on it."""

    kept: bool
    text: str


def _first(outputs: Outputs) -> np.ndarray:
    return next(iter(outputs.values())).astype(np.float64)


def _same(read: Callable[[np.ndarray], list[object]], what: str) -> Judge:
    """Whether the same is read of the first output; where a value is not finite, nothing is read."""

    def judge(wanted: Sequence[Outputs], got: Sequence[Outputs]) -> Verdict:
        ours = [read(values) if np.isfinite(values).all() else [] for values in map(_first, got)]
        pairs = [pair for a, b in zip(wanted, ours, strict=True) for pair in zip_longest(read(_first(a)), b)]
        same = sum(a == b for a, b in pairs)
        return Verdict(same == len(pairs), f"{same} of {len(pairs)} {what}")

    return judge


def _within(differences: np.ndarray, limit: float, unit: str) -> Verdict:
    off = differences.max(initial=0.0)  # NaN where one is
    return Verdict(bool(off <= limit), f"{off:.2g} {unit}")


def _text(values: np.ndarray) -> list[object]:
    """Connectionist temporal classification: the best class of each step, repeats joined, blanks dropped."""
    steps = values.argmax(-1).ravel() if values.ndim > 2 else values.ravel().astype(int)
    return [[int(s) for s, before in zip(steps, [-1, *steps[:-1]], strict=True) if s not in (before, 0)]]


def _phonemes(values: np.ndarray) -> list[object]:
    """Of each row the best class of each step, up to the first 3."""
    return [row[: [*row, 3].index(3)] for row in values.argmax(-1).tolist()]


texts, phonemes = _same(_text, "texts"), _same(_phonemes, "words")
decisions = _same(lambda values: [values.argmax(-1).ravel().tolist()], "decisions")
"""The best class of each row."""
voice = _same(lambda values: (values.ravel() >= 0.5).tolist(), "decisions")
"""Speech or not, by a probability of one half."""


def onsets(distance: int, what: str) -> Judge:
    """Onsets of the same pitch within some frames: maxima in time of at least 0.5 of the first output.

    One is lost where its maximum is below 0.49, and one too many where it is above 0.51.
    """

    def peaks(outputs: Outputs, least: float) -> list[tuple[int, int]]:
        grid = _first(outputs)[0]
        if not np.isfinite(grid).all():
            return [(-1, -1)]
        inner = grid[1:-1]
        return [(f, p) for f, p in np.argwhere((inner >= least) & (inner > grid[:-2]) & (inner >= grid[2:])).tolist()]

    def judge(wanted: Sequence[Outputs], got: Sequence[Outputs]) -> Verdict:
        total = lost = 0
        for a, b in zip(wanted, got, strict=True):
            free, clear, marks = peaks(b, 0.49), set(peaks(b, 0.51)), peaks(a, 0.5)
            total += len(marks)
            for frame, key in marks:
                near = [mark for mark in free if mark[1] == key and abs(mark[0] - frame) <= distance]
                if near:
                    free.remove(min(near, key=lambda mark: abs(mark[0] - frame)))
                else:
                    lost += 1
            lost += len(clear.intersection(free))
        return Verdict(lost == 0, f"{lost} of {total} {what} differ")

    return judge


def within(limit: float, unit: str, read: Callable[[Outputs], np.ndarray] = _first) -> Judge:
    """All values of the first output, or what ``read`` makes of the outputs."""
    return lambda wanted, got: _within(
        np.concatenate([np.abs(read(a) - read(b)).ravel() for a, b in zip(wanted, got, strict=True)]), limit, unit
    )


def opinion(curves: Sequence[Sequence[float]]) -> Judge:
    """A mean opinion score within 0.05; ``curves`` are polynomials that the package puts the outputs through."""

    def score(outputs: Outputs) -> np.ndarray:
        values = _first(outputs).reshape(-1, len(curves))
        return np.array([np.polyval(curve, v) for curve, v in zip(curves, values.T, strict=True)])

    return within(MOS, "MOS", score)


def pitch(wanted: Sequence[Outputs], got: Sequence[Outputs]) -> Verdict:
    """Cents between the pitches of frames with a confidence of at least 0.5: the mean over nine bins of 20 cents."""

    def cents(outputs: Outputs) -> tuple[np.ndarray, np.ndarray]:
        values = _first(outputs)
        best = values.argmax(1)
        near = np.abs(np.arange(values.shape[1])[None] - best[:, None]) <= 4
        return (values * near) @ (20.0 * np.arange(values.shape[1])) / (values * near).sum(1), values.max(1)

    off = []
    for a, b in zip(wanted, got, strict=True):
        (ours, _), (theirs, sure) = cents(b), cents(a)
        off.append(np.abs(ours - theirs)[sure >= 0.5])
    return _within(np.concatenate(off), CENTS, "cents")


def speaker(wanted: Sequence[Outputs], got: Sequence[Outputs]) -> Verdict:
    """The cosines between all pairs of voices within 0.01."""

    def cosines(outputs: Sequence[Outputs]) -> np.ndarray:
        rows = np.concatenate([_first(o) for o in outputs])
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        return rows @ rows.T

    return _within(np.abs(cosines(wanted) - cosines(got)), SIMILARITY, "cosine")


def text_boxes(wanted: Sequence[Outputs], got: Sequence[Outputs]) -> Verdict:
    """Regions of a map above 0.3 whose mean is at least 0.5: their bounding boxes."""

    def boxes(outputs: Outputs) -> np.ndarray:
        grid = np.nan_to_num(_first(outputs)[0, 0])
        labels, _ = ndimage.label(grid > 0.3)
        found = []
        for k, (rows, columns) in enumerate(ndimage.find_objects(labels), start=1):
            inside = grid[rows, columns][labels[rows, columns] == k]
            if min(rows.stop - rows.start, columns.stop - columns.start) >= 3 and inside.mean() >= 0.5:
                found.append((0, columns.start, rows.start, columns.stop, rows.stop))
        return np.array(found, dtype=float).reshape(-1, 5)

    return _boxes_kept([(boxes(a), boxes(b)) for a, b in zip(wanted, got, strict=True)])


def yolo_boxes(strides: Sequence[int], threshold: float, overlap: float, size: int) -> Judge:
    """Boxes of a YOLO head after non-maximum suppression within 2 px.

    ``strides`` of a head whose boxes are relative to its grids (YOLOX: rows of x, y, w, h, objectness, classes);
    without them, columns of x, y, w, h, classes (YOLOv8).
    """

    def boxes(outputs: Outputs) -> np.ndarray:
        rows = np.nan_to_num(_first(outputs)[0])
        if strides:
            grids = [np.stack(np.meshgrid(*2 * [np.arange(size // s)]), -1).reshape(-1, 2) for s in strides]
            scale = np.concatenate([np.full((len(g), 1), s) for g, s in zip(grids, strides, strict=True)])
            centre, extent = (rows[:, :2] + np.concatenate(grids)) * scale, np.exp(rows[:, 2:4]) * scale
            classes = rows[:, 4:5] * rows[:, 5:]
        else:
            centre, extent, classes = rows[:2].T, rows[2:4].T, rows[4:].T
        scores, kinds = classes.max(1), classes.argmax(1)
        corners = np.concatenate([centre - extent / 2, centre + extent / 2], 1)
        left, kept = [int(k) for k in np.argsort(-scores) if scores[k] > threshold], []
        while left:
            best, *rest = left
            kept.append((kinds[best], *corners[best]))
            left = [k for k in rest if _overlap(corners[best], corners[k]) <= overlap]
        return np.array(kept, dtype=float).reshape(-1, 5)

    return lambda wanted, got: _boxes_kept([(boxes(a), boxes(b)) for a, b in zip(wanted, got, strict=True)])


def _overlap(a: np.ndarray, b: np.ndarray) -> float:
    shared = np.prod(np.maximum(0.0, np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2])))
    return float(shared / max(np.prod(a[2:] - a[:2]) + np.prod(b[2:] - b[:2]) - shared, 1e-9))


def _boxes_kept(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> Verdict:
    """Each box (class, left, top, right, bottom) has a counterpart of its class within 2 px, and none is left over."""
    total = kept = extra = 0
    for wanted, got in pairs:
        total += len(wanted)
        free = list(got)
        for box in wanted:
            near = [k for k, g in enumerate(free) if g[0] == box[0] and np.abs(g[1:] - box[1:]).max() <= BOX_PX]
            if near:
                kept += 1
                free.pop(near[0])
        extra += len(free)
    return Verdict(kept == total and not extra, f"{kept} of {total} boxes" + (f", {extra} more" if extra else ""))
