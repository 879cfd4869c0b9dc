"""The situations that tests show, and those that only an engine on a GPU shows.

All others are cases of a table, named by their code and what is particular about them, each with its sound twin:
``SHOWN``, ``FURTHER``, ``GRAPHS``, ``PLANS``, the specimens of ``fp32``, and the recordings.
"""

from __future__ import annotations

from typing import NamedTuple

_TWO = "diagnosis/test_two_models.py::"
_CAUSES = "diagnosis/test_named_causes.py::"
_SAMPLES = "data/test_samples.py::"
_QUANTISED = "graph/test_quantised.py::"
_REACH = "test_out_of_reach.py::"
_OPTIMISATION = "test_reference_optimisation.py::"
_MIXED = f"{_TWO}test_check_passes_a_mixed_model_within_its_limit_and_exits_with_3_beyond"
_PARTS = f"{_SAMPLES}test_parts_are_disjoint_not_empty_capped_and_repeatable"
_IN_AN_IF = "test_inspection.py::test_a_network_in_an_if_has_nothing_to_tune_and_that_is_said_first"

ON_A_DEVICE = {"no-fp16-kernel", "no-bf16-kernel", "engine-differs", "emulation-differs"}
"""Only an engine that a GPU runs shows these; what reads its answer is tested with answers that are recorded."""


class Line(NamedTuple):
    """One situation: its code, and as ``PATH::TEST`` what shows it and what its twin."""

    code: str
    case: str
    twin: str


LINES = [
    Line(
        "one-size-tried",
        f"{_SAMPLES}test_samples_of_one_size_leave_the_others_untried",
        f"{_SAMPLES}test_a_batch_fixed_axes_and_shapes_that_allow_one_size_leave_nothing_untried",
    ),
    Line("random-data", "data/test_calibration.py::test_types_shapes_and_a_warning_that_stays", _PARTS),
    Line("too-few-samples", f"{_SAMPLES}test_a_single_sample_or_sequence_is_both_parts_with_a_warning", _PARTS),
    Line(
        "quantised-parts",
        f"{_QUANTISED}test_the_finding_says_how_many_and_their_share",
        f"{_QUANTISED}test_weights_alone_dequantised_leave_a_product_free",
    ),
    Line(
        "operators-out-of-reach",
        f"{_REACH}test_an_operator_that_nobody_knows_is_a_finding_with_its_share",
        f"{_REACH}test_what_the_optimiser_writes_at_its_extended_level_is_no_finding",
    ),
    Line(
        "reference-depends-on-optimisation",
        f"{_OPTIMISATION}test_a_reference_that_depends_on_optimisation_is_a_finding",
        f"{_OPTIMISATION}test_rounding_alone_is_no_finding",
    ),
    Line(
        "target-not-here",
        "test_findings.py::test_a_target_that_is_not_here",
        "targets/test_findings.py::test_the_profile_of_the_device_and_what_is_unknown_are_no_warning_a_floating_clock_is",
    ),
    Line("nothing-to-tune", _IN_AN_IF, _IN_AN_IF),
    *(
        Line(
            code,
            f"{_TWO}test_the_first_group_that_diverges_is_that_of_the_planted_difference",
            f"{_TWO}test_the_same_model_under_other_names_agrees",
        )
        for code in ("attribute-differs", "first-difference")
    ),
    Line(
        "attribute-differs",
        f"{_CAUSES}test_of_many_changed_constants_the_one_that_matters_is_named",
        f"{_CAUSES}test_changed_constants_that_do_not_matter_are_no_difference",
    ),
    Line("precision", _MIXED, _MIXED),
]
