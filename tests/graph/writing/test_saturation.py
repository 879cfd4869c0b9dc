"""Constants beyond a type's range are held as its largest finite value, as exported attention masks need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from mptune.diagnosis.pairs.structure import align
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.hazards.find import find_hazards, pinned_by_hazards
from mptune.graph.hazards.seen import Seen
from mptune.graph.loading.model import load_model
from mptune.graph.plan import REDUCED, Precision, PrecisionPlan
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from tests.graph import models
from tests.graph.hazards.observed import ranges_on
from tests.graph.helpers import relative_l2, run
from tests.graph.models import constant, node, value, weight

LOWEST = float(np.finfo(np.float32).min)
LENGTH, WIDTH = 5, 8
NOISE = {Precision.FP16: 4e-3, Precision.BF16: 3e-2}
"""What rounding to a precision alone does to the block's output, and some more."""


def _inverted() -> list[onnx.NodeProto]:
    """``1 - mask`` of an INT64 mask of padding, shape (batch, 1, length)."""
    return [
        node("Unsqueeze", ["mask", "axis"], "mask_3d", "unsqueeze"),
        node("Cast", ["mask_3d"], "given", "to float", to=TensorProto.FLOAT),
        node("Sub", ["one", "given"], "padding", "invert"),
    ]


def _is_padding() -> list[onnx.NodeProto]:
    return [*_inverted(), node("Cast", ["padding"], "is_padding", "to bool", to=TensorProto.BOOL)]


def _times(low: float) -> list[onnx.NodeProto]:
    """BERT and T5: ``scores + (1 - mask) * low``."""
    return [
        *_inverted(),
        node("Mul", ["padding", "low"], "bias", "times low"),
        node("Add", ["s", "bias"], "masked", "add mask"),
    ]


def _subtracted(high: float) -> list[onnx.NodeProto]:
    """``scores - (1 - mask) * high``."""
    return [
        *_inverted(),
        node("Mul", ["padding", "low"], "bias", "times high"),
        node("Sub", ["s", "bias"], "masked", "subtract mask"),
    ]


def _chosen() -> list[onnx.NodeProto]:
    """``masked_fill(scores, mask == 0, low)``: the low value beside the scores."""
    return [*_is_padding(), node("Where", ["is_padding", "low", "s"], "masked", "fill")]


def _chosen_from_node() -> list[onnx.NodeProto]:
    """A causal mask of truth values, and the number in a node of its own."""
    return [
        node("Constant", [], "lowest", "lowest", value_float=LOWEST),
        node("Where", ["lower", "s", "lowest"], "masked", "fill"),
    ]


def _chosen_bias() -> list[onnx.NodeProto]:
    """The scaled product's mask of truth values: ``scores + where(mask, 0, low)``."""
    return [
        *_is_padding(),
        node("Where", ["is_padding", "low", "zero"], "bias", "choose"),
        node("Add", ["s", "bias"], "masked", "add mask"),
    ]


def _filled(op: str) -> list[onnx.NodeProto]:
    """A causal mask from ``torch.full``: filled, its upper triangle kept, added; as ``op`` fills."""
    fill = node("ConstantOfShape", ["side"], "full", "fill", value=constant("v", [LOWEST]))
    if op == "Expand":
        fill = node("Expand", ["low", "side"], "full", "fill")
    return [
        fill,
        node("Trilu", ["full", "k"], "causal", "upper", upper=1),
        node("Add", ["s", "causal"], "masked", "add mask"),
    ]


def _causal_and_padding() -> list[onnx.NodeProto]:
    """GPT-2: the causal mask by a Where, that of padding added."""
    return [
        node("Where", ["lower", "s", "low"], "causal", "causal"),
        *_inverted(),
        node("Mul", ["padding", "low"], "bias", "times low"),
        node("Add", ["causal", "bias"], "masked", "add mask"),
    ]


def _times_fill(shape: str) -> list[onnx.NodeProto]:
    """The lowest number is filled to a shape, and multiplied by the padding; that shape is an input, or known."""
    return [
        *_inverted(),
        node("ConstantOfShape", [shape], "full", "fill", value=constant("v", [LOWEST])),
        node("Mul", ["padding", "full"], "bias", "times low"),
        node("Add", ["s", "bias"], "masked", "add mask"),
    ]


def _times_expanded() -> list[onnx.NodeProto]:
    return [
        *_inverted(),
        node("Expand", ["low", "side"], "full", "expand"),
        node("Mul", ["padding", "full"], "bias", "times low"),
        node("Add", ["s", "bias"], "masked", "add mask"),
    ]


def _shaped_fill() -> list[onnx.NodeProto]:
    """Filled to the shape of the scores at run time, chosen by a Where."""
    return [
        *_is_padding(),
        node("Shape", ["s"], "shape", "shape"),
        node("ConstantOfShape", ["shape"], "full", "fill", value=constant("v", [-1e9])),
        node("Where", ["is_padding", "full", "s"], "masked", "choose"),
    ]


def _limited() -> list[onnx.NodeProto]:
    """Bounds that are no bounds, on all sides."""
    return [
        node("Clip", ["s", "low", "high"], "clipped", "clip"),
        node("Max", ["clipped", "low"], "raised", "raise"),
        node("Min", ["raised", "high"], "masked", "lower"),
    ]


def _sentinel() -> list[onnx.NodeProto]:
    """A sentinel: the smallest of the scores that are not padding, taken off."""
    return [
        *_is_padding(),
        node("Where", ["is_padding", "high", "s"], "sentinel", "choose"),
        node("ReduceMin", ["sentinel"], "least", "least", axes=[-1], keepdims=1),
        node("Sub", ["s", "least"], "masked", "shift"),
    ]


FORMS: dict[str, tuple[Callable[[], list[onnx.NodeProto]], float]] = {
    "times -1e4": (lambda: _times(-1e4), -1e4),
    "times -1e9": (lambda: _times(-1e9), -1e9),
    "times -1e30": (lambda: _times(-1e30), -1e30),
    "times lowest": (lambda: _times(LOWEST), LOWEST),
    "minus times 1e9": (lambda: _subtracted(1e9), 1e9),
    "chosen beside the scores": (_chosen, -1e9),
    "chosen from a node": (_chosen_from_node, LOWEST),
    "chosen, -inf": (_chosen, -np.inf),
    "chosen, added": (_chosen_bias, LOWEST),
    "chosen, added, -inf": (_chosen_bias, -np.inf),
    "filled and added": (lambda: _filled("ConstantOfShape"), LOWEST),
    "expanded and added": (lambda: _filled("Expand"), LOWEST),
    "causal and padding": (_causal_and_padding, LOWEST),
    "filled to a shape": (_shaped_fill, LOWEST),
    "times a fill": (lambda: _times_fill("side"), LOWEST),
    "times a fill of any shape": (lambda: _times_fill("dims"), LOWEST),
    "times an expanded number": (_times_expanded, -1e9),
    "limits": (_limited, -1e9),
    "sentinel": (_sentinel, -1e9),
}


def block(name: str) -> onnx.ModelProto:
    """An attention block of one head with a mask of some form."""
    make, low = FORMS[name]
    high = abs(low) if np.isfinite(low) else 1e9
    given = {
        **dict.fromkeys(("wq", "wk", "wv"), None),
        "scale": 8**-0.5,
        "one": 1.0,
        "zero": 0.0,
        "low": low,
        "high": high,
    }
    constants = [weight(n, WIDTH, WIDTH) if v is None else constant(n, v) for n, v in given.items()]
    constants += [
        constant("axis", [1], np.int64),
        constant("side", [LENGTH, LENGTH], np.int64),
        constant("k", 1, np.int64),
        constant("lower", np.tril(np.ones((LENGTH, LENGTH), bool)), bool),
    ]
    nodes = [
        node("MatMul", ["x", "wq"], "q", "query"),
        node("MatMul", ["x", "wk"], "keys", "key"),
        node("MatMul", ["x", "wv"], "v", "value"),
        node("Transpose", ["keys"], "kt", "transpose", perm=[0, 2, 1]),
        node("MatMul", ["q", "kt"], "scores", "scores"),
        node("Mul", ["scores", "scale"], "s", "scale"),
        *make(),
        node("Softmax", ["masked"], "p", "softmax", axis=-1),
        node("MatMul", ["p", "v"], "y", "read"),
    ]  # fmt: skip
    read = {i for n in nodes for i in n.input}
    inputs = [value("x", [2, LENGTH, WIDTH])]
    if "mask" in read:
        inputs.append(value("mask", [2, LENGTH], TensorProto.INT64))
    if "dims" in read:
        inputs.append(value("dims", [2], TensorProto.INT64))
    return models.model(nodes, inputs, [value("y", [2, LENGTH, WIDTH])], [c for c in constants if c.name in read])


FEED = {
    "x": np.random.default_rng(5).standard_normal((2, LENGTH, WIDTH)).astype(np.float32),
    "mask": np.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]], np.int64),
    "dims": np.array([LENGTH, LENGTH], np.int64),
}


def feed_of(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {given.name: FEED[given.name] for given in proto.graph.input}


def uniform(grouped: GroupedModel, precision: Precision) -> PrecisionPlan:
    """The precision wherever a plan may have it."""
    return grouped.uniform(precision).replace({g.id: Precision.FP32 for g in grouped.groups if g.pinned is not None})


def grouped_block(name: str, folder: Path) -> tuple[GroupedModel, dict[str, np.ndarray], np.ndarray]:
    """A block, what it is fed with, and its outputs in FP32."""
    proto = block(name)
    model = load_model(models.save(proto, folder))
    feed = feed_of(proto)
    return GroupedModel(model, find_groups(model)), feed, run(model.path, feed)["y"]


@pytest.mark.parametrize("name", FORMS)
def test_all_of_a_masked_block_may_be_reduced(name: str, tmp_path: Path) -> None:
    """FP16 as ONNX Runtime computes the typed model, and both precisions as both emulations round."""
    grouped, feed, exact = grouped_block(name, tmp_path)
    bank = WeightBank.write(grouped.model, tmp_path, precisions=REDUCED)
    plans = {precision: uniform(grouped, precision) for precision in REDUCED}
    path = Rewriter(grouped).write(plans[Precision.FP16], tmp_path / "typed.onnx")
    assert relative_l2(run(path, feed)["y"], exact) < NOISE[Precision.FP16]
    assert align(grouped.model, load_model(path)).differences == (), "compare finds no other difference"
    switched = Emulator(grouped, bank)
    every = {name for of in switched.switches.values() for name in of.values()}
    path = switched.write_switched(tmp_path / "switched.onnx", [g.id for g in grouped.groups], precisions=REDUCED)
    for precision, plan in plans.items():
        emulated = run(Emulator(grouped, bank).write(plan, tmp_path / "emulated.onnx"), feed)["y"]
        assert 0 < relative_l2(emulated, exact) < NOISE[precision], "finite, and rounded"
        on = switched.on(plan)
        by_switch = run(path, {**feed, **{s: np.array(s in on) for s in every}})["y"]
        assert np.array_equal(by_switch, emulated)


@pytest.mark.parametrize("name", FORMS)
def test_a_mask_pins_no_group(name: str, tmp_path: Path) -> None:
    grouped, feed, _ = grouped_block(name, tmp_path)
    found = find_hazards(grouped, Seen(ranges_on(grouped.model, [feed], tmp_path)))
    for precision in REDUCED:
        assert pinned_by_hazards(found, precision, is_measured=True) == {}
    if name == "sentinel":  # the smallest of the others is no softmax's mask
        assert {h.code for h in found if h.severity == "warning"} == {"overflow"}
        return
    assert {h.code for h in found if not h.is_note} <= {"mask"}
    assert {h.place.tensor for h in found if h.severity != "info"} <= {"masked"}, "masked twice: -131008 is -inf"
    assert pinned_by_hazards(found) == {}


def written(grouped: GroupedModel, plan: PrecisionPlan, path: Path) -> dict[str, np.ndarray]:
    """The constants of the typed model, by name."""
    typed = onnx.load(Rewriter(grouped).write(plan, path))
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in typed.graph.initializer}


def test_infinities_stay_and_numbers_stay_finite(tmp_path: Path) -> None:
    for name, held in (("chosen, -inf", -np.inf), ("chosen beside the scores", -65504.0)):
        grouped, _, _ = grouped_block(name, tmp_path)
        assert written(grouped, uniform(grouped, Precision.FP16), tmp_path / "typed.onnx")["low__fp16"] == held


def test_a_constant_of_both_precisions_is_changed_in_the_lower_only(tmp_path: Path) -> None:
    """GPT-2's lowest number, which the attention and the mask of padding share."""
    grouped, feed, exact = grouped_block("causal and padding", tmp_path)
    (mask,) = [g.id for g in grouped.groups if "times low" in g.nodes]
    plan = grouped.uniform(Precision.FP32).replace({mask: Precision.FP16})
    path = tmp_path / "typed.onnx"
    constants = written(grouped, plan, path)
    assert constants["low"] == np.float32(LOWEST)
    assert constants["low__fp16"] == -65504
    assert relative_l2(run(path, feed)["y"], exact) < NOISE[Precision.FP16]


def test_a_row_that_is_masked_whole_keeps_its_weights(tmp_path: Path) -> None:
    """A mask that is folded into a constant is held as a number, too: -inf everywhere has no softmax."""
    grouped, feed, _ = grouped_block("filled to a shape", tmp_path)
    feed = {**feed, "mask": np.zeros((2, LENGTH), np.int64)}
    exact = run(grouped.model.path, feed)["y"]
    plan = uniform(grouped, Precision.FP16)
    for path in (
        Rewriter(grouped).write(plan, tmp_path / "typed.onnx"),
        Emulator(grouped).write(plan, tmp_path / "emulated.onnx"),
    ):
        assert relative_l2(run(path, feed)["y"], exact) < NOISE[Precision.FP16]


@pytest.mark.parametrize("name", ["times lowest", "chosen, added", "minus times 1e9"])
def test_a_mask_that_is_cast_is_held_too(name: str, tmp_path: Path) -> None:
    """The attention alone in FP16, rows that are masked whole: -inf in all of a row would be NaN after the softmax."""
    grouped, feed, _ = grouped_block(name, tmp_path)
    feed = {**feed, "mask": np.array([[0, 0, 0, 0, 0], [1, 1, 0, 0, 0]], np.int64)}
    exact = run(grouped.model.path, feed)["y"]
    (attention,) = [g.id for g in grouped.groups if "softmax" in g.nodes]
    plan = grouped.uniform(Precision.FP32).replace({attention: Precision.FP16})
    switched = Emulator(grouped, WeightBank.write(grouped.model, tmp_path))
    switch = switched.switches[Precision.FP16][attention]
    for path, more in (
        (Rewriter(grouped).write(plan, tmp_path / "typed.onnx"), {}),
        (Emulator(grouped).write(plan, tmp_path / "emulated.onnx"), {}),
        (switched.write_switched(tmp_path / "switched.onnx", [attention]), {switch: np.array(True)}),
    ):
        y = run(path, {**feed, **more})["y"]
        assert np.isfinite(y).all()
        assert relative_l2(y[1], exact[1]) < NOISE[Precision.FP16]
