"""Every code has a case that shows it, and a sound twin: in a table of the zoo, or in a test (``LINES``).

The tables are ``SHOWN``, ``FURTHER``, ``GRAPHS``, ``PLANS``, the specimens of ``fp32``, and the recordings.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from mptune.finding import CODES
from tests.diagnosis.test_recordings import CASES
from tests.zoo.fp32 import specimens
from tests.zoo.graphs import FURTHER_GRAPHS, GRAPHS
from tests.zoo.numbers import SHOWN
from tests.zoo.numbers.further import FURTHER
from tests.zoo.plans import PLANS

TESTS = Path(__file__).resolve().parents[1]
_TWO = "diagnosis/test_two_models.py::"
_SAMPLES = "data/test_samples.py::"
_QUANTISED = "graph/test_quantised.py::"
_CONTRIB = "test_contrib.py::"
_MIXED = f"{_TWO}test_check_passes_a_mixed_model_within_its_limit_and_exits_with_3_beyond"
_PARTS = f"{_SAMPLES}test_parts_are_disjoint_not_empty_capped_and_repeatable"
_ONE_SIZE = f"{_SAMPLES}test_a_batch_fixed_axes_and_shapes_that_allow_one_size_leave_nothing_untried"
_PROFILE = (
    "targets/test_findings.py::test_the_profile_of_the_device_and_what_is_unknown_are_no_warning_a_floating_clock_is"
)
_DIVERGES = f"{_TWO}test_the_first_group_that_diverges_is_that_of_the_planted_difference"
_OTHER_NAMES = f"{_TWO}test_the_same_model_under_other_names_agrees"
_NO_MATTER = f"{_TWO}test_changed_constants_that_do_not_matter_are_no_difference"
_IN_AN_IF = "test_inspection.py::test_a_network_in_an_if_has_nothing_to_tune_and_that_is_said_first"

ON_A_DEVICE = {"no-fp16-kernel", "no-bf16-kernel", "engine-differs", "emulation-differs"}
"""Only an engine that a GPU runs shows these; what reads its answer is tested with answers that are recorded."""
LINES = [
    ("one-size-tried", f"{_SAMPLES}test_samples_of_one_size_leave_the_others_untried", _ONE_SIZE),
    ("random-data", "data/test_calibration.py::test_types_shapes_and_a_warning_that_stays", _PARTS),
    ("too-few-samples", f"{_SAMPLES}test_a_single_sample_or_sequence_is_both_parts_with_a_warning", _PARTS),
    (
        "quantised-parts",
        f"{_QUANTISED}test_the_finding_says_how_many_and_their_share",
        f"{_QUANTISED}test_weights_alone_dequantised_leave_a_product_free",
    ),
    (
        "operators-out-of-reach",
        f"{_CONTRIB}test_an_operator_that_nobody_knows_is_a_finding_with_its_share",
        f"{_CONTRIB}test_a_search_of_an_optimised_model_reaches_every_group",
    ),
    (
        "reference-depends-on-optimisation",
        f"{_CONTRIB}test_a_reference_that_depends_on_optimisation_is_a_finding",
        f"{_CONTRIB}test_rounding_alone_is_no_finding",
    ),
    ("target-not-here", "test_findings_table.py::test_a_target_that_is_not_here", _PROFILE),
    ("nothing-to-tune", _IN_AN_IF, _IN_AN_IF),
    ("attribute-differs", f"{_TWO}test_of_many_changed_constants_the_one_that_matters_is_named", _NO_MATTER),
    ("attribute-differs", _DIVERGES, _OTHER_NAMES),
    ("first-difference", _DIVERGES, _OTHER_NAMES),
    ("precision", _MIXED, _MIXED),
]
"""Situations of a test each: the code, and as ``PATH::TEST`` what shows it and what its twin."""


@cache
def _tests_of(path: str) -> frozenset[str]:
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize(("code", "case", "twin"), LINES)
def test_each_situation_has_a_test_that_shows_it_and_one_of_its_twin(code: str, case: str, twin: str) -> None:
    assert code in CODES
    for test in (case, twin):
        path, name = test.split("::")
        assert name in _tests_of(path), f"{test} is not there"


def test_no_code_is_without_a_case() -> None:
    paired = {**SHOWN, **FURTHER, **GRAPHS, **FURTHER_GRAPHS, **PLANS}
    shown = {name.split()[0].rstrip(",:") for name in paired}
    shown |= {code for _, _, code in CASES}  # the twin is a recording that is equal
    zoo = specimens()
    broken = {name for name, one in zoo.items() if one.code}
    shown |= {zoo[name].code for name in broken}
    assert {f"{name}_twin" for name in broken - set(OTHER_TWINS)} | set(OTHER_TWINS.values()) <= zoo.keys() - broken
    assert shown | {code for code, _, _ in LINES} | ON_A_DEVICE == set(CODES)


OTHER_TWINS = {"faint_noise": "noise_twin", "max_over_batch": "pooled_twin"}
"""Specimens of FP32 that share a twin with another."""
