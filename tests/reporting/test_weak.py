"""``mptune export --for tensorrt-8``: the model, what trtexec is told of its layers, and what is refused."""

from __future__ import annotations

import subprocess
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
import pytest

import mptune
from mptune.cli import main
from mptune.engines.loading import load_typed_model
from mptune.engines.tensorrt.builder import BuildObjects, parse_network
from mptune.engines.tensorrt.library import load_library
from mptune.errors import ModelError, PlanError
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.plan import Precision
from mptune.graph.value_types import value_types
from mptune.graph.writing.weak import WeakModel, weak_model
from mptune.settings import TensorRtSettings
from mptune.tuning.front import Front
from tests.conftest import save_cnn
from tests.fakes import make_toolchain, search
from tests.graph import helpers, models

pytestmark = pytest.mark.usefixtures("opened_here")
CORPUS = Path(__file__).parents[1] / "graph" / "corpus"
MODELS = "cnn_batchnorm constants detector_topk gru if_branches layernorm_13 local_functions loop_state"


def load(path: Path) -> GroupedModel:
    model = load_typed_model(path)
    return GroupedModel(model, find_groups(model))


def parsed(text: str, folder: Path, opset: int = 17) -> GroupedModel:
    """A model in ONNX's text form, from its inputs on."""
    return load(models.save(models.text(text, opset=opset), folder))


def outputs_agree(grouped: GroupedModel, weak: WeakModel, path: Path) -> None:
    weak.write(path)
    feed = helpers.feeds(grouped.model)
    expected, outputs = helpers.run(grouped.model.path, feed), helpers.run(path, feed)
    for name, value in expected.items():
        np.testing.assert_allclose(outputs[name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS.split())
def test_a_random_plan(name: str, tmp_path: Path) -> None:
    grouped = load(CORPUS / f"{name}.onnx")
    (plan,) = helpers.plans(grouped.model, grouped.groups, 1)[2:]
    weak = weak_model(grouped, plan)
    outputs_agree(grouped, weak, tmp_path / "weak.onnx")
    proto = onnx.load(tmp_path / "weak.onnx")
    onnx.checker.check_model(proto)
    assert [node.name for node in proto.graph.node] == [f"n{k + 1:04d}__" for k in range(len(proto.graph.node))]
    planned, outputs = value_types(grouped).node_precisions(plan), {info.name for info in grouped.model.outputs}
    for node in proto.graph.node:
        precision, kind = weak.precisions.get(node.name), weak.types.get(node.name)
        assert precision in (None, planned.get(node.doc_string), Precision.FP32)
        assert kind in (None, Precision.FP32 if outputs & {*node.output} else precision)


@pytest.mark.tensorrt_rtx
def test_layers_carry_the_names(tmp_path: Path) -> None:
    """By the parser of TensorRT-RTX, which names layers after nodes as 8.5 does."""
    library = load_library("tensorrt-rtx")
    grouped = load(CORPUS / "detector_topk.onnx")
    weak = weak_model(grouped, grouped.uniform(Precision.FP16))
    weak.write(tmp_path / "weak.onnx")
    with closing(BuildObjects()) as objects:
        _, network, _ = parse_network(library, tmp_path / "weak.onnx", objects)
        layers = {network.get_layer(k).name for k in range(network.num_layers)}
        del network
    assert weak.precisions.keys() <= layers


def test_which_layers_are_named(tmp_path: Path) -> None:
    # No constants, casts, shape arithmetic and integers; TopK, whose second output is INT64, has no type.
    text = """(float[n, 8] x, int64[n, 1] ids) => (float[n, 2] y, int64[n, 2] k) <float[1] one = {1}> {
        shape = Shape(x) two = Add(one, one) g = Mul(x, two) r = Reshape(g, shape) is_large = Greater(r, one)
        c = Cast<to = 1>(is_large) s = Mul(r, c) count = Constant<value = int64[1] {2}>()
        y, k0 = TopK(s, count) k = Add(k0, ids)
    }"""
    grouped = parsed(text, tmp_path)
    weak = weak_model(grouped, grouped.uniform(Precision.FP32))
    named = {node.output[0] for node in weak.proto.graph.node if node.name in weak.precisions}
    assert named == {"g", "r", "is_large", "s", "y"}
    assert {node.output[0] for node in weak.proto.graph.node if node.name in weak.types} == {"g", "r", "s"}


def test_layers_that_read_values_beyond_fp16_are_fp32(tmp_path: Path) -> None:
    text = """(float[2, 4] x, float[2, 4] keep) => (float[2, 4] y, float[2, 4] s)
        <float one = {1}, float low = {-1000000000}, float[4] up = {1, 2, 3, 100000}, float down = {0.00001}> {
        z = Relu(x) gone = Sub(one, keep) mask = Mul(gone, low) masked = Add(z, mask)
        y = Softmax<axis = 1>(masked) larger = Mul(z, up) s = Mul(larger, down)
    }"""
    grouped = parsed(text, tmp_path)
    weak = weak_model(grouped, grouped.uniform(Precision.FP16))
    outputs_agree(grouped, weak, tmp_path / "weak.onnx")
    precisions = {node.output[0]: weak.precisions[node.name] for node in weak.proto.graph.node}
    assert {value for value, precision in precisions.items() if precision is Precision.FP16} == {"z", "gone", "s"}


REFUSED = {
    "LayerNormalization .* no operator": "(float[2, 4] x, float[4] w) => (float[] y) { y = LayerNormalization(x, w) }",
    "a Shape with start or end": "(float[2, n] x) => (int64[1] s, float[] y) { s = Shape<start = 1>(x) y = Relu(x) }",
    "is a Conv with a computed kernel": "(float[1, 1, 8, 8] x, float[1, 1, 3, 3] w) => (float[] y) { y = Conv(x, w) }",
    "has opset 18, TensorRT 8 reads 17 at most": "(float[2, 4] x) => (float[2, 4] y) { y = Relu(x) }",
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message: str, tmp_path: Path) -> None:
    grouped = parsed(REFUSED[message], tmp_path, 18 if "opset 18" in message else 17)
    for error, words, precision in ((ModelError, message, "fp32"), (PlanError, "has groups in BF16", "bf16")):
        with pytest.raises(error, match=words):
            weak_model(grouped, grouped.uniform(Precision.named(precision)))


@pytest.fixture
def run(place: Path, monkeypatch: pytest.MonkeyPatch) -> Front:
    """A search of a model that TensorRT 8 takes, and a trtexec that prints its arguments."""
    model = load_typed_model(save_cnn(place / "cnn.onnx"))
    np.savez("data.npz", **helpers.feeds(model))
    (place / "bin").mkdir()
    (place / "bin" / "trtexec").write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    (place / "bin" / "trtexec").chmod(0o755)
    monkeypatch.setenv("PATH", str(place / "bin"), prepend=":")
    return search(make_toolchain("cnn.onnx"), "cnn.onnx", out="cnn.mptune", tensorrt=TensorRtSettings(512, 5))


def options_of(script: Path) -> dict[str, str]:
    """What build.sh gives to trtexec."""
    words = subprocess.run([script, "--verbose"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert (words[1], words[-1]) == ("--onnx=model.onnx", "--verbose")
    return {word.partition("=")[0]: word.partition("=")[2] for word in words}


def test_the_folder(run: Front, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("mptune.reporting.recipe._LONGEST_ARGUMENT", 64)
        with pytest.raises(PlanError, match="more than one argument of a command may hold"):
            mptune.export(run.run_dir, for_="tensorrt-8")
    assert not (run.run_dir / "weak" / "build.sh").exists()
    plan = next(point.plan for point in run.points if point.plan.fp16_groups)
    asked = ["export", "cnn.mptune", "--for", "tensorrt-8", "--plan", plan.fingerprint[:8]]
    assert main(asked) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert {path.name for path in folder.iterdir()} == {"model.onnx", "build.sh", "README.txt"}
    weak = weak_model(load(Path("cnn.onnx")), plan)
    options = options_of(folder / "build.sh")
    for option, kinds in (("--layerPrecisions", weak.precisions), ("--layerOutputTypes", weak.types)):
        assert options[option] == ",".join(f"{name}:{kind}" for name, kind in kinds.items())
    assert "fp16" in options["--layerPrecisions"]
    assert (options["--precisionConstraints"], options["--memPoolSize"]) == ("obey", "workspace:512")
    assert {"--fp16", "--noTF32"} <= options.keys()
    assert not {"--stronglyTyped", "--builderOptimizationLevel", "--timingCacheFile"} & options.keys()
    script = (folder / "build.sh").read_text()
    assert f"{len(weak.precisions)} of {len(weak.proto.graph.node)} nodes have a precision" in script
    assert main(asked) == 1
    assert "cnn.mptune/weak exists already" in capsys.readouterr().err
    assert main([*asked, "--force"]) == 0
    assert main(["export", "cnn.mptune", "--for", "tensorrt-9"]) == 2
    assert "--for tensorrt-9 is unknown" in capsys.readouterr().err
