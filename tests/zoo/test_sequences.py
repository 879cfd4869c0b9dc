"""Axis 0 of a recurrent operator is a sequence, and rows of a softmax that are -inf are NaN in FP32: said as that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import mptune
from tests.graph.models import constant, model, node, save, value

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("operator", ["LSTM", "GRU"])
def test_a_sequence_along_axis_0_is_no_batch(operator: str, tmp_path: Path) -> None:
    gates = {"LSTM": 4, "GRU": 3}[operator]
    constants = [
        constant("w", RNG.standard_normal((1, gates * 4, 3)).astype(np.float32)),
        constant("r", RNG.standard_normal((1, gates * 4, 4)).astype(np.float32)),
    ]
    nodes = [node(operator, ["x", "w", "r"], "y", "recurrent", hidden_size=4)]
    proto = model(nodes, [value("x", [10, 1, 3])], [value("y", [10, 1, 1, 4])], constants)
    data = np.cumsum(RNG.standard_normal((40, 1, 3)), axis=0).astype(np.float32)
    found = [one for one in mptune.inspect(save(proto, tmp_path), data={"x": data}).findings if one.code == "rows-mix"]
    assert [one.severity for one in found] == ["warning"]
    assert f"{operator} 'recurrent' takes axis 0 for a sequence" in found[0].text


def test_a_row_that_is_infinite_throughout_is_not_called_a_matter_of_fp16(tmp_path: Path) -> None:
    keep = np.zeros((8, 6), np.float32)
    keep[3] = 1.0
    nodes = [
        node("Greater", ["keep", "half"], "hole", "is masked"),
        node("Where", ["hole", "low", "x"], "s", "masked"),
        node("Softmax", ["s"], "y", "weights", axis=-1),
    ]
    constants = [constant("half", 0.5), constant("low", -np.inf)]
    inputs = [value(name, ["batch", 6]) for name in ("x", "keep")]
    proto = model(nodes, inputs, [value("y", ["batch", 6])], constants)
    data = {"x": RNG.standard_normal((8, 6)).astype(np.float32), "keep": keep}
    found = {one.code: one for one in mptune.inspect(save(proto, tmp_path), data=data).findings}
    assert "a row that is -inf throughout" in found["reference-not-finite"].text
    assert "in FP32 already" in found["mask"].text


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_fed", [True, False])
def test_rows_that_are_taken_by_indices_are_nodes_of_a_graph(is_fed: bool, seed: int, tmp_path: Path) -> None:
    """Messages along the edges of one graph; with neighbours that the values themselves choose, rows are samples."""
    rng = np.random.default_rng(seed)
    edges = [node("Gather", ["edges", "first"], "from", axis=1), node("Gather", ["edges", "second"], "to", axis=1)]
    if not is_fed:
        edges = [
            node("ReduceSum", ["x", "second"], "sums", keepdims=0),
            node("TopK", ["sums", "ten"], ["top", "from"], "order"),
            node("Identity", ["rows"], "to"),
        ]
    nodes = [
        *edges,
        node("Gather", ["x", "from"], "message", "messages", axis=0),
        node("Unsqueeze", ["to", "last"], "at"),
        node("Expand", ["at", "shape"], "places"),
        node("ScatterElements", ["x", "places", "message"], "sum", "sum", axis=0, reduction="add"),
        node("MatMul", ["sum", "w"], "y", "product"),
    ]
    constants = [constant("first", 0, np.int64), constant("second", [1] if not is_fed else 1, np.int64)]
    constants += [constant("last", [1], np.int64), constant("shape", [10, 4], np.int64)]
    constants += [constant("rows", np.arange(10), np.int64), constant("ten", [10], np.int64)]
    constants.append(constant("w", rng.standard_normal((4, 3)).astype(np.float32)))
    inputs = [value("x", [10, 4])] + [value("edges", [10, 2], onnx.TensorProto.INT64)] * is_fed
    proto = model(nodes, inputs, [value("y", [10, 3])], constants)
    data = {"x": rng.standard_normal((40, 4)).astype(np.float32)}
    if is_fed:
        data["edges"] = np.tile(rng.integers(0, 10, (10, 2)), (4, 1))
    found = [one for one in mptune.inspect(save(proto, tmp_path), data=data).findings if one.code == "rows-mix"]
    assert [one.severity for one in found] == ["warning" if is_fed else "error"]
    assert ("by indices that are fed" in found[0].text) is is_fed
