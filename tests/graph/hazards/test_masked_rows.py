"""Rows of a softmax that are masked whole, seen on data: a finding of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mptune.finding import Finding
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.hazards.find import find_hazards
from mptune.graph.hazards.hazard import ObservedValues, hazard_findings
from mptune.graph.loading.model import load_model
from tests.graph.hazards.observed import ranges_on
from tests.graph.models import save, text

LENGTH = 4
MASKED = {
    "Softmax": "m = Add(x, mask) [softmax] y = Softmax<axis = 2>(m)",
    "MultiHeadAttention": """bias = Unsqueeze(mask, axis)
        [core] y = com.microsoft.MultiHeadAttention<num_heads = 2>(x, x, x, , , bias)""",
}


def found(form: str, lowest: float, folder: Path, opset: int = 17) -> tuple[Finding, ...]:
    """On four samples, the first row of each masked but for one element; in the third the last row is masked whole."""
    ends = "(float[n,4,4] x, float[n,4,4] mask) => (float[n,4,4] y) <int64[1] axis = {1}>"
    proto = text(f"{ends} {{ {MASKED[form]} }}", opset=opset)
    save(proto, folder)
    model = load_model(folder / "model.onnx")
    mask = np.zeros((4, LENGTH, LENGTH), np.float32)
    mask[2, -1, :] = mask[:, 0, 1:] = lowest
    x = np.random.default_rng(1).standard_normal((LENGTH, LENGTH, LENGTH)).astype(np.float32)
    seen = ObservedValues(ranges_on(model, [{"x": x[k : k + 1], "mask": mask[k : k + 1]} for k in range(4)], folder))
    hazards = find_hazards(GroupedModel(model, find_groups(model)), seen)
    return hazard_findings([hazard for hazard in hazards if hazard.wording == "rows"], "inspect")


@pytest.mark.parametrize(
    ("form", "lowest", "opset"),
    [
        ("Softmax", -3.4e38, 17), ("Softmax", -1e9, 12),
        ("MultiHeadAttention", -3.4e38, 17),
    ],
)  # fmt: skip
def test_a_row_that_is_masked_whole_is_a_finding(form: str, lowest: float, opset: int, tmp_path: Path) -> None:
    (finding,) = found(form, lowest, tmp_path, opset)
    assert (finding.code, finding.severity) == ("mask", "warning")
    assert finding.evidence["masked_rows"] == 1
    assert finding.where.samples == (2,)
    assert ("core" if form == "MultiHeadAttention" else "softmax") in finding.where.nodes


def test_a_mask_that_fp16_holds_is_no_finding(tmp_path: Path) -> None:
    assert found("Softmax", -1e4, tmp_path) == ()
