"""TensorRT-RTX's own parser and builder, which run without a GPU."""

from __future__ import annotations

import gc
import itertools
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from mptune.data.archive import save_samples
from mptune.engines.base import EngineError, FailureKind, Progress
from mptune.engines.tensorrt import builder as builder_module
from mptune.engines.tensorrt.builder import (
    BuildJob,
    BuildObjects,
    BuildOptions,
    _configure,
    _fill_profile,
    build_engine,
    parse_network,
)
from mptune.engines.tensorrt.library import Library, load_library, open_log
from mptune.errors import SettingsError
from mptune.graph.facts import facts_of
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from mptune.processes.child import TRANSIENT, WorkerState
from mptune.settings import ShapeRange
from tests.graph import models, rtx
from tests.graph.models import node, value

pytestmark = pytest.mark.tensorrt_rtx

FLOAT, HALF, INT64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64
OPTIONS = BuildOptions("tensorrt-rtx", capabilities=((8, 9),))
SQUARE = {"x": (FLOAT, [2, 2])}
SCATTERED = {"x": (FLOAT, [4, 3]), "i": (INT64, [2, 3]), "u": (FLOAT, [2, 3])}


@pytest.fixture(scope="module")
def library() -> Library:
    return load_library("tensorrt-rtx")


def rows(*counts: int) -> list[dict[str, np.ndarray]]:
    return [{"x": np.zeros((count, 32), np.float32)} for count in counts]


def one_node(
    folder: Path, op: str, inputs: dict[str, tuple[int, list[int]]], output: tuple[int, Any], **attributes: Any
) -> Path:
    given = [value(name, shape, kind) for name, (kind, shape) in inputs.items()]
    made = node(op, list(inputs), "y", "the node", **attributes)
    return models.save(models.model([made], given, [value("y", output[1], output[0])]), folder)


def refusal(call: Callable[[], object]) -> EngineError:
    with pytest.raises(EngineError) as caught:
        call()
    return caught.value


@pytest.mark.smoke
def test_typed_models_beside_the_weight_bank_are_built(library: Library, mlp_path: Path, tmp_path: Path) -> None:
    model = load_model(mlp_path)
    groups = find_groups(model)
    rewriter = Rewriter(GroupedModel(model, groups), WeightBank.write(model, tmp_path))
    sizes = {}
    for precision in (Precision.FP32, Precision.FP16):
        plan = PrecisionPlan.uniform(model.sha256, [group.id for group in groups], precision)
        engine, warnings = build_engine(library, rewriter.write(plan, tmp_path / "typed.onnx"), OPTIONS, rows(2, 1, 4))
        assert warnings == ()
        assert rtx.engine_faults(library, engine) == ()
        sizes[precision] = engine.nbytes
    assert min(sizes.values()) > 1000
    assert sizes[Precision.FP32] != sizes[Precision.FP16]


def test_an_input_that_is_an_output_is_refused_by_name(library: Library, mlp_path: Path, tmp_path: Path) -> None:
    proto = onnx.load(mlp_path)
    proto.graph.output.append(proto.graph.input[0])
    onnx.save(proto, tmp_path / "m.onnx")
    error = refusal(lambda: build_engine(library, tmp_path / "m.onnx", OPTIONS, rows(1)))
    assert error.kind is FailureKind.UNSUPPORTED
    assert error.message.startswith("TensorRT calls an input '__x', which the model has not")


def test_every_capability_that_is_named_is_built_for(library: Library, mlp_path: Path) -> None:
    all_three = BuildOptions("tensorrt-rtx", capabilities=((8, 6), (8, 9), (12, 0)))
    assert build_engine(library, mlp_path, all_three, rows(1))[0].nbytes
    none = BuildOptions("tensorrt-rtx", capabilities=((9, 0),))
    failure = refusal(lambda: build_engine(library, mlp_path, none, rows(1)))
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


@pytest.mark.parametrize(
    ("op", "inputs", "attributes", "kind", "words"),
    [
        ("NoSuchOp", SQUARE, {}, FailureKind.UNSUPPORTED, "NoSuchOp node 'the node': Plugin not found"),
        ("Det", SQUARE, {}, FailureKind.UNSUPPORTED, "Det node 'the node': TensorRT's parser does not support it"),
        ("Add", {"x": (FLOAT, [2]), "z": (HALF, [2])}, {}, FailureKind.PARSER, "must have same input types"),
        ("ScatterElements", SCATTERED, {"reduction": "add"}, FailureKind.UNSUPPORTED, "Unsupported reduction type"),
    ],
)
def test_operators_and_types_and_attributes_that_it_does_not_take(
    library: Library, op: str, inputs: Any, attributes: Any, kind: FailureKind, words: str, tmp_path: Path
) -> None:
    path = one_node(tmp_path, op, inputs, (FLOAT, None), **attributes)
    failure = refusal(lambda: build_engine(library, path, OPTIONS, rows(1)))
    assert failure.kind is kind
    assert words in failure.message
    assert failure.message.startswith(op)


def test_a_layer_without_a_kernel_is_no_parser_error(library: Library, tmp_path: Path) -> None:
    """NonMaxSuppression is parsed, and then nothing in TensorRT-RTX implements it."""
    path = Path(__file__).parents[2] / "graph" / "corpus" / "detector.onnx"
    model = load_model(path)
    feeds = [
        {i.name: np.zeros([d if isinstance(d, int) else 1 for d in i.shape or ()], i.numpy_dtype) for i in model.inputs}
    ]
    failure = refusal(lambda: build_engine(library, path, OPTIONS, feeds))
    assert failure.kind is FailureKind.NO_TACTIC
    assert "no runners that implement it" in failure.message


def test_files_that_are_not_there(library: Library, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    path = folder / "m.onnx"
    onnx.save(models.product(np.ones((4, 4))), path, save_as_external_data=True, location="fp32.bin", size_threshold=0)
    assert build_engine(library, path, OPTIONS, [])[0].nbytes
    path.write_bytes(b"no model")
    assert "Failed to parse the ONNX model" in refusal(lambda: build_engine(library, path, OPTIONS, [])).message
    shutil.rmtree(folder)
    vanished = refusal(lambda: build_engine(library, path, OPTIONS, []))
    assert vanished.kind is FailureKind.PARSER
    assert "Input file cannot be found" in vanished.message


def test_progress_is_told_and_not_too_often(library: Library, mlp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection within a callback may destroy TensorRT's objects under its own locks, and never end."""
    ticks = itertools.count()
    monkeypatch.setattr(builder_module, "monotonic", lambda: float(next(ticks)))
    heard: list[tuple[Progress, bool]] = []
    build_engine(library, mlp_path, OPTIONS, rows(1), report=lambda one: heard.append((one, gc.isenabled())))
    assert len(heard) > 10
    assert all(0 < one.done <= one.steps and one.phase for one, _ in heard)
    assert "Building engine" in {one.phase for one, _ in heard}
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
    large = refusal(lambda: fill(32, [2**40, 1]))
    assert large.kind is FailureKind.UNSUPPORTED
    assert f"'size' decides a shape and holds {2**40}" in large.message
    assert str(2**31 - 1) in large.message
    for values in ([True, False], [1.5, 2.0]):
        failure = refusal(lambda values=values: fill(64, values))
        assert failure.kind is FailureKind.UNSUPPORTED
        assert "takes whole numbers" in failure.message


def test_what_a_build_made_is_freed_once_the_answer_is_sent(
    library: Library, mlp_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash in a destructor then costs no result."""
    freed: list[list[str]] = []
    close = BuildObjects.close

    def watched(objects: BuildObjects) -> None:
        freed.append([type(one).__name__ for one in objects])
        close(objects)
        assert not objects

    monkeypatch.setattr(BuildObjects, "close", watched)
    save_samples(tmp_path / "samples.npz", rows(1))
    state = WorkerState()
    closed: list[str] = []
    state.cached("baseline", "", lambda: SimpleNamespace(close=lambda: closed.append("baseline")))
    job = BuildJob(mlp_path, tmp_path / "engine", OPTIONS, (tmp_path / "samples.npz",), 60.0)
    assert job.run(state)[0] > 0
    assert closed == []
    assert replace(job, alone=True).run(state)[0] > 0
    assert closed == ["baseline"], "an engine that is open would leave a build on a Jetson too little memory"
    freed.clear()
    assert freed == []
    state.drop(TRANSIENT)
    ((*names,),) = freed
    assert {"Builder", "INetworkDefinition", "OnnxParser", "IBuilderConfig", "IHostMemory"} <= set(names)
    assert names.index("Builder") < names.index("INetworkDefinition") < names.index("IHostMemory")

    (tmp_path / "bad.onnx").write_bytes(b"no model")
    with pytest.raises(EngineError):
        BuildJob(tmp_path / "bad.onnx", tmp_path / "engine", OPTIONS, (tmp_path / "samples.npz",), 60.0).run(state)
    assert len(freed) == 1
    state.drop(TRANSIENT)
    assert "Builder" in freed[1]


@pytest.mark.parametrize(
    ("op", "values"),
    [
        ("Reshape", {"target": [2]}),
        ("Slice", {"starts": [2], "ends": [2]}),
        ("TopK", {"k": [1]}),
        ("Gather", {"rows": [3]}),
        ("GatherElements", {"at": [4, 4]}),
    ],
)
@pytest.mark.parametrize("through", ["", "Cast", "Mul"])
def test_which_inputs_are_shapes_is_known_without_tensorrt(
    library: Library, tmp_path: Path, op: str, values: dict[str, list[int]], through: str
) -> None:
    """What ``build.sh`` writes values of is what TensorRT's parser calls a shape tensor."""
    nodes = [node("Relu", ["x"], "r")]
    names = list(values)
    if through:
        extra = [] if through == "Cast" else ["one"]
        to = {"to": INT64} if through == "Cast" else {}
        nodes += [node(through, [name, *extra], f"{name}64", **to) for name in names]
        names = [f"{name}64" for name in names]
    nodes.append(node(op, ["r", *names], ["y", "indices"] if op == "TopK" else "y"))
    kind = TensorProto.INT32 if through == "Cast" else INT64
    inputs = [value("x", [4, 4]), *(value(name, shape, kind) for name, shape in values.items())]
    one = [models.constant("one", 1, np.int64)]
    path = models.save(models.model(nodes, inputs, [value("y", None)], one if through == "Mul" else []), tmp_path)
    objects = BuildObjects()
    _, network, _ = parse_network(library, path, objects)
    tensors = [network.get_input(k) for k in range(network.num_inputs)]
    shapes = {tensor.name for tensor in tensors if tensor.is_shape_tensor}
    objects.close()
    assert set(facts_of(load_model(path)).shape_inputs) == shapes


def test_tactics_are_timed_as_trtexec_times_them(library: Library) -> None:
    """Else the engine of build.sh is not built with the settings of the search."""
    builder = library.trt.Builder(open_log(library.trt))
    config = builder.create_builder_config()
    _configure(library, config, BuildOptions("tensorrt-rtx"))
    assert config.avg_timing_iterations == 8
