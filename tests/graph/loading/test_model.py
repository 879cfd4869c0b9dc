"""What loads, how it is typed, and what is refused in one line."""

from __future__ import annotations

import gc
import os
import re
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, external_data_helper, helper

from mptune.errors import ModelError
from mptune.graph.facts import facts_of, node_rules
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.value_types import value_types
from mptune.graph.writing.rewrite import rewrite
from tests.graph import models
from tests.graph.helpers import feeds, relative_l2, run


def test_what_is_computed_once_of_a_model_is_freed_with_it(tmp_path: Path) -> None:
    path = models.save(models.mlp(), tmp_path)
    model, other = load_model(path), load_model(path)
    grouped = GroupedModel(model, find_groups(model))
    assert facts_of(model) is facts_of(model)
    assert value_types(grouped) is value_types(grouped)
    assert value_types(grouped).rules is node_rules(model)
    assert node_rules(model) is not node_rules(other)
    ends = [weakref.ref(model), weakref.ref(grouped)]
    del model, grouped
    gc.collect()
    assert [end() for end in ends] == [None, None]


def test_hash_covers_external_data(tmp_path: Path) -> None:
    proto = models.mlp()
    w1 = onnx.numpy_helper.to_array(proto.graph.initializer[2]).copy()
    onnx.save(proto, tmp_path / "a.onnx", save_as_external_data=True, location="a.bin", size_threshold=0)
    before = load_model(tmp_path / "a.onnx")
    assert np.array_equal(before.initializers["w1"].numpy(), w1)
    data = bytearray((tmp_path / "a.bin").read_bytes())
    data[0] ^= 1
    (tmp_path / "a.bin").write_bytes(data)
    assert load_model(tmp_path / "a.onnx").sha256 != before.sha256


def test_names_nodes_uniquely_and_sorts_them(tmp_path: Path) -> None:
    nodes = "y = Relu(b) [same] a = Relu(x) [same] b = Relu(a)"
    path = models.save(models.text(f"(float[2] x) => (float[2] y) {{ {nodes} }}"), tmp_path)
    assert [n.name for n in load_model(path).nodes] == ["same", "same_2", "Relu_0"]
    many = [models.node("Relu", [f"v{i}"], f"v{i + 1}", "same") for i in range(20_000)]
    model = load_model(
        models.save(models.model(many, [models.value("v0", [2])], [models.value("v20000", [2])]), tmp_path)
    )
    assert len({node.name for node in model.nodes}) == 20_000, "and quickly"


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(path)
    assert caught.value.hint
    assert "\n" not in caught.value.message
    return caught.value.message


def test_refuses_what_is_no_model(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "none.onnx")
    assert "not a file" in refused(tmp_path)
    path, whole = tmp_path / "m.onnx", models.mlp().SerializeToString()
    for data in (b"", b"not an onnx file at all", bytes(range(256)) * 8):
        path.write_bytes(data)
        assert "ONNX" in refused(path)
    for share in (0.1, 0.5, 0.999):
        path.write_bytes(whole[: int(len(whole) * share)])
        refused(path)


def _opset(version: int) -> onnx.ModelProto:
    proto = models.mlp()
    proto.opset_import[0].version = version
    return proto


def _branch(read: str, out: str) -> onnx.ModelProto:
    then = f"then_branch: graph = a () => (float[2] {out}) {{ t = Neg({read}) }}"
    other = "else_branch: graph = b () => (float[2] e) { e = Abs(x) }"
    return models.text(f"(float[2] x, bool c) => (float[2] y) {{ y = If(c) <{then}, {other}> }}")


UNTUNABLE = {
    "FP16 already": models.text("(float16[2] x) => (float16[2] y) { y = Relu(x) }"),
    "BF16 already": models.text("(bfloat16[2] x) => (bfloat16[2] y) { y = Relu(x) }", opset=22),
    "needs 7": _opset(6),
    "knows up to": _opset(999),
    "type-check": models.text("(float[2,3] x) => (float[2,2] y) { y = MatMul(x, w) }", models.weight("w", 4, 2)),
    "cycle": models.text("(float[2] x) => (float[2] y) { a = Add(x, y) y = Relu(a) }"),
    "nothing computes": models.text("() => (float[2] y) { y = Relu(nowhere) }"),
    "reads 'nowhere'": _branch("nowhere", "t"),
    "does not compute": _branch("x", "x"),
    "negative": models.model([models.node("Relu", ["x"], "y")], [models.value("x", [-2])], [models.value("y", None)]),
}


@pytest.mark.parametrize("says", UNTUNABLE)
def test_refuses_what_it_cannot_tune(says: str, tmp_path: Path) -> None:
    assert says in refused(models.save(UNTUNABLE[says], tmp_path))


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/passwd", "", "none.bin", "short.bin"])
def test_refuses_external_data_outside_the_models_folder_missing_or_too_short(tmp_path: Path, location: str) -> None:
    (tmp_path / "secret.bin").write_bytes(bytes(4096))
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "short.bin").write_bytes(b"short")
    proto = models.mlp()
    tensor = proto.graph.initializer[2]
    external_data_helper.set_external_data(tensor, location=location, offset=0, length=512)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    word = {"none.bin": "missing", "short.bin": "does not fit"}.get(location, "outside")
    assert word in refused(models.save(proto, tmp_path / "inner"))


def test_types_what_a_large_constant_node_and_a_norm_that_onnx_refuses_give(tmp_path: Path) -> None:
    """onnx 1.23 refuses its own definition of MeanVarianceNormalization."""
    proto = models.text("(float[2,64] x) => (float[n,m] y) { m = MeanVarianceNormalization(x) y = MatMul(m, c) }")
    proto.graph.node.insert(0, models.node("Constant", [], "c", "big", value=models.weight("", 64, 32)))
    model = load_model(models.save(proto, tmp_path))
    assert (model.info("m").dtype, model.info("y").shape) == ("float", (2, 32))
    assert (model.nodes[1].op_type, model.initializers["c"].node_index) == ("MeanVarianceNormalization", 0)


def test_types_the_outer_product_of_two_computed_vectors(tmp_path: Path) -> None:
    """onnx 1.23 takes their values for a shape, and refuses the product."""
    graph = """(float[6] x, float[4] v) => (float[n] y) <int64[1] last = {1}, int64[1] first = {0}> {
        column = Unsqueeze(x, last) row = Unsqueeze(v, first) outer = Mul(column, row) shape = Shape(outer)
        width = Gather(shape, last) y = Reshape(v, width)
    }"""
    proto = models.text(graph)
    with pytest.raises(onnx.shape_inference.InferenceError, match="Invalid rank for Mul"):  # else nothing is to be done
        onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)
    model = load_model(models.save(proto, tmp_path))
    assert model.info("outer").shape == (6, 4)
    assert model.info("y").shape == (4,), "other values are still propagated"


@pytest.mark.parametrize("opset", [7, 8])
def test_old_operator_sets_are_raised(opset: int, tmp_path: Path) -> None:
    """Upsample's scales became an input at 9; BatchNormalization and Dropout have other attributes."""
    nodes = """c = Conv(x, w) n = BatchNormalization(c, s, s, s, s) d = Dropout(n)
        u = Upsample<scales = [1.0, 1.0, 2.0, 2.0]>(d) y = PRelu(u, p)"""
    constants = [models.weight("w", 4, 3, 1, 1), models.constant("s", [1, 2, 3, 4]), models.constant("p", [0.1])]
    path = models.save(
        models.text(f"(float[1,3,4,4] x) => (float[1,4,8,8] y) {{ {nodes} }}", *constants, opset=opset), tmp_path
    )
    model = load_model(path)
    assert (model.opset, model.raised_from, load_model(path, opset=11).raised_from) == (9, opset, None)
    feed = feeds(model)
    plan = PrecisionPlan.uniform(model.sha256, [g.id for g in find_groups(model)], Precision.FP16)
    written = models.save(rewrite(model, plan), tmp_path, "fp16.onnx")
    assert relative_l2(run(written, feed)["y"], run(path, feed)["y"]) < 2e-3


def test_a_group_norm_is_not_raised_to_where_its_scale_means_channels(tmp_path: Path) -> None:
    """onnx 1.23 converts it without a word, and the model fails when it is run."""
    nodes = "[norm] y = GroupNormalization<num_groups = 2>(x, scale, bias)"
    graph = f"(float[1,4,3] x) => (float[1,4,3] y) {{ {nodes} }}"
    path = models.save(models.text(graph, models.weight("scale", 2), models.weight("bias", 2), opset=18), tmp_path)
    assert load_model(path, opset=20).opset == 20
    with pytest.raises(ModelError, match="from 21 on a GroupNormalization has a scale for each channel"):
        load_model(path, opset=22)


def test_classical_learners_and_outputs_of_maps_are_refused_in_one_line(tmp_path: Path) -> None:
    def save(nodes: list[onnx.NodeProto], output: onnx.ValueInfoProto) -> Path:
        proto = models.model(nodes, [models.value("x", ["n", 2])], [output], [models.weight("w", 2, 2)])
        proto.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
        return models.save(proto, tmp_path)

    normalise = helper.make_node("Normalizer", ["x"], ["n"], domain="ai.onnx.ml", norm="L2")
    scale = helper.make_node("Scaler", ["n"], ["s"], domain="ai.onnx.ml", offset=[0.0], scale=[1.0])
    cast = models.node("Cast", ["s"], "y", "cast", to=TensorProto.FLOAT)
    message = refused(save([normalise, scale, cast], models.value("y", ["n", 2])))
    assert "no FP32 layer to tune" in message
    maps = helper.make_node("ZipMap", ["p"], ["maps"], domain="ai.onnx.ml", classlabels_int64s=[0, 1])
    kind = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    output = helper.make_value_info("maps", helper.make_sequence_type_proto(kind))
    assert "'maps' holds maps" in refused(save([models.node("MatMul", ["x", "w"], "p", "product"), maps], output))


def test_dimensions_of_minus_one_are_dynamic_each_of_its_own_size(tmp_path: Path) -> None:
    """As older exporters of Paddle write them, with ``?`` for heights and widths."""
    nodes = [models.node("Relu", ["x"], "r", "relu"), models.node("ReduceMean", ["r"], "y", "mean", axes=[2, 3])]
    proto = models.model(nodes, [models.value("x", [-1, 3, "?", "?"])], [models.value("y", [-1, 3, 1, 1])])
    model = load_model(models.save(proto, tmp_path))
    assert model.info("x").shape == (None, 3, None, None)
    assert (model.info("y").shape or ())[1:] == (3, 1, 1)


def _spoilt(path: str, value: object) -> onnx.ModelProto:
    """A network with one field changed, such as ``input.0.name``."""
    proto = models.mlp()
    *parents, last = path.split(".")
    message: Any = proto.graph
    for part in parents:
        message = message[int(part)] if part.isdecimal() else getattr(message, part)
    if last in ("input", "initializer"):
        getattr(message, last).append(value)
    elif last == "dims":
        message.dims[:] = value
    else:
        setattr(message, last, value)
    return proto


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        ("initializer.2.dims", [2**40, 2**40], "other data"),
        ("initializer.2.dims", [-8, -16], "other data"),
        ("initializer.2.dims", [0, 16], "other data"),
        ("initializer.0.data_type", 99, "unknown element type"),
        ("input.0.type.tensor_type.elem_type", 99, "unknown element type"),
        ("initializer", models.mlp().graph.initializer[0], "there twice"),
        ("input", models.mlp().graph.input[0], "there twice"),
        ("input.0.name", "", "has no name"),
    ],
)
def test_refuses_what_contradicts_itself(path: str, value: object, word: str, tmp_path: Path) -> None:
    assert word in refused(models.save(_spoilt(path, value), tmp_path))


@pytest.mark.parametrize("text", [b"/block/norm", b"gamma", b"MatMul"])
def test_what_no_check_looks_for_is_refused_in_one_line_as_well(text: bytes, tmp_path: Path) -> None:
    """Text that is not UTF-8: protobuf hands it over as bytes."""
    (tmp_path / "m.onnx").write_bytes(models.mlp().SerializeToString().replace(text, b"\xff" * len(text)))
    assert "cannot be read" in refused(tmp_path / "m.onnx")


def test_a_value_may_be_an_output_twice(tmp_path: Path) -> None:
    proto = models.mlp()
    proto.graph.output.append(proto.graph.output[0])
    model = load_model(models.save(proto, tmp_path))
    plan = PrecisionPlan.uniform(model.sha256, [g.id for g in find_groups(model)], Precision.FP16)
    assert list(rewrite(model, plan).graph.output) == list(proto.graph.output)


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there, and there are no named pipes")
def test_refuses_external_data_behind_a_link_and_what_is_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.bin").write_bytes(bytes(1 << 16))
    onnx.save(models.mlp(), folder / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    assert load_model(folder / "m.onnx").nodes
    (folder / "w.bin").rename(folder / "real.bin")
    (folder / "w.bin").symlink_to("real.bin")
    assert load_model(folder / "m.onnx").nodes  # a link that stays in the folder
    for target in ("../secret.bin", "w.bin", "."):
        (folder / "w.bin").unlink()
        (folder / "w.bin").symlink_to(target)
        assert re.search("outside|missing|bad location", refused(folder / "m.onnx"))
    (folder / "w.bin").unlink()
    os.mkfifo(folder / "w.bin")
    assert "missing" in refused(folder / "m.onnx")
    os.mkfifo(folder / "pipe.onnx")
    assert "not a file" in refused(folder / "pipe.onnx")
