"""``mptune export --for tensorrt-8``: the model, what trtexec is told of its layers, and what is refused."""

from __future__ import annotations

import re
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from mptune.cli import main
from mptune.engines.loading import load_typed_model
from mptune.engines.tensorrt.builder import BuildObjects, parse_network
from mptune.engines.tensorrt.library import load_library, open_log
from mptune.errors import ModelError, PlanError
from mptune.graph.casting.value_types import value_types
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.plan import Precision
from mptune.graph.writing.weak import WeakModel, weak_model
from mptune.reporting.recipe import BuildRecipe
from mptune.reporting.weak import write_weak_folder
from mptune.settings import TensorRtSettings
from mptune.tuning.front import Front
from tests.conftest import save_cnn
from tests.fakes import make_toolchain, search
from tests.graph import helpers

pytestmark = pytest.mark.usefixtures("opened_here")
GRAPH = Path(__file__).parents[1] / "graph"
MODELS = """
    corpus/cnn_batchnorm corpus/constants corpus/detector_topk corpus/flow_gridsample corpus/gru corpus/if_branches
    corpus/layernorm_13 corpus/local_functions corpus/loop_state corpus/rmsnorm_eps exported/cnn_dynamo_18
"""


def load(path: Path) -> GroupedModel:
    model = load_typed_model(path)
    return GroupedModel(model, find_groups(model))


def parsed(text: str, folder: Path, opset: int = 17) -> GroupedModel:
    """A model in ONNX's text form, from its inputs on."""
    path = folder / "text.onnx"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> g {text}'), path)
    return load(path)


def outputs_agree(grouped: GroupedModel, weak: WeakModel, path: Path) -> None:
    weak.write(path)
    feed = helpers.feeds(grouped.model)
    expected, outputs = helpers.run(grouped.model.path, feed), helpers.run(path, feed)
    for name, value in expected.items():
        np.testing.assert_allclose(outputs[name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS.split())
def test_a_random_plan(name: str, tmp_path: Path) -> None:
    grouped = load(GRAPH / f"{name}.onnx")
    model = grouped.model
    (plan,) = helpers.plans(model, grouped.groups, 1)[2:]
    weak = weak_model(grouped, plan)
    outputs_agree(grouped, weak, tmp_path / "weak.onnx")
    proto = onnx.load(tmp_path / "weak.onnx")
    onnx.checker.check_model(proto)
    assert proto.opset_import[0].version == min(model.opset, 17)
    nodes = proto.graph.node
    assert [node.name for node in nodes] == [f"n{k + 1:04d}" for k in range(len(nodes))]
    operators = [[node.op_type for node in each].count("Cast") for each in (nodes, model.nodes)]
    assert operators[0] == operators[1]
    own, given = value_types(grouped).node_precisions(plan), {info.name for info in model.outputs}
    for node in nodes:
        precision, kind = weak.precisions.get(node.name), weak.types.get(node.name)
        assert precision in (None, own.get(node.doc_string, Precision.FP32))
        assert kind in (None, Precision.FP32 if given & {*node.output} else precision)


@pytest.mark.tensorrt_rtx
def test_layers_carry_the_names(tmp_path: Path) -> None:
    """By the parser of TensorRT-RTX, which names layers after nodes as 8.5 does."""
    library = load_library("tensorrt-rtx")
    for name in ("corpus/cnn_batchnorm", "corpus/detector_topk", "corpus/layernorm_13"):
        grouped = load(GRAPH / f"{name}.onnx")
        weak = weak_model(grouped, grouped.uniform(Precision.FP16))
        weak.write(tmp_path / "weak.onnx")
        with closing(BuildObjects()) as objects:
            _, network, _ = parse_network(library, tmp_path / "weak.onnx", open_log(library.trt), objects)
            layers = {network.get_layer(k).name for k in range(network.num_layers)}
            del network
        assert weak.precisions.keys() <= layers


def test_which_layers_are_named(tmp_path: Path) -> None:
    """No constants, casts, shape arithmetic, integers and booleans; TopK, whose second output is INT64, no type."""
    text = """(float[n, 8] x, int64[n, 1] ids) => (float[n, 2] y, int64[n, 2] k) <float[1] one = {1}> {
        shape = Shape(x)
        size = Cast<to = 1>(shape)
        sizes = Cast<to = 7>(size)
        more = Add(ids, ids)
        h = Relu(x)
        two = Add(one, one)
        g = Mul(h, two)
        r = Reshape(g, sizes)
        is_large = Greater(r, one)
        c = Cast<to = 1>(is_large)
        s = Mul(r, c)
        count = Constant<value = int64[1] {2}>()
        y, k0 = TopK(s, count)
        k = Add(k0, more)
    }"""
    grouped = parsed(text, tmp_path)
    weak = weak_model(grouped, grouped.uniform(Precision.FP32))
    named = {node.output[0] for node in weak.proto.graph.node if node.name in weak.precisions}
    assert named == {"h", "g", "r", "is_large", "s", "y"}
    typed = {node.output[0] for node in weak.proto.graph.node if node.name in weak.types}
    assert typed == {"h", "g", "r", "s"}


@pytest.mark.parametrize("name", ["constants", "mask"])
def test_fp16_layers_read_no_constant_beyond_fp16(name: str, tmp_path: Path) -> None:
    mask = """(float[2, 4] x, float[2, 4] keep) => (float[2, 4] y)
        <float one = {1}, float low = {-1000000000}, float[4, 4] w = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}> {
        z = MatMul(x, w)
        gone = Sub(one, keep)
        mask = Mul(gone, low)
        masked = Add(z, mask)
        y = Softmax<axis = 1>(masked)
    }"""
    grouped = parsed(mask, tmp_path) if name == "mask" else load(GRAPH / "corpus" / f"{name}.onnx")
    weak = weak_model(grouped, grouped.uniform(Precision.FP16))
    outputs_agree(grouped, weak, tmp_path / "weak.onnx")
    graph = onnx.load(tmp_path / "weak.onnx").graph
    constants = {c.name: numpy_helper.to_array(c) for c in graph.initializer if c.data_type == onnx.TensorProto.FLOAT}
    half = {node for node, precision in weak.precisions.items() if precision is Precision.FP16}
    read = {i for node in graph.node if node.name in half for i in node.input if i in constants}
    assert read
    assert max(np.abs(constants[i][np.isfinite(constants[i])]).max(initial=0) for i in read) <= 65504


def test_constants_have_the_rank_of_what_they_are_combined_with(tmp_path: Path) -> None:
    text = """(float[2, 3, 4] x) => (float[2, 3, 4] y) <float[4] b = {1, 2, 3, 4}, float s = {2}> {
        h = Add(x, b)
        y = Mul(s, h)
    }"""
    grouped = parsed(text, tmp_path)
    weak = weak_model(grouped, grouped.uniform(Precision.FP32))
    assert sorted(constant.shape for constant in weak.constants.values()) == [(1, 1, 1), (1, 1, 4)]
    outputs_agree(grouped, weak, tmp_path / "weak.onnx")


REFUSED = {
    "LayerNormalization .* is no operator of TensorRT 8.5": (
        "(float[2, 4] x) => (float[2, 4] y) <float[4] w = {1, 1, 1, 1}> { y = LayerNormalization(x, w) }",
        "opset 16 or below",
    ),
    "is a Shape with start or end": (
        "(float[n, 4] x) => (float[n, 4] y) { s = Shape<start = 1>(x) k = Cast<to = 1>(s) y = Mul(x, k) }",
        "opset 14 or below",
    ),
    "is a Conv with a computed kernel and no kernel_shape": (
        "(float[1, 2, 8, 8] x, float[2, 2, 3, 3] w) => (float[1, 2, 6, 6] y) { v = Relu(w) y = Conv(x, v) }",
        "the attribute kernel_shape",
    ),
    "Pad of opset 19 has no equal in opset 17": (
        '(float[2, 4] x) => (float[2, 6] y) <int64[4] p = {0, 1, 0, 1}> { y = Pad<mode = "wrap">(x, p) }',
        "opset 17 or below",
    ),
    "Split of opset 18 has no equal in opset 17": (
        "(float[2, 5] x) => (float[2, 3] y, float[2, 2] z) { y, z = Split<axis = 1, num_outputs = 2>(x) }",
        "opset 17 or below",
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message: str, tmp_path: Path) -> None:
    text, hint = REFUSED[message]
    grouped = parsed(text, tmp_path, 19 if "17" in message else 17)
    with pytest.raises(ModelError, match=message) as caught:
        weak_model(grouped, grouped.uniform(Precision.FP32))
    assert hint in str(caught.value.hint)
    with pytest.raises(PlanError, match="has groups in BF16"):
        weak_model(grouped, grouped.uniform(Precision.BF16))


@pytest.fixture
def run(place: Path, monkeypatch: pytest.MonkeyPatch) -> Front:
    """A search of a model that TensorRT 8 takes, and a trtexec that prints its arguments."""
    model = load_typed_model(save_cnn(place / "cnn.onnx"))
    np.savez("data.npz", **helpers.feeds(model))
    (place / "bin").mkdir()
    (place / "bin" / "trtexec").write_text('#!/bin/sh\npwd\nfor word; do echo "$word"; done\n')
    (place / "bin" / "trtexec").chmod(0o755)
    monkeypatch.setenv("PATH", str(place / "bin"), prepend=":")
    return search(make_toolchain("cnn.onnx"), "cnn.onnx", out="cnn.mptune")


def options_of(script: Path) -> dict[str, str]:
    """What build.sh gives to trtexec, and what trtexec is given behind it."""
    done = subprocess.run([script, "--verbose"], capture_output=True, text=True, check=True)
    said, where, *words = done.stdout.splitlines()
    assert re.fullmatch(r"\d+ of \d+ nodes have a precision, \d+ cannot be named or take none", said)
    assert where == str(script.parent.resolve())
    assert (words[0], words[-1]) == ("--onnx=model.onnx", "--verbose")
    return {word.partition("=")[0]: word.partition("=")[2] for word in words}


def test_the_folder(run: Front, capsys: pytest.CaptureFixture[str]) -> None:
    plan = next(point.plan for point in run.points if point.plan.fp16_groups)
    asked = ["export", "cnn.mptune", "--for", "tensorrt-8", "--plan", plan.fingerprint[:8]]
    assert main(asked) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert folder == Path("cnn.mptune/weak")
    assert {path.name for path in folder.iterdir()} == {"model.onnx", "build.sh", "README.txt"}
    weak = weak_model(load(Path("cnn.onnx")), plan)
    options = options_of(folder / "build.sh")
    for option, kinds in (("--layerPrecisions", weak.precisions), ("--layerOutputTypes", weak.types)):
        assert options[option] == ",".join(f"{name}:{kind}" for name, kind in kinds.items())
    assert "fp16" in options["--layerPrecisions"]
    assert options["--precisionConstraints"] == "obey"
    assert {"--fp16", "--noTF32"} <= options.keys()
    readme = (folder / "README.txt").read_text()
    assert f"names {len(weak.precisions)} of the {len(weak.proto.graph.node)} nodes" in readme
    (folder / "notes.txt").write_text("mine")
    assert main(asked) == 1
    assert "holds model.onnx already" in capsys.readouterr().err
    assert main([*asked, "--force"]) == 0
    assert (folder / "notes.txt").read_text() == "mine"
    assert main(["export", "cnn.mptune", "--for", "tensorrt-9"]) == 2
    assert "--for tensorrt-9 is unknown" in capsys.readouterr().err


def test_options_that_tensorrt_8_lacks_and_an_argument_that_is_too_long(
    run: Front, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grouped = load(Path("cnn.onnx"))
    recipe = BuildRecipe(
        ranges={"image": ((1, 3, 16, 16),) * 3},
        settings=TensorRtSettings(workspace_mb=512, optimization_level=5),
        timing_cache=True,
        plugins=("plugin.so",),
    )
    write_weak_folder(run, run.fp32, grouped, place / "out", recipe)
    options = options_of(place / "out" / "build.sh")
    assert options["--memPoolSize"] == "workspace:512"
    assert options["--optShapes"] == "image:1x3x16x16"
    lacking = {"--fp16", "--stronglyTyped", "--builderOptimizationLevel", "--timingCacheFile", "--staticPlugins"}
    assert not lacking & options.keys()
    many = {f"n{k:05d}": Precision.FP16 for k in range(12_000)}
    weak = replace(weak_model(grouped, run.fp32.plan), precisions=many)
    monkeypatch.setattr("mptune.reporting.weak.weak_model", lambda grouped, plan: weak)
    with pytest.raises(PlanError, match=r"12000 layers are 1440.. bytes of one argument"):
        write_weak_folder(run, run.fp32, grouped, place / "other", recipe)
    assert not (place / "other").exists()
