"""Where a model can be entered half-way."""

from __future__ import annotations

from pathlib import Path

import pytest

from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import Model, load_model
from mptune.graph.writing.stretches import Stretch, Waist, find_stretches
from tests.graph import models

WIDTH = 8


def chain(folder: Path, layers: int, outputs: str = "", rows: int | str = 1) -> Model:
    """``x0 -> x1 -> ...``: in each layer a product four times as wide, then back, added to what came in."""
    nodes = " ".join(
        f"wide{i} = MatMul(x{i}, up) tanh{i} = Tanh(wide{i}) back{i} = MatMul(tanh{i}, down)"
        f" x{i + 1} = Add(x{i}, back{i})"
        for i in range(layers)
    )
    graph = f"(float[{rows},{WIDTH}] x0) => (float[{rows},{WIDTH}] x{layers} {outputs}) {{ {nodes} }}"
    weights = [models.weight("up", WIDTH, 4 * WIDTH), models.weight("down", 4 * WIDTH, WIDTH)]
    return load_model(models.save(models.text(graph, *weights), folder))


def stretches(model: Model, count: int = 4, max_bytes: int = 1 << 20) -> tuple[Stretch, ...]:
    groups = find_groups(model)
    result = find_stretches(GroupedModel(model, groups), {}, count, max_bytes)
    assert [g for s in result for g in s.groups] == [g.id for g in groups]
    return result


def test_waists_are_where_little_crosses(tmp_path: Path) -> None:
    model = chain(tmp_path, 4)
    result = stretches(model)
    assert [s.start.tensors for s in result] == [(), ("x1",), ("x2",), ("x3",)]
    assert [s.start.nbytes for s in result] == [0, 4 * WIDTH, 4 * WIDTH, 4 * WIDTH]
    assert [len(s.groups) for s in result] == [2, 2, 2, 2]


def test_none_takes_more_than_there_is_room_for(tmp_path: Path) -> None:
    model = chain(tmp_path, 4)
    result = stretches(model, max_bytes=2 * 4 * WIDTH)
    assert [s.start.tensors for s in result] == [(), ("x1",), ("x2",), ("x2",)]
    assert {s.start for s in stretches(model, max_bytes=0)} == {Waist()}


def test_no_output_lies_before_a_waist(tmp_path: Path) -> None:
    model = chain(tmp_path, 4, f", float[1,{WIDTH}] x2")
    started = {s.start for s in stretches(model)}
    assert len(started) > 1
    assert max(s.last for s in started) < model.producer["x2"]


def test_sizes_must_be_known(tmp_path: Path) -> None:
    model = chain(tmp_path, 4, rows="rows")
    assert {s.start for s in stretches(model)} == {Waist()}
    shapes = {f"x{i}": (3, WIDTH) for i in range(5)}
    result = find_stretches(GroupedModel(model, find_groups(model)), shapes, 4, 1 << 20)
    assert [s.start.nbytes for s in result] == [0, *[3 * 4 * WIDTH] * 3]


@pytest.mark.parametrize("count", [1, 2, 50])
def test_every_group_is_in_one_stretch_after_its_waist(count: int, tmp_path: Path) -> None:
    model = chain(tmp_path, 3)
    groups = {g.id: g for g in find_groups(model)}
    index = {n.name: n.index for n in model.nodes}
    result = stretches(model, count)
    assert len(result) <= count
    for stretch in result:
        assert all(index[name] > stretch.start.last for g in stretch.groups for name in groups[g].nodes)
