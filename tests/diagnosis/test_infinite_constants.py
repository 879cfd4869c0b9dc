"""``mptune compare`` names constants beyond FP16 that another tool has made infinite, and what mptune makes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import mptune
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
from mptune.graph.writing.rewrite import Rewriter
from tests.graph.models import constant, model, node, value
from tests.zoo.numbers import Show, rows, times_mask, weights
from tests.zoo.numbers.further import FURTHER

WHOLE_ROW = FURTHER["mask of -1e9 over a whole row"][0]
LARGEST = np.float16(65504)


def converted(show: Show, folder: Path) -> tuple[Path, Path]:
    """The model, and the FP16 model of a tool that rounds constants to infinity; the data beside them."""
    model = folder / "model.onnx"
    onnx.save(show.proto, model)
    np.savez(folder / "data.npz", **show.data)  # type: ignore[arg-type]
    loaded = load_model(model)
    grouped = GroupedModel(loaded, find_groups(loaded))
    path = Rewriter(grouped).write(grouped.uniform(Precision.FP16), folder / "half.onnx")
    proto = onnx.load(path)
    for tensor in proto.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.dtype == np.float16 and (abs(values) == LARGEST).any():
            infinite = np.where(abs(values) == LARGEST, np.copysign(np.float16(np.inf), values), values)
            tensor.CopyFrom(numpy_helper.from_array(infinite, tensor.name))
    onnx.save(proto, path)
    return model, path


def recorded(show: Show, half: Path) -> Path:
    """Outputs of the FP16 model, sample by sample, in a file."""
    session = ort.InferenceSession(str(half), providers=["CPUExecutionProvider"])
    count = len(next(iter(show.data.values())))
    feeds = [{name: values[k : k + 1] for name, values in show.data.items()} for k in range(count)]
    names = [output.name for output in session.get_outputs()]
    runs = [session.run(names, feed) for feed in feeds]
    np.savez(
        half.with_suffix(".npz"), **{name: np.concatenate([run[k] for run in runs]) for k, name in enumerate(names)}
    )
    return half.with_suffix(".npz")


def scaled() -> Show:
    """Numbers, some of them zero, times 1e6: times infinity zero is NaN."""
    nodes = [
        node("MatMul", ["x", "w"], "h", "fc"),
        node("Relu", ["h"], "r", "relu"),
        node("Mul", ["r", "large"], "s", "scale"),
        node("Sigmoid", ["s"], "y", "sigmoid"),
    ]
    constants = [weights("w", 16, 4), constant("large", 1e6)]
    return Show(model(nodes, [value("x", [1, 16])], [value("y", [1, 4])], constants), {"x": rows(16)})


CASES: dict[str, tuple[Callable[[], Show], str, tuple[str, ...]]] = {
    "multiplied": (lambda: times_mask(-1e9), "mask", ("times low",)),
    "whole row": (WHOLE_ROW, "mask", ("mask value",)),
    "no mask": (scaled, "overflow", ("scale",)),
}
"""Case -> model with data, the code that is right, the nodes that read the constant."""


@pytest.mark.parametrize("is_recorded", [False, True], ids=["model", "recorded"])
@pytest.mark.parametrize(
    "case", ["multiplied", *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != "multiplied")]
)
def test_a_constant_that_another_tool_made_infinite_is_named(case: str, is_recorded: bool, tmp_path: Path) -> None:
    make, code, nodes = CASES[case]
    show = make()
    path, half = converted(show, tmp_path)
    data = tmp_path / "data.npz"
    found = (
        mptune.compare(path, data=data, outputs=recorded(show, half))
        if is_recorded
        else mptune.compare(path, half, data=data)
    )
    assert found.verdict == "differs"
    (finding,) = [one for one in found.findings if one.severity != "info"]
    assert (finding.code, finding.where.nodes) == (code, nodes)
    assert "mptune apply" in finding.cure
    assert float(finding.evidence["not_finite"]) > 0


def test_no_constant_is_blamed_for_nan_that_it_does_not_make(tmp_path: Path) -> None:
    """The engine gives NaN in one sample, where a mask of -1e9 made infinite gives NaN in all."""
    show = times_mask(-1e9)
    path, half = converted(show, tmp_path)
    with np.load(recorded(show, half)) as arrays:
        outputs = {name: np.zeros_like(array) for name, array in arrays.items()}
    outputs["y"][2] = np.nan
    np.savez(tmp_path / "other.npz", **outputs)  # type: ignore[arg-type]
    found = mptune.compare(path, data=tmp_path / "data.npz", outputs=tmp_path / "other.npz")
    assert not {"mask", "overflow"} & {one.code for one in found.findings}
