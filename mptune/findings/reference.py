"""Findings about the model in FP32: its reference outputs, its rows and its state."""

from __future__ import annotations

from mptune.findings.wording import Table, Values, Words, counted

REFERENCE = Table()
OPSET_RAISED = "opset-raised"
WRONG_SHAPE = "wrong-output-shape"
_NOT_FINITE = {
    "Softmax": "a row that is -inf throughout, such as one that is masked completely, or that holds +inf",
    "Div": "a division by zero, or by nearly zero",
    "Log": "the logarithm of zero, or of a negative number",
    "Sqrt": "the root of a negative number",
    "Exp": "an exponent above 88",
}
"""Operator that gives NaN or Inf of finite operands, or of masks -> how that happens."""
_EVALUATION = "export the model in evaluation mode (model.eval(), no dropout, no RandomNormal, a fixed seed)"


def _begins(v: Values, what: str) -> str:
    """Where something begins, where that is known."""
    return what.format(place=v.place) if v.get("place") else ""


@REFERENCE.row("reference-not-finite", "error", "the FP32 reference contains NaN or Inf")
def _reference_not_finite(v: Values) -> Words:
    samples = f"{v.bad_samples} of {v.of_samples} samples, first on " if v.get("bad_samples") else ""
    why = _NOT_FINITE.get(v.kind.partition(" ")[0], "")
    return Words(
        f"the reference is not finite: output {v.output!r} has {v.non_finite} NaN or Inf in FP32, on {samples}sample"
        f" {v.sample}{_begins(v, '; it begins at {place}')}{f': {why}' if why else ''}",
        "guard the value in the model with an epsilon or a limit (masks: -1e4 in place of -inf), or leave such samples"
        " out; check that the data are prepared as in training",
    )


@REFERENCE.row("not-deterministic", "error", "two FP32 runs on the same sample differ")
def _not_deterministic(v: Values) -> Words:
    does = {
        "norm": "is in training mode: it normalises by the statistics of each batch, not by the model's own",
        "dropout": "is in training mode: it sets values to zero at random",
        "random": "draws random numbers that reach an output",
    }
    if v.kind in does:
        more = f" and {v.more} more" if v.get("more") else ""
        return Words(f"{v.operator} {v.node!r}{more} {does[v.kind]}", _EVALUATION)
    if v.kind == "runs":
        return Words(
            f"{v.runs} runs of {v.runner} {v.mode} differ from isolated runs on the same samples by up to"
            f" {v.relative_l2:.3g} (relative L2)",
            "look for a node that draws random numbers or was left in training mode: `mptune inspect` lists the"
            " operators",
        )
    text = f"two FP32 runs on the same sample differ by {v.relative_l2:.1e}{_begins(v, ', first at {place}')}"
    if v.kind == "noise":
        return Words(f"{text}: errors below that are noise", severity="warning")
    return Words(f"{text}: the model is not deterministic", _EVALUATION)


@REFERENCE.row("reference-zero", "error", "every output of the FP32 reference is zero")
def _reference_zero(v: Values) -> Words:
    what = "empty in every output on every sample" if v.kind == "empty" else "all zero in every output"
    cure = "check that the calibration data are what the model expects (scale, layout, channel order)"
    return Words(f"the reference is {what}{_begins(v, ': {place} makes it so')}", cure)


@REFERENCE.row("output-constant", "warning", "an output does not depend on the data")
def _output_constant(v: Values) -> Words:
    what = {"zero": "all zero", "empty": "empty on every sample", "": "the same on all samples, although these differ"}
    text = f"output {v.output!r} of the reference is {what[v.kind]}{_begins(v, ': {place} makes it so')}"
    return Words(f"{text}; its error is meaningless", "give data that make the output respond, or correct the export")


_BATCH_FIRST = "nothing where axis 0 is the sequence; where it is the batch, export with batch_first"


@REFERENCE.row("rows-mix", "error", "a row of a batch alone differs from the same row among different rows")
def _rows_mix(v: Values) -> Words:
    text = (
        f"a row's output depends on the other rows of its batch: output {v.output!r} differs by {v.relative_l2:.1e}"
        " (relative L2) in FP32"
    )
    if v.kind == "step":
        text += (
            f"; they first meet at {v.place}, which rounds each element to a step: one near its end may go to the next"
        )
        return Words(text, "nothing: kernels round differently at another batch size, and a step enlarges that", "info")
    if v.kind == "sequence":
        text += f"; {v.place} takes axis 0 for a sequence, so a row is a step of it and no sample of its own"
        return Words(text, _BATCH_FIRST, "warning")
    if v.kind == "index":
        text += (
            f"; {v.place} takes rows of axis 0 by indices that are fed, as along edges of a graph: a row may be a node"
        )
        cure = (
            "nothing where axis 0 holds the nodes of one graph; where it is the batch, an index reaches another sample"
        )
        return Words(text, cure, "warning")
    text, cure = (
        text + _begins(v, "; they first meet at {place}"),
        "a reshape, a mean or a broadcast over the batch axis",
    )
    if v.kind == "fixed":
        cure = f"nothing where axis 0 holds the parts of one sample; where it is a batch, look for {cure}"
        return Words(text, cure, "warning")
    return Words(text, f"look for {cure}; or tune and deploy with --batch 1")


@REFERENCE.row("batch-not-kept", "error", "an output does not have as many rows as the input")
def _batch_not_kept(v: Values) -> Words:
    if v.kind == "fails":
        text = f"the model's first dimension is dynamic, but it fails with a batch of {v.rows} ({v.failure})"
        return Words(text, f"fix it at {v.rows_that_run}", "warning")
    text = f"output {v.output!r} has the shape {v.shape} for {v.rows} rows, declared {v.declared}"
    if v.kind == "sequence":
        return Words(f"{text}; {v.place} takes axis 0 for a sequence", _BATCH_FIRST, "warning")
    cure = "export it with a dynamic batch (a Reshape with -1 or 0 for the batch), or with a batch fixed at 1"
    return Words(text + _begins(v, ": {place} fixes it"), cure)


@REFERENCE.row("broadcast", "info", "a broadcast at a static batch of 1 that TensorRT has been seen to get wrong")
def _broadcast(v: Values) -> Words:
    text = (
        f"{v.operator} stretches {v.operands}, all computed, to {v.result}: with a batch fixed at 1, TensorRT has been"
    )
    return Words(f"{text} seen to get this wrong", "put an Expand before it, or export with a dynamic batch")


@REFERENCE.row("value-dependent-shape", "info", "an operator whose output shape depends on values, such as NonZero")
def _value_dependent_shape(v: Values) -> Words:
    if v.kind == "unmatched":
        text = f"the all-FP32 engine and the reference differ in {counted(v.rows, 'row')} that only one of them has"
        return Words(f"{text}: rows at a threshold come and go with FP32 rounding already")
    if v.kind == "inside":
        return Words(f"{v.operators}: a shape inside the model depends on values, that of no output does")
    return Words(
        f"values decide how many rows {v.names} have ({v.operators}): rows are compared as sets, the nearest of one"
        " class, and a row that only one side has counts as an error",
        "where rows at the threshold do not matter, judge by your own --metric script.py:function",
    )


@REFERENCE.row("rows-selected", "info", "rows of an output come from TopK: they are compared by value, not by position")
def _rows_selected(v: Values) -> Words:
    limit = (
        'limit their share: --limit "foreign_rows<=0.02" in search, --tolerance foreign_rows=0.02 in compare and check'
    )
    if v.kind == "foreign":
        text = f"{v.side}: {v.share:.1%} of the rows of {v.names} have no partner among the reference's: TopK selected"
        return Words(f"{text} other candidates, and the error leaves these rows out", limit, "warning")
    text = f"{v.operators} selects the rows of {v.names}: rows are paired by value before they are compared, and those"
    return Words(f"{text} of another candidate are left out of the error and counted apart (foreign_rows)", limit)


@REFERENCE.row("state-fed-back", "info", "an output that pairs with an input: the error of one step says little")
def _state_fed_back(v: Values) -> Words:
    return Words(
        f"{counted(v.pairs, 'output')} paired with inputs by name or recurrence ({v.shown}): errors add up from step to"
        " step, and the error of one step says little about many",
        f"search over recorded sequences: `mptune search MODEL --data PATH {v.options} --steps K`; or give samples from"
        " early and late steps, each with the state that the steps before it gave",
    )


@REFERENCE.row("overridable-constants", "warning", "constants are also inputs of the model")
def _overridable_constants(v: Values) -> Words:
    return Words(
        f"{counted(v.constants, 'constant')} ({v.names}) may be given as inputs, too: runtimes neither fold nor"
        " fuse them, and where a plan reads them in FP16 each run casts them",
        "take them from the graph's inputs, or export anew (torch.onnx.export with keep_initializers_as_inputs=False)",
    )


@REFERENCE.row(OPSET_RAISED, "info", "the operator set is older than mptune supports, and was raised")
def _opset_raised(v: Values) -> Words:
    text = f"raised from opset {v.opset} to {v.raised_to} by ONNX's converter: before, some operators have no FP16"
    return Words(text, "to have another, export it again (17 to 21 are served best), or give --opset")


@REFERENCE.row(WRONG_SHAPE, "warning", "the file declares a shape of an output that the nodes do not give")
def _wrong_output_shape(v: Values) -> Words:
    text = f"the file declares another shape: inferred is {v.shape}, which written models declare"
    return Words(text, "declare it so, or without a shape, if another runtime refuses the model")


@REFERENCE.row("one-size-tried", "info", "spatial axes are dynamic, and all samples have one size")
def _one_size_tried(v: Values) -> Words:
    return Words(
        f"the model takes several sizes, and all samples are of one ({v.size}): the error at another size is not known",
        "check the chosen model on samples of each further size that it is deployed with: `mptune check"
        " RUN/chosen/model.onnx --against MODEL --data other.npz --max-error 1e-2`",
    )
