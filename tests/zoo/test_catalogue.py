"""Every code of a finding has a model or data set that shows it, and a sound twin: the table of both.

The zoo's own tables say what shows a code; for what is shown elsewhere ``ELSEWHERE`` names the two tests.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from mptune.finding import CODES
from tests.diagnosis.test_recordings import CASES
from tests.zoo.fp32 import specimens
from tests.zoo.graphs import GRAPHS
from tests.zoo.numbers import SHOWN
from tests.zoo.plans import PLANS

TESTS = Path(__file__).resolve().parents[1]

ON_A_DEVICE = {"no-fp16-kernel", "no-bf16-kernel", "engine-differs", "emulation-differs"}
"""Only an engine that a GPU runs shows these; what reads its answer is tested with answers that are recorded."""

_TWO_MODELS = "diagnosis/test_two_models.py::"
_FIRST = f"{_TWO_MODELS}test_the_first_group_that_diverges_is_that_of_the_planted_difference"
_RENAMED = f"{_TWO_MODELS}test_the_same_model_under_other_names_agrees"
_CHECK = f"{_TWO_MODELS}test_check_passes_a_mixed_model_within_its_limit_and_exits_with_3_beyond"

ELSEWHERE: dict[str, tuple[str, str]] = {
    "too-few-samples": (
        "data/test_calibration.py::test_a_single_sample_is_both_with_a_warning",
        "data/test_calibration.py::test_two_samples_are_enough_to_hold_one_out",
    ),
    "size-dependent": (
        "diagnosis/test_sweeps.py::test_an_error_that_grows_with_the_size_is_named",
        "diagnosis/test_sweeps.py::test_a_sound_twin_is_silent",
    ),
    "quantised-parts": (
        "graph/grouping/test_quantised.py::test_the_finding_says_how_many_and_their_share",
        "graph/grouping/test_quantised.py::test_weights_alone_dequantised_leave_a_product_free",
    ),
    "operators-out-of-reach": (
        "test_out_of_reach.py::test_an_operator_that_nobody_knows_is_a_finding_with_its_share",
        "test_out_of_reach.py::test_what_the_optimiser_writes_at_its_extended_level_is_no_finding",
    ),
    "reference-depends-on-optimisation": (
        "test_reference_optimisation.py::test_a_reference_that_depends_on_optimisation_is_a_finding",
        "test_reference_optimisation.py::test_rounding_alone_is_no_finding",
    ),
    "target-not-here": (
        "test_findings.py::test_a_target_that_is_not_here",
        "targets/test_mismatch.py::test_the_profile_of_the_device_is_no_warning",
    ),
    "attribute-differs": (_FIRST, _RENAMED),
    "first-difference": (_FIRST, _RENAMED),
    "precision": (_CHECK, _CHECK),
}
"""Code -> the test that shows it, and that of its sound twin."""


def _shown() -> dict[str, int]:
    """Code -> how many models or data sets of the zoo show it and have a sound twin."""
    fp32 = specimens()
    twins = {name.removesuffix("_twin") for name, one in fp32.items() if name.endswith("_twin") and not one.code}
    broken = [one.code for name, one in fp32.items() if one.code and name in twins]
    recorded = [code for _, fault, code in CASES if fault != "equal"]  # the twin is a recording that is equal
    codes = [*broken, *(name.split()[0] for name in SHOWN), *PLANS, *GRAPHS, *recorded]
    return {code: codes.count(code) for code in codes}


@cache
def _tests_of(path: str) -> dict[str, str]:
    """The tests of a file, with their source."""
    text = (TESTS / path).read_text(encoding="utf-8")
    nodes = ast.walk(ast.parse(text))
    return {n.name: ast.get_source_segment(text, n) or "" for n in nodes if isinstance(n, ast.FunctionDef)}


@pytest.mark.parametrize("code", CODES)
def test_each_code_has_a_case_and_a_sound_twin(code: str) -> None:
    places = [code in _shown(), code in ELSEWHERE, code in ON_A_DEVICE]
    assert any(places), f"nothing shows {code}: give it a model or data set, and a sound twin"
    assert sum(places) == 1, "in one place only"
    if code in ELSEWHERE:
        for test in ELSEWHERE[code]:
            path, name = test.split("::")
            assert name in _tests_of(path), f"{test} is not there"


def test_the_tables_name_codes_alone() -> None:
    assert {*_shown(), *ELSEWHERE, *ON_A_DEVICE} <= set(CODES)
