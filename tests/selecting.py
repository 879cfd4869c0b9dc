"""Small networks whose outputs have as many rows as their values call for: detectors with NMS, selected points."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

from tests.graph.models import constant, save, text

SIZE = 16
"""Images are 3 x 16 x 16; heads have one box per position, 256 a image."""

HEAD = """
    c1 = Conv<pads = [1, 1, 1, 1]>(x, w1) h1 = Relu(c1) c2 = Conv<pads = [1, 1, 1, 1]>(h1, w2) h2 = Relu(c2)
    raw = Conv(h2, w3) long = Reshape(raw, sizes) flat = Transpose<perm = [0, 2, 1]>(long)
    shift = Slice(flat, k0, k2, k2) size = Slice(flat, k2, k4, k2) logits = Slice(flat, k4, k7, k2)
    t = Tanh(size) e = Exp(t) half = Mul(e, six) centre = Add(shift, grid)
    low = Sub(centre, half) high = Add(centre, half) all_boxes = Concat<axis = 2>(low, high)
    probable = Sigmoid(logits) all_scores = Transpose<perm = [0, 2, 1]>(probable)
    ["nms"] chosen = NonMaxSuppression(all_boxes, all_scores, most, overlap, threshold)
"""
"""Corners (batch, boxes, 4) in pixels and scores (batch, classes, boxes) of an image, and what is selected of them."""
ROWS = """
    image = Gather<axis = 1>(chosen, i0) label = Gather<axis = 1>(chosen, i1) box = Gather<axis = 1>(chosen, i2)
    images1 = Unsqueeze(image, k1) boxes1 = Unsqueeze(box, k1) where = Concat<axis = 1>(images1, boxes1)
    corners = GatherND(all_boxes, where) score = GatherND(all_scores, chosen)
"""
OUTPUTS = {
    "raw": (
        "float[BATCH,256,4] boxes, int64[N,3] selected",
        "boxes = Identity(all_boxes) selected = Identity(chosen)",
    ),
    "apart": (
        "float[N,4] boxes, float[N] scores, int64[N] labels, int64[N] images",
        f"{ROWS} boxes = Identity(corners) scores = Identity(score) labels = Identity(label) images = Identity(image)",
    ),
    "together": (
        "float[N,7] detections",
        f"""{ROWS} image_f = Cast<to = 1>(image) image_column = Unsqueeze(image_f, k1)
        label_f = Cast<to = 1>(label) label_column = Unsqueeze(label_f, k1) score_column = Unsqueeze(score, k1)
        detections = Concat<axis = 1>(image_column, corners, label_column, score_column)""",
    ),
}


def weights(*shapes_and_scales: tuple[tuple[int, ...], float]) -> list[onnx.TensorProto]:
    rng = np.random.default_rng(7)
    return [constant(f"w{k + 1}", rng.normal(0, scale, shape)) for k, (shape, scale) in enumerate(shapes_and_scales)]


def detector(
    path: Path, batch: int | str = 1, threshold: float = 0.6, rows: str = "apart", declared: int | None = None
) -> Path:
    """A detector with NonMaxSuppression inside, which takes ``batch`` images at a time; a name makes it dynamic.

    ``rows``: ``apart`` gives boxes, scores, labels and images as outputs of their own; ``together`` one output of rows
    (image, x1, y1, x2, y2, class, score); ``raw`` all boxes and what NonMaxSuppression returns. ``declared``: how many
    rows the file says that outputs have, as exporters write what they saw in one example.
    """
    outputs, nodes = OUTPUTS[rows]
    outputs = outputs.replace("BATCH", str(batch)).replace("N", str(declared or "n"))
    graph = f"(float[{batch},3,{SIZE},{SIZE}] x) => ({outputs}) {{ {HEAD} {nodes} }}"
    integers = {"sizes": [0, 7, -1], "most": [100]} | {f"k{n}": [n] for n in (0, 1, 2, 4, 7)}
    integers |= {f"i{n}": n for n in range(3)}
    ys, xs = np.mgrid[:SIZE, :SIZE].reshape(2, -1) * 8.0
    floats = {"grid": np.stack([xs, ys], axis=1)[None], "six": 6.0, "overlap": [0.45], "threshold": [threshold]}
    constants = [constant(name, v, np.int64) for name, v in integers.items()]
    constants += [constant(name, v) for name, v in floats.items()]
    constants += weights(((16, 3, 3, 3), 0.3), ((16, 16, 3, 3), 0.15), ((7, 16, 1, 1), 0.5))
    return save(text(graph, *constants), path.parent, path.name)


def points(path: Path) -> Path:
    """Features of the positions at which a score is positive, by NonZero, and the positions."""
    graph = f"""(float[1,3,{SIZE},{SIZE}] x) => (float[n,8] features, int64[2,n] positions)
        <float zero = {{0}}, int64[1] first = {{0}}, int64[2] both = {{0, 1}}> {{
        c = Conv<pads = [1, 1, 1, 1]>(x, w1) hidden = Relu(c) map = Conv(hidden, w2) score = Squeeze(map, both)
        positive = Greater(score, zero) ["select"] where = NonZero(positive) positions = Identity(where)
        image = Squeeze(hidden, first) last = Transpose<perm = [1, 2, 0]>(image)
        rows = Transpose<perm = [1, 0]>(where) features = GatherND(last, rows)
    }}"""
    return save(text(graph, *weights(((8, 3, 3, 3), 0.3), ((1, 8, 1, 1), 0.5))), path.parent, path.name)


def images(path: Path, count: int = 6, batch: int = 1, scale: float = 1.0) -> Path:
    """Smooth random images for these networks, ``count`` samples of ``batch`` each."""
    random = np.random.default_rng(3)
    x = random.normal(0, scale, (count * batch, 3, SIZE, SIZE)).astype(np.float32)
    np.savez(path, x=(x + np.roll(x, 1, axis=2) + np.roll(x, 1, axis=3)) / 2)
    return path
