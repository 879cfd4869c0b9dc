"""Each situation that the list of findings describes -> the case that shows it, with its sound twin.

A case is named by its table (``numbers``, which is ``SHOWN`` and ``FURTHER``, ``graphs``, ``fp32``, ``plans`` or
``recordings``), or by its tests, ``PATH::TEST`` for what shows it and for the twin. ``device`` stands for what only an
engine on a GPU shows.
"""

from __future__ import annotations

from typing import NamedTuple

_TWO = "diagnosis/test_two_models.py::"
_PLANTED = f"{_TWO}test_the_first_group_that_diverges_is_that_of_the_planted_difference"
_SAME = f"{_TWO}test_the_same_model_under_other_names_agrees"
_MIXED = f"{_TWO}test_check_passes_a_mixed_model_within_its_limit_and_exits_with_3_beyond"
_CAUSES = "diagnosis/test_named_causes.py::"
_NAMED = f"{_CAUSES}test_of_many_changed_constants_the_one_that_matters_is_named"
_HARMLESS = f"{_CAUSES}test_changed_constants_that_do_not_matter_are_no_difference"
_SAMPLES = "data/test_samples.py::"
_QUANTISED = "graph/grouping/test_quantised.py::"
_REACH = "test_out_of_reach.py::"
_OPTIMISATION = "test_reference_optimisation.py::"


class Line(NamedTuple):
    """One situation."""

    code: str
    situation: str
    table: str
    case: str
    twin: str = ""


LINES = [
    Line("overflow", "a value beyond 65504 seen on data", "numbers", "overflow"),
    Line("overflow", "a constant beyond 65504", "numbers", "overflow of a constant"),
    Line("vanishing-epsilon", "rounds to 0, 0/0", "numbers", "vanishing-epsilon"),
    Line("vanishing-epsilon", "rounds to 0, x/0", "numbers", "vanishing-epsilon, one over zero"),
    Line("vanishing-epsilon", "below the smallest normal", "numbers", "vanishing-epsilon below the normal numbers"),
    Line("vanishing-epsilon", "in a norm", "numbers", "vanishing-epsilon of a written-out InstanceNorm"),
    Line("vanishing-values", "a value that is zero in FP16", "numbers", "vanishing-values"),
    Line("cancellation", "to zero, before a Log", "numbers", "cancellation before a Log"),
    Line("spacing", "before a softmax", "numbers", "spacing"),
    Line("spacing", "before an argmax", "numbers", "spacing before ArgMax"),
    Line("spacing", "before a comparison", "numbers", "spacing before a comparison"),
    Line("stagnation", "positions", "numbers", "stagnation"),
    Line("stagnation", "accumulated flow", "numbers", "stagnation of accumulated flow"),
    Line("stagnation", "a running state", "numbers", "stagnation of a running sum"),
    Line("cancellation", "a Sub (spacing before a subtraction is this)", "numbers", "cancellation"),
    Line("cancellation", "an Add", "numbers", "cancellation in an Add"),
    Line("long-sum", "a pooling of one sign", "numbers", "long-sum"),
    Line("long-sum", "a reduction of one sign", "numbers", "long-sum in a ReduceSum"),
    Line("index-in-float", "an index", "numbers", "index-in-float"),
    Line("index-in-float", "a size: never FP16", "numbers", "index-in-float: what becomes a size is never FP16"),
    Line("mask", "-1e9, multiplied", "numbers", "mask"),
    Line("mask", "-3.4e38, multiplied; added is harmless", "numbers", "mask of the lowest FP32 number, multiplied"),
    Line("mask", "-1e9, a fully masked row", "numbers", "mask of -1e9 over a whole row"),
    Line("mask", "-3.4e38, a fully masked row", "numbers", "mask of the lowest FP32 number over a whole row"),
    Line("mask", "-inf, a fully masked row: not finite in FP32 already", "fp32", "masked"),
    Line("norm-written-out", "LayerNorm; no energy of an image", "numbers", "norm-written-out"),
    Line("norm-written-out", "RMSNorm; no length", "numbers", "norm-written-out: RMSNorm"),
    Line("norm-written-out", "InstanceNorm", "numbers", "norm-written-out: RMSNorm and no InstanceNorm"),
    Line("int64-range", "means something; no end behind Unsqueeze", "numbers", "int64-range"),
    Line("int64-range", "compared; no end behind Concat", "numbers", "int64-range in a comparison"),
    Line("reference-not-finite", "the first node, overflow of Exp", "fp32", "exp"),
    Line("reference-not-finite", "the first node, a fully masked row", "fp32", "masked"),
    Line("not-deterministic", "draws random numbers", "fp32", "noise"),
    Line("not-deterministic", "draws a little", "fp32", "faint_noise", "noise_twin"),
    Line("not-deterministic", "Dropout in training mode", "fp32", "dropout"),
    Line("not-deterministic", "BatchNormalization in training mode", "fp32", "batch_norm"),
    Line("reference-zero", "an output that is zero", "fp32", "dead"),
    Line("output-constant", "an output that does not depend on the data", "fp32", "stuck"),
    Line("rows-mix", "centred over the batch", "fp32", "centred"),
    Line("rows-mix", "a fixed batch", "fp32", "centred_fixed"),
    Line("rows-mix", "a running sum over the batch", "fp32", "running"),
    Line("rows-mix", "attention over the batch", "fp32", "attention"),
    Line("batch-not-kept", "a Reshape", "fp32", "pooled"),
    Line("batch-not-kept", "no batch in an If beside that of a state", "fp32", "pooled", "voice_twin"),
    Line("batch-not-kept", "another node", "fp32", "max_over_batch", "pooled_twin"),
    Line("broadcast", "an image against a one-channel plane", "graphs", "broadcast"),
    Line("broadcast", "stretched over more than one axis", "graphs", "broadcast over more than one axis"),
    Line("broadcast", "both stretched", "graphs", "broadcast of both operands"),
    Line("broadcast", "no gate", "graphs", "broadcast: a gate is none"),
    Line("broadcast", "no bias", "graphs", "broadcast: a bias is none"),
    Line("broadcast", "no scale", "graphs", "broadcast: a scale is none"),
    Line("value-dependent-shape", "Compress", "graphs", "value-dependent-shape"),
    Line("value-dependent-shape", "NMS", "graphs", "value-dependent-shape of NMS"),
    Line("value-dependent-shape", "NonZero", "graphs", "value-dependent-shape of NonZero"),
    Line("state-fed-back", "name and shape pair", "graphs", "state-fed-back"),
    Line(
        "one-size-tried",
        "",
        "tests",
        f"{_SAMPLES}test_samples_of_one_size_leave_the_others_untried",
        f"{_SAMPLES}test_a_batch_fixed_axes_and_shapes_that_allow_one_size_leave_nothing_untried",
    ),
    Line(
        "random-data",
        "no samples given",
        "tests",
        "data/test_calibration.py::test_types_shapes_and_a_warning_that_stays",
        f"{_SAMPLES}test_parts_are_disjoint_not_empty_capped_and_repeatable",
    ),
    Line("constant-data", "the same value everywhere", "numbers", "constant-data"),
    Line("constant-data", "no state fed back", "numbers", "constant-data: a state that is fed back is none"),
    Line("constant-data", "no recurrent state", "numbers", "constant-data: a recurrent state is none"),
    Line("duplicate-samples", "samples that repeat", "numbers", "duplicate-samples"),
    Line(
        "too-few-samples",
        "one sample",
        "tests",
        f"{_SAMPLES}test_a_single_sample_or_sequence_is_both_parts_with_a_warning",
        f"{_SAMPLES}test_parts_are_disjoint_not_empty_capped_and_repeatable",
    ),
    Line("data-do-not-fit", "0..255 for 0..1", "numbers", "data-do-not-fit"),
    Line(
        "data-do-not-fit",
        "a uint8 input",
        "numbers",
        "data-do-not-fit: bytes that nothing divides",
    ),
    Line("one-sample-decides", "by its index", "plans", "one-sample-decides"),
    Line("held-out-differs", "held-out error far above", "plans", "held-out-differs"),
    Line("column-hidden", "a column", "plans", "column-hidden"),
    Line("column-hidden", "a channel of [N, C, H, W]", "plans", "column-hidden in a channel"),
    Line("near-zero", "values near zero", "plans", "near-zero"),
    Line("no-fp16-kernel", "", "device", ""),
    Line("no-bf16-kernel", "", "device", ""),
    Line(
        "quantised-parts",
        "how many and their share",
        "tests",
        f"{_QUANTISED}test_the_finding_says_how_many_and_their_share",
        f"{_QUANTISED}test_weights_alone_dequantised_leave_a_product_free",
    ),
    Line(
        "operators-out-of-reach",
        "their share of the FLOPs",
        "tests",
        f"{_REACH}test_an_operator_that_nobody_knows_is_a_finding_with_its_share",
        f"{_REACH}test_what_the_optimiser_writes_at_its_extended_level_is_no_finding",
    ),
    Line("engine-differs", "", "device", ""),
    Line(
        "reference-depends-on-optimisation",
        "on and off differ",
        "tests",
        f"{_OPTIMISATION}test_a_reference_that_depends_on_optimisation_is_a_finding",
        f"{_OPTIMISATION}test_rounding_alone_is_no_finding",
    ),
    Line(
        "target-not-here",
        "latency is predicted",
        "tests",
        "test_findings.py::test_a_target_that_is_not_here",
        "targets/test_findings.py::test_the_profile_of_the_device_and_what_is_unknown_are_no_warning_a_floating_clock_is",
    ),
    Line("emulation-differs", "", "device", ""),
    Line("already-mixed", "a layer in FP16; no FP16 weights alone", "graphs", "already-mixed"),
    Line(
        "nothing-to-tune",
        "all layers in an If; not flat",
        "tests",
        "test_inspection.py::test_a_network_in_an_if_has_nothing_to_tune_and_that_is_said_first",
        "test_inspection.py::test_a_network_in_an_if_has_nothing_to_tune_and_that_is_said_first",
    ),
    Line("agrees", "equal", "recordings", "equal"),
    Line("agrees", "FP16 rounding", "recordings", "fp16"),
    Line("stale-rows", "rows of the run before", "recordings", "stale"),
    Line("stale-rows", "with FP16 rounding", "recordings", "stale fp16"),
    Line("torn-rows", "part this and part the previous result", "recordings", "torn"),
    Line("not-computed", "zero everywhere", "recordings", "zero"),
    Line("not-computed", "equal rows", "recordings", "one buffer"),
    Line("tf32-reference", "in the reference", "recordings", "tf32 reference"),
    Line("tf32-candidate", "rounded to nearest", "recordings", "tf32"),
    Line("tf32-candidate", "cut off", "recordings", "cut"),
    Line("outputs-permuted", "columns", "recordings", "columns"),
    Line("outputs-permuted", "rows", "recordings", "rows"),
    Line("outputs-permuted", "outputs", "recordings", "outputs"),
    *(
        Line(code, situation, "tests", _PLANTED, _SAME)
        for code, situation in (
            ("attribute-differs", "eps, axis, resize mode"),
            ("attribute-differs", "a constant"),
            ("attribute-differs", "structure: a Cast"),
            ("first-difference", "its predecessors still inside"),
        )
    ),
    Line("attribute-differs", "a constant, among many without effect", "tests", _NAMED, _HARMLESS),
    Line("precision", "the groups that make it, and the plan that removes it", "tests", _MIXED, _MIXED),
]
