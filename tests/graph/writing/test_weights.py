"""Constants of written models: rounded once, in the model's file, beside it, or in the weight bank."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays
from onnx import TensorProto, helper, numpy_helper

from mptune.errors import ModelError, RunError
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import Model, load_model
from mptune.graph.loading.tensors import Initializer
from mptune.graph.plan import DEFAULT_PRECISIONS, Precision, PrecisionPlan
from mptune.graph.writing import weights
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import (
    INDEX_FILE,
    WeightBank,
    bank_file,
    chunks,
    fp16_rounding,
    round_values,
    write_self_contained,
)
from tests.graph import models
from tests.graph.helpers import feeds, run

RNG = np.random.default_rng(3)


def described(tensor: onnx.TensorProto) -> Initializer:
    return Initializer(tensor.name, tensor, Path())


@given(arrays(np.float32, 16, elements=st.floats(width=32, allow_nan=True)))
def test_rounding_keeps_signs_and_infinities(values: np.ndarray) -> None:
    half = round_values(values, Precision.FP16)
    numbers = ~np.isnan(values)
    assert np.array_equal(np.signbit(half[numbers]), np.signbit(values[numbers]))
    assert np.all(np.isinf(half[np.isinf(values)]))
    beyond = np.isfinite(values) & (np.abs(values) >= 65520)
    assert np.all(np.abs(half[beyond]) == 65504)
    near = np.isfinite(half) & (np.abs(values) >= 2.0**-14) & ~beyond
    exact = values[near].astype(np.float64)
    assert np.all(np.abs(half[near].astype(np.float64) - exact) <= np.abs(exact) * 2.0**-11)
    rounding = fp16_rounding(described(numpy_helper.from_array(values, "w")))
    assert rounding.overflowed == np.sum(beyond)
    assert rounding.vanished == np.count_nonzero(values) - np.count_nonzero(half)


@pytest.mark.parametrize("code", ["FLOAT", "INT64", "BFLOAT16", "FLOAT8E4M3FN", "INT4", "STRING"])
@pytest.mark.parametrize("limit", [10**9, 0], ids=["inside", "beside"])
def test_a_constant_stays_what_it_is(code: str, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SELF_CONTAINED_LIMIT", limit)
    if code == "STRING":
        tensor = helper.make_tensor("c", TensorProto.STRING, [5000], [b"abc"] * 5000)
    else:
        dtype = helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(code))
        tensor = numpy_helper.from_array(RNG.integers(0, 2, (5000, 2)).astype(dtype), "c")
    path = tmp_path / "m.onnx"
    write_self_contained(onnx.ModelProto(ir_version=9), [(described(tensor), "other", None)], path)
    (written,) = onnx.load(path).graph.initializer
    assert (written.name, written.data_type, written.dims) == ("other", tensor.data_type, tensor.dims)
    assert np.array_equal(numpy_helper.to_array(written), numpy_helper.to_array(tensor))


def test_the_bank_holds_large_constants_in_both_types_and_is_used_again(tmp_path: Path) -> None:
    graph = "(float[1,64] x) => (float[1,64] y) { m = MatMul(x, w) y = Add(m, b) }"
    proto = models.text(graph, models.weight("w", 64, 64), models.weight("b", 64))
    model = load_model(models.save(proto, tmp_path))
    bank = WeightBank.write(model, tmp_path / "bank")
    assert {p: set(places) for p, places in bank.places.items()} == {p: {"w"} for p in DEFAULT_PRECISIONS}
    assert not (tmp_path / "bank" / bank_file(Precision.BF16)).exists()
    w = model.initializers["w"].numpy()
    for precision, dtype in ((Precision.FP32, np.float32), (Precision.FP16, np.float16)):
        place = bank.places[precision]["w"]
        stored = np.fromfile(tmp_path / "bank" / bank_file(precision), dtype, offset=place.offset, count=w.size)
        assert np.array_equal(stored.reshape(w.shape), w.astype(dtype))
        assert place.offset % 4096 == 0
    before = (tmp_path / "bank" / bank_file(Precision.FP32)).stat().st_mtime_ns
    assert WeightBank.write(model, tmp_path / "bank") == bank
    assert (tmp_path / "bank" / bank_file(Precision.FP32)).stat().st_mtime_ns == before


@pytest.mark.parametrize("damage", ["truncated", "index", "other model"])
def test_a_damaged_bank_is_written_anew(damage: str, tmp_path: Path) -> None:
    model = load_model(models.save(models.product(RNG.standard_normal((64, 64))), tmp_path))
    bank = WeightBank.write(model, tmp_path / "bank")
    half, index = tmp_path / "bank" / bank_file(Precision.FP16), tmp_path / "bank" / INDEX_FILE
    content = half.read_bytes()
    if damage == "truncated":
        half.write_bytes(content[:-1])
    else:
        changed = json.loads(index.read_text()) | {"model_sha256": "0"}
        index.write_text("{" if damage == "index" else json.dumps(changed))
    assert WeightBank.write(model, tmp_path / "bank") == bank
    assert half.read_bytes() == content


def test_external_data_that_shrink_later_are_an_error(tmp_path: Path) -> None:
    proto = models.product(RNG.standard_normal((64, 64)))
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    constant = load_model(tmp_path / "m.onnx").initializers["w"]
    (tmp_path / "m.bin").write_bytes(bytes(100))
    with pytest.raises(ModelError, match="does not fit"):
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
    monkeypatch.setattr(weights, "SELF_CONTAINED_LIMIT", 10_000)
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
    assert {t.name: t.raw_data for t in first} == {t.name: t.raw_data for t in second}
    feed = feeds(model)
    assert np.array_equal(run(one, feed)["x4"], run(out, feed)["x4"])


def test_a_failed_export_leaves_both_files_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, plan, rewriter = deep(tmp_path)
    monkeypatch.setattr(weights, "SELF_CONTAINED_LIMIT", 10_000)
    folder = tmp_path / "out"
    out = rewriter.export(plan, folder / "m.onnx")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(weights, "_reference", full)
    with pytest.raises(RunError, match="disk full") as caught:
        rewriter.export(plan, out)
    assert caught.value.hint
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
