"""A recurrent layer in FP32 behind FP16: TensorRT-RTX takes no Cast right before a forward one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import NodeProto, helper

from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from tests.graph import rtx
from tests.graph.helpers import feeds, run
from tests.graph.models import constant, model, node, save, value, weight
from tests.graph.verify import verify

STEPS, WIDTH, HIDDEN = 6, 8, 4
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
BETWEEN: dict[str, list[NodeProto]] = {
    "nothing": [],
    "views": [
        node("Unsqueeze", ["h0", "one"], "h1"),
        node("Transpose", ["h1"], "h2", perm=[0, 2, 1, 3]),
        node("Squeeze", ["h2", "two"], "h"),
    ],
    "what changes nothing": [node("Concat", ["h0"], "h1", axis=0), node("MaxPool", ["h1"], "h", kernel_shape=[1])],
    "a computation": [node("Softmax", ["h0"], "h", axis=-1)],
}


def network(folder: Path, op: str, direction: str, between: str) -> Path:
    """A product, what stands between, and a recurrent layer."""
    directions = 2 if direction == "bidirectional" else 1
    nodes = BETWEEN[between]
    first = node("MatMul", ["x", "w"], "h0" if nodes else "h", "product")
    layer = node(op, ["h", "k", "r", "b"], "y", "layer", hidden_size=HIDDEN, direction=direction)
    gates = GATES[op] * HIDDEN
    weights = [
        weight("w", WIDTH, WIDTH),
        weight("k", directions, gates, WIDTH),
        weight("r", directions, gates, HIDDEN),
        weight("b", directions, 2 * gates),
        constant("one", [1], np.int64),
        constant("two", [2], np.int64),
    ]
    shape = [STEPS, directions, "batch", HIDDEN]
    proto = model([first, *nodes, layer], [value("x", [STEPS, "batch", WIDTH])], [value("y", shape)], weights)
    return save(proto, folder)


def written(folder: Path, op: str, direction: str, between: str, fp16: Sequence[str] = ("product",)) -> Path:
    """The typed model with the groups of these nodes in FP16, all else in FP32; verified."""
    loaded = load_model(network(folder, op, direction, between))
    grouped = GroupedModel(loaded, find_groups(loaded, "op"))
    half = {group.id for group in grouped.groups if set(group.nodes) & set(fp16)}
    choice = {g.id: Precision.FP16 if g.id in half else Precision.FP32 for g in grouped.groups}
    rewriter, plan = Rewriter(grouped, WeightBank.write(loaded, folder)), PrecisionPlan(loaded.sha256, choice)
    path = rewriter.write(plan, folder / "typed.onnx")
    verify(rewriter, plan, path)
    return path


def barriers(path: Path) -> list[NodeProto]:
    return [n for n in onnx.load(path, load_external_data=False).graph.node if n.op_type == "Sub"]


@pytest.mark.tensorrt_rtx
@pytest.mark.parametrize(
    ("op", "between"),
    [("LSTM", "nothing"), ("LSTM", "what changes nothing"), ("GRU", "views"), ("RNN", "nothing")],
)
def test_tensorrt_rtx_builds_a_layer_in_fp32_behind_fp16(op: str, between: str, tmp_path: Path) -> None:
    library = rtx.library()
    path = written(tmp_path, op, "forward", between)
    assert rtx.refusal(library, path) is None
    assert len(barriers(path)) == 1


def test_it_changes_no_value(tmp_path: Path) -> None:
    path = written(tmp_path, "LSTM", "forward", "views")
    (barrier,) = barriers(path)
    proto = onnx.load(path)
    for one in proto.graph.node:
        one.input[:] = [barrier.input[0] if name == barrier.output[0] else name for name in one.input]
    bare = save(proto, tmp_path, "bare.onnx")
    for infinite in (False, True):
        feed = feeds(load_model(tmp_path / "model.onnx"))
        feed["x"][2, 1, 3] = 1e6 if infinite else 1.0  # beyond FP16
        assert np.array_equal(run(path, feed)["y"], run(bare, feed)["y"], equal_nan=True)


@pytest.mark.parametrize(
    ("op", "direction", "between", "fp16"),
    [
        ("LSTM", "reverse", "nothing", ("product",)),
        ("GRU", "bidirectional", "views", ("product",)),
        ("LSTM", "forward", "a computation", ("product",)),
        ("LSTM", "forward", "nothing", ("product", "layer")),
        ("LSTM", "forward", "nothing", ("layer",)),
        ("LSTM", "forward", "nothing", ()),
    ],
)
def test_there_is_none_where_it_is_not_needed(
    op: str, direction: str, between: str, fp16: Sequence[str], tmp_path: Path
) -> None:
    assert not barriers(written(tmp_path, op, direction, between, fp16))


def test_names_are_new(tmp_path: Path) -> None:
    path = network(tmp_path, "LSTM", "forward", "nothing")
    proto = onnx.load(path)
    proto.graph.node.append(helper.make_node("Identity", ["y"], ["layer__barrier"], name="layer__barrier"))
    proto.graph.output.append(value("layer__barrier", [STEPS, 1, "batch", HIDDEN]))
    loaded = load_model(save(proto, tmp_path))
    grouped = GroupedModel(loaded, find_groups(loaded))
    plan = grouped.uniform(Precision.FP16).replace({g.id: Precision.FP32 for g in grouped.groups if "layer" in g.nodes})
    rewriter = Rewriter(grouped)
    exported = rewriter.export(plan, tmp_path / "named.onnx")
    assert len(barriers(exported)) == 1
    onnx.checker.check_model(str(exported), full_check=True)
