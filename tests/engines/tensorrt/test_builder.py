"""TensorRT-RTX's own parser and builder, which run without a GPU, and the timing cache."""

from __future__ import annotations

import gc
import itertools
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from mptune.data.archive import save_samples
from mptune.engines.base import EngineError, FailureKind, Progress
from mptune.engines.tensorrt import builder as builder_module
from mptune.engines.tensorrt.builder import (
    BuildJob,
    BuildObjects,
    BuildOptions,
    _fill_profile,
    attach_timing_cache,
    build_engine,
    parse_network,
    save_timing_cache,
)
from mptune.engines.tensorrt.library import Library, load_library, open_log
from mptune.errors import SettingsError
from mptune.graph.facts import facts_of
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from mptune.processes.child import TRANSIENT, WorkerState
from mptune.settings import ShapeRange
from tests.device.cuda import FakeCuda
from tests.device.tensorrt import make_module
from tests.graph import models, rtx
from tests.graph.helpers import feeds

pytestmark = [
    pytest.mark.tensorrt_rtx,
    pytest.mark.filterwarnings("ignore:Use Deprecated in TensorRT-RTX:DeprecationWarning"),
]

OPTIONS = BuildOptions("tensorrt-rtx", capabilities=((8, 9),))


@pytest.fixture(scope="module")
def library() -> Library:
    return load_library("tensorrt-rtx")


def rows(*counts: int) -> list[dict[str, np.ndarray]]:
    return [{"x": np.zeros((count, 32), np.float32)} for count in counts]


def refusal(path: Path, feeds: Sequence[Mapping[str, np.ndarray]] = (), options: BuildOptions = OPTIONS) -> EngineError:
    with pytest.raises(EngineError) as caught:
        build_engine(load_library("tensorrt-rtx"), path, options, feeds)
    return caught.value


@pytest.mark.smoke
def test_typed_models_beside_the_weight_bank_are_built(library: Library, mlp_path: Path, tmp_path: Path) -> None:
    model = load_model(mlp_path)
    grouped, sizes = GroupedModel(model, find_groups(model)), set()
    rewriter = Rewriter(grouped, WeightBank.write(model, tmp_path))
    for precision in (Precision.FP32, Precision.FP16):
        typed = rewriter.write(grouped.uniform(precision), tmp_path / "typed.onnx")
        engine, warnings = build_engine(library, typed, OPTIONS, rows(2, 1, 4))
        assert warnings == ()
        assert rtx.engine_faults(library, engine) == ()
        sizes.add(engine.nbytes)
    assert len(sizes) == 2
    assert min(sizes) > 1000


def test_every_capability_that_is_named_is_built_for(library: Library, mlp_path: Path) -> None:
    all_three = BuildOptions("tensorrt-rtx", capabilities=((8, 6), (8, 9), (12, 0)))
    assert build_engine(library, mlp_path, all_three, rows(1))[0].nbytes
    failure = refusal(mlp_path, rows(1), BuildOptions("tensorrt-rtx", capabilities=((9, 0),)))
    assert failure.kind is FailureKind.UNSUPPORTED
    assert "builds no engines for compute capability 9.0" in failure.message


def test_shapes_come_from_the_user_where_given(library: Library, mlp_path: Path) -> None:
    def build(text: str) -> object:
        options = BuildOptions("tensorrt-rtx", capabilities=((8, 9),), shapes=(ShapeRange.parse(text),))
        return build_engine(library, mlp_path, options, rows(2, 5))

    build("x:1x32,2x32,8x32")
    for text, words in (
        ("x:1x32,2x32,4x32", r"the data hold shapes from 2x32 to 5x32"),
        ("x:1x31,2x31,8x31", r"8x31 does not fit the input's shape \?x32"),
        ("x:1,2,8", "does not fit"),
        ("z:1x32,2x32,8x32", "'z', which is no dynamic input"),
    ):
        with pytest.raises(SettingsError, match=words) as caught:
            build(text)
        assert caught.value.hint


UNSUPPORTED, PARSER = FailureKind.UNSUPPORTED, FailureKind.PARSER


@pytest.mark.parametrize(
    ("graph", "kind", "words"),
    [
        ("(float[2] x) => (float[] y) {{ {}y = NoSuchOp (x) }}", UNSUPPORTED, "NoSuchOp{}Plugin not found"),
        ("(float[2, 2] x) => (float[] y) {{ {}y = Det (x) }}", UNSUPPORTED, "Det{}TensorRT's parser does not"),
        ("(float[2] x, float16[2] z) => (float[] y) {{ {}y = Add (x, z) }}", PARSER, "Add{}.*must have same input"),
        (
            "(float[4, 3] x, int64[2, 3] i, float[2, 3] u) => (float[] y)"
            ' {{ {}y = ScatterElements <reduction = "add"> (x, i, u) }}',
            UNSUPPORTED,
            "ScatterElements.*Unsupported reduction type",
        ),
        (
            "(float[2] x) => (float[2] y, float[2] x) {{ y = Neg (x) }}",
            UNSUPPORTED,
            "TensorRT calls an input '__x', which the model ",
        ),
    ],
)
def test_operators_and_types_and_outputs_that_it_does_not_take(
    graph: str, kind: FailureKind, words: str, tmp_path: Path
) -> None:
    path = models.save(models.text(graph.format('["the node"] ')), tmp_path)
    failure = refusal(path, rows(1))
    assert failure.kind is kind
    assert re.match(words.format(" node 'the node': "), failure.message)


def test_a_layer_without_a_kernel_is_no_parser_error() -> None:
    """NonMaxSuppression is parsed, and then nothing in TensorRT-RTX implements it."""
    path = Path(__file__).parents[2] / "graph" / "corpus" / "detector.onnx"
    failure = refusal(path, [feeds(load_model(path), batch=1)])
    assert failure.kind is FailureKind.NO_TACTIC
    assert "no runners that implement it" in failure.message


def test_files_that_are_not_there(library: Library, tmp_path: Path) -> None:
    path = tmp_path / "weights" / "m.onnx"
    path.parent.mkdir()
    onnx.save(models.product(np.ones((4, 4))), path, save_as_external_data=True, location="fp32.bin", size_threshold=0)
    assert build_engine(library, path, OPTIONS, [])[0].nbytes
    path.write_bytes(b"no model")
    assert "Failed to parse the ONNX model" in refusal(path).message
    path.unlink()
    vanished = refusal(path)
    assert vanished.kind is PARSER
    assert "Input file cannot be found" in vanished.message


def test_progress_is_told_and_not_too_often(library: Library, mlp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection within a callback may destroy TensorRT's objects under its own locks, and never end."""
    ticks = itertools.count()
    monkeypatch.setattr(builder_module, "monotonic", lambda: float(next(ticks)))
    heard: list[tuple[Progress, bool]] = []
    build_engine(library, mlp_path, OPTIONS, rows(1), report=lambda step: heard.append((step, gc.isenabled())))
    assert len(heard) > 10
    assert all(0 < step.done <= step.steps and step.phase for step, _ in heard)
    assert "Building engine" in {step.phase for step, _ in heard}
    assert not any(is_collecting for _, is_collecting in heard)
    assert gc.isenabled()
    monkeypatch.setattr(builder_module, "monotonic", lambda: 0.0)
    few: list[Progress] = []
    build_engine(library, mlp_path, OPTIONS, rows(1), report=few.append)
    assert len(few) == 1


@dataclass
class OneShape:
    """A network with one input that is a shape, and its profile; before 10.11 it takes 32 bits (pyCore.cpp)."""

    bits: int
    num_inputs = 1

    def get_input(self, position: int) -> Any:
        return SimpleNamespace(name="size", shape=(2,), is_shape_tensor=True)

    def set_shape_input(self, name: str, *values: tuple[int, ...]) -> None:
        if np.abs(values).max() >= 2 ** (self.bits - 1):
            raise TypeError("set_shape_input(): incompatible function arguments")
        self.values = {name: values}


def test_values_of_shapes_that_do_not_fit_get_a_clear_error() -> None:
    def fill(bits: int, *values: Any) -> Any:
        shape = OneShape(bits)
        assert _fill_profile(shape, shape, [{"size": np.array(each)} for each in values], ())
        return shape.values

    assert fill(32, [4, 9], [2, 12]) == {"size": ((2, 9), (4, 9), (4, 12))}
    assert fill(64, [2**40, 1])
    large = rf"'size' decides a shape and holds {2**40} .* whole numbers there, before 10.11 of at most {2**31 - 1}"
    for bits, values, words in ((32, [2**40, 1], large), (64, [True, False], "whole"), (64, [1.5, 2], "whole")):
        with pytest.raises(EngineError, match=words) as caught:
            fill(bits, values)
        assert caught.value.kind is FailureKind.UNSUPPORTED


def test_what_a_build_made_is_freed_once_the_answer_is_sent(
    mlp_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash in a destructor then costs no result; the builder goes last. A failed build is freed so, too."""
    freed: list[list[str]] = []
    close = BuildObjects.close

    def watched(objects: BuildObjects) -> None:
        freed.append([type(each).__name__ for each in objects])
        close(objects)
        assert not objects

    monkeypatch.setattr(BuildObjects, "close", watched)
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    save_samples(tmp_path / "samples.npz", rows(1))
    state, closed = WorkerState(), list[str]()
    state.cached("baseline", "", lambda: SimpleNamespace(close=lambda: closed.append("baseline")))
    job = BuildJob(mlp_path, tmp_path / "engine", OPTIONS, (tmp_path / "samples.npz",), 60.0)
    assert job.run(state)[0] > 0
    assert (freed, closed) == ([], [])
    state.drop(TRANSIENT)
    ((*names,),) = freed
    assert {"Builder", "INetworkDefinition", "OnnxParser", "IBuilderConfig", "IHostMemory"} <= set(names)
    assert names.index("Builder") < names.index("INetworkDefinition") < names.index("IHostMemory")
    with pytest.raises(EngineError):
        replace(job, model=tmp_path / "bad.onnx", alone=True).run(state)
    assert closed == ["baseline"], "an engine that is open would leave a build on a Jetson too little memory"
    assert len(freed) == 1
    state.drop(TRANSIENT)
    assert "Builder" in freed[1]


@pytest.mark.parametrize(
    ("op", "values"),
    [
        ("Reshape", {"target": 2}),
        ("Slice", {"starts": 2, "ends": 2}),
        ("TopK", {"k": 1}),
        ("Gather", {"rows": 3}),
        ("GatherElements", {"at": "4, 4"}),
    ],
)
@pytest.mark.parametrize("through", ["{}", "Cast <to = 7> ({})", "Mul ({}, one)"])
def test_which_inputs_are_shapes_is_known_without_tensorrt(
    library: Library, tmp_path: Path, op: str, values: dict[str, object], through: str
) -> None:
    """What ``build.sh`` writes values of is what TensorRT's parser calls a shape tensor."""
    kind = "int32" if through.startswith("Cast") else "int64"
    inputs = "".join(f", {kind}[{shape}] {name}" for name, shape in values.items())
    is_direct, outputs = through == "{}", "y, indices" if op == "TopK" else "y"
    steps = "" if is_direct else "".join(f"{name}64 = {through.format(name)} " for name in values)
    read = ", ".join(name if is_direct else f"{name}64" for name in values)
    nodes = f"r = Relu (x) {steps}{outputs} = {op} (r, {read})"
    graph = f"(float[4, 4] x{inputs}) => (float[] y) <int64 one = {{1}}> {{ {nodes} }}"
    path = models.save(models.text(graph), tmp_path)
    objects = BuildObjects()
    _, network, _ = parse_network(library, path, objects)
    tensors = [network.get_input(k) for k in range(network.num_inputs)]
    shapes = {tensor.name for tensor in tensors if tensor.is_shape_tensor}
    objects.close()
    assert set(facts_of(load_model(path)).shape_inputs) == shapes


def attached(trt: Any, path: Path) -> tuple[Any, BuildObjects]:
    """The configuration of a build that has the cache of a file, and what lives as long as the build."""
    builder = trt.Builder(open_log(trt))
    objects = BuildObjects([builder, builder.create_builder_config()])
    attach_timing_cache(path, objects[1], objects)
    return objects[1], objects


def test_what_another_process_wrote_meanwhile_is_merged(tmp_path: Path) -> None:
    path = tmp_path / "timing.cache"
    builds = {name: attached(make_module("10.16.2", FakeCuda()), path) for name in ("mine", "theirs")}
    for name, (config, _) in builds.items():
        config.get_timing_cache().tactics.add(name)
        save_timing_cache(path, config)
    assert json.loads(path.read_bytes()) == ["10.16.2", ["mine", "theirs"]]
    assert attached(make_module("10.16.2", FakeCuda()), path)[0].get_timing_cache().tactics == {"mine", "theirs"}
    save_timing_cache(path, attached(make_module("10.3.0", FakeCuda()), path)[0])
    assert json.loads(path.read_bytes())[0] == "10.3.0", "one of another version is replaced"


def test_a_damaged_file_is_replaced_and_one_that_cannot_be_written_costs_the_cache_only(tmp_path: Path) -> None:
    trt, path = load_library("tensorrt-rtx").trt, tmp_path / "engines" / "timing.cache"
    path.parent.mkdir()
    path.write_bytes(b"no cache at all")
    config, _objects = attached(trt, path)
    save_timing_cache(path, config)
    assert path.read_bytes() != b"no cache at all"
    assert {entry.name for entry in path.parent.iterdir()} <= {"timing.cache", "timing.cache.lock"}
    shutil.rmtree(path.parent)
    path.parent.write_text("a file is in the way")
    save_timing_cache(path, config)
    attached(trt, path)
