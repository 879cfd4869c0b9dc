"""Findings about the model in FP32: its reference outputs, its rows and its state."""

from __future__ import annotations

from collections.abc import Mapping

from mptune.findings.wording import AT, CodeInfo, Severity, Wording, row

_NOT_FINITE = (
    "the reference is not finite: output {output!r} holds {non_finite} NaN or Inf in FP32, on"
    " [{bad_samples} of {of_samples} samples, first on ]sample {sample}[; it begins at {place}, which gives {value}]"
)
_GUARD = "; guard it in the model, as by an epsilon or a limit, or leave such samples out"
_MASKED = (
    "a row that is -inf throughout, as one that is masked whole, or that holds +inf",
    "mask with a finite value such as -1e4, or leave rows that are masked whole out of the samples",
)
_BEYOND_ONE = "a value beyond -1..1", "limit it to -1..1 in the model"
_NOT_FINITE_CAUSES: Mapping[str, tuple[str, str]] = {
    "Softmax nan": _MASKED,
    "LogSoftmax nan": _MASKED,
    "Div nan": ("0 / 0, or inf / inf", f"see what is zero there{_GUARD}"),
    "Div inf": ("a division by zero, or by nearly zero", f"see what is zero there{_GUARD}"),
    "Reciprocal inf": ("one over zero, or over nearly zero", f"see what is zero there{_GUARD}"),
    "Log inf": ("the logarithm of zero", f"see what is zero there{_GUARD}"),
    "Log nan": ("the logarithm of a negative number", f"see what is negative there{_GUARD}"),
    "Sqrt nan": ("the root of a negative number", f"see what is negative there{_GUARD}"),
    "Exp inf": ("an exponent above 88", "subtract the largest value before the exponential"),
    "Acos nan": _BEYOND_ONE,
    "Asin nan": _BEYOND_ONE,
}
"""Operator and what it gives of finite operands, or of masks -> how that happens, and what to do."""

_EVALUATION = "export the model in evaluation mode (model.eval(), no dropout, no RandomNormal, a fixed seed)"

_ROWS_MIX = {
    "mixed": "a row gives another output alone than among different rows of a batch",
    "others": "a row gives another output when the other rows of its batch change",
}
_ROWS_MEET: Mapping[str, tuple[str, str, Severity | None]] = {
    "": (
        "[; they first meet at {place}]",
        "look for a reshape, a mean or a broadcast over the batch axis; or tune and deploy with --batch 1",
        None,
    ),
    " step": (
        "; they first meet at {place}, which rounds each element to a step: a value near the end of a step may go to"
        " the next one",
        "nothing: kernels round differently at another batch size, and a step enlarges that",
        "info",
    ),
    " sequence": (
        "; {place} takes axis 0 for a sequence, so a row is a step of it and no sample of its own",
        "nothing where axis 0 is the sequence; where it is the batch, export with batch_first",
        "warning",
    ),
    " index": (
        "; {place} takes rows of axis 0 by indices that are fed, as along edges of a graph: a row may be a node, and no"
        " sample",
        "nothing where axis 0 holds the nodes of one graph; where it is the batch, an index reaches another sample",
        "warning",
    ),
}
"""How rows of a batch come to depend on each other: what is added to the text, the cure, and the severity."""

REFERENCE: Mapping[str, CodeInfo] = {
    "reference-not-finite": CodeInfo(
        "error",
        "the FP32 reference holds NaN or Inf",
        {
            "": Wording(
                _NOT_FINITE,
                "check the preprocessing of the calibration data and the model's export; if these are masks, cut that"
                " output off the model",
            ),
            **{kind: Wording(f"{_NOT_FINITE}: {why}", cure) for kind, (why, cure) in _NOT_FINITE_CAUSES.items()},
        },
    ),
    "not-deterministic": CodeInfo(
        "error",
        "two FP32 runs on the same sample differ",
        {
            "": Wording(
                "two FP32 runs on the same sample differ by {relative_l2:.1e}[, first at {place}]: the model is not"
                " deterministic",
                _EVALUATION,
            ),
            "noise": Wording(
                "two FP32 runs on the same sample differ by {relative_l2:.1e}[, first at {place}]: errors below that"
                " are noise",
                severity="warning",
            ),
            "norm": Wording(
                "{operator} {node!r}[ and {more} more] is in training mode: it normalises by the statistics of each"
                " batch, not by the model's own",
                _EVALUATION,
            ),
            "dropout": Wording(
                "{operator} {node!r}[ and {more} more] is in training mode: it sets values to zero at random",
                _EVALUATION,
            ),
            "runs": Wording(
                "{runs} runs of {runner} {mode} differ from isolated runs on the same samples by up to"
                " {relative_l2:.3g} (relative L2)",
                "look for a node that draws random numbers or was left in training mode: `mptune inspect` lists the"
                " operators",
            ),
            "random": Wording(
                "{operator} {node!r}[ and {more} more] draws random numbers that reach an output", _EVALUATION
            ),
        },
    ),
    "reference-zero": CodeInfo(
        "error",
        "every output of the FP32 reference is zero",
        {
            "": Wording(
                "the reference is all zero in every output[: {place} makes it so]",
                "check that the calibration data are what the model expects (scale, layout, channel order)",
            ),
            "empty": Wording(
                "the reference is empty in every output on every sample: nothing was selected",
                "give calibration data in which the model finds something, or export it with a lower threshold",
            ),
        },
    ),
    "output-constant": CodeInfo(
        "warning",
        "an output does not depend on the data",
        {
            "": Wording(
                "output {output!r} of the reference is the same on all samples, although these differ[: {place} makes"
                " it so]; its error says nothing",
                "give data that make the output respond, or correct the export",
            ),
            "zero": Wording(
                "output {output!r} of the reference is all zero[: {place} makes it so]; its error says nothing",
                "give data that make the output respond, or correct the export",
            ),
            "empty": Wording(
                "output {output!r} of the reference is empty on every sample, so its error says nothing",
                "give data in which the model finds something",
            ),
        },
    ),
    "rows-mix": CodeInfo(
        "error",
        "a row of a batch alone differs from the same row among different rows",
        {
            f"{kind}{meet}": Wording(
                f"{what}: output {{output!r}} differs by {{relative_l2:.1e}} (relative L2) in FP32{added}",
                cure,
                severity,
            )
            for kind, what in _ROWS_MIX.items()
            for meet, (added, cure, severity) in _ROWS_MEET.items()
        },
    ),
    "batch-not-kept": CodeInfo(
        "error",
        "an output does not have as many rows as the input",
        {
            "": Wording(
                "output {output!r} has the shape {shape} for {rows} rows, declared {declared}[: {place} fixes it]",
                "export it with a dynamic batch (a Reshape with -1 or 0 for the batch), or with a batch fixed at 1",
            ),
            "fails": Wording(
                "the model's first dimension is dynamic, but it fails with a batch of {rows} ({failure})",
                "fix it at {rows_that_run}",
                "warning",
            ),
        },
    ),
    "broadcast": row(
        "info",
        "a broadcast at a static batch of 1 that TensorRT has been seen to get wrong",
        "{operator} stretches {operands}, all computed, to {result}: with a batch fixed at 1, TensorRT has been"
        " seen to get such broadcasts wrong",
        "put an Expand before it, or export with a dynamic batch",
        at=AT,
    ),
    "value-dependent-shape": CodeInfo(
        "info",
        "an operator whose output shape depends on values, such as NonZero",
        {
            "": Wording(
                "{outputs:/output/outputs} {names} {outputs:/has/have} as many rows as values call for ({operators}):"
                " their rows are compared as sets, boxes by overlap and class, others by the nearest, and a row that"
                " only one side has counts as an error",
                "where rows at the threshold do not matter, judge by your own --metric script.py:function",
            ),
            "inside": Wording("{operators}: a shape inside the model depends on values, that of no output does"),
            "unmatched": Wording(
                "the all-FP32 engine and the reference differ in {rows:/# row/# rows} that only one of them has: rows"
                " at a threshold come and go with FP32 rounding already"
            ),
        },
    ),
    "state-fed-back": row(
        "info",
        "an output that pairs with an input: the error of one step says little",
        "{pairs:/# output pairs with an input/# outputs pair with inputs} by name and shape ({shown}): where a"
        " step hands its state to the next, errors add up from step to step, and the error of one step says"
        " little about many",
        "search over recorded sequences: `mptune search MODEL --data PATH {options} --steps K`; or give samples"
        " from early and late steps, each with the state that the steps before it gave",
    ),
    "one-size-tried": row(
        "info",
        "spatial axes are dynamic, and all samples have one size",
        "the model takes several sizes, and all samples are of one ({size}): the error of a plan at another size is not"
        " known",
        "check the chosen model on samples of each further size that it is deployed with: `mptune check"
        " RUN/chosen/model.onnx --against MODEL --data other.npz --max-error 1e-2`",
    ),
}
