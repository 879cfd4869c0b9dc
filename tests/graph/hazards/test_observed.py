"""Ranges of values on data: of each value, part by part, and of elements that are not finite."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mptune.graph.hazards.hazard import TensorRange
from mptune.graph.hazards.probes import range_of
from mptune.graph.loading.model import load_model
from mptune.graph.writing import variants
from mptune.graph.writing.weights import WeightBank
from tests.graph import models
from tests.graph.hazards.observed import hazards_on, ranges_on
from tests.graph.helpers import feeds, run


@pytest.mark.parametrize("make", [models.mlp, models.cnn, models.attention, models.decomposed_norm])
def test_each_value_is_observed_whole_or_in_parts(
    make: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = models.save(make(), tmp_path)  # type: ignore[operator]
    model = load_model(path)
    feed = feeds(model)
    whole = ranges_on(model, [feed], tmp_path)
    assert tuple(whole) == variants.observed_tensors(model)
    for name, values in {**feed, **run(path, feed)}.items():
        if name in whole:
            assert (whole[name].lowest, whole[name].highest) == pytest.approx((values.min(), values.max()), rel=1e-6)
            assert whole[name].shape == values.shape
    monkeypatch.setattr(variants, "_MOST_OUTPUTS", 3)
    parts = variants.observed_parts(model, {})
    assert len(parts) > 1
    assert [name for part in parts for name in part.rows] == list(whole)
    bank = WeightBank.write(model, tmp_path / "bank")
    for name, again in ranges_on(model, [feed], tmp_path / "bank", bank).items():
        assert again.absmax == pytest.approx(whole[name].absmax, rel=1e-6)
        assert again.shape == whole[name].shape


@pytest.mark.parametrize(
    ("values", "lowest", "highest"),
    [
        ((-np.inf, np.nan, 0.0, 0.7), 0.0, 0.7),
        ((np.inf, np.nan, -0.7, -1.4), -1.4, 0.0),
        ((-np.inf, np.inf, -0.7, 0.7), -0.7, 0.7),
        ((-0.7, -1.4, -0.7, -2.1), -2.1, -0.7),
        ((3e38, 3e38, 3e38, -3e38), -3e38, 3e38),  # a sum that overflows
        ((), 0.0, 0.0),
    ],
)
def test_what_is_not_finite_is_left_out(values: tuple[float, ...], lowest: float, highest: float) -> None:
    observed = range_of(np.array(values, np.float32))
    assert observed.shape == (len(values),)
    assert (observed.lowest, observed.highest) == pytest.approx((lowest, highest))


def test_the_range_over_all_samples_names_the_worst() -> None:
    samples = [np.float32([[0, 1]]), np.float32([[-7e4, 9], [-np.inf, -1e9]]), np.float32([[-1e5, -1e5]])]
    each = [range_of(values, (-1,)) for values in samples]
    expected = TensorRange(1e9, (1, 2), -1e9, 9.0, 1, 2, 3, masked_rows=2, masked_sample=1, masked_samples=2)
    assert TensorRange.over_samples(each) == expected


def test_nodes_without_elements_have_no_hazard(tmp_path: Path) -> None:
    """As what reads the boxes of an image without any."""
    graph = """(float[boxes,4] x) => (float[boxes,4] y, int64[boxes,1] a, bool[boxes,4] g) {
        n = LayerNormalization(x, one) s = Softmax(n) a = ArgMax<axis = 1>(s) g = Greater(s, n)
        t = Add(s, n) y = Sqrt(t)
    }"""
    proto = models.text(graph, models.constant("one", np.ones(4)))
    assert hazards_on(proto, {"x": np.zeros((0, 4), np.float32)}, tmp_path) == ()
    assert len(ranges_on(load_model(tmp_path / "model.onnx"), [{"x": np.ones((2, 4), np.float32)}], tmp_path)) == 5
