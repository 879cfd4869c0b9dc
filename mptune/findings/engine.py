"""Findings about the plan, its engine, and what of the model no plan changes."""

from __future__ import annotations

from mptune.findings.reference import OPSET_RAISED, WRONG_SHAPE
from mptune.findings.wording import Table, Values, Words, counted

ENGINE = Table()
NOTHING = "nothing-to-tune"  # the code of the finding that is shown before all others
TARGET_CODE = "target-not-here"
ALREADY_MIXED = "already-mixed"
TOLD_FIRST = (TARGET_CODE, ALREADY_MIXED, OPSET_RAISED, WRONG_SHAPE)
"""What a search says before its first plan, since no plan changes it."""
GIVE_FP32 = "give the FP32 model that it was made from"


@ENGINE.row("column-hidden", "warning", "a column of an output moves far more than the whole tensor's error shows")
def _column_hidden(v: Values) -> Words:
    text = f"plan {v.plan}: {v.part} moves by {v.column_error:.1e} of its own standard deviation, at most by"
    metric = f", or search with --metric {v.better_metric}" if v.better_metric else ""
    return Words(
        f"{text} {v.max_abs:.2g}, while the relative L2 error of the whole output is {v.output_relative_l2:.1e}",
        f"limit it: `mptune pick {v.run} --tolerance '{v.part}=abs:X'`{metric}",
    )


@ENGINE.row("near-zero", "info", "a large relative error with a tiny absolute one")
def _near_zero(v: Values) -> Words:
    text = (
        f"plan {v.plan}: {v.part} has an error of {v.column_error:.1e} of its own scale, and of {v.max_abs:.1e} at most"
    )
    return Words(f"{text} as it is: its values lie near zero, where FP16 has few digits; nothing is wrong")


@ENGINE.row("no-bf16-kernel", "info", "the toolchain has no BF16 kernel for an operator")
@ENGINE.row("no-fp16-kernel", "info", "the toolchain has no FP16 kernel for an operator")
def _no_kernel(v: Values) -> Words:
    text = v.reason or f"{v.fp32_provider} has no {v.precision} kernel for {v.operator}"
    if v.provider and not v.reason:
        text += f": {counted(v.nodes, 'node')} would run on {v.provider}, with copies between"
    place = "in FP32" if v.precision == "FP16" else f"out of {v.precision}"
    return Words(text, f"{counted(v.groups, 'group')} kept {place}")


@ENGINE.row("quantised-parts", "warning", "quantised patterns of the model stay as they are")
def _quantised_parts(v: Values) -> Words:
    parts = f"{counted(v.parts, 'quantised part')} ({v.nodes} nodes)" if v.parts else ""
    operators = f"{counted(v.operators, 'operator')} on integers" if v.operators else ""
    rest = f"the other {v.other_groups} groups, those that are not pinned, are searched"
    return Words(
        f"what the model has quantised, {' and '.join(filter(None, (parts, operators)))}, stays as it is:"
        f" {v.flops_share:.0%} of the FLOPs; {rest if v.other_groups else 'no other group is left'}",
        "to search these parts, too, give the model from before its quantisation",
    )


@ENGINE.row("operators-out-of-reach", "warning", "operators whose precision cannot be searched")
def _operators_out_of_reach(v: Values) -> Words:
    least, failure = "at least " * bool(v.untyped_nodes), f" (ONNX Runtime: {v.failure})" if v.failure else ""
    why = f"{v.named}; {v.first!r}: {v.rule}" if v.kind.startswith("fixed") else f"types are not known behind {v.named}"
    text = f"no plan changes the precision of {counted(v.nodes, 'node')}, {least}{v.flops_share:.0%} of the FLOPs"
    cure = "give the model from before the optimiser, as the framework exported it"
    if v.kind.endswith("own"):
        cure = "write it as a local function (onnx.helper.make_function), or export the model without it"
    return Words(f"{text}: {why}{failure}", cure)


@ENGINE.row("engine-differs", "error", "the all-FP32 engine differs from the reference beyond rounding")
def _engine_differs(v: Values) -> Words:
    where = "on the held-out samples " if v.held_out else ""
    if v.kind == "not finite":
        text = f"{where}the all-FP32 engine gives {v.non_finite} NaN or Inf where the reference has none"
        return Words(text, "the engine itself is wrong: try another --engine, or another version of it")
    text = f"{where}the all-FP32 engine is off by {v.shown} against the reference (limit {v.limit:.0e})"
    if v.kind == "near":
        return Words(f"{text}: FP16 is not the cause", "look for TF32 in the engine", "warning")
    cure = "look for TF32, missing synchronisation, a broken broadcast, or outputs that jump (TopK, NMS, ArgMax)"
    return Words(text, f"{cure}; try another --engine")


@ENGINE.row("reference-depends-on-optimisation", "warning", "ONNX Runtime with optimisations on and off differs")
def _reference_depends_on_optimisation(v: Values) -> Words:
    others = f" ({v.others} other outputs too)" if v.others else ""
    return Words(
        f"with and without graph optimisations, ONNX Runtime's FP32 results differ by {v.relative_l2:.1e} (relative L2,"
        f" limit {v.limit:.0e}) at output {v.output!r}{others}: errors are taken against the optimised results",
        "find out which result is right (SessionOptions.graph_optimization_level); instead of a quantised model, give"
        " the FP32 one",
    )


@ENGINE.row(TARGET_CODE, "info", "the target is not here, so latency is predicted")
def _target_not_here(v: Values) -> Words:
    text = f"{v.target} is not measured here: latency is predicted and errors are emulated"
    if v.get("tf32_ms"):
        text += f"; all-FP32 is true FP32, {v.fp32_ms:.3g} ms: in TF32, TensorRT's own default, the model would take"
        text += f" {v.tf32_ms:.3g} ms, so against that speedups are {v.ratio:.2f} times smaller"
        mixed = "; mixed plans are predicted with TF32 in their FP32 groups; emulated errors leave out what it rounds"
        text += mixed * v.tf32
    return Words(text, "`mptune confirm` measures both on the device")


@ENGINE.row("emulation-differs", "warning", "measured and emulated errors disagree")
def _emulation_differs(v: Values) -> Words:
    if v.kind == "recurrent":
        text = (
            f"the errors of {v.operators} are not emulated here: those of three LSTM layers, measured on an H200, were"
        )
        cure = "run `mptune confirm` on the device before you rely on a plan that has them in FP16"
        return Words(f"{text} {v.low:g} to {v.high:g} times as large", cure)
    text = f"plan {v.plan}: the error is {v.measured:.2e} as measured and {v.emulated:.2e} as emulated"
    cure = "rely on the measured error: emulation does not give what this engine computes"
    return Words(f"{text}, apart by more than a factor of {v.factor:g}", cure)


@ENGINE.row(ALREADY_MIXED, "warning", "the model contains FP16 already")
def _already_mixed(v: Values) -> Words:
    share = f"{v.reduced} of {counted(v.layers, 'layer')} are {v.precisions} already, {v.flops_share:.0%} of the FLOPs"
    rest = f"no plan changes that: only the other {v.other_groups} groups are searched, and " * (v.kind != "compared")
    return Words(f"{share}, and {rest}the reference includes the rounding of these layers", GIVE_FP32)


@ENGINE.row(NOTHING, "warning", "no layer has a precision that can be chosen")
def _nothing_to_tune(v: Values) -> Words:
    if v.kind == "subgraphs":
        but = f" but {counted(v.free_groups, 'group')} outside them" if v.free_groups else ""
        return Words(f"the network lies in {v.operators} nodes; nothing to tune{but}")
    what = "the network is quantised already" if v.kind == "quantised" else "no layer group can have another precision"
    return Words(f"{what}; nothing to tune")
