"""Findings about numbers that FP16 or BF16 cannot hold, and about what an engine makes of them."""

from __future__ import annotations

from mptune.findings.wording import Table, Values, Words, counted

NUMBERS = Table()
NOTES = frozenset({("overflow", "near"), ("overflow", "mask"), ("vanishing-epsilon", "weights")})
"""Codes and kinds of hazards that are shown, and are no findings."""


def where_to_keep(precision: str) -> str:
    """Where a group with a hazard of a precision is kept."""
    return "in FP32" if precision == "FP16" else f"out of {precision}"


def in_samples(beyond: int, samples: int, sample: int) -> str:
    """How many samples hold a value beyond FP16's end, and the index of that with the largest magnitude."""
    if not beyond or samples == 1:
        return f"in sample {sample}"
    if beyond == 1:
        return f"in 1 of {samples} samples: sample {sample}"
    share = f"all {samples}" if beyond == samples else f"{beyond} of {samples}"
    return f"in {share} samples, most in sample {sample}"


@NUMBERS.row("overflow", "warning", "a value beyond 65504 that the plan would hold in FP16")
def _overflow(v: Values) -> Words:
    cures = {
        "seen": "the group is kept out of FP16",
        "near": "make sure that the calibration data hold the extremes, or keep the group in FP32",
        "mask": "a limit may stay infinite, but a row that is masked everywhere gives NaN: use -1e4 for masks",
        "saturated": "none: what reads it gives the same of an infinite value",
    }
    if v.kind == "inside":
        text = f"{v.operator} sums up to {v.absmax:.4g} inside, FP16 ends at {v.fp16_max:g}"
        return Words(f"{text}: an engine that holds the sum in FP16, as TensorRT does, gets Inf", v.kept)
    if v.kind in cures:
        text = f"reached {v.absmax:.4g} on the calibration data, FP16 ends at {v.fp16_max:g}, {v.in_samples}"
        return Words(text, cures[v.kind])
    cure = "a search measures what that does; without one (apply) the group is kept in FP32; or scale it at export"
    return Words(_constant_beyond(v), cure)


def _constant_beyond(v: Values) -> str:
    if v.get("size") in (None, 1):
        return f"{v.absmax:.4g} exceeds FP16's {v.fp16_max:g} and is held as {v.held_as:g} there"
    text = f"{v.overflowed} of {v.size} values exceed FP16's {v.fp16_max:g} and are held as {v.held_as:g} there"
    return f"{text}, the largest is {v.absmax:.4g}"


@NUMBERS.row(
    "vanishing-epsilon", "warning", "an epsilon that is zero in FP16 and guards a denominator that can reach zero"
)
def _vanishing_epsilon(v: Values) -> Words:
    if v.kind == "weights":
        text = f"{v.vanished} of {v.size} values are too small for FP16 and become zero"
        return Words(text, "harmless if the error is small; otherwise keep the group in FP32")
    what = "is zero in FP16, so it no longer keeps what it guards from zero"
    if v.kind == "subnormal":
        what = f"is below FP16's smallest normal value, {v.fp16_normal:g}"
    smallest = v.get("smallest")
    down = "" if smallest is None else f"; what it guards came down to {smallest:.2g} on the calibration data"
    return Words(
        f"the constant {v.epsilon:g} {what}{down}", "keep the group in FP32, or export with an epsilon of 1e-4 or more"
    )


@NUMBERS.row("vanishing-values", "warning", "values that FP16 rounds to 0 at a Log, division, root or reciprocal")
def _vanishing_values(v: Values) -> Words:
    text = (
        f"of the values that {v.operator} reads, {v.zero_share:.1%} are so small that {v.precision} makes them zero,"
        f" and {v.subnormal_share:.1%} lose digits below its smallest normal value, {v.smallest_normal:.2g}"
    )
    cure = f"{v.keep_out}, or keep the values from zero in the model, such as by a limit of 1e-4"
    return Words(f"{text}; {_at_pole(v)}" if v.kind else text, cure)


def _at_pole(v: Values) -> str:
    lost = f"{v.lost} of {v.values} values of {v.tensor!r} (down to {v.smallest:.2g})"
    return f"{lost} come to zero or below it, where {v.operator} gives Inf or NaN"


@NUMBERS.row("spacing", "warning", "values so large that FP16's spacing exceeds the differences that decide downstream")
def _spacing(v: Values) -> Words:
    decided = {
        "softmax": "of the weight of its rows moves to other elements",
        "largest": f"of the rows have another largest element in {v.operator}",
        "comparison": f"of the answers of {v.operator} change",
        "comparison Equal": "of what Equal finds equal change",
    }
    far = f"values reach {v.magnitude:.4g}, where {v.precision}'s spacing is {v.spacing:.3g}"
    cure = f"{v.keep_out}, with what computes its operands"
    if v.kind == "output":
        text = f"{far}, and an output varies by {v.varies:.3g} within a sample: rounding it adds {v.relative_error:.1%}"
        return Words(f"{text} of that", v.kept)
    if v.kind in ("GridSample", "NonMaxSuppression"):
        unit = "pixels of the image that GridSample reads" if v.kind == "GridSample" else "sides of a box"
        return Words(f"coordinates of {v.operator}: {far}: once rounded, they move by {v.moved:.2g} {unit}", cure)
    gap = "" if v.get("gap") is None else f", and the next value is {v.gap:.3g} away on average"
    return Words(f"{far}{gap}: once rounded, {v.share:.1%} {decided[v.kind]}", cure)


@NUMBERS.row("angle-spacing", "warning", "a Sin or Cos of angles whose FP16 spacing is a considerable part of a period")
def _angle_spacing(v: Values) -> Words:
    text = f"angles reach {v.largest:.4g} rad, where {v.precision}'s spacing is {v.spacing:.3g}"
    text += f" ({v.periods:.2g} of a period)"
    if v.left < v.different:
        text += f": of {v.different} different angles from {v.coarse_from:g} rad on, {v.left} are left"
    text += f"; digits are lost from node {v.first!r} on"
    return Words(text, f"{v.kept}; or bring the angles to one period in FP32 before they are rounded")


@NUMBERS.row(
    "stagnation", "warning", "an Add whose smaller side is below half of FP16's spacing at the other: it is lost"
)
def _stagnation(v: Values) -> Words:
    cure = f"{v.kept}: the error of one step does not show the loss over many"
    if v.is_logged:
        cure = f"{v.keep_out}, or take the logarithm of the step itself, as Softplus and Log1p do"
    return Words(
        f"{v.operator} of {v.moved!r} (root mean square {v.step:.3g}) to {v.unchanged!r} ({v.base:.4g}), where"
        f" {v.precision}'s spacing is {v.spacing:.3g}: on {v.share:.0%} of the elements {v.unchanged!r} stays"
        " unchanged",
        cure,
    )


@NUMBERS.row("cancellation", "warning", "a Sub or Add whose result is much smaller than its operands")
def _cancellation(v: Values) -> Words:
    if v.kind.startswith("pole"):
        text = f"rounding to {v.precision} before a difference: {_at_pole(v)}"
    elif v.kind == "norm":
        text = f"values reach {v.magnitude:.4g}, where {v.precision}'s spacing is {v.spacing:.3g}: once rounded,"
        text += f" {v.operator} changes by {v.relative_error:.1%} of its results' standard deviation"
    elif v.kind == "slope":
        text = f"{v.operator} where it is so steep that relative errors grow {v.factor:.0f} times: rounding its"
        text += f" operand to {v.precision} changes the result by {v.relative_error:.1%}"
    else:
        text = (
            f"{v.operator} of values {v.factor:.0f} times as large as its result: relative errors grow by that factor,"
        )
        text += f" and rounding the operands to {v.precision} changes the result by {v.relative_error:.1%}"
    return Words(text, f"{v.keep_out}, with what computes its operands")


@NUMBERS.row("long-sum", "info", "a long one-signed sum that would stop growing if it were accumulated in FP16")
def _long_sum(v: Values) -> Words:
    end = f"a sum of equal terms stops growing after {v.exact_to:.0f} of them"
    end = f"the sum, {v.sum:.4g}, leaves FP16's range and is Inf" if v.sum > 65504 else end
    text = f"{v.operator} sums {v.terms} values of one sign: accumulated in {v.narrowest}, {end}"
    if v.kind == "held":
        text += f"; output {v.output!r} is NaN or Inf in the same places as an FP16 run that also rounds sums to FP16"
        return Words(text, v.command, "warning")
    return Words(
        text,
        "none if the engine accumulates in FP32, as ONNX Runtime's reductions do; compare the outputs of another engine"
        f" before the group goes to {v.narrowest}",
    )


@NUMBERS.row("index-in-float", "warning", "inexact float arithmetic that becomes an index, a size or a comparison")
def _index_in_float(v: Values) -> Words:
    if v.kind == "fraction":
        text = f"{v.operator} of fractions, which become an index or are compared at node {v.reader!r}: once they are"
        return Words(f"{text} rounded to {v.precision}, {v.share:.1%} of the whole numbers change", v.keep_out)
    use = "are compared as whole numbers" if v.kind == "compared" else "become an index or a size"
    text = f"floating-point values up to {v.largest:.6g} {use} at node {v.reader!r}: {v.precision}"
    return Words(f"{text} does not hold every whole number above {v.exact_to:.0f}", v.kept)


@NUMBERS.row("mask", "warning", "a mask beyond FP16's range that is multiplied, added or meets a fully masked row")
def _mask(v: Values) -> Words:
    if v.kind == "rows":
        samples = f"in {v.samples} samples, first " if v.get("samples") else ""
        rows = (
            f"{counted(v.masked_rows, 'row')} masked completely on the calibration data, {samples}in sample {v.sample}"
        )
        return Words(
            f"{rows}: every element lies below {v.limit:g}, -inf in FP16 where the mask is an input or scores are added"
            " to it, and the softmax NaN",
            "mask with a value that FP16 holds (-1e4), or give rows that are not masked completely",
        )
    if v.kind in ("seen", "mask"):
        return _overflow(v)
    text = f"{_constant_beyond(v)}; a tool that does not limit constants makes it infinite"
    return Words(text, "none: it masks just as well, unless a row is masked completely")


@NUMBERS.row("norm-written-out", "warning", "a normalisation written out in pieces instead of as one operator")
def _norm_written_out(v: Values) -> Words:
    square = v.get("largest_square")
    largest = "" if square is None else f"; the largest square was {square:.4g} on the calibration data"
    cure = "keep the norm whole in FP32"
    if v.get("operator"):
        cure += f", or export at opset {v.operator_opset} or newer: {v.operator} keeps its statistics in FP32"
    return Words(f"{v.pattern}: squares of values from {v.square_limit:g} on leave FP16's range{largest}", cure)


@NUMBERS.row("int64-range", "warning", "an INT64 value that INT32 cannot hold and that is not the end of a Slice")
def _int64_range(v: Values) -> Words:
    text = f"the INT64 constant holds {v.value}, which INT32 cannot: TensorRT before 10 clamps it"
    return Words(text, "build with TensorRT 10 or newer, or export with indices below 2147483648")
