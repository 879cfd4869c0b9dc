"""What one run of a model takes, from its inputs' sizes alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from mptune.data.samples import CalibrationSet
from mptune.engines.toolchains.emulation import run_bytes
from mptune.graph.loading.model import load_model
from tests.graph import models
from tests.graph.models import node, value


def taken(proto: onnx.ModelProto, folder: Path, *shapes: tuple[int, ...]) -> int | None:
    samples = folder / "samples.npz"
    CalibrationSet(tuple({"x": np.zeros(shape, np.float32)} for shape in shapes), "test", False).save(samples)
    return run_bytes(load_model(models.save(proto, folder)), samples)


def chain(shape: list[int | str]) -> onnx.ModelProto:
    nodes = [node("Exp", ["x"], "a", "a"), node("Relu", ["a"], "b", "b"), node("Neg", ["b"], "y", "y")]
    return models.model(nodes, [value("x", shape)], [value("y", None)])


def test_it_is_what_lives_at_once_on_the_largest_sample(tmp_path: Path) -> None:
    one = taken(chain([1, 1000]), tmp_path, (1, 1000))
    assert one == 3 * 4 * 3 * 1000, "the input, which the caller keeps, and two values, each in three forms"
    assert taken(chain(["batch", 1000]), tmp_path, (1, 1000), (5, 1000), (2, 1000)) == 5 * one


def test_it_is_unknown_where_a_size_depends_on_values_or_a_branch_has_values_of_its_own(tmp_path: Path) -> None:
    selected = [node("NonZero", ["x"], "n", "n"), node("Cast", ["n"], "y", "y", to=TensorProto.FLOAT)]
    assert taken(models.model(selected, [value("x", [4, 4])], [value("y", None)]), tmp_path, (4, 4)) is None
    branch = helper.make_graph([node("Exp", ["x"], "e", "e")], "branch", [], [value("e", [4, 4])])
    choice = node("If", ["which"], "y", "if", then_branch=branch, else_branch=branch)
    either = models.model(
        [choice], [value("x", [4, 4])], [value("y", None)], [models.constant("which", True, np.bool_)]
    )
    assert taken(either, tmp_path, (4, 4)) is None
