"""Axis 0 of a recurrent operator is a sequence, and rows of a softmax that are -inf are NaN in FP32: said as that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mptune
from tests.graph.models import constant, save, text

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("operator", ["LSTM", "GRU"])
def test_a_sequence_along_axis_0_is_no_batch(operator: str, tmp_path: Path) -> None:
    gates = {"LSTM": 4, "GRU": 3}[operator]
    constants = [constant(name, RNG.standard_normal((1, gates * 4, size))) for name, size in (("w", 3), ("r", 4))]
    nodes = f"[recurrent] y = {operator}<hidden_size = 4>(x, w, r)"
    proto = text(f"(float[10,1,3] x) => (float[10,1,1,4] y) {{ {nodes} }}", *constants)
    data = np.cumsum(RNG.standard_normal((40, 1, 3)), axis=0).astype(np.float32)
    (finding,) = (f for f in mptune.inspect(save(proto, tmp_path), data={"x": data}).findings if f.code == "rows-mix")
    assert finding.severity == "warning"
    assert f"{operator} 'recurrent' takes axis 0 for a sequence" in finding.text


def test_a_row_that_is_infinite_throughout_is_not_called_a_matter_of_fp16(tmp_path: Path) -> None:
    keep = np.zeros((8, 6), np.float32)
    keep[3] = 1.0
    nodes = "hole = Greater(keep, half) s = Where(hole, low, x) y = Softmax<axis = -1>(s)"
    graph = f"(float[n,6] x, float[n,6] keep) => (float[n,6] y) <float half = {{0.5}}> {{ {nodes} }}"
    proto = text(graph, constant("low", -np.inf))
    data = {"x": RNG.standard_normal((8, 6)).astype(np.float32), "keep": keep}
    found = {finding.code: finding for finding in mptune.inspect(save(proto, tmp_path), data=data).findings}
    assert "a row that is -inf throughout" in found["reference-not-finite"].text
    assert "mask" not in found


@pytest.mark.parametrize("is_fed", [True, False])
def test_rows_that_are_taken_by_indices_are_nodes_of_a_graph(is_fed: bool, tmp_path: Path) -> None:
    """Messages along the edges of one graph; with neighbours that the values themselves choose, rows are samples."""
    rng = np.random.default_rng(0)
    edges, inputs = "from = Gather<axis = 1>(edges, zero) to = Gather<axis = 1>(edges, one)", ", int64[10,2] edges"
    if not is_fed:
        edges = "sums = ReduceSum<keepdims = 0>(x, last) top, from = TopK(sums, ten) to = Identity(rows)"
        inputs = ""
    given = "int64 zero = {0}, int64 one = {1}, int64[1] last = {1}, int64[1] ten = {10}, int64[2] shape = {10, 4}"
    graph = f"""(float[10,4] x {inputs}) => (float[10,3] y) <{given}> {{
        {edges} message = Gather<axis = 0>(x, from) at = Unsqueeze(to, last) places = Expand(at, shape)
        sum = ScatterElements<axis = 0, reduction = "add">(x, places, message) y = MatMul(sum, w)
    }}"""
    constants = [constant("rows", np.arange(10), np.int64), constant("w", rng.standard_normal((4, 3)))]
    proto = text(graph, *constants)
    data = {"x": rng.standard_normal((40, 4)).astype(np.float32)}
    if is_fed:
        data["edges"] = np.tile(rng.integers(0, 10, (10, 2)), (4, 1))
    (finding,) = (f for f in mptune.inspect(save(proto, tmp_path), data=data).findings if f.code == "rows-mix")
    assert finding.severity == ("warning" if is_fed else "error")
    assert ("by indices that are fed" in finding.text) is is_fed
