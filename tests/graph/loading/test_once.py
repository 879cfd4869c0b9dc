"""What is found once for each model."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

from mptune.graph.casting.value_types import value_types
from mptune.graph.facts import facts_of, node_rule, node_rules
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from tests.graph.models import mlp, save


def test_facts_of_a_model_are_found_once_and_freed_with_it(tmp_path: Path) -> None:
    path = save(mlp(), tmp_path)
    model, other = load_model(path), load_model(path)
    grouped = GroupedModel(model, find_groups(model))
    for facts in (facts_of, node_rules):
        assert facts(model) is facts(model)
    assert value_types(grouped) is value_types(grouped)
    assert value_types(grouped).rules is node_rules(model)
    assert node_rules(model) is not node_rules(other)
    assert node_rule(model, model.nodes[1]) is node_rules(model)[1]
    ends = [weakref.ref(model), weakref.ref(grouped)]
    del model, grouped
    gc.collect()
    assert [end() for end in ends] == [None, None]
    assert node_rules(other)
