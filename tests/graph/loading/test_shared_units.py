"""Which columns of an output come from one Softmax, LogSoftmax or Sigmoid, through operators that move values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import NodeProto, helper

from mptune.data.archive import read_samples
from mptune.data.metrics.comparing import compare_outputs
from mptune.data.metrics.parts import LEAST_SHARE, OutputParts, cover_held_out, find_parts, load_parts
from mptune.data.samples import CalibrationSet
from mptune.diagnosis.limits import error_of
from mptune.engines.jobs.reference import ReferenceJob
from mptune.graph.loading.model import load_model
from mptune.graph.loading.shapes import shared_units
from tests.engines.engine_support import run_here, save_graph

node = helper.make_node


def head(name: str, operator: str = "Sigmoid", x: str = "x", **attributes: int) -> NodeProto:
    return node(operator, [x], [name], name=name, **attributes)


I64 = np.int64
CASES: dict[str, tuple[list[NodeProto], dict[str, np.ndarray], tuple[int, ...], int, tuple[int, ...]]] = {
    "softmax": ([head("y", "Softmax")], {}, (2, 6), 1, (1,) * 6),
    "log-softmax": ([head("y", "LogSoftmax")], {}, (2, 6), 1, (1,) * 6),
    "cast and identity": (
        [head("a"), node("Cast", ["a"], ["b"], to=1), node("Identity", ["b"], ["y"])], {}, (2, 6), 1, (1,) * 6,
    ),
    "transpose": ([head("a"), node("Transpose", ["a"], ["y"], perm=[0, 2, 1])], {}, (1, 3, 4), 1, (1,) * 4),
    "reshape to what the input's shape says": (
        [
            head("a"), node("Shape", ["x"], ["s"]), node("Gather", ["s", "zero"], ["n"], axis=0),
            node("Concat", ["n", "rest"], ["t"], axis=0), node("Reshape", ["a", "t"], ["y"]),
        ],
        {"zero": np.array([0], I64), "rest": np.array([-1, 4], I64)}, (2, 3, 4), 1, (1,) * 3,
    ),
    "no head": ([node("Relu", ["x"], ["y"])], {}, (2, 6), 1, ()),
    "scaled after it": ([head("a"), node("Mul", ["a", "k"], ["y"])], {"k": np.float32([9.0])}, (2, 6), 1, ()),
    "beside boxes": (
        [node("Relu", ["x"], ["boxes"]), head("a"), node("Concat", ["boxes", "a"], ["y"], axis=1)],
        {}, (1, 4, 9), 1, (0, 0, 0, 0, 1, 1, 1, 1),
    ),
    "beside boxes, then transposed and flattened": (
        [
            node("Relu", ["x"], ["boxes"]), head("a"), node("Concat", ["boxes", "a"], ["b"], axis=1),
            node("Transpose", ["b"], ["c"], perm=[0, 2, 3, 1]), node("Reshape", ["c", "to"], ["y"]),
        ],
        {"to": np.array([1, -1, 4], I64)}, (1, 2, 3, 3), 2, (0, 0, 1, 1),
    ),
    "two softmaxes side by side": (
        [head("a", "Softmax"), head("b", "LogSoftmax"), node("Concat", ["a", "b"], ["y"], axis=-1)],
        {}, (2, 3), 1, (1, 1, 1, 2, 2, 2),
    ),
    "levels of a pyramid": (
        [
            head("a"), head("b"), node("Relu", ["x"], ["boxes"]), node("Concat", ["boxes", "a"], ["c"], axis=1),
            node("Concat", ["boxes", "b"], ["d"], axis=1), node("Concat", ["c", "d"], ["y"], axis=2),
        ],
        {}, (1, 2, 5), 1, (0, 0, 1, 1),
    ),
    "a slice and a part of a split": (
        [
            head("a"), node("Split", ["x", "sizes"], ["l", "r"], axis=1), head("b", x="r"),
            node("Slice", ["a", "from", "to", "axes"], ["c"]), node("Concat", ["l", "b", "c"], ["y"], axis=1),
        ],
        {"sizes": np.array([1, 3], I64), "from": np.array([1], I64), "to": np.array([3], I64),
         "axes": np.array([1], I64)},
        (2, 4), 1, (0, 2, 2, 2, 1, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("nodes", "constants", "shape", "axis", "units"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_columns_of_one_head_share_a_unit(
    nodes: list[NodeProto],
    constants: dict[str, np.ndarray],
    shape: tuple[int, ...],
    axis: int,
    units: tuple[int, ...],
    dynamic: bool,
    tmp_path: Path,
) -> None:
    dims: list[int | str] = ["n", *shape[1:]] if dynamic else list(shape)
    model = load_model(save_graph(tmp_path / "m.onnx", nodes, dims, constants))
    assert shared_units(model, {"x": shape}).get("y", {}).get(axis, ()) == units


RNG = np.random.default_rng(0)
BIASES = np.float32([8.0, 7.0, 3.0, 2.0, -6.0, -9.0])
"""Of the logits: the last classes have probabilities near 1e-6."""


def probabilities(folder: Path, *, boxes: bool) -> tuple[Path, list[dict[str, np.ndarray]], OutputParts]:
    """A classifier, or a detector whose scores are its classes' columns: the reference outputs, and their parts."""
    nodes = [node("Add", ["x", "biases"], ["logits"]), node("Softmax", ["logits"], ["p"], axis=-1)]
    if boxes:
        nodes += [node("Mul", ["x", "pixels"], ["boxes"]), node("Concat", ["boxes", "p"], ["y"], axis=-1)]
    else:
        nodes += [node("Identity", ["p"], ["y"])]
    constants = {"biases": BIASES, **({"pixels": np.float32([300.0])} if boxes else {})}
    model = save_graph(folder / "m.onnx", nodes, [1, 50, 6], constants)
    samples, reference = folder / "samples.npz", folder / "reference.npz"
    feeds = tuple({"x": RNG.standard_normal((1, 50, 6)).astype(np.float32)} for _ in range(4))
    CalibrationSet(feeds, "test", False).save(samples)
    units = shared_units(load_model(model), {"x": (1, 50, 6)})
    run_here(ReferenceJob(model, samples, reference, "cpu", parts=folder / "parts.json", units=units))
    parts = load_parts(folder / "parts.json")
    assert parts is not None
    return model, list(read_samples(reference)), parts["y"]


def test_a_class_near_zero_does_not_decide(tmp_path: Path) -> None:
    """Off by 5e-7 where a class is near 1e-6: half its own scale, and nothing on the scale of the probabilities."""
    _, reference, parts = probabilities(tmp_path, boxes=False)
    whole = np.concatenate([sample["y"] for sample in reference]).std()
    assert parts.is_split
    assert parts.scales[5] == pytest.approx(LEAST_SHARE * whole, rel=1e-5)
    assert parts.scales[0] == pytest.approx(np.concatenate([sample["y"] for sample in reference])[..., 0].std())
    off = [{"y": sample["y"] + np.float32([0, 0, 0, 0, 0, 5e-7])} for sample in reference]
    assert compare_outputs(off, reference).value("worst_part") > 0.1
    assert compare_outputs(off, reference, parts={"y": parts}).value("worst_part") < 1e-3
    column = [[sample["y"][..., 5] for sample in outputs] for outputs in (off, reference)]
    assert error_of(*column) > 0.1
    assert error_of(*column, least=parts.least_scale((5,))) < 1e-3


def test_boxes_beside_a_softmax_keep_their_scales(tmp_path: Path) -> None:
    """Boxes in pixels make no score exact, whatever the share of theirs is."""
    _, reference, parts = probabilities(tmp_path, boxes=True)
    values = np.concatenate([sample["y"] for sample in reference]).reshape(-1, 12)
    assert (parts.is_split, len(parts.ranges)) == (True, 12)
    assert parts.scales[:6] == pytest.approx(values[:, :6].std(axis=0), rel=1e-5)
    assert parts.scales[11] == pytest.approx(LEAST_SHARE * values[:, 6:].std(), rel=1e-5)
    assert (parts.least_scale((0, 1)), parts.least_scale((6,))) == (0.0, parts.scales[6])


def test_one_score_column_beside_boxes_is_divided_by_its_own_scale() -> None:
    values = RNG.standard_normal((1, 30, 5)) * [300.0, 300.0, 80.0, 80.0, 1e-4]
    found = find_parts([{"y": values}], units={"y": {2: (0, 0, 0, 0, 1)}})["y"]
    assert found.scales == pytest.approx(values[0].std(axis=0))


def test_held_out_samples_with_larger_probabilities_raise_what_columns_are_divided_by(tmp_path: Path) -> None:
    _, reference, parts = probabilities(tmp_path, boxes=False)
    small = [{"y": np.float32(0.01) * sample["y"]} for sample in reference]
    units = {"y": dict.fromkeys((1, 2), parts.units)}
    searched = find_parts(small, units=units)
    covering = cover_held_out(searched, reference)["y"]
    assert covering.scales[5] == pytest.approx(parts.scales[5], rel=1e-5)
    assert searched["y"].scales[5] == pytest.approx(0.01 * parts.scales[5], rel=1e-5)
