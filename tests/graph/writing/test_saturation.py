"""Constants beyond a type's range are held as its largest finite value, as exported attention masks need."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from mptune.diagnosis.structure import align
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.hazards.find import find_hazards, pinned_by_hazards
from mptune.graph.hazards.hazard import ObservedValues
from mptune.graph.loading.model import load_model
from mptune.graph.plan import REDUCED, Precision, PrecisionPlan
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from tests.graph import models
from tests.graph.hazards.observed import ranges_on
from tests.graph.helpers import relative_l2, run
from tests.graph.models import constant, text, weight

LOWEST = float(np.finfo(np.float32).min)
LENGTH, WIDTH = 5, 8
NOISE = {Precision.FP16: 4e-3, Precision.BF16: 3e-2}
"""What rounding to a precision alone does to the block's output, and some more."""


INVERTED = """
    mask_3d = Unsqueeze(mask, axis) given = Cast<to = 1>(mask_3d) padding = Sub(one, given)
"""
"""``1 - mask`` of an INT64 mask of padding, shape (batch, 1, length)."""
IS_PADDING = f"{INVERTED} is_padding = Cast<to = 9>(padding)"
TIMES = f"{INVERTED} [times_low] bias = Mul(padding, low) masked = Add(s, bias)"
CHOSEN = f"{IS_PADDING} masked = Where(is_padding, low, s)"
CHOSEN_BIAS = f"{IS_PADDING} bias = Where(is_padding, low, zero) masked = Add(s, bias)"
FILL = "full = ConstantOfShape<value = float[1] {LOW}>"
CAUSAL = "causal = Trilu<upper = 1>(full, k) masked = Add(s, causal)"

FORMS: dict[str, tuple[str, float]] = {
    # BERT and T5: scores + (1 - mask) * low.
    "times -1e4": (TIMES, -1e4),
    "times lowest": (TIMES, LOWEST),
    "minus times 1e9": (f"{INVERTED} bias = Mul(padding, low) masked = Sub(s, bias)", 1e9),
    # masked_fill(scores, mask == 0, low): the low value beside the scores.
    "chosen beside the scores": (CHOSEN, -1e9),
    "chosen, -inf": (CHOSEN, -np.inf),
    # A causal mask of truth values, and the number in a node of its own.
    "chosen from a node": ("lowest = Constant<value = float {LOW}>() masked = Where(lower, s, lowest)", LOWEST),
    # The scaled product's mask of truth values: scores + where(mask, 0, low).
    "chosen, added": (CHOSEN_BIAS, LOWEST),
    "chosen, added, -inf": (CHOSEN_BIAS, -np.inf),
    # A causal mask from torch.full: filled, its upper triangle kept, added.
    "filled and added": (f"{FILL}(side) {CAUSAL}", LOWEST),
    # GPT-2: the causal mask by a Where, that of padding added.
    "causal and padding": (
        f"causal = Where(lower, s, low) {INVERTED} [times_low] bias = Mul(padding, low) masked = Add(causal, bias)",
        LOWEST,
    ),
    # Filled to the shape of the scores at run time, chosen by a Where.
    "filled to a shape": (f"{IS_PADDING} dims0 = Shape(s) {FILL}(dims0) masked = Where(is_padding, full, s)", -1e9),
    # The lowest number is filled to a shape, and multiplied by the padding; that shape is known, or an input.
    "times a fill": (f"{INVERTED} {FILL}(side) bias = Mul(padding, full) masked = Add(s, bias)", LOWEST),
    "times a fill of any shape": (f"{INVERTED} {FILL}(dims) bias = Mul(padding, full) masked = Add(s, bias)", LOWEST),
    "times an expanded number": (
        f"{INVERTED} full = Expand(low, side) bias = Mul(padding, full) masked = Add(s, bias)",
        -1e9,
    ),
    # Bounds that are no bounds, on all sides.
    "limits": ("clipped = Clip(s, low, high) raised = Max(clipped, low) masked = Min(raised, high)", -1e9),
    # A sentinel: the smallest of the scores that are not padding, taken off.
    "sentinel": (
        f"{IS_PADDING} sentinel = Where(is_padding, high, s)"
        " least = ReduceMin<axes = [-1], keepdims = 1>(sentinel) masked = Sub(s, least)",
        -1e9,
    ),
}


def block(name: str) -> onnx.ModelProto:
    """An attention block of one head with a mask of some form."""
    nodes, low = FORMS[name]
    high = abs(low) if np.isfinite(low) else 1e9
    constants = [weight(n, WIDTH, WIDTH) for n in ("wq", "wk", "wv")]
    numbers = {"scale": 8**-0.5, "one": 1.0, "zero": 0.0, "low": low, "high": high}
    constants += [constant(n, number) for n, number in numbers.items()]
    constants += [
        constant("axis", [1], np.int64),
        constant("side", [LENGTH, LENGTH], np.int64),
        constant("k", 1, np.int64),
        constant("lower", np.tril(np.ones((LENGTH, LENGTH), bool)), bool),
    ]
    nodes = nodes.replace("LOW", repr(low))
    size = f"2,{LENGTH},{WIDTH}"
    proto = text(f"""(float[{size}] x, int64[2,{LENGTH}] mask, int64[2] dims) => (float[{size}] y) {{
        q = MatMul(x, wq) keys = MatMul(x, wk) v = MatMul(x, wv) kt = Transpose<perm = [0, 2, 1]>(keys)
        scores = MatMul(q, kt) s = Mul(scores, scale) {nodes}
        [softmax] p = Softmax<axis = -1>(masked) y = MatMul(p, v)
    }}""")
    read = {i for n in proto.graph.node for i in n.input}
    inputs = [given for given in proto.graph.input if given.name in read]
    del proto.graph.input[:]
    proto.graph.input.extend(inputs)
    proto.graph.initializer.extend(c for c in constants if c.name in read)
    return proto


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
def test_all_of_a_masked_block_may_be_reduced_and_no_group_is_pinned(name: str, tmp_path: Path) -> None:
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
    hazards = find_hazards(grouped, ObservedValues(ranges_on(grouped.model, [feed], tmp_path)))
    if name == "sentinel":  # the smallest of the others is no softmax's mask
        assert {h.place.tensor for h in hazards if h.severity == "error"} == {"sentinel"}
        return
    for precision in REDUCED:
        assert pinned_by_hazards(hazards, precision, is_measured=True) == {}
    assert {h.code for h in hazards if not h.is_note} <= {"mask"}
    assert {h.place.tensor for h in hazards if h.severity != "info"} <= {"masked"}, "masked twice: -131008 is -inf"
    assert pinned_by_hazards(hazards) == {}


def written(grouped: GroupedModel, plan: PrecisionPlan, path: Path) -> dict[str, np.ndarray]:
    """The constants of the typed model, by name."""
    typed = onnx.load(Rewriter(grouped).write(plan, path))
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in typed.graph.initializer}


def test_infinities_stay_and_numbers_stay_finite_in_the_lower_precision_only(tmp_path: Path) -> None:
    """A constant of both precisions: GPT-2's lowest number, which the attention and the mask of padding share."""
    path = tmp_path / "typed.onnx"
    for name, held in (("chosen, -inf", -np.inf), ("chosen beside the scores", -65504.0)):
        grouped, _, _ = grouped_block(name, tmp_path)
        assert written(grouped, uniform(grouped, Precision.FP16), path)["low__fp16"] == held
    grouped, feed, exact = grouped_block("causal and padding", tmp_path)
    (mask,) = [g.id for g in grouped.groups if "times_low" in g.nodes]
    constants = written(grouped, grouped.uniform(Precision.FP32).replace({mask: Precision.FP16}), path)
    assert (constants["low"], constants["low__fp16"]) == (np.float32(LOWEST), -65504)
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
