"""Findings about the plan, its engine, and what of the model no plan changes."""

from __future__ import annotations

from collections.abc import Mapping

from mptune.findings.wording import CodeInfo, Wording, row

NOTHING = "nothing-to-tune"
"""The code of the finding that is shown before all others."""

GIVE_FP32 = "give the FP32 model that it was made from"

_KERNEL = "{fp32_provider} has no {precision} kernel for {operator}"
_ITS_GROUPS = "its {groups:/group is/# groups are} kept "


def _no_kernel(code_kept: str, meaning: str) -> CodeInfo:
    cure = _ITS_GROUPS + code_kept
    return CodeInfo(
        "info",
        meaning,
        {
            "elsewhere": Wording(
                _KERNEL + ": in {precision} {nodes:/# node runs/# nodes run} on {provider}, with copies between", cure
            ),
            "nowhere": Wording(_KERNEL + ": nor has another provider", cure),
            "stated": Wording("{reason}", cure),
        },
    )


_OUT_OF_REACH = (
    "{nodes:/# node keeps/# nodes keep} the precision of the model under any plan, [untyped_nodes?at least"
    " ]{flops_share:.0%} of the FLOPs: "
)

_OFF = "[held_out?on the held-out samples ]the all-FP32 engine is off by {shown} against the reference"

_NOT_MEASURED = "{target} is not measured here: latency is predicted and errors are emulated"
_CONFIRM = "`mptune confirm` measures both on the device"

_MIXED = (
    "{reduced} of {layers} {reduced:/layers is/layers are} {precisions} already, {flops_share:.0%} of the FLOPs, and "
)
_MIXED_REFERENCE = "the reference holds the rounding of these layers"

ENGINE: Mapping[str, CodeInfo] = {
    "column-hidden": row(
        "warning",
        "a column of an output moves far more than the whole tensor's error shows",
        "plan {plan}: {part} moves by {column_error:.1e} of its own standard deviation, at most by"
        " {max_abs:.2g}, while the relative L2 error of the whole output is {output_relative_l2:.1e}",
        "say how large it may be: `mptune pick {run} --tolerance '{part}=abs:X'`[, or search with --metric"
        " {better_metric}]",
    ),
    "near-zero": row(
        "info",
        "a large relative error with a tiny absolute one",
        "plan {plan}: {part} has an error of {column_error:.1e} of its own scale, and of {max_abs:.1e} at most"
        " as it is: its values lie near zero, where FP16 has few digits; nothing is wrong",
    ),
    "no-fp16-kernel": _no_kernel("in FP32", "the toolchain has no FP16 kernel for an operator"),
    "no-bf16-kernel": _no_kernel("out of BF16", "the toolchain has no BF16 kernel for an operator"),
    "quantised-parts": row(
        "warning",
        "quantised patterns of the model stay as they are",
        "[parts?{parts:/# quantised part/# quantised parts} ({nodes} nodes)][is_both? and ]"
        "[operators?{operators:/# operator/# operators} on integers]"
        " {together:/stays as the model has it/stay as the model has them}: {flops_share:.0%} of the FLOPs; "
        "[other_groups?of the other {other_groups} groups, those that are not pinned are searched]"
        "[is_whole?no other group is left]",
        "to search these parts, too, give the model from before its quantisation",
    ),
    "operators-out-of-reach": CodeInfo(
        "warning",
        "operators whose precision cannot be searched",
        {
            f"{kind}{own}": Wording(_OUT_OF_REACH + why, cure)
            for kind, why in {
                "unknown": "types are not known of {named}[ (ONNX Runtime: {failure})], nor of what is computed from"
                " it",
                "untyped": "types are not known behind {named}",
                "fixed": "{named}; {first!r}: {rule}",
            }.items()
            for own, cure in {
                "": "give the model from before the optimiser, as the framework exported it",
                " own": "write it as a local function of ONNX's own operators (onnx.helper.make_function), or export"
                " the model without it",
            }.items()
        },
    ),
    "engine-differs": CodeInfo(
        "error",
        "the all-FP32 engine differs from the reference beyond rounding",
        {
            "not finite": Wording(
                "[held_out?on the held-out samples ]the all-FP32 engine gives {non_finite} NaN or Inf where the"
                " reference has none",
                "the engine itself is wrong: try another --engine, or another version of it",
            ),
            "far": Wording(
                _OFF + " (limit {limit:.0e})",
                "look for TF32, missing synchronisation, a broken broadcast, or outputs that jump (TopK, NMS, ArgMax);"
                " try another --engine",
            ),
            "near": Wording(_OFF + ": that much is not FP16's doing", "look for TF32 in the engine", "warning"),
        },
    ),
    "reference-depends-on-optimisation": row(
        "warning",
        "ONNX Runtime with optimisations on and off differs",
        "with and without graph optimisations, ONNX Runtime's FP32 results differ by {relative_l2:.1e}"
        " (relative L2, rounding is below {limit:.0e}) at output {output!r}[others? ({others} other outputs"
        " too)]: every error is taken against the optimised results",
        "see which result is right (SessionOptions.graph_optimization_level); of a quantised model, give the"
        " one from before its quantisation",
    ),
    "target-not-here": CodeInfo(
        "info",
        "the target is not here, so latency is predicted",
        {
            "": Wording(_NOT_MEASURED, _CONFIRM),
            "beside TF32": Wording(
                _NOT_MEASURED + "; all-FP32 is true FP32, {fp32_ms:.3g} ms: in TF32, TensorRT's own default, the model"
                " would take {tf32_ms:.3g} ms, so against that speedups are {ratio:.2f} times smaller[tf32?; mixed"
                " plans are predicted with TF32 in their FP32 groups, and emulated errors leave out what it rounds]",
                _CONFIRM,
            ),
        },
    ),
    "emulation-differs": CodeInfo(
        "warning",
        "measured and emulated errors disagree",
        {
            "": Wording(
                "plan {plan}: the error is {measured:.2e} as measured and {emulated:.2e} as emulated, apart by more"
                " than a factor of {factor:g}",
                "rely on the measured error: emulation does not give what this engine computes",
            ),
            "recurrent": Wording(
                "the errors of {operators} are not emulated here: those of three LSTM layers, measured on an H200, were"
                " {low:g} to {high:g} times as large",
                "run `mptune confirm` on the device before you rely on a plan that has them in FP16",
            ),
        },
    ),
    "already-mixed": CodeInfo(
        "warning",
        "the model holds FP16 already",
        {
            "": Wording(
                _MIXED
                + "no plan changes that: only the other {other_groups} groups are searched, and "
                + _MIXED_REFERENCE,
                GIVE_FP32,
            ),
            "compared": Wording(_MIXED + _MIXED_REFERENCE, GIVE_FP32),
        },
    ),
    NOTHING: CodeInfo(
        "warning",
        "no layer has a precision that can be chosen",
        {
            "subgraphs": Wording(
                "the network lies in {operators} nodes; nothing to tune[free_groups? but"
                " {free_groups:/# group/# groups} outside them]"
            ),
            "quantised": Wording("the network is quantised already; nothing to tune"),
            "": Wording("no layer group can have another precision; nothing to tune"),
        },
    ),
}
