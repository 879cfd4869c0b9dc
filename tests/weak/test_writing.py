"""What the written model and ``build.sh`` hold, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from mptune.engines.loading import load_typed_model
from mptune.errors import ModelError, PlanError
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.plan import Precision
from mptune.graph.writing.weak import WEAK_BRANCHES, WeakNode, write_weak
from mptune.reporting.recipe import BuildRecipe
from mptune.reporting.weak import trtexec_script

CORPUS = Path(__file__).parents[1] / "graph" / "corpus"


def grouped_model(name: str) -> GroupedModel:
    model = load_typed_model(CORPUS / f"{name}.onnx")
    return GroupedModel(model, find_groups(model))


@pytest.mark.parametrize("name", ["mask_1e9", "mask_min", "constants"])
def test_fp16_layers_read_no_constant_beyond_fp16(name: str, tmp_path: Path) -> None:
    grouped = grouped_model(name)
    weak = write_weak(grouped, grouped.uniform(Precision.FP16), WEAK_BRANCHES["tensorrt-8.6"], tmp_path / "m.onnx")
    graph = onnx.load(tmp_path / "m.onnx").graph
    constants = {c.name: numpy_helper.to_array(c) for c in graph.initializer if c.data_type == onnx.TensorProto.FLOAT}
    half = {node.name for node in weak.nodes if node.precision is Precision.FP16}
    read = {i for node in graph.node if node.name in half for i in node.input if i in constants}
    assert read
    assert max(np.abs(constants[i][np.isfinite(constants[i])]).max(initial=0) for i in read) <= 65504
    plain = write_weak(grouped, grouped.uniform(Precision.FP32), WEAK_BRANCHES["tensorrt-8.6"], tmp_path / "w.onnx")
    originals = {c.numpy().tobytes() for c in grouped.model.initializers.values()}
    assert {numpy_helper.to_array(c).tobytes() for c in onnx.load(tmp_path / "w.onnx").graph.initializer} <= originals
    assert len(plain.nodes) <= len(weak.nodes)


def test_bf16_is_refused(tmp_path: Path) -> None:
    grouped = grouped_model("cnn_batchnorm")
    with pytest.raises(PlanError, match="has groups in BF16"):
        write_weak(grouped, grouped.uniform(Precision.BF16), WEAK_BRANCHES["tensorrt-8"], tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()


@pytest.mark.parametrize("target", ["tensorrt-8", "tensorrt-8.4"])
def test_more_layers_than_fit_one_argument(target: str, tmp_path: Path) -> None:
    grouped = grouped_model("cnn_batchnorm")
    plan = grouped.uniform(Precision.FP16)
    weak = write_weak(grouped, plan, WEAK_BRANCHES[target], tmp_path / "m.onnx")
    weak.nodes = [WeakNode(f"n{k:05d}", "", "Relu", Precision.FP16, ("x",), ("y",)) for k in range(12_000)]
    if target == "tensorrt-8":
        assert "run build.py" in trtexec_script(plan, weak, BuildRecipe())
    else:
        with pytest.raises(PlanError, match=r"12000 layers are 1440.. bytes of one argument"):
            trtexec_script(plan, weak, BuildRecipe())


@pytest.mark.parametrize(("attributes", "is_refused"), [("<start = 1>", True), ("<end = -1>", True), ("", False)])
def test_a_part_of_a_shape_is_refused_for_tensorrt_8(attributes: str, is_refused: bool, tmp_path: Path) -> None:
    """``DEFINE_BUILTIN_OP_IMPORTER(Shape)`` of onnx-tensorrt 8.5-GA and 8.6-GA reads neither attribute."""
    text = f"""<ir_version: 8, opset_import: ["" : 17]> g (float[n, 4] x) => (float[m] y) {{
        s = Shape{attributes}(x)
        k = Cast<to = 1>(s)
        t = ReduceSum<keepdims = 0>(x)
        y = Mul(k, t)
    }}"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "shape.onnx")
    model = load_typed_model(tmp_path / "shape.onnx")
    grouped = GroupedModel(model, find_groups(model))
    for branch in ("tensorrt-8", "tensorrt-8.6", "tensorrt-10-weak"):
        plan = grouped.uniform(Precision.FP32)
        if is_refused and branch != "tensorrt-10-weak":
            with pytest.raises(ModelError, match="start or end, which the parser of TensorRT 8"):
                write_weak(grouped, plan, WEAK_BRANCHES[branch], tmp_path / "weak.onnx")
        else:
            write_weak(grouped, plan, WEAK_BRANCHES[branch], tmp_path / "weak.onnx")
