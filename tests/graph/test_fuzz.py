"""Damaged ONNX files through ``inspect`` and ``apply``: a result or one clear error, never a changed interface.

``MPTUNE_FUZZ_COUNT`` tries more.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from mptune.errors import ModelError
from mptune.graph.loading.model import load_model
from tests.graph import models
from tests.graph.mutate import mutant, outcome, write_companions

COUNT = int(os.environ.get("MPTUNE_FUZZ_COUNT", "10"))
CHUNK = 10


@pytest.mark.parametrize("first", range(0, COUNT, CHUNK))
def test_a_damaged_file_gives_a_result_or_one_error(
    first: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_companions(tmp_path)
    path = tmp_path / "mutant.onnx"
    for seed in range(first, min(first + CHUNK, COUNT)):
        path.write_bytes(mutant(seed))
        try:
            outcome(path, seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    assert capfd.readouterr() == ("", ""), "native code wrote past the commands"


def refused(proto: onnx.ModelProto, tmp_path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(models.save(proto, tmp_path))
    assert caught.value.hint
    assert "\n" not in caught.value.message
    return caught.value.message


def one_node(op: str, opset: int = 21, outputs: int = 1, **attributes: object) -> onnx.ModelProto:
    names = [f"y{i}" for i in range(outputs)]
    node = models.node(op, ["x", "i"] if op == "GatherND" else ["x"] * (2 if "Norm" in op else 1), names, **attributes)
    inputs = [models.value("x", [2, 3]), models.value("i", [2, 1], TensorProto.INT64)]
    return models.model([node], inputs, [models.value(name, None) for name in names], opset=opset)


@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        ("Einsum", {"equation": "i.j->ij"}),
        ("Split", {"num_outputs": 1, "outputs": 3}),
        ("Split", {"num_outputs": 2**31, "outputs": 2}),
        ("GatherND", {"batch_dims": -2}),
        ("GatherND", {"batch_dims": -(2**31)}),
        ("LayerNormalization", {"axis": 2**63 - 1}),
        ("LayerNormalization", {"axis": -(2**63)}),
    ],
)
def test_refuses_nodes_that_crash_onnx(op: str, attributes: dict[str, object], tmp_path: Path) -> None:
    """Each of these ends the process, or never ends, in onnx.shape_inference (1.23.2)."""
    assert f"{op}'s attribute" in refused(one_node(op, **attributes), tmp_path)


def test_an_einsum_with_an_ellipsis_is_fine(tmp_path: Path) -> None:
    assert load_model(models.save(one_node("Einsum", equation="...j->j..."), tmp_path)).nodes


def test_local_functions_that_call_themselves_or_multiply_are_refused(tmp_path: Path) -> None:
    def calling(name: str, *callees: str) -> onnx.FunctionProto:
        chain = ["a", *(f"t{i}" for i in range(len(callees) - 1)), "b"]
        body = [
            helper.make_node(op, [chain[i]], [chain[i + 1]], domain="com.example" if op[0] == "F" else "")
            for i, op in enumerate(callees)
        ]
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.example", 1)]
        return helper.make_function("com.example", name, ["a"], ["b"], body, opsets)

    call = helper.make_node("F0", ["x"], ["y"], domain="com.example")
    proto = models.model([call], [models.value("x", [2])], [models.value("y", [2])])
    proto.functions.extend([calling("F0", "F1"), calling("F1", "Relu", "F0")])
    assert "calls itself" in refused(proto, tmp_path)
    del proto.functions[:]
    proto.functions.extend(calling(f"F{i}", f"F{i + 1}", f"F{i + 1}") for i in range(40))
    proto.functions.append(calling("F40", "Relu"))
    assert "inlined" in refused(proto, tmp_path)


def test_a_chain_of_concats_of_shapes_does_not_multiply_its_integers(tmp_path: Path) -> None:
    """40 doublings would be 2**40 integers for ONNX's data propagation."""
    nodes = [models.node("Relu", ["x"], "y"), models.node("Shape", ["x"], "s0")]
    nodes += [models.node("Concat", [f"s{i}", f"s{i}"], f"s{i + 1}", axis=0) for i in range(40)]
    outputs = [models.value("y", [2]), models.value("s40", None, TensorProto.INT64)]
    model = load_model(models.save(models.model(nodes, [models.value("x", [2])], outputs), tmp_path))
    assert len(model.nodes) == 42


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
        ("initializer.2.dims", [2**40, 2**40], "holds"),
        ("initializer.2.dims", [-8, -16], "negative"),
        ("initializer.2.dims", [7, 16], "holds"),
        ("initializer.2.dims", [0, 16], "holds"),
        ("initializer.0.data_type", 99, "unknown element type"),
        ("input.0.type.tensor_type.elem_type", 99, "unknown element type"),
        ("initializer", models.mlp().graph.initializer[0], "there twice"),
        ("input", models.mlp().graph.input[0], "there twice"),
        ("input.0.name", "", "has no name"),
    ],
)
def test_refuses_what_contradicts_itself(path: str, value: object, word: str, tmp_path: Path) -> None:
    assert word in refused(_spoilt(path, value), tmp_path)


@pytest.mark.parametrize("text", [b"/block/norm", b"gamma", b"MatMul", b"tests", b"batch"])
def test_refuses_text_that_is_not_utf8(text: bytes, tmp_path: Path) -> None:
    data = models.mlp().SerializeToString()
    assert text in data
    (tmp_path / "m.onnx").write_bytes(data.replace(text, b"\xff" * len(text)))
    with pytest.raises(ModelError, match="UTF-8"):
        load_model(tmp_path / "m.onnx")


def test_a_value_may_be_an_output_twice(tmp_path: Path) -> None:
    proto = models.mlp()
    proto.graph.output.append(proto.graph.output[0])
    path = models.save(proto, tmp_path)
    assert outcome(path, 0) == "result"


def test_thousands_of_equal_names_are_made_unique_quickly(tmp_path: Path) -> None:
    nodes = [models.node("Relu", [f"v{i}"], f"v{i + 1}", "same") for i in range(20_000)]
    proto = models.model(nodes, [models.value("v0", [2])], [models.value("v20000", [2])])
    model = load_model(models.save(proto, tmp_path))
    assert len({node.name for node in model.nodes}) == 20_000


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
    for target, word in (("../secret.bin", "outside"), ("w.bin", "outside|missing"), (".", "missing|outside")):
        (folder / "w.bin").unlink()
        (folder / "w.bin").symlink_to(target)
        with pytest.raises(ModelError, match=word):
            load_model(folder / "m.onnx")
    (folder / "w.bin").unlink()
    os.mkfifo(folder / "w.bin")
    with pytest.raises(ModelError, match="missing"):
        load_model(folder / "m.onnx")
    os.mkfifo(folder / "pipe.onnx")
    with pytest.raises(ModelError, match="not a file"):
        load_model(folder / "pipe.onnx")
