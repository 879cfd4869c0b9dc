"""A recurrent layer in FP32 behind FP16: TensorRT-RTX takes no Cast right before a forward one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import NodeProto

from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
from mptune.graph.writing.rewrite import Rewriter
from tests.graph import rtx
from tests.graph.helpers import feeds, run
from tests.graph.models import save, text, weight
from tests.graph.verify import verify

STEPS, WIDTH, HIDDEN = 6, 8, 4
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
BETWEEN = {
    "nothing": "h = MatMul(x, w)",
    "views": "h0 = MatMul(x, w) h1 = Unsqueeze(h0, one) h2 = Transpose<perm = [0, 2, 1, 3]>(h1) h = Squeeze(h2, two)",
    "what changes nothing": "h0 = MatMul(x, w) h1 = Concat<axis = 0>(h0) h = MaxPool<kernel_shape = [1]>(h1)",
    "a computation": "h0 = MatMul(x, w) h = Softmax<axis = -1>(h0)",
}


def written(folder: Path, op: str, direction: str, between: str, fp16: tuple[str, ...] = ("product",)) -> Path:
    """A product, what stands between, and a recurrent layer; typed with the groups of these nodes in FP16."""
    directions, gates = 2 if direction == "bidirectional" else 1, GATES[op] * HIDDEN
    shape = f"float[{STEPS},{directions},batch,{HIDDEN}]"
    graph = f"""(float[{STEPS},batch,{WIDTH}] x) => ({shape} y, {shape} layer__barrier)
        <int64[1] one = {{1}}, int64[1] two = {{2}}> {{
        [product] {BETWEEN[between]} [layer] y = {op}<hidden_size = {HIDDEN}, direction = "{direction}">(h, k, r, b)
        [layer__barrier] layer__barrier = Identity(y)
    }}"""  # a name that mptune would give
    weights = [weight("w", WIDTH, WIDTH), weight("k", directions, gates, WIDTH), weight("r", directions, gates, HIDDEN)]
    loaded = load_model(save(text(graph, *weights, weight("b", directions, 2 * gates)), folder))
    grouped = GroupedModel(loaded, find_groups(loaded, "op"))
    half = {group.id: Precision.FP16 for group in grouped.groups if set(group.nodes) & set(fp16)}
    rewriter, plan = Rewriter(grouped), grouped.uniform(Precision.FP32).replace(half)
    path = rewriter.export(plan, folder / "typed.onnx")
    verify(rewriter, plan, path)
    return path


def barriers(path: Path) -> list[NodeProto]:
    return [n for n in onnx.load(path).graph.node if n.op_type == "Sub"]


@pytest.mark.tensorrt_rtx
@pytest.mark.parametrize(("op", "between"), [("LSTM", "what changes nothing"), ("GRU", "views"), ("RNN", "nothing")])
def test_tensorrt_rtx_builds_a_layer_in_fp32_behind_fp16(op: str, between: str, tmp_path: Path) -> None:
    library = rtx.library()
    path = written(tmp_path, op, "forward", between)
    assert rtx.refusal(library, path) is None
    assert len(barriers(path)) == 1


def test_it_changes_no_value(tmp_path: Path) -> None:
    path = written(tmp_path, "LSTM", "forward", "views")
    (barrier,) = barriers(path)
    proto = onnx.load(path)
    for each in proto.graph.node:
        each.input[:] = [barrier.input[0] if name == barrier.output[0] else name for name in each.input]
    bare = save(proto, tmp_path, "bare.onnx")
    for largest in (1.0, 1e6):  # the second is beyond FP16
        feed = feeds(load_model(tmp_path / "model.onnx"))
        feed["x"][2, 1, 3] = largest
        assert np.array_equal(run(path, feed)["y"], run(bare, feed)["y"], equal_nan=True)


@pytest.mark.parametrize(
    ("op", "direction", "between", "fp16"),
    [
        ("LSTM", "reverse", "nothing", ("product",)),
        ("GRU", "bidirectional", "views", ("product",)),
        ("LSTM", "forward", "a computation", ("product",)),
        ("LSTM", "forward", "nothing", ("product", "layer")),
        ("LSTM", "forward", "nothing", ()),
    ],
)
def test_there_is_none_where_it_is_not_needed(
    op: str, direction: str, between: str, fp16: tuple[str, ...], tmp_path: Path
) -> None:
    assert not barriers(written(tmp_path, op, direction, between, fp16))
