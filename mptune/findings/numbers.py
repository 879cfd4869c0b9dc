"""Findings about numbers that FP16 or BF16 cannot hold, and about what an engine makes of them."""

from __future__ import annotations

from collections.abc import Mapping

from mptune.findings.wording import AT, CodeInfo, Wording, row


def where_to_keep(precision: str) -> str:
    """Where a group with a hazard of a precision is kept."""
    return "in FP32" if precision == "FP16" else f"out of {precision}"


def _hazard(text: str, cure: str, *, is_note: bool = False) -> Wording:
    return Wording(text, cure, at=AT, is_note=is_note)


def in_samples(beyond: int, samples: int, sample: int) -> str:
    """How many samples hold a value beyond FP16's end, and the index of that with the largest magnitude."""
    if not beyond or samples == 1:
        return f"in sample {sample}"
    if beyond == 1:
        return f"in 1 of {samples} samples: sample {sample}"
    share = f"all {samples}" if beyond == samples else f"{beyond} of {samples}"
    return f"in {share} samples, most in sample {sample}"


_REACHED = "reached {absmax:.4g} on the calibration data, FP16 ends at {fp16_max:g}"
_SEEN = {"seen": _hazard(f"{_REACHED}[, {{in_samples}}]", "the group is kept out of FP16")}

_BEYOND_CURE = (
    "a search measures what that does; without one (apply) the group is kept in FP32; scale the value at export to"
    " free it"
)
_LIMITED = "; a tool that does not limit constants makes it infinite"
_LIMITED_CURE = "nothing: it masks as well, unless a row is masked whole"

_CONSTANTS = {
    "constant": "{absmax:.4g} exceeds FP16's {fp16_max:g} and is held as {held_as:g} there",
    "constants": "{overflowed} of {size} values exceed FP16's {fp16_max:g} and are held as {held_as:g} there, the"
    " largest is {absmax:.4g}",
    "filled": "filled with {absmax:g}, which exceeds FP16's {fp16_max:g} and is held as {held_as:g} there",
}

_EPSILON_CURE = "keep the group in FP32, or export with an epsilon of {least} or more"
_CAME_DOWN = "[; what it guards came down to {smallest:.2g} on the calibration data]"

_SCALED_UP = "keep the group in FP32, or scale the values up in the model"
_VANISHED = "{vanished} of {size} values are too small for FP16 and become zero"

_POLES: Mapping[str, tuple[str, str]] = {
    "Log": ("zero or negative", "Log is -Inf or NaN"),
    "Sqrt": ("negative", "Sqrt is NaN"),
    "Pow": ("zero or negative", "Pow is Inf or NaN"),
    "Div": ("zero", "the division gives Inf or NaN"),
    "Reciprocal": ("zero", "Reciprocal is Inf"),
}
"""Operator -> what its operand comes to in FP16, and what it gives there."""

_LOST_VALUES = "{lost} of {values} values of {tensor!r} (down to {smallest:.2g})"

_VANISHING = (
    "of the values that {operator} reads, {zero_share:.1%} are so small that {precision} makes them zero, and"
    " {subnormal_share:.1%} lose digits below its smallest normal value, {smallest_normal:.2g}"
)
_KEPT_FROM_ZERO = "{keep_out}, or keep the values from zero in the model, as by a limit of 1e-4"

_DECIDED: Mapping[str, str] = {
    "softmax": "{share:.1%} of the weight of its rows moves to other elements",
    "largest": "{operator} chooses another element in {share:.1%} of the rows",
    "comparison": "{share:.1%} of the answers of {operator} change",
    "comparison Equal": "{share:.1%} of what Equal finds equal change",
}

_MASKED_ROWS = (
    "{masked_rows:/# row is/# rows are} masked whole on the calibration data, [in {samples} samples, first ]in sample"
    " {sample}: every element lies below {limit:g}. "
)
_MASKED_ROWS_CURE = "mask with a value that FP16 holds (-1e4), or give rows that are not masked whole"

NUMBERS: Mapping[str, CodeInfo] = {
    "overflow": CodeInfo(
        "warning",
        "a value beyond 65504 that the plan would hold in FP16",
        {
            **_SEEN,
            "held": _hazard(
                f"{_REACHED}[, {{in_samples}}]; the constants beyond it that this comes from are held as {{held_as:g}}"
                " there",
                _BEYOND_CURE,
            ),
            "near": _hazard(
                "reached {absmax:.4g} on the calibration data, close to FP16's end at {fp16_max:g}[, {in_samples}]",
                "make sure that the calibration data hold the extremes, or keep the group in FP32",
                is_note=True,
            ),
            "mask": _hazard(
                f"{_REACHED}[, {{in_samples}}]",
                "a limit may stay infinite, but a row that is masked everywhere gives NaN: use -1e4 for masks",
                is_note=True,
            ),
            **{kind: _hazard(text, _BEYOND_CURE) for kind, text in _CONSTANTS.items()},
            **{
                f"{kind} limit": _hazard(text + _LIMITED, _LIMITED_CURE, is_note=True)
                for kind, text in _CONSTANTS.items()
            },
            "rescaled": _hazard(
                "{overflowed} of {size} values exceed FP16's {fp16_max:g}, the largest is {absmax:.4g}; in FP16 they"
                " are rescaled, together with the constant beside them, so that the function is the same",
                "nothing: the model that mptune writes does this",
            ),
        },
        breaks=1,
    ),
    "vanishing-epsilon": CodeInfo(
        "warning",
        "an epsilon that is zero in FP16 and guards a denominator that can reach zero",
        {
            "constant": _hazard(
                "the constant {epsilon:g} is zero in FP16, so nothing keeps what it guards from zero any more"
                + _CAME_DOWN,
                _EPSILON_CURE.format(least="1e-5"),
            ),
            "subnormal": _hazard(
                "the constant {epsilon:g} is below FP16's smallest normal value, {fp16_normal:g}" + _CAME_DOWN,
                _EPSILON_CURE.format(least="1e-4"),
            ),
            **{
                kind: _hazard(
                    "the epsilon {epsilon:g} of {operator} is zero in FP16, so nothing guards the division",
                    _EPSILON_CURE.format(least="1e-5"),
                    is_note=kind != "attribute",
                )
                for kind in ("attribute", "attribute of a safe variance")
            },
            "weights": _hazard(
                _VANISHED, "harmless where the error says so; otherwise keep the group in FP32", is_note=True
            ),
        },
        breaks=2,
    ),
    "vanishing-values": CodeInfo(
        "warning",
        "values that FP16 rounds to 0, or that lie below its smallest normal, at a Log, division, root or reciprocal",
        {
            "": _hazard(
                f"{_VANISHING}: that changes the results by {{relative_error:.1%}} of their standard deviation",
                _KEPT_FROM_ZERO,
            ),
            **{
                f"pole {operator}": _hazard(
                    f"{_VANISHING}; {_LOST_VALUES} become zero, and there {result}", _KEPT_FROM_ZERO
                )
                for operator, (_, result) in _POLES.items()
            },
            **{
                f"underflow {lost}": _hazard(
                    f"stayed below {{absmax:.2g}} on the calibration data: in FP16 all values {lost}",
                    _SCALED_UP,
                    is_note=True,
                )
                for lost in ("become zero", "lose digits")
            },
        },
        breaks=2,
    ),
    "spacing": CodeInfo(
        "warning",
        "values so large that FP16's spacing exceeds the differences that decide downstream",
        {
            **{
                kind: _hazard(
                    "values reach {magnitude:.4g}, where {precision}'s spacing is {spacing:.3g}[, and the next value"
                    f" is {{gap:.3g}} away on average]: once they are rounded, {decided}",
                    "{keep_out}, with what computes its operands",
                )
                for kind, decided in _DECIDED.items()
            },
        },
        breaks=6,
    ),
    "stagnation": row(
        "warning",
        "an Add whose smaller side is below half of FP16's spacing at the other: it is lost",
        "{operator} of {moved!r} (root mean square {step:.3g}) to {unchanged!r} ({base:.4g}): {precision}'s"
        " spacing is {spacing:.3g} there, and on {share:.0%} of the elements {precision} gives back"
        " {unchanged!r} unchanged",
        "{kept}: the error of one step does not show what many lose",
        at=AT,
        breaks=4,
    ),
    "cancellation": CodeInfo(
        "warning",
        "a Sub or Add whose result is much smaller than its operands",
        {
            "": _hazard(
                "{operator} of values {factor:.0f} times as large as its result: relative errors grow by that factor,"
                " and rounding the operands to {precision} changes the result by {relative_error:.1%}",
                "{keep_out}, with what computes its operands",
            ),
            "norm": _hazard(
                "values reach {magnitude:.4g}, where {precision}'s spacing is {spacing:.3g}: once they are rounded,"
                " {operator} changes by {relative_error:.1%} of its results' standard deviation",
                "{keep_out}, with what computes its operand",
            ),
            **{
                f"pole {operator}": _hazard(
                    f"rounding to {{precision}} before a difference makes {_LOST_VALUES} {there}, and there {result}",
                    "{keep_out}, with what computes its operand",
                )
                for operator, (there, result) in _POLES.items()
            },
        },
        breaks=7,
    ),
    "long-sum": row(
        "info",
        "a long one-signed sum that would stop growing if it were accumulated in FP16",
        "{operator} sums {terms} values of one sign: accumulated in {narrowest}, such a sum stops growing where"
        " a term is below half of the spacing, for equal terms after {exact_to:.0f} of them",
        "none where the engine accumulates in FP32, as ONNX Runtime's reductions on the CPU and with CUDA do;"
        " of another engine, compare its outputs before the group goes to {narrowest}",
        at=AT,
    ),
    "index-in-float": CodeInfo(
        "warning",
        "float arithmetic that becomes an index or a size, above 2048 not exact in FP16",
        {
            "": _hazard(
                "floating-point values up to {largest:.6g} become an index or a size at node {reader!r}: {narrowest}"
                " does not hold every whole number above {exact_to:.0f}",
                "{kept}",
            ),
        },
        breaks=5,
    ),
    "mask": CodeInfo(
        "warning",
        "a mask beyond FP16's range that is multiplied, added or meets a fully masked row",
        {
            **_SEEN,
            **{kind: _hazard(text + _LIMITED, _LIMITED_CURE) for kind, text in _CONSTANTS.items()},
            "rows": Wording(
                "value {tensor!r}: "
                f"{_MASKED_ROWS}In FP16 all are -inf, and their softmax is NaN, where the mask is an input, or where"
                " scores below -16 are added to one that is held as -65504",
                _MASKED_ROWS_CURE,
            ),
            "rows in FP32": Wording(
                "value {tensor!r}: "
                f"{_MASKED_ROWS}They are -inf, and their softmax is NaN, in FP32 already: precision is not the problem",
                _MASKED_ROWS_CURE,
            ),
        },
        breaks=3,
    ),
    "norm-written-out": CodeInfo(
        "warning",
        "a normalisation written out in pieces instead of as one operator",
        {
            kind: _hazard(
                "{pattern}: squares of values from {square_limit:g} on leave FP16's range[; the largest square was"
                " {largest_square:.4g} on the calibration data]",
                f"keep the norm whole in FP32{export}",
                is_note=not export,
            )
            for kind, export in {
                "no operator": "",
                "": ", or export at opset {operator_opset} or newer: {operator} keeps its statistics in FP32",
            }.items()
        },
    ),
    "int64-range": row(
        "warning",
        "an INT64 value that INT32 cannot hold and that is not the end of a Slice",
        "the INT64 constant holds {value}, which INT32 cannot: TensorRT before 10 clamps it",
        "build with TensorRT 10 or newer, or export with indices below 2147483648",
        at=AT,
    ),
}
