"""``--io fp16``: what becomes FP16 at the interface; search, apply, check, README.txt and infer.py follow."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import mptune
from mptune.cli import main
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
from mptune.targets.roofline import roofline
from mptune.targets.target import load_target
from tests.graph.helpers import run
from tests.graph.models import save, text, weight

FLOAT, BOOL, FLOAT16 = 1, 9, 10
GRAPH = """(float[4,8] x, float[4,8] k, bool c) => (float[4,8] y, float[4,8] z) {
  [fp16] a = MatMul(x, w)  b = Add(x, a)  y = Relu(b)
  z = If(c) <then_branch = t () => (float[4, 8] u) { u = Neg(k) }, else_branch = e () => (float[4, 8] v) { v = Abs(k) }>
}"""


def _types(path: Path) -> dict[str, int]:
    graph = onnx.load(path).graph
    return {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.output)}


def test_inputs_and_outputs_are_fp16_and_no_cast_stands_before_a_group_in_fp16(tmp_path: Path) -> None:
    source, plan, said = save(text(GRAPH, weight("w", 8, 8)), tmp_path), tmp_path / "plan.json", list[str]()
    plan.write_text(json.dumps({"nodes": {"fp16": "fp16"}, "io": "fp16"}))
    data = {"x": np.full((4, 8), 1e6, np.float32), "k": np.ones((4, 8), np.float32), "c": np.array(True)}
    path = mptune.apply(source, plan, tmp_path / "mixed.onnx", data=[data], warn=said.append)
    assert _types(path) == {"x": FLOAT16, "k": FLOAT, "c": BOOL, "y": FLOAT16, "z": FLOAT16}
    assert any("'k' stays FP32: a subgraph reads it" in line for line in said)
    assert any("input 'x' has values beyond 65504" in line for line in said)
    assert next(node.input[0] for node in onnx.load(path).graph.node if node.name == "fp16") == "x"
    data["x"] = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float16).astype(np.float32)
    wanted = run(source, data)
    for name, array in run(path, data | {"x": data["x"].astype(np.float16)}).items():
        np.testing.assert_allclose(array, wanted[name], atol=4e-3, err_msg=name)
    exact = mptune.apply(source, None, tmp_path / "exact.onnx", io="fp16", keep_fp32=["*"])
    assert _types(exact)["x"] == _types(mptune.apply(source, plan, tmp_path / "wide.onnx", io="fp32"))["x"] == FLOAT
    assert main(["apply", str(source), "--fp16-all", "--io", "fp8", "-o", str(tmp_path / "never.onnx")]) == 2


def test_a_search_predicts_measures_and_writes_it(tmp_path: Path) -> None:
    graph = "(float[n,512] x) => (float[n,512] y) { h = MatMul(x, w)  r = Relu(h)  y = MatMul(r, v) }"
    source = save(text(graph, weight("w", 512, 512), weight("v", 512, 512)), tmp_path)
    grouped = GroupedModel(model := load_model(source), find_groups(model))
    shapes, fp16 = dict.fromkeys("xhry", (8, 512)), grouped.uniform(Precision.FP16)
    terms = (roofline(each, load_target("a100-40gb"), shapes) for each in (grouped, replace(grouped, io="fp16")))
    assert [sum(each.casts(fp16) for each in of.boundaries) for of in terms] == [2, 0]

    data, out = np.random.default_rng(0).standard_normal((8, 512)).astype(np.float32), tmp_path / "run"
    front = mptune.search(source, data=data, target="a100-40gb", budget=4, out=out, io="fp16", max_error=0.1)
    assert front.fp32.error_value == 0, "the baseline keeps its interface"
    assert _types(out / "chosen/model.onnx") == _types(out / "chosen/check.onnx") == {"x": FLOAT16, "y": FLOAT16}
    assert "FP16 where it has FP32" in (out / "chosen/README.txt").read_text()
    assert subprocess.run([sys.executable, out / "chosen/infer.py", "--check"], check=False).returncode == 0
    again = mptune.apply(source, out / "chosen/plan.json", tmp_path / "again.onnx")
    assert mptune.check(again, against=source, data=data, max_error=0.1).agrees
    with pytest.raises(mptune.MptuneError, match="another --io"):
        mptune.search(source, data=data, target="a100-40gb", budget=4, out=out, max_error=0.1)
