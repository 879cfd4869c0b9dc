from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from mptune.graph.groups import find_groups
from mptune.graph.hazards import Hazard, find_hazards, over_threshold, pinned_by_hazards
from mptune.graph.model import Model, load_model
from mptune.graph.observe import observed_tensors, write_observing_model
from mptune.graph.weights import WeightBank
from tests.graph import models
from tests.graph.helpers import feeds, run


def hazards(proto: object, folder: Path, **given: object) -> tuple[Model, tuple[Hazard, ...]]:
    model = load_model(models.save(proto, folder))  # type: ignore[arg-type]
    return model, find_hazards(model, find_groups(model), **given)  # type: ignore[arg-type]


def test_a_clean_model_has_none(tmp_path: Path) -> None:
    assert hazards(models.mlp(), tmp_path)[1] == ()


def test_weights_that_overflow_pin_their_group(tmp_path: Path) -> None:
    _, found = hazards(models.product(np.eye(4) * 1e5), tmp_path)
    assert [(h.severity, h.kind, h.group, h.tensor, h.value) for h in found] == [
        ("error", "overflow", "g000", "w", 1e5)
    ]
    assert "4 of 16" in found[0].reason
    assert list(pinned_by_hazards(found)) == ["g000"]


def test_infinite_weights_are_no_overflow(tmp_path: Path) -> None:
    w = np.eye(4)
    w[0, 0] = -np.inf
    assert hazards(models.product(w), tmp_path)[1] == ()


def test_weights_that_vanish_are_mentioned(tmp_path: Path) -> None:
    _, found = hazards(models.product(np.full((4, 4), 1e-9)), tmp_path)
    assert [(h.severity, h.kind) for h in found] == [("info", "vanishing")]


def test_a_product_with_minus_1e9_pins_the_mask_and_not_the_attention(tmp_path: Path) -> None:
    """(1 - mask) * -1e9 in FP16 is 0 * -inf, NaN, wherever nothing is masked."""
    model, found = hazards(models.attention(-1e9), tmp_path)
    assert [(h.severity, h.kind, h.value) for h in found] == [("error", "overflow", 1e9)]
    pinned = {g.name for g in find_groups(model) if g.id in pinned_by_hazards(found)}
    assert pinned == {"mask"}


def test_a_limit_that_becomes_infinite_is_a_warning(tmp_path: Path) -> None:
    nodes = [models.node("MatMul", ["x", "w"], "m", "m"), models.node("Where", ["keep", "m", "low"], "y", "where")]
    inputs = [models.value("x", [1, 4]), models.value("keep", [1, 4], TensorProto.BOOL)]
    low = models.constant("low", -3.4e38)
    proto = models.model(nodes, inputs, [models.value("y", [1, 4])], [models.weight("w", 4, 4), low])
    _, found = hazards(proto, tmp_path)
    assert [(h.severity, h.kind) for h in found] == [("warning", "overflow")]
    assert pinned_by_hazards(found) == {}


def test_an_epsilon_that_vanishes_is_a_warning(tmp_path: Path) -> None:
    _, found = hazards(models.decomposed_norm(eps=1e-12), tmp_path)
    assert [(h.severity, h.kind, h.tensor) for h in found] == [("warning", "epsilon", "eps")]


def test_observed_ranges_pin_producer_and_readers(tmp_path: Path) -> None:
    _, found = hazards(models.mlp(), tmp_path, ranges={"r": 7e4, "h": 6e4})
    assert {h.group for h in found} == {"g001", "g002"}
    assert all(h.severity == "error" and h.value == 7e4 for h in found)


def test_says_the_same_with_and_without_the_banks_figures(tmp_path: Path) -> None:
    model, found = hazards(models.product(np.eye(4) * 1e5), tmp_path)
    bank = WeightBank.write(model, tmp_path / "bank")
    assert find_hazards(model, find_groups(model), roundings=bank.roundings) == found


def test_over_threshold_names_groups_that_touch_large_values(tmp_path: Path) -> None:
    model = load_model(models.save(models.mlp(), tmp_path))
    assert over_threshold(model, find_groups(model), {"r": 600.0, "y": 10.0}, 512) == ("g001", "g002")


@pytest.mark.parametrize("make", [models.mlp, models.cnn, models.attention, models.decomposed_norm])
@pytest.mark.parametrize("banked", [False, True])
def test_observing_gives_every_values_range_and_shape(make: object, banked: bool, tmp_path: Path) -> None:
    path = models.save(make(), tmp_path)  # type: ignore[operator]
    model = load_model(path)
    bank = WeightBank.write(model, tmp_path / "bank") if banked else None
    taps = write_observing_model(model, bank, tmp_path / "bank" / "observe.onnx")
    feed = feeds(model)
    out = run(tmp_path / "bank" / "observe.onnx", feed)
    assert tuple(t.tensor for t in taps) == observed_tensors(model)
    reference = run(path, feed)
    for tap in taps:
        if tap.tensor in feed or tap.tensor in reference:
            y = feed.get(tap.tensor, reference.get(tap.tensor))
            assert out[tap.absmax] == pytest.approx(np.abs(y).max(), rel=1e-6)
            assert tuple(out[tap.shape]) == y.shape
            assert out[tap.non_finite] == 0


def test_observing_counts_what_is_not_finite(tmp_path: Path) -> None:
    proto = models.model([models.node("Log", ["x"], "y", "log")], [models.value("x", [4])], [models.value("y", [4])])
    model = load_model(models.save(proto, tmp_path))
    taps = write_observing_model(model, None, tmp_path / "o.onnx")
    out = run(tmp_path / "o.onnx", {"x": np.array([0, -1, 1, 2], np.float32)})
    tap = taps[-1]
    assert out[tap.non_finite] == 2
    assert out[tap.absmax] == pytest.approx(np.log(2))
