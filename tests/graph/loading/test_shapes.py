"""Shapes without running the model, against shapes of a run; output columns that come from one softmax or sigmoid."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx.parser
import pytest

from mptune.data.archive import read_samples
from mptune.data.metrics.comparing import compare_outputs
from mptune.data.metrics.parts import LEAST_SHARE, OutputParts, cover_held_out, find_parts, load_parts
from mptune.data.samples import CalibrationSet
from mptune.engines.jobs.reference import ReferenceJob
from mptune.graph.loading.model import load_model
from mptune.graph.loading.shapes import ASSUMED_SIZE, shared_units, static_shapes
from tests.engines.engine_support import run_here, save_graph
from tests.graph import models
from tests.graph.hazards.observed import ranges_on
from tests.graph.models import constant, node, value

EXPORTED = sorted((Path(__file__).parents[1] / "exported").glob("*.onnx"))


@pytest.mark.parametrize("path", EXPORTED, ids=lambda p: p.stem)
def test_inferred_shapes_are_those_of_a_run(path: Path, tmp_path: Path) -> None:
    """What torch's exporters write computes its shapes at run time, in places by Range, Where and Expand."""
    model = load_model(path)
    inferred = static_shapes(model, batch=2)
    assert inferred.unknown == 0
    rng = np.random.default_rng(0)
    feed = {
        i.name: rng.integers(0, 50, inferred.shapes[i.name])
        if i.dtype == "int64"
        else rng.standard_normal(inferred.shapes[i.name], np.float32)
        for i in model.inputs
    }
    ranges = ranges_on(model, [feed], tmp_path)
    assert {name: seen.shape for name, seen in ranges.items()} == {name: inferred.shapes[name] for name in ranges}


def test_says_what_it_assumed(tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", "z"], "y", "m")]
    inputs = [value("x", ["time", "batch", 8]), value("z", ["time", 8, None])]
    model = load_model(models.save(models.model(nodes, inputs, [value("y", None)]), tmp_path))
    inferred = static_shapes(model, batch=3)
    assert inferred.assumed == {"time": ASSUMED_SIZE, "batch": 3, "z[2]": ASSUMED_SIZE}
    assert inferred.shapes["y"] == (ASSUMED_SIZE, 3, ASSUMED_SIZE)
    assert inferred.unknown == 0


def test_what_depends_on_values_stays_unknown(tmp_path: Path) -> None:
    nodes = [node("NonZero", ["x"], "n"), node("Cast", ["n"], "f", to=1), node("Add", ["f", "one"], "y")]
    proto = models.model(nodes, [value("x", [4, 4])], [value("y", None)], [constant("one", 1.0)])
    inferred = static_shapes(load_model(models.save(proto, tmp_path)))
    assert inferred.unknown == 2
    assert "y" not in inferred.shapes


CASES: dict[str, tuple[str, tuple[int, ...], int, tuple[int, ...]]] = {
    "softmax": ("y = Softmax(x)", (2, 6), 1, (1,) * 6),
    "cast and identity": ("a = LogSoftmax(x); b = Cast<to=1>(a); y = Identity(b)", (2, 6), 1, (1,) * 6),
    "transpose": ("a = Sigmoid(x); y = Transpose<perm=[0, 2, 1]>(a)", (1, 3, 4), 1, (1,) * 4),
    "reshape to what the input's shape says": (
        "a = Sigmoid(x); s = Shape(x); n = Gather<axis=0>(s, zero); t = Concat<axis=0>(n, rest); y = Reshape(a, t)",
        (2, 3, 4),
        1,
        (1,) * 3,
    ),
    "no head": ("y = Relu(x)", (2, 6), 1, ()),
    "scaled after it": ("a = Sigmoid(x); y = Mul(a, k)", (2, 6), 1, ()),
    "beside boxes, then transposed and flattened": (
        """boxes = Relu(x); a = Sigmoid(x); b = Concat<axis=1>(boxes, a); c = Transpose<perm=[0, 2, 3, 1]>(b);
        y = Reshape(c, to)""",
        (1, 2, 3, 3),
        2,
        (0, 0, 1, 1),
    ),
    "two softmaxes side by side": (
        "a = Softmax(x); b = LogSoftmax(x); y = Concat<axis=-1>(a, b)",
        (2, 3),
        1,
        (1, 1, 1, 2, 2, 2),
    ),
    "levels of a pyramid": (
        """a = Sigmoid(x); b = Sigmoid(x); boxes = Relu(x); c = Concat<axis=1>(boxes, a); d = Concat<axis=1>(boxes, b);
        y = Concat<axis=2>(c, d)""",
        (1, 2, 5),
        1,
        (0, 0, 1, 1),
    ),
    "a slice and a part of a split": (
        """a = Sigmoid(x); l, r = Split<axis=1>(x, sizes); b = Sigmoid(r); c = Slice(a, begin, end, axes);
        y = Concat<axis=1>(l, b, c)""",
        (2, 4),
        1,
        (0, 2, 2, 2, 1, 1),
    ),
}
INTEGERS = {"zero": [0], "rest": [-1, 4], "to": [1, -1, 4], "sizes": [1, 3], "begin": [1], "end": [3], "axes": [1]}


@pytest.mark.parametrize(("text", "shape", "axis", "units"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_columns_of_one_head_share_a_unit(
    text: str, shape: tuple[int, ...], axis: int, units: tuple[int, ...], dynamic: bool, tmp_path: Path
) -> None:
    nodes = [onnx.parser.parse_node(line) for line in text.split(";")]
    used = {name for each in nodes for name in each.input}
    constants = {name: np.array(values) for name, values in INTEGERS.items() if name in used}
    constants |= {"k": np.float32([9.0])} if "k" in used else {}
    dims: list[int | str] = ["n", *shape[1:]] if dynamic else list(shape)
    model = load_model(save_graph(tmp_path / "m.onnx", nodes, dims, constants))
    assert shared_units(model, {"x": shape}).get("y", {}).get(axis, ()) == units


RNG = np.random.default_rng(0)
BIASES = np.float32([8.0, 7.0, 3.0, 2.0, -6.0, -9.0])
"""Of the logits: the last classes have probabilities near 1e-6."""


def probabilities(folder: Path, *, boxes: bool) -> tuple[list[dict[str, np.ndarray]], OutputParts]:
    """The reference outputs of a classifier, or of a detector whose scores are its classes' columns; their parts."""
    end = "scaled = Mul(x, pixels); y = Concat<axis=-1>(scaled, p)" if boxes else "y = Identity(p)"
    nodes = [onnx.parser.parse_node(t) for t in f"l = Add(x, biases); p = Softmax<axis=-1>(l); {end}".split(";")]
    constants = {"biases": BIASES, **({"pixels": np.float32([300.0])} if boxes else {})}
    model = save_graph(folder / "m.onnx", nodes, [1, 50, 6], constants)
    samples, reference = folder / "samples.npz", folder / "reference.npz"
    feeds = tuple({"x": RNG.standard_normal((1, 50, 6)).astype(np.float32)} for _ in range(4))
    CalibrationSet(feeds, "test", False).save(samples)
    units = shared_units(load_model(model), {"x": (1, 50, 6)})
    run_here(ReferenceJob(model, samples, reference, "cpu", units=units))
    parts = load_parts(folder / "parts.json")
    assert parts is not None
    return list(read_samples(reference)), parts["y"]


def test_a_class_near_zero_does_not_decide(tmp_path: Path) -> None:
    """Off by 5e-7 where a class is near 1e-6: half its own scale, and nothing on the scale of the probabilities."""
    reference, parts = probabilities(tmp_path, boxes=False)
    whole = np.concatenate([sample["y"] for sample in reference])
    assert parts.is_split
    assert parts.scales[5] == pytest.approx(LEAST_SHARE * whole.std(), rel=1e-5)
    assert parts.scales[0] == pytest.approx(whole[..., 0].std())
    off = [{"y": sample["y"] + np.float32([0, 0, 0, 0, 0, 5e-7])} for sample in reference]
    assert compare_outputs(off, reference).value("worst_part") > 0.1
    assert compare_outputs(off, reference, parts={"y": parts}).value("worst_part") < 1e-3
    # Held-out samples with larger probabilities raise what columns are divided by.
    small = [{"y": np.float32(0.01) * sample["y"]} for sample in reference]
    searched = find_parts(small, units={"y": dict.fromkeys((1, 2), parts.units)})
    assert searched["y"].scales[5] == pytest.approx(0.01 * parts.scales[5], rel=1e-5)
    assert cover_held_out(searched, reference)["y"].scales[5] == pytest.approx(parts.scales[5], rel=1e-5)


def test_boxes_beside_a_softmax_keep_their_scales(tmp_path: Path) -> None:
    """Boxes in pixels make no score exact, whatever the share of theirs is."""
    reference, parts = probabilities(tmp_path, boxes=True)
    values = np.concatenate([sample["y"] for sample in reference]).reshape(-1, 12)
    assert (parts.is_split, len(parts.ranges)) == (True, 12)
    assert parts.scales[:6] == pytest.approx(values[:, :6].std(axis=0), rel=1e-5)
    assert parts.scales[11] == pytest.approx(LEAST_SHARE * values[:, 6:].std(), rel=1e-5)
    column = RNG.standard_normal((1, 30, 5)) * [300.0, 300.0, 80.0, 80.0, 1e-4]  # of scores, which is divided by itself
    parts = find_parts([{"y": column}], units={"y": {2: (0, 0, 0, 0, 1)}})["y"]
    assert parts.scales == pytest.approx(column[0].std(axis=0))
