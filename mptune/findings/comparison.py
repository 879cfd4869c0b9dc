"""Findings of ``mptune compare``."""

from __future__ import annotations

from mptune.findings.wording import Table, Values, Words, counted, percent

COMPARISON = Table()
_TF32_OFF = (
    "use_tf32=0 for ONNX Runtime's CUDA provider, clear_flag(BuilderFlag.TF32) for TensorRT, or NVIDIA_TF32_OVERRIDE=0"
    " in the environment"
)
_SYNCHRONISE = (
    "no plan repairs this: synchronise the stream before the outputs are read (cudaStreamSynchronize, or"
    " stream.synchronize()), give each run in flight buffers of its own, and check that the batch was not fixed at 1"
)


@COMPARISON.row("agrees", "info", "the outputs differ by what FP16 or TF32 rounding gives, or less")
def _agrees(v: Values) -> Words:
    sizes = {
        "equal": "nothing differs",
        "fp32": "what FP32 rounding gives",
        "fp16": "the size of FP16 rounding",
        "within tolerance": "within the tolerance given, and more than FP16 rounding gives",
    }
    return Words(
        f"output {v.place!r} has {v.error_shown}: {sizes[v.kind]} (all-FP16 with its pins, emulated, gives"
        f" {v.judged_fp16:.3g}){'; it is stored as FP16' if v.is_stored else ''}"
    )


@COMPARISON.row("stale-rows", "warning", "rows equal the reference of another row, such as the one before")
def _stale_rows(v: Values) -> Words:
    text = f"output {v.output!r}: {v.rows} of {v.of_rows} rows are stale: row {v.row} equals the reference's row"
    return Words(f"{text} {v.source_row}", _SYNCHRONISE)


@COMPARISON.row("torn-rows", "warning", "rows mix this result and the previous one")
def _torn_rows(v: Values) -> Words:
    text = f"output {v.output!r}: {v.torn} of {v.of_rows} rows are torn: row {v.row} mixes its own result with"
    return Words(f"{text} that of row {v.source_row}", _SYNCHRONISE)


@COMPARISON.row(
    "not-computed", "warning", "a recorded output is all zero, or has equal rows where the reference's differ"
)
def _not_computed(v: Values) -> Words:
    what = (
        "is zero everywhere, and the reference is not: it was never copied back"
        if v.kind == "zero"
        else f"has {v.rows} rows that are all equal, and the reference's are not: one buffer was read for all"
    )
    cure = "copy the output back after each run, and the input before it, and give the engine the address of its buffer"
    return Words(f"output {v.output!r} {what}", f"{cure} (setTensorAddress)")


def _tf32(v: Values, side: str) -> str:
    return (
        f"output {v.output!r}: TF32 in the {side} ({v.name}) causes the difference of {v.error:.3g}: emulated, it has"
        f" {v.size_ratio:.2f} times its size, and {percent(v.left_share)} of the difference is left without it"
    )


@COMPARISON.row("tf32-reference", "warning", "TF32 in the reference causes the difference")
def _tf32_reference(v: Values) -> Words:
    return Words(_tf32(v, "reference"), f"compute the reference with TF32 off: {_TF32_OFF}")


@COMPARISON.row("tf32-candidate", "warning", "TF32 in the candidate causes the difference")
def _tf32_candidate(v: Values) -> Words:
    return Words(_tf32(v, "candidate"), f"switch TF32 off where this matters: {_TF32_OFF}")


@COMPARISON.row("outputs-permuted", "warning", "outputs, columns or rows are in another order")
def _outputs_permuted(v: Values) -> Words:
    if v.kind == "outputs":
        text = f"output {v.name!r} holds what is {v.other!r} of the reference"
        return Words(text, "read outputs by name, not by position, or exchange the two")
    if v.kind == "form":
        return _other_form(v)
    what = "rows" if v.kind == "rows" else f"entries along axis {v.axis}"
    text = f"output {v.output!r} has its {what} in another order: {v.moved} of {v.entries} moved ({v.shown})"
    return Words(text, "give them in the reference's order, or in that of the data, one row for each of its rows")


def _other_form(v: Values) -> Words:
    text = f"output {v.output!r}, entries {v.entries} along axis {v.axis}: the candidate holds {v.form}, the reference"
    text += f" {v.other}; with both in one form the difference is {v.left:.2g} of the spread"
    return Words(text, "end both models with the same operators, or bring the outputs into one form before comparing")


@COMPARISON.row("attribute-differs", "warning", "two models differ in an attribute, a constant or their structure")
def _attribute_differs(v: Values) -> Words:
    if v.get("kind") == "form":
        return _other_form(v)
    then = f"output {v.place!r} then has {v.error_shown} (all-FP16 with its pins gives {v.judged_fp16:.3g})"
    cure = "export both from the same source, or give this node the same value in both"
    if not v.get("node"):
        text = f"{v.differences} constants or attributes differ, and none that was tried alone makes a tenth of the"
        return Words(f"{text} difference: together, in FP32, they make an error of {v.together:.3g}; {then}", cure)
    alone = "" if v.get("alone") is None else f" (alone, in FP32, it makes an error of {v.alone:.3g})"
    others = f"; next {v.others}" if v.others else ""
    return Words(f"node {v.node}: {v.difference}{alone}{others}; {then}", cure)


@COMPARISON.row("first-difference", "warning", "the first group along the graph that leaves the tolerance")
def _first_difference(v: Values) -> Words:
    text = f"the two models begin to differ in {v.name}: value {v.tensor!r}, computed by {v.node}"
    text += f", has a relative error of {v.error:.3g}"
    if v.kind == "rounding":
        text += "; that is where FP16 or BF16 begins, and none differs by more than twice what these give, emulated"
        return Words(text, severity="info")
    before = f"is within {v.error_before:.3g}" if not v.kind else "differs by what FP16 or BF16 makes, or less"
    return Words(
        f"{text}; every value before it {before}",
        "compare this node in both models: its attributes, its constants and its type; if its type causes it, keep"
        " the group in FP32",
    )


@COMPARISON.row("precision", "warning", "the difference comes from FP16")
def _precision(v: Values) -> Words:
    if v.kind == "stored":
        text = f"output {v.output!r} has {v.error_shown}, the limit is {v.limit:.3g}: it is stored as FP16, and"
        return Words(
            f"{text} {v.rounded_share:.0%} of its values are the reference's, rounded to FP16",
            "give the output the type FP32: outputs of trtexec with --outputIOFormats=fp32:chw, of converters with"
            " keep_io_types=True, and a buffer of that type",
        )
    cause = f"emulating {v.precisions} reproduces it ({percent(v.left_share)} of the difference is left)"
    if v.left_share == 1:
        cause = (
            f"{v.precisions} throughout, emulated, gives an error of that size ({v.judged_fp16:.3g}), in other values"
        )
    detail = f"; {v.seen}" if v.seen else ""
    bits = "; BF16 keeps 8 bits where FP16 keeps 11" if v.bf16_groups else ""
    cure = f"no plan with {v.precisions} groups keeps the limit: allow more with {v.option}, or stay in FP32"
    if v.left:
        cure = f"keep {counted(v.kept_groups, 'group')} in FP32, which leaves {v.left}: {v.command}"
    return Words(
        f"output {v.place!r} has {v.error_shown}, the limit is {v.limit_value:.3g}: {cause}; most of it comes from"
        f" {v.named}{detail}{bits}",
        cure,
    )
