from __future__ import annotations

import json

import pytest
from hypothesis import given, strategies as st

from mptune.errors import PlanError
from mptune.graph.plan import PRECISIONS, Precision, PrecisionPlan

precisions = st.dictionaries(
    st.text(min_size=1, max_size=8), st.sampled_from(tuple(PRECISIONS)), min_size=1, max_size=12
)


@given(precisions)
def test_survives_json(precision: dict[str, Precision]) -> None:
    plan = PrecisionPlan("abc", precision)
    again = PrecisionPlan.from_json(json.dumps(plan.to_json()))
    assert again == plan
    assert again.fingerprint == plan.fingerprint
    assert {*plan.fp16_groups, *plan.bf16_groups} == set(plan.reduced_groups)
    assert set(plan.reduced_groups) | set(plan.fp32_groups) == set(precision)


@given(precisions, st.data())
def test_the_fingerprint_tells_plans_apart_and_ignores_order(
    precision: dict[str, Precision], data: st.DataObject
) -> None:
    plan = PrecisionPlan("abc", precision)
    group = data.draw(st.sampled_from(sorted(precision)))
    flipped = Precision.FP32 if precision[group] is Precision.FP16 else Precision.FP16
    assert plan.replace({group: flipped}).fingerprint != plan.fingerprint
    assert PrecisionPlan("abc", dict(reversed(precision.items()))).fingerprint == plan.fingerprint
    assert PrecisionPlan("other", precision).fingerprint != plan.fingerprint


def test_is_immutable_from_outside() -> None:
    source = {"g0": Precision.FP16}
    plan = PrecisionPlan("abc", source)
    source["g0"] = Precision.FP32
    assert plan.fp16_groups == ("g0",)
    with pytest.raises(PlanError, match="g9"):
        plan.replace({"g9": Precision.FP32})


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"format": 1}', '{"format": 2, "precision": {}}', '{"format": 1, "precision": {"g0": "int8"}}']
)
def test_refuses_what_is_no_plan(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        PrecisionPlan.from_json(text)
    assert caught.value.hint
