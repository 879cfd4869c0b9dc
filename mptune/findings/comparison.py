"""Findings of ``mptune compare``."""

from __future__ import annotations

from collections.abc import Mapping

from mptune.findings.wording import CodeInfo, Wording, row

_FP16_GIVES = "(FP16 throughout, emulated, gives {judged_fp16:.3g})"
_HAS = "output {place!r} has {error_shown}"
_UNDONE = "; undone, {left_share:.2g%} of the difference is left"

_LATE_CURES = {
    "": "no plan repairs this: synchronise the stream before the outputs are read (cudaStreamSynchronize, or"
    " stream.synchronize()), and give each run in flight buffers of its own",
    "one row": "no plan repairs this: see whether the batch was fixed at 1 where the model was exported or the engine"
    " built (dynamic axes, optimisation profile), and whether the input is copied for each run",
}

_TF32_OFF = (
    ": use_tf32=0 for ONNX Runtime's CUDA provider, clear_flag(BuilderFlag.TF32) for TensorRT, or"
    " NVIDIA_TF32_OVERRIDE=0 in the environment"
)
_NONE_ALONE = (
    "{differences:/# constant or attribute differs/# constants or attributes differ}, and none that was tried alone"
    " makes a tenth of the difference: together, in FP32, they make an error of {together:.3g}; output {place!r} has"
    " {error_shown}"
)


def _late(what: str, example: str) -> dict[str, Wording]:
    text = f"output {{output!r}}: {{count}} of {{of_rows}} rows are {what}: row {{row}} {example} {{source_row}}"
    lags = {
        "": "[before?; the source is most often {before:/# row/# rows} before]",
        "one row": "; so do all {count} that differ",
    }
    return {kind: Wording(text + lag, _LATE_CURES[kind]) for kind, lag in lags.items()}


def _tf32(side: str, cure: str) -> CodeInfo:
    return row(
        "warning",
        f"the difference is what TF32 in the {side} makes",
        f"output {{output!r}}: TF32 in the {side} ({{name}}) makes the difference of {{error:.3g}}: emulated,"
        " it has {size_ratio:.2f} times its size, and {left_share:.2g%} of the difference is left without it",
        cure + _TF32_OFF,
    )


COMPARISON: Mapping[str, CodeInfo] = {
    "agrees": CodeInfo(
        "info",
        "the outputs differ by what FP16 or TF32 rounding gives, or less",
        {
            "equal": Wording(f"output {{place!r}} equals the reference {_FP16_GIVES}"),
            **{
                kind: Wording(f"{_HAS}: {what} {_FP16_GIVES}")
                for kind, what in {
                    "fp32": "what FP32 rounding gives",
                    "fp16": "the size of FP16 rounding",
                    "within tolerance": "within the tolerance given, and more than FP16 rounding gives",
                }.items()
            },
        },
    ),
    "stale-rows": CodeInfo(
        "warning",
        "rows equal the reference of another row, such as the one before",
        _late("stale", "equals the reference's row"),
    ),
    "torn-rows": CodeInfo(
        "warning",
        "rows are part this and part the previous result",
        _late("torn[, {whole} are wholly another row's]", "is part its own result and part that of row"),
    ),
    "not-computed": CodeInfo(
        "warning",
        "a recorded output is all zero, or has equal rows where the reference's differ",
        {
            "zero": Wording(
                "output {output!r} is zero everywhere, and the reference is not",
                "copy it back after each run, and give the engine the address of its buffer (setTensorAddress)",
            ),
            "equal rows": Wording(
                "output {output!r}: all {rows} rows are equal, and the reference's differ",
                "copy the output back after each run, and not once, and the input before it",
            ),
        },
    ),
    "tf32-reference": _tf32("reference", "compute the reference with TF32 off"),
    "tf32-candidate": _tf32("candidate", "switch TF32 off where this matters"),
    "outputs-permuted": CodeInfo(
        "warning",
        "outputs, columns or rows are in another order",
        {
            "ahead": Wording(
                "output {output!r}: from row {begin} on, {rows} of {of_rows} rows are those of later samples (row"
                " {row} equals the reference's row {source_row}): as where a sample was left out",
                "give the rows in the order of the data, one for each sample: see which sample the recording lacks",
            ),
            "exchanged": Wording(
                "output {name!r} holds what is {other!r} of the reference",
                "read outputs by name, not by position, or exchange the two",
            ),
            **{
                kind: Wording(
                    f"output {{output!r}} has its {what} in another order: {{moved}} of {{entries}} moved ({{shown}})"
                    + _UNDONE,
                    cure,
                )
                for kind, what, cure in (
                    ("rows", "rows", "give the rows in the order of the data"),
                    (
                        "entries",
                        "entries along axis {along}",
                        "bring the entries into the reference's order, or compare them by what they mean",
                    ),
                )
            },
        },
    ),
    "attribute-differs": CodeInfo(
        "warning",
        "two models differ in an attribute, a constant or their structure",
        {
            "": Wording(
                "node {node}: {difference}[ (alone, in FP32, it makes an error of {alone:.3g})][; next {next}];"
                " output {place!r} then has {error_shown} (FP16 throughout gives {judged_fp16:.3g})",
                "export both from the same source, or give this node the same value in both",
            ),
            "together": Wording(_NONE_ALONE, "export both from the same source"),
            "together little": Wording(_NONE_ALONE, severity="info"),
        },
    ),
    "first-difference": CodeInfo(
        "warning",
        "the first group along the graph that leaves the tolerance",
        {
            f"{kind}{shape}": Wording(
                f"the two models begin to differ in {{name}}: value {{tensor!r}}, computed by {{node}}, {differs};"
                f" {before}",
                cure,
                "info" if kind == "rounding" else None,
            )
            for kind, before, cure in (
                (
                    "",
                    "every value before it is within {error_before:.3g}",
                    "compare this node in both models: its attributes, its constants and its type",
                ),
                (
                    "reduced",
                    "every value before it differs by what FP16 or BF16 makes, or less",
                    "if its precision makes that, keep this group in FP32; else compare the node in both models",
                ),
                (
                    "rounding",
                    "that is where FP16 or BF16 begins, and none differs by more than twice what these give, emulated",
                    "",
                ),
            )
            for shape, differs in {
                "": "has a relative error of {error:.3g}",
                " infinite": "differs in its shape, in values that are not finite, or where one model has zeros only",
            }.items()
        },
    ),
    "precision": CodeInfo(
        "warning",
        "the difference comes from FP16",
        {
            f"{kind}{plan}": Wording(
                f"{_HAS}, the limit is {{limit_value:.3g}}: {cause}; most of it comes from {{named}}[; {{seen}}]"
                "[is_bf16?; BF16 keeps 8 bits where FP16 keeps 11]",
                cure,
            )
            for kind, cause in {
                "reproduced": "emulating {precisions} reproduces it ({left_share:.2g%} of the difference is left)",
                "of its size": "{precisions} throughout, emulated, gives an error of that size ({judged_fp16:.3g}), in"
                " other values",
            }.items()
            for plan, cure in {
                "": "keep {kept_groups:/# group/# groups} in FP32 ({left}): mptune apply {model} {options} -o OUT.onnx",
                ", no plan": "no plan with {precisions} groups keeps the limit: allow more with --tolerance, or stay in"
                " FP32",
            }.items()
        },
    ),
}
