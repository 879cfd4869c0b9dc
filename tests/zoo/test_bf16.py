"""What BF16 has too few digits for and FP16 has enough: the same codes, at an eighth of the magnitude."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

from mptune.finding import Finding
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.hazards.find import find_hazards
from mptune.graph.hazards.hazard import Hazard, ObservedValues, hazard_findings, spacing
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
from tests.graph.hazards.observed import ranges_on
from tests.zoo.numbers import SHOWN, Show, _argmax, _cancellation, _rotary, _spacing, _tracker
from tests.zoo.numbers.further import _added, _compared, _flow, _running

FP16, BF16 = Precision.FP16, Precision.BF16
TWO, ALL, BF16_ALONE = ("fp32", "fp16"), ("fp32", "fp16", "bf16"), ("fp32", "bf16")

CASES: dict[str, tuple[str, Callable[[], Show], Callable[[], Show]]] = {
    "positions": ("stagnation", lambda: _tracker(8.0, 900.0), lambda: _tracker(320.0, 900.0)),
    "accumulated flow": ("stagnation", lambda: _flow(240.0), lambda: _flow(0.5)),
    "a running sum": ("stagnation", lambda: _running(0.7), lambda: _running(0.001)),
    "before a softmax": ("spacing", lambda: _spacing(0.1), lambda: _spacing(1e-3)),
    "before ArgMax": ("spacing", lambda: _argmax(120.0), lambda: _argmax(0.0)),
    "before a comparison": ("spacing", lambda: _compared(250.0), lambda: _compared(0.0)),
    "rotary positions": ("angle-spacing", lambda: _rotary(120), lambda: _rotary(10)),
    "a difference": ("cancellation", lambda: _cancellation(60.0), lambda: _cancellation(0.0)),
    "a difference as a sum": ("cancellation", lambda: _added(60.0), lambda: _added(0.0)),
}

PINNING = ("stagnation", "angle-spacing")
OF_DIGITS = (*PINNING, "spacing", "cancellation", "vanishing-values")


def hazards_of(show: Show, folder: Path, precisions: Sequence[str], codes: Sequence[str] = OF_DIGITS) -> list[Hazard]:
    """Those of some codes, as a search with these precisions finds them."""
    show.proto.opset_import[0].version = 22  # convolutions have BF16 from there
    show.proto.ir_version = 10
    onnx.save(show.proto, folder / "model.onnx")
    model = load_model(folder / "model.onnx")
    count = len(next(iter(show.data.values())))
    samples = tuple({name: array[k : k + 1] for name, array in show.data.items()} for k in range(count))
    seen = ObservedValues(ranges_on(model, samples, folder, precisions=precisions))
    found = find_hazards(GroupedModel(model, find_groups(model)), seen, precisions)
    return [h for h in found if h.code in codes and not h.is_note]


@pytest.mark.parametrize("name", CASES)
def test_bf16_breaks_what_fp16_holds(name: str, tmp_path: Path) -> None:
    code, broken, sound = CASES[name]
    assert hazards_of(broken(), tmp_path, TWO) == [], "FP16 has digits enough"
    found = hazards_of(broken(), tmp_path, ALL)
    assert {hazard.code for hazard in found} == {code}
    assert set(broken().nodes) <= {hazard.place.node for hazard in found}
    for hazard in found:
        assert ("BF16" in hazard.reason, "FP16" in hazard.reason.replace("BF16", "")) == (True, False)
        assert "out of BF16" in hazard.cure
        assert (hazard.rules_out(FP16), hazard.rules_out(BF16)) == (False, code in PINNING)
        assert (hazard.holds_in(FP16), hazard.holds_in(BF16)) == (False, True)
    assert hazards_of(broken(), tmp_path, BF16_ALONE) == found
    assert hazards_of(sound(), tmp_path, ALL) == []


def test_what_both_break_is_said_once_and_of_fp16(tmp_path: Path) -> None:
    for name in ("stagnation", "angle-spacing", "spacing before ArgMax", "cancellation"):
        show = SHOWN[name][0]()
        found, of_two = (hazards_of(show, tmp_path, precisions) for precisions in (ALL, TWO))
        assert [(h.code, h.place.node) for h in found] == [(h.code, h.place.node) for h in of_two]
        assert all(h.precision is FP16 and h.holds_in(BF16) for h in found)
        assert all(h.precision is BF16 for h in hazards_of(show, tmp_path, BF16_ALONE))


def test_what_overflows_is_kept_out_of_fp16_and_not_out_of_bf16(tmp_path: Path) -> None:
    show = SHOWN["overflow"][0]()
    for precisions in (TWO, ALL):
        found = [h for h in hazards_of(show, tmp_path, precisions, ("overflow",)) if h.severity == "error"]
        assert {hazard.cure for hazard in found} == {"the group is kept out of FP16"}
        assert all(hazard.rules_out(FP16) and not hazard.rules_out(BF16) for hazard in found)


def test_a_plan_without_bf16_there_is_not_warned(tmp_path: Path) -> None:
    hazard, *_ = hazards_of(_argmax(120.0), tmp_path, ALL)
    (finding,) = hazard_findings([hazard], "search")
    group = hazard.place.group
    assert Finding.from_json(finding.to_json()) == finding
    for fp16, bf16, severity in (([], [], "info"), ([group], [], "info"), ([], [group], "warning")):
        assert finding.under_plan(fp16, bf16).severity == severity


@pytest.mark.parametrize("precision", [FP16, BF16])
def test_spacing_is_that_of_the_type(precision: Precision) -> None:
    exact = precision.exact_integers
    assert spacing(exact, precision) == 2.0
    assert spacing(exact - 1, precision) == 1.0
    assert spacing(-0.75 * exact, precision) == 1.0
    assert 0.0 < spacing(0.0, precision) < np.finfo(np.float16).tiny
