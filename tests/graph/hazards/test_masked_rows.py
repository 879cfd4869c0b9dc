"""Rows of a softmax that are masked whole, seen on data: a finding of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from mptune.finding import Finding
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.hazards.masks import masked_row_findings
from mptune.graph.hazards.seen import Seen
from mptune.graph.loading.model import load_model
from tests.graph import models
from tests.graph.hazards.observed import ranges_on
from tests.graph.models import constant, node, value

LENGTH = 4
SHAPE = ["batch", LENGTH, LENGTH]
MASKED = {
    "Softmax": [node("Add", ["x", "mask"], "m", "add"), node("Softmax", ["m"], "y", "softmax", axis=2)],
    "filled": [
        node("Less", ["mask", "zero"], "hidden", "less"),
        node("Where", ["hidden", "infinite", "x"], "m", "where"),
        node("Softmax", ["m"], "y", "softmax", axis=2),
    ],
    "written out": [
        node("Add", ["x", "mask"], "m", "add"),
        node("ReduceMax", ["m"], "largest", "max", axes=[-1]),
        node("Sub", ["m", "largest"], "shifted", "shift"),
        node("Exp", ["shifted"], "y", "exp"),
    ],
    "MultiHeadAttention": [
        node("Unsqueeze", ["mask", "axis"], "bias", "unsqueeze"),
        helper.make_node(
            "MultiHeadAttention", ["x", "x", "x", "", "", "bias"], ["y"], "core", domain="com.microsoft", num_heads=2
        ),
    ],
}


def found(form: str, lowest: float, folder: Path, opset: int = 17) -> tuple[Finding, ...]:
    """On four samples, the first row of each masked but for one element; in the third the last row is masked whole."""
    constants = [constant("zero", 0.0), constant("infinite", -np.inf), constant("axis", [1], np.int64)]
    proto = models.model(MASKED[form], [value("x", SHAPE), value("mask", SHAPE)], [value("y", None)], constants, opset)
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    onnx.save(proto, folder / "model.onnx")
    model = load_model(folder / "model.onnx")
    mask = np.zeros((4, LENGTH, LENGTH), np.float32)
    mask[2, -1, :] = mask[:, 0, 1:] = lowest
    x = np.random.default_rng(1).standard_normal((LENGTH, LENGTH, LENGTH)).astype(np.float32)
    seen = Seen(ranges_on(model, [{"x": x[k : k + 1], "mask": mask[k : k + 1]} for k in range(4)], folder))
    return masked_row_findings(GroupedModel(model, find_groups(model)), seen, "inspect")


@pytest.mark.parametrize(
    ("form", "lowest", "opset"),
    [
        ("Softmax", -3.4e38, 17), ("Softmax", -1e9, 12), ("filled", -1.0, 17), ("written out", -3.4e38, 17),
        ("MultiHeadAttention", -3.4e38, 17),
    ],
)  # fmt: skip
def test_a_row_that_is_masked_whole_is_a_finding(form: str, lowest: float, opset: int, tmp_path: Path) -> None:
    (finding,) = found(form, lowest, tmp_path, opset)
    assert (finding.code, finding.severity) == ("mask", "warning")
    assert finding.evidence["masked_rows"] == 1
    assert finding.where.samples == (2,)
    names = {"written out": "shift", "MultiHeadAttention": "core"}
    assert names.get(form, "softmax") in finding.where.nodes


def test_a_mask_that_fp16_holds_is_no_finding(tmp_path: Path) -> None:
    assert found("Softmax", -1e4, tmp_path) == ()
