from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mptune.errors import RunError
from mptune.graph.loading.model import load_model
from mptune.graph.writing import wire
from mptune.graph.writing.weights import FP16_FILE, FP32_FILE, INDEX_FILE, WeightBank, measure_rounding, round_to_fp16
from tests.graph import models

RNG = np.random.default_rng(3)


@given(arrays(np.float32, 16, elements=st.floats(width=32, allow_nan=True)))
def test_rounding_keeps_signs_and_infinities(values: np.ndarray) -> None:
    half = round_to_fp16(values)
    numbers = ~np.isnan(values)
    assert np.array_equal(np.signbit(half[numbers]), np.signbit(values[numbers]))
    assert np.all(np.isinf(half[np.isinf(values)]))
    told = measure_rounding("w", values, half)
    assert told.overflowed == np.sum(np.isfinite(values) & np.isinf(half))
    kept = np.isfinite(half) & (np.abs(values) >= 2.0**-14)
    assert np.all(
        np.abs(half[kept].astype(np.float64) - values[kept]) <= np.abs(values[kept].astype(np.float64)) * 2.0**-11
    )


def test_holds_large_constants_in_both_types_and_is_found_again(tmp_path: Path) -> None:
    proto = models.model(
        [models.node("MatMul", ["x", "w"], "m", "m"), models.node("Add", ["m", "b"], "y", "a")],
        [models.value("x", [1, 64])],
        [models.value("y", [1, 64])],
        [models.weight("w", 64, 64), models.weight("b", 64)],
    )
    model = load_model(models.save(proto, tmp_path))
    bank = WeightBank.write(model, tmp_path / "bank")
    assert set(bank.fp32) == set(bank.fp16) == {"w"}
    w = model.initializers["w"].numpy()
    for file, place, dtype in ((FP32_FILE, bank.fp32["w"], np.float32), (FP16_FILE, bank.fp16["w"], np.float16)):
        stored = np.fromfile(tmp_path / "bank" / file, dtype, offset=place.offset, count=w.size)
        assert np.array_equal(stored.reshape(w.shape), w.astype(dtype))
        assert place.offset % 4096 == 0
    before = (tmp_path / "bank" / FP32_FILE).stat().st_mtime_ns
    assert WeightBank.write(model, tmp_path / "bank") == bank
    assert (tmp_path / "bank" / FP32_FILE).stat().st_mtime_ns == before


@pytest.mark.parametrize("damage", ["truncated", "index", "other model"])
def test_a_damaged_bank_is_written_anew(damage: str, tmp_path: Path) -> None:
    proto = models.product(RNG.standard_normal((64, 64)))
    model = load_model(models.save(proto, tmp_path))
    bank = WeightBank.write(model, tmp_path / "bank")
    if damage == "truncated":
        (tmp_path / "bank" / FP16_FILE).write_bytes(b"")
    elif damage == "index":
        (tmp_path / "bank" / INDEX_FILE).write_text("{")
    else:
        index = json.loads((tmp_path / "bank" / INDEX_FILE).read_text())
        (tmp_path / "bank" / INDEX_FILE).write_text(json.dumps(index | {"model_sha256": "0"}))
    assert WeightBank.write(model, tmp_path / "bank") == bank
    assert (tmp_path / "bank" / FP16_FILE).stat().st_size == 64 * 64 * 2


def test_external_data_is_read_in_place(tmp_path: Path) -> None:
    proto = models.product(RNG.standard_normal((64, 64)))
    expected = onnx.numpy_helper.to_array(proto.graph.initializer[0]).copy()
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    model = load_model(tmp_path / "m.onnx")
    assert isinstance(model.initializers["w"].numpy(), np.memmap)
    bank = WeightBank.write(model, tmp_path / "bank")
    stored = np.fromfile(tmp_path / "bank" / FP32_FILE, np.float32, offset=bank.fp32["w"].offset, count=64 * 64)
    assert np.array_equal(stored, expected.reshape(-1))


def test_says_when_it_cannot_be_written(tmp_path: Path) -> None:
    model = load_model(models.save(models.cnn(), tmp_path))
    (tmp_path / "bank").write_text("a file in the way")
    with pytest.raises(RunError) as caught:
        WeightBank.write(model, tmp_path / "bank")
    assert caught.value.hint


@given(st.integers(0, 2**40), st.binary(max_size=300), st.integers(1, 2000))
def test_the_wire_format_is_protobufs_own(number: int, payload: bytes, field: int) -> None:
    tensor = onnx.TensorProto(name="n", raw_data=payload)
    encoded = wire.strings(8, ["n"]) + wire.field(9, payload)
    assert onnx.TensorProto.FromString(encoded) == tensor
    assert onnx.AttributeProto.FromString(wire.varint(3 << 3) + wire.varint(number)).i == number
    assert wire.field(field, payload).endswith(payload)
