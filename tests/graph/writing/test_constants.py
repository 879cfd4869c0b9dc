from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, external_data_helper, helper, numpy_helper

from mptune.errors import ModelError, RunError
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import Model, load_model
from mptune.graph.loading.tensors import Initializer, make_initializer
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.model_file import serialized, serialized_size
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import LargeConstant, StoredConstant, chunks, in_file, inline
from tests.graph import models
from tests.graph.helpers import feeds, run

RNG = np.random.default_rng(5)


def described(tensor: onnx.TensorProto, folder: Path) -> Initializer:
    return make_initializer(tensor.name, tensor, folder)


def written(stored: StoredConstant) -> onnx.TensorProto:
    """The constant as it stands in the bytes of a model."""
    proto, large = onnx.ModelProto(ir_version=9), []
    proto.graph.name = "graph"
    if isinstance(stored, LargeConstant):
        large.append(stored)
    else:
        proto.graph.initializer.append(stored)
    whole = b"".join(serialized(proto, large))
    assert 0 <= len(whole) - serialized_size(proto, large) < 10
    read = onnx.ModelProto.FromString(whole)
    assert (read.ir_version, read.graph.name) == (9, "graph")
    (tensor,) = read.graph.initializer
    return tensor


@pytest.mark.parametrize("count", [1, 5000], ids=["small", "streamed"])
@pytest.mark.parametrize("code", ["FLOAT", "DOUBLE", "INT64", "BOOL", "BFLOAT16", "FLOAT16", "INT8", "FLOAT8E4M3FN"])
def test_a_constant_stays_what_it_is(code: str, count: int, tmp_path: Path) -> None:
    dtype = helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(code))
    tensor = numpy_helper.from_array(RNG.integers(0, 2, (count, 2)).astype(dtype), "c")
    tensor.doc_string = "kept"
    piece = inline(described(tensor, tmp_path), "other")
    made = written(piece)
    assert (made.name, made.data_type, list(made.dims)) == ("other", tensor.data_type, [count, 2])
    assert made.doc_string == "kept"
    assert made.raw_data == tensor.raw_data


def test_strings_and_packed_types_are_copied(tmp_path: Path) -> None:
    words = helper.make_tensor("s", TensorProto.STRING, [2000], [b"abc"] * 2000)
    assert list(written(inline(described(words, tmp_path), "s")).string_data) == [b"abc"] * 2000
    nibbles = helper.make_tensor("n", TensorProto.INT4, [9000], [1] * 9000)
    assert np.array_equal(
        numpy_helper.to_array(written(inline(described(nibbles, tmp_path), "n"))), numpy_helper.to_array(nibbles)
    )


@pytest.mark.parametrize("count", [4, 4000])
def test_a_constant_is_rounded_to_fp16(count: int, tmp_path: Path) -> None:
    values = (RNG.standard_normal(count) * 1e3).astype(np.float32)
    made = written(inline(described(numpy_helper.from_array(values, "c"), tmp_path), "c16", Precision.FP16))
    assert np.array_equal(numpy_helper.to_array(made), values.astype(np.float16))


def external(folder: Path, side: int = 64) -> Model:
    proto = models.product(RNG.standard_normal((side, side)))
    onnx.save(proto, folder / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    return load_model(folder / "m.onnx")


def test_external_data_are_read_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mptune.graph.writing.weights._CHUNK", 1000)
    constant = external(tmp_path).initializers["w"]
    parts = list(chunks(constant))
    assert [p.size for p in parts] == [1000, 1000, 1000, 1000, 96]
    assert np.array_equal(np.concatenate(parts), constant.numpy().reshape(-1))


def test_external_data_that_shrink_or_vanish_later_are_an_error(tmp_path: Path) -> None:
    constant = external(tmp_path).initializers["w"]
    (tmp_path / "m.bin").write_bytes(bytes(100))
    with pytest.raises(ModelError, match="does not fit"):
        list(chunks(constant))
    (tmp_path / "m.bin").unlink()
    with pytest.raises(ModelError, match="missing"):
        list(chunks(constant))


def deep(folder: Path) -> tuple[Model, PrecisionPlan, Rewriter]:
    nodes = [models.node("MatMul", [f"x{i}", "w" if i < 2 else f"w{i}"], f"x{i + 1}", f"m{i}") for i in range(4)]
    constants = [models.weight(name, 40, 40, scale=0.1) for name in ("w", "w2", "w3")]
    proto = models.model(nodes, [models.value("x0", [1, 40])], [models.value("x4", [1, 40])], constants)
    model = load_model(models.save(proto, folder))
    groups = find_groups(model)
    precision = {g.id: (Precision.FP16, Precision.FP32)[i % 2] for i, g in enumerate(groups)}
    return model, PrecisionPlan(model.sha256, precision), Rewriter(GroupedModel(model, groups))


def test_past_the_limit_weights_lie_in_a_file_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan, rewriter = deep(tmp_path)
    one = tmp_path / "one.onnx"
    assert rewriter.exported_files(plan, one) == (one,)
    rewriter.export(plan, one)
    monkeypatch.setattr("mptune.graph.writing.rewrite.SELF_CONTAINED_LIMIT", 10_000)
    out = tmp_path / "new" / "two.onnx"
    files = rewriter.exported_files(plan, out)
    assert [f.name for f in files] == ["two.onnx", "two.onnx.data"]
    assert not out.parent.exists()
    assert rewriter.export(plan, out) == out
    assert sorted(out.parent.iterdir()) == sorted(files)
    assert out.stat().st_size < 10_000
    for path in (one, out):
        onnx.checker.check_model(str(path), full_check=True)
    first, second = onnx.load(one).graph.initializer, onnx.load(out).graph.initializer
    assert {t.name: numpy_helper.to_array(t).tobytes() for t in first} == {
        t.name: numpy_helper.to_array(t).tobytes() for t in second
    }
    feed = feeds(model)
    assert np.array_equal(run(one, feed)["x4"], run(out, feed)["x4"])


def test_a_shared_weight_counts_twice_towards_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan, rewriter = deep(tmp_path)
    fp32 = PrecisionPlan.uniform(model.sha256, plan.precision, Precision.FP32)
    weights = sum(c.nbytes for c in model.initializers.values())
    shared = {**fp32.precision, next(iter(fp32.precision)): Precision.FP16}
    monkeypatch.setattr("mptune.graph.writing.rewrite.SELF_CONTAINED_LIMIT", weights + 2000)
    assert len(rewriter.exported_files(fp32, tmp_path / "a.onnx")) == 1
    assert len(rewriter.exported_files(PrecisionPlan(model.sha256, shared), tmp_path / "a.onnx")) == 2


def test_a_failed_export_leaves_both_files_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, plan, rewriter = deep(tmp_path)
    monkeypatch.setattr("mptune.graph.writing.rewrite.SELF_CONTAINED_LIMIT", 10_000)
    folder = tmp_path / "out"
    out = rewriter.export(plan, folder / "m.onnx")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def full(*written: Any) -> Iterator[bytes]:
        """The disk is full after the data are written."""
        yield from serialized(*written)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("mptune.graph.writing.rewrite.serialized", full)
    with pytest.raises(RunError, match="disk full") as caught:
        rewriter.export(plan, out)
    assert caught.value.hint
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_a_data_file_is_named_in_the_model_as_it_will_be_called(tmp_path: Path) -> None:
    constant = external(tmp_path).initializers["w"]
    with (tmp_path / "partial").open("wb") as file:
        tensor = written(in_file(file, "d.data")(constant, "w", None))
        assert external_data_helper.ExternalDataInfo(tensor).location == "d.data"
    assert (tmp_path / "partial").stat().st_size == constant.nbytes
