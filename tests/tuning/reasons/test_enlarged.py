"""Groups whose rounding is enlarged further along the graph: named with the node that enlarges it, and only then."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mptune.engines.context import RunContext
from mptune.finding import Finding, Where
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.hazards.hazard import Hazard, HazardPlace
from mptune.graph.loading.model import load_model
from mptune.settings import SearchSettings
from mptune.tuning.reasons.group_findings import with_reasons
from mptune.tuning.steps.sensitivity import SENSITIVITY_JSON, Sensitivity
from tests.graph import models
from tests.graph.models import constant, node, value
from tests.tuning.factory import make_evaluation

SUB = Finding(
    "cancellation",
    "warning",
    "search",
    Where(nodes=("difference",), groups=("own",), tensors=("d",)),
    {"factor": 4000.0, "relative_error": 1.0},
    "a difference",
    "keep it in FP32",
)


def grouped(folder: Path) -> GroupedModel:
    """Two products, one of which comes to a difference, the other to an output of its own."""
    weight = np.eye(4, dtype=np.float32)
    nodes = [
        node("MatMul", ["x", "w"], "a", "first"),
        node("MatMul", ["a", "w"], "b", "second"),
        node("Sub", ["b", "x"], "d", "difference"),
        node("MatMul", ["x", "w"], "c", "apart"),
    ]
    proto = models.model(nodes, [value("x", ["n", 4])], [value("d", None), value("c", None)], [constant("w", weight)])
    model = load_model(models.save(proto, folder))
    return GroupedModel(model, find_groups(model, "op"))


def taken(model: GroupedModel, folder: Path, **errors: float) -> RunContext:
    owners = model.owners
    known = Sensitivity("worst_part", {owners[name]: error for name, error in errors.items()})
    known.save(folder / SENSITIVITY_JSON)
    return RunContext(model, SearchSettings(), *[folder] * 4)


def test_a_large_error_is_said_of_the_node_that_enlarges_it(tmp_path: Path) -> None:
    model = grouped(tmp_path)
    context = taken(model, tmp_path, first=3.0, second=0.5, apart=2.0, difference=1.0)
    known = (replace(SUB, where=replace(SUB.where, groups=(model.owners["difference"],))),)
    *before, new = with_reasons(context, known, (), "worst_part")
    assert tuple(before) == known
    assert new.code == "cancellation"
    assert new.where.groups == (model.owners["first"], model.owners["second"])  # "apart" comes to no such node
    assert new.evidence == {"one_group_error": 3.0}
    assert "Sub 'difference'" in new.text


@pytest.mark.parametrize("errors", [{"first": 0.05}, {"first": math.nan}, {}])
def test_nothing_is_said_of_small_errors(errors: dict[str, float], tmp_path: Path) -> None:
    model = grouped(tmp_path)
    assert with_reasons(taken(model, tmp_path, **errors), (SUB,), (), "worst_part") == (SUB,)


def test_nothing_is_said_where_no_finding_is_on_the_way(tmp_path: Path) -> None:
    model = grouped(tmp_path)
    assert with_reasons(taken(model, tmp_path, first=3.0, apart=2.0), (), (), "worst_part") == ()


def small(model: GroupedModel, node_name: str) -> Hazard:
    place, evidence = HazardPlace(node_name, model.owners[node_name], "a"), {"absmax": 1e-9}
    return Hazard("vanishing-values", place, evidence, wording="underflow become zero", value=1e-9)


def test_values_that_vanish_are_named_where_the_error_is_large(tmp_path: Path) -> None:
    model = grouped(tmp_path)
    context = taken(model, tmp_path, first=3.0, apart=2.0)
    fp32 = make_evaluation(1.0, 2.0)
    assert with_reasons(context, (), [small(model, "first")], "worst_part", fp32) == (), "all-FP32 errs as much"
    (new,) = with_reasons(context, (), [small(model, "first")], "worst_part")
    assert (new.code, new.severity) == ("vanishing-values", "warning")
    assert (new.where.nodes, new.where.groups) == (("first",), (model.owners["first"],))
    assert new.evidence == {"one_group_error": 3.0, "largest": 1e-9}


def test_values_that_vanish_are_not_named_where_it_is_small(tmp_path: Path) -> None:
    model = grouped(tmp_path)
    context = taken(model, tmp_path, first=0.01)
    assert with_reasons(context, (), [small(model, "first")], "worst_part") == ()
