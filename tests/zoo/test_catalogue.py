"""Every code has a case that shows it, and most a sound twin: in a table of the zoo, or in a test (``ELSEWHERE``)."""

from __future__ import annotations

from pathlib import Path

from mptune.finding import CODES
from tests.diagnosis.test_recordings import CASES
from tests.zoo.fp32 import specimens
from tests.zoo.graphs import FURTHER_GRAPHS, GRAPHS
from tests.zoo.numbers import SHOWN
from tests.zoo.numbers.further import FURTHER
from tests.zoo.plans import PLANS

TESTS = Path(__file__).resolve().parents[1]
ON_A_DEVICE = {"no-fp16-kernel", "no-bf16-kernel", "engine-differs", "emulation-differs"}
"""Only an engine that a GPU runs shows these; what reads its answer is tested with answers that are recorded."""
ELSEWHERE = {
    "rows-selected": "test_what_topk_selects_is_compared_by_value",
    "one-size-tried": "test_samples_of_one_size_leave_the_others_untried",
    "random-data": "test_types_shapes_and_a_warning_that_stays",
    "too-few-samples": "test_a_single_sample_or_sequence_is_both_parts_with_a_warning",
    "quantised-parts": "test_the_finding_says_how_many_and_their_share",
    "operators-out-of-reach": "test_an_operator_that_nobody_knows_is_a_finding_with_its_share",
    "reference-depends-on-optimisation": "test_a_reference_that_depends_on_optimisation_is_a_finding",
    "target-not-here": "test_a_target_that_is_not_here",
    "nothing-to-tune": "test_a_network_in_an_if_has_nothing_to_tune_and_that_is_said_first",
    "attribute-differs": "test_the_first_group_that_diverges_is_that_of_the_planted_difference",
    "first-difference": "test_the_first_group_that_diverges_is_that_of_the_planted_difference",
    "precision": "test_check_passes_a_mixed_model_within_its_limit_and_exits_with_3_beyond",
}
"""Code -> the test that shows it."""


def test_no_code_is_without_a_case() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    assert [name for name in ELSEWHERE.values() if f"def {name}(" not in tests] == []
    paired = {**SHOWN, **FURTHER, **GRAPHS, **FURTHER_GRAPHS, **PLANS}
    shown = {name.split()[0].rstrip(",:") for name in paired}
    shown |= {code for _, _, code in CASES}  # the twin is a recording that is equal
    shown |= {specimen.code for specimen in specimens().values() if specimen.code}
    assert shown | ELSEWHERE.keys() | ON_A_DEVICE == set(CODES)
