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


def mixed_rows(proto: onnx.ModelProto, folder: Path, **data: np.ndarray) -> list[Finding]:
    return [f for f in in_process(Specimen(proto, data), folder) if f.code == "rows-mix"]


@pytest.mark.parametrize("operator", ["LSTM", "GRU"])
@pytest.mark.parametrize("steps", ["10", "n"])
def test_a_sequence_along_axis_0_is_no_batch(operator: str, steps: str, tmp_path: Path) -> None:
    """A fixed axis 0 whose rows are told apart by their positions is none; a dynamic one may be one by mistake."""
    gates = {"LSTM": 4, "GRU": 3}[operator]
    constants = [constant(name, RNG.standard_normal((1, gates * 4, size))) for name, size in (("w", 3), ("r", 4))]
    nodes = f"[pool] p = CumSum(x, zero) [recurrent] y = {operator}<hidden_size = 4>(p, w, r)"
    graph = f"(float[{steps},1,3] x) => (float[{steps},1,1,4] y) <int64 zero = {{0}}> {{ {nodes} }}"
    data = np.cumsum(RNG.standard_normal((40, 1, 3)), axis=0).astype(np.float32)
    findings = mixed_rows(text(graph, *constants), tmp_path, x=data)
    assert [f.severity for f in findings] == (["warning"] if steps == "n" else [])
    assert all(f"{operator} 'recurrent' takes axis 0 for a sequence" in f.text for f in findings)


@pytest.mark.parametrize(
    ("axes", "positions", "severities"),
    [("6,4", "6", []), ("6,4", "1", ["warning"]), ("batch,4", "1", ["error"]), ("tokens,4", "1", [])],
)
def test_tokens_on_axis_0_are_a_batch_only_where_one_is_declared(
    axes: str, positions: str, severities: list[str], tmp_path: Path
) -> None:
    """Attention between the rows: fixed ones with positions are no batch, others may be one."""
    nodes = """
        h = Add(x, places) turned = Transpose<perm = [1, 0]>(h) s = MatMul(h, turned)
        p = Softmax<axis = -1>(s) y = MatMul(p, h)
    """
    proto = text(
        f"(float[{axes}] x) => (float[{axes}] y) {{ {nodes} }}",
        constant("places", RNG.standard_normal((int(positions), 4))),
    )
    findings = mixed_rows(proto, tmp_path, x=RNG.standard_normal((24, 4)).astype(np.float32))
    assert [f.severity for f in findings] == severities


def test_a_last_state_of_a_sequence_along_axis_0_may_be_meant(tmp_path: Path) -> None:
    nodes = "[recurrent] y, h = GRU<hidden_size = 4>(x, w, r)"
    constants = [constant(name, RNG.standard_normal((1, 12, size))) for name, size in (("w", 3), ("r", 4))]
    specimen = Specimen(
        text(f"(float[n,1,3] x) => (float[1,1,4] h) {{ {nodes} }}", *constants),
        {"x": RNG.standard_normal((24, 1, 3)).astype(np.float32)},
    )
    (finding,) = in_process(specimen, tmp_path)
    assert (finding.code, finding.severity, finding.where.nodes) == ("batch-not-kept", "warning", ("recurrent",))


def test_a_fixed_axis_0_that_an_output_does_not_have_is_no_batch(tmp_path: Path) -> None:
    nodes = "m = ReduceMean<axes = [0]>(x) y = Add(m, x) z = ReduceSum<keepdims = 0>(y, zero)"
    proto = text(f"(float[6,4] x) => (float[6,4] y, float[4] z) <int64[1] zero = {{0}}> {{ {nodes} }}", opset=13)
    assert mixed_rows(proto, tmp_path, x=RNG.standard_normal((24, 4)).astype(np.float32)) == []


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
    (finding,) = mixed_rows(text(graph), tmp_path, **data)
    assert finding.severity == ("warning" if is_fed else "error")
    assert ("by indices that are fed" in finding.text) is is_fed


def test_nodes_of_one_graph_with_its_edges_are_no_batch(tmp_path: Path) -> None:
    nodes = """
        from = Gather<axis = 1>(edges, zero) to = Gather<axis = 1>(edges, ones) message = Gather<axis = 0>(x, from)
        places = Expand(to, shape) y = ScatterElements<axis = 0, reduction = "add">(x, places, message)
    """
    given = "int64 zero = {0}, int64[1] ones = {1}, int64[2] shape = {10, 4}"
    graph = f"(float[10,4] x, int64[10,2] edges) => (float[10,4] y) <{given}> {{ {nodes} }}"
    edges = np.tile(np.stack([np.arange(10), np.roll(np.arange(10), 3)], 1), (4, 1))
    assert mixed_rows(text(graph), tmp_path, x=RNG.standard_normal((40, 4)).astype(np.float32), edges=edges) == []
