"""Axis 0 of a recurrent operator is a sequence, and rows of a softmax that are -inf are NaN in FP32: said as that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import mptune
from mptune.finding import Finding
from tests.graph.models import constant, save, text
from tests.zoo.fp32 import Specimen
from tests.zoo.in_process import in_process

RNG = np.random.default_rng(0)


def found_of(graph: str, folder: Path, *constants: onnx.TensorProto, **data: np.ndarray) -> dict[str, Finding]:
    return {finding.code: finding for finding in in_process(Specimen(text(graph, *constants), data), folder)}


@pytest.mark.parametrize("operator", ["LSTM", "GRU"])
@pytest.mark.parametrize("steps", ["10", "n"])
def test_a_sequence_along_axis_0_is_no_batch(operator: str, steps: str, tmp_path: Path) -> None:
    """A dynamic axis 0 may be one by mistake: a warning, also where rows meet before the layer that says so."""
    gates = {"LSTM": 4, "GRU": 3}[operator]
    constants = [constant(name, RNG.standard_normal((1, gates * 4, size))) for name, size in (("w", 3), ("r", 4))]
    nodes = f"sum = CumSum(x, zero) [recurrent] y, h = {operator}<hidden_size = 4>(sum, w, r)"
    ends = f"(float[{steps},1,3] x) => (float[{steps},1,1,4] y, float[1,1,4] h)"
    data = np.cumsum(RNG.standard_normal((40, 1, 3)), axis=0).astype(np.float32)
    found = found_of(f"{ends} <int64 zero = {{0}}> {{ {nodes} }}", tmp_path, *constants, x=data)
    assert found.keys() == ({"rows-mix", "batch-not-kept"} if steps == "n" else set())
    assert {finding.severity for finding in found.values()} <= {"warning"}
    assert all(f"{operator} 'recurrent' takes axis 0 for a sequence" in finding.text for finding in found.values())


@pytest.mark.parametrize(
    ("ends", "positions", "severity"),
    [
        ("(float[6,4] x) => (float[6,4] y)", 6, None),
        ("(float[6,4] x) => (float[6,4] y)", 1, "warning"),
        ("(float[6,4] x) => (float[6,4] y, float[1,4] first)", 1, None),
        ("(float[tokens,4] x) => (float[tokens,4] y)", 1, None),
        ("(float[batch,4] x) => (float[batch,4] y)", 1, "error"),
    ],
)
def test_rows_are_a_batch_where_one_is_declared(ends: str, positions: int, severity: str, tmp_path: Path) -> None:
    """Attention between the rows: fixed ones that all outputs share may be a batch, unless they have positions."""
    nodes = """
        h = Add(x, places) turned = Transpose<perm = [1, 0]>(h) s = MatMul(h, turned)
        p = Softmax<axis = -1>(s) y = MatMul(p, h) first = Gather<axis = 0>(h, zero)
    """
    places = constant("places", RNG.standard_normal((positions, 4)))
    data = RNG.standard_normal((24, 4)).astype(np.float32)
    found = found_of(f"{ends} <int64[1] zero = {{0}}> {{ {nodes} }}", tmp_path, places, x=data)
    assert {code: finding.severity for code, finding in found.items()} == ({"rows-mix": severity} if severity else {})


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
    """Nodes relative to their parents; with parents that the values themselves choose, rows are samples."""
    parents, inputs = "", ", int64[n] parents"
    if not is_fed:
        parents, inputs = "m = ReduceMin<axes = [1], keepdims = 0>(x) b = Tanh(m) parents = Cast<to = 7>(b)", ""
    graph = f"""(float[n,4] x {inputs}) => (float[n,4] y) {{
        {parents} of_parents = Gather<axis = 0>(x, parents) y = Sub(x, of_parents)
    }}"""
    data = {"x": RNG.standard_normal((40, 4)).astype(np.float32)}
    data |= {"parents": np.zeros(40, np.int64)} if is_fed else {}
    finding = found_of(graph, tmp_path, **data)["rows-mix"]
    assert finding.severity == ("warning" if is_fed else "error")
    assert ("by indices that are fed" in finding.text) is is_fed
