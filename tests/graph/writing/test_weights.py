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
from mptune.graph.plan import DEFAULT_PRECISIONS, Precision
from mptune.graph.writing.weights import INDEX_FILE, WeightBank, bank_file, measure_rounding
from tests.graph import models

RNG = np.random.default_rng(3)


@given(arrays(np.float32, 16, elements=st.floats(width=32, allow_nan=True)))
def test_rounding_keeps_signs_and_infinities(values: np.ndarray) -> None:
    half, rounding = measure_rounding("w", values, Precision.FP16)
    numbers = ~np.isnan(values)
    assert np.array_equal(np.signbit(half[numbers]), np.signbit(values[numbers]))
    assert np.all(np.isinf(half[np.isinf(values)]))
    beyond = np.isfinite(values) & (np.abs(values) >= 65520)
    assert rounding.overflowed == np.sum(beyond)
    assert np.all(np.abs(half[beyond]) == 65504)
    kept = np.isfinite(half) & (np.abs(values) >= 2.0**-14) & ~beyond
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
    assert {precision: set(places) for precision, places in bank.places.items()} == {
        p: {"w"} for p in DEFAULT_PRECISIONS
    }
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
    proto = models.product(RNG.standard_normal((64, 64)))
    model = load_model(models.save(proto, tmp_path))
    bank = WeightBank.write(model, tmp_path / "bank")
    if damage == "truncated":
        (tmp_path / "bank" / bank_file(Precision.FP16)).write_bytes(b"")
    elif damage == "index":
        (tmp_path / "bank" / INDEX_FILE).write_text("{")
    else:
        index = json.loads((tmp_path / "bank" / INDEX_FILE).read_text())
        (tmp_path / "bank" / INDEX_FILE).write_text(json.dumps(index | {"model_sha256": "0"}))
    assert WeightBank.write(model, tmp_path / "bank") == bank
    assert (tmp_path / "bank" / bank_file(Precision.FP16)).stat().st_size == 64 * 64 * 2


def test_external_data_is_read_in_place(tmp_path: Path) -> None:
    proto = models.product(RNG.standard_normal((64, 64)))
    expected = onnx.numpy_helper.to_array(proto.graph.initializer[0]).copy()
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    model = load_model(tmp_path / "m.onnx")
    assert isinstance(model.initializers["w"].numpy(), np.memmap)
    bank = WeightBank.write(model, tmp_path / "bank")
    stored = np.fromfile(
        tmp_path / "bank" / bank_file(Precision.FP32),
        np.float32,
        offset=bank.places[Precision.FP32]["w"].offset,
        count=64 * 64,
    )
    assert np.array_equal(stored, expected.reshape(-1))


def test_says_when_it_cannot_be_written(tmp_path: Path) -> None:
    model = load_model(models.save(models.cnn(), tmp_path))
    (tmp_path / "bank").write_text("a file in the way")
    with pytest.raises(RunError) as caught:
        WeightBank.write(model, tmp_path / "bank")
    assert caught.value.hint
