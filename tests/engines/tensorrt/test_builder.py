"""TensorRT-RTX's own parser and builder, which run without a GPU."""

from __future__ import annotations

import gc
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from mptune.data.archive import save_samples
from mptune.engines.base import EngineError, FailureKind, Progress
from mptune.engines.tensorrt import builder as builder_module
from mptune.engines.tensorrt.builder import (
    BuildObjects,
    BuildOptions,
    _configure,
    _fill_profile,
    build_engine,
    parse_network,
)
from mptune.engines.tensorrt.jobs import BuildJob
from mptune.engines.tensorrt.library import Library, load_library, open_log
from mptune.errors import SettingsError
from mptune.graph.facts import facts_of
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from mptune.processes.child import TRANSIENT, WorkerState
from mptune.settings import ShapeRange
from tests.graph import rtx

pytestmark = pytest.mark.tensorrt_rtx

FLOAT, HALF, INT64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64
OPTIONS = BuildOptions("tensorrt-rtx", capabilities=((8, 9),))
info = helper.make_tensor_value_info


@pytest.fixture(scope="module")
def library() -> Library:
    return load_library("tensorrt-rtx")


def rows(*counts: int) -> list[dict[str, np.ndarray]]:
    return [{"x": np.zeros((count, 32), np.float32)} for count in counts]


def one_node(
    path: Path, op: str, inputs: dict[str, tuple[int, list[Any]]], output: tuple[int, list[Any]], **attributes: Any
) -> Path:
    node = helper.make_node(op, list(inputs), ["y"], "the node", **attributes)
    graph = helper.make_graph([node], "g", [info(name, *kind) for name, kind in inputs.items()], [info("y", *output)])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


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
        built = build_engine(library, rewriter.write(plan, tmp_path / "typed.onnx"), OPTIONS, rows(2, 1, 4))
        assert built.warnings == ()
        assert rtx.engine_faults(library, built.memory) == ()
        sizes[precision] = built.memory.nbytes
    assert min(sizes.values()) > 1000
    assert sizes[Precision.FP32] != sizes[Precision.FP16]


def test_an_attribute_that_is_not_supported_is_told_with_its_operator(library: Library, tmp_path: Path) -> None:
    inputs = {"x": (TensorProto.FLOAT, [4, 3]), "i": (TensorProto.INT64, [2, 3]), "u": (TensorProto.FLOAT, [2, 3])}
    path = one_node(
        tmp_path / "m.onnx", "ScatterElements", inputs, (TensorProto.FLOAT, [4, 3]), axis=0, reduction="add"
    )
    error = refusal(lambda: build_engine(library, path, OPTIONS, rows(1)))
    assert (error.kind, error.message) == (FailureKind.UNSUPPORTED, "ScatterElements: Unsupported reduction type")


def test_an_input_that_is_an_output_is_refused_by_name(library: Library, mlp_path: Path, tmp_path: Path) -> None:
    proto = onnx.load(mlp_path)
    proto.graph.output.append(proto.graph.input[0])
    onnx.save(proto, tmp_path / "m.onnx")
    error = refusal(lambda: build_engine(library, tmp_path / "m.onnx", OPTIONS, rows(1)))
    assert error.kind is FailureKind.UNSUPPORTED
    assert error.message.startswith("TensorRT calls an input '__x', which the model has not")


def test_every_capability_that_is_named_is_built_for(library: Library, mlp_path: Path) -> None:
    all_three = BuildOptions("tensorrt-rtx", capabilities=((8, 6), (8, 9), (12, 0)))
    assert build_engine(library, mlp_path, all_three, rows(1)).memory.nbytes
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
        ("x:1x32,2x32,4x32", r"the data hold the shape 5x32"),
        ("x:1x31,2x31,8x31", r"8x31 does not fit the input's shape \?x32"),
        ("x:1,2,8", "does not fit"),
        ("z:1x32,2x32,8x32", "'z', which is no dynamic input"),
    ):
        with pytest.raises(SettingsError, match=words) as caught:
            build(text)
        assert caught.value.hint


def test_operators_that_it_does_not_know(library: Library, tmp_path: Path) -> None:
    square, scalar = {"x": (FLOAT, [2, 2])}, (FLOAT, [])
    for op, words in (("NoSuchOp", "Plugin not found"), ("Det", "TensorRT's parser does not support it")):
        path = one_node(tmp_path / "m.onnx", op, square, scalar)
        failure = refusal(lambda path=path: build_engine(library, path, OPTIONS, []))  # type: ignore[misc]
        assert failure.kind is FailureKind.UNSUPPORTED
        assert failure.message.startswith(f"{op} node 'the node': ")
        assert words in failure.message


def test_types_that_do_not_agree_are_a_parser_error(library: Library, tmp_path: Path) -> None:
    path = one_node(tmp_path / "m.onnx", "Add", {"x": (FLOAT, [2]), "z": (HALF, [2])}, (FLOAT, [2]))
    failure = refusal(lambda: build_engine(library, path, OPTIONS, []))
    assert failure.kind is FailureKind.PARSER
    assert "must have same input types" in failure.message


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
    weight = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "g", [info("x", FLOAT, [2, 4])], [info("y", FLOAT, [2, 4])], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = folder / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, location="fp32.bin", size_threshold=0)
    assert build_engine(library, path, OPTIONS, []).memory.nbytes
    (folder / "fp32.bin").unlink()
    lost = refusal(lambda: build_engine(library, path, OPTIONS, []))
    assert (lost.kind, "fp32.bin" in lost.message) == (FailureKind.PARSER, True)
    path.write_bytes(b"no model")
    assert "Failed to parse the ONNX model" in refusal(lambda: build_engine(library, path, OPTIONS, [])).message
    shutil.rmtree(folder)
    vanished = refusal(lambda: build_engine(library, path, OPTIONS, []))
    assert vanished.kind is FailureKind.PARSER
    assert "Input file cannot be found" in vanished.message


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock takes a second."""
    ticks = itertools.count()
    monkeypatch.setattr(builder_module, "monotonic", lambda: float(next(ticks)))


@pytest.mark.usefixtures("ticking")
def test_progress_is_told_and_not_too_often(library: Library, mlp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Progress] = []
    build_engine(library, mlp_path, OPTIONS, rows(1), report=heard.append)
    assert len(heard) > 10
    assert all(0 < one.done <= one.steps and one.phase for one in heard)
    assert "Building engine" in {one.phase for one in heard}
    monkeypatch.setattr(builder_module, "monotonic", lambda: 0.0)
    few: list[Progress] = []
    build_engine(library, mlp_path, OPTIONS, rows(1), report=few.append)
    assert len(few) == 1


@pytest.mark.usefixtures("ticking")
def test_nothing_is_collected_while_tensorrt_runs(library: Library, mlp_path: Path) -> None:
    """A collection within a callback may destroy TensorRT's objects under its own locks, and never end."""
    enabled: list[bool] = []
    build_engine(library, mlp_path, OPTIONS, rows(1), report=lambda progress: enabled.append(gc.isenabled()))
    assert enabled
    assert not any(enabled)
    assert gc.isenabled()


class Profile:
    """An optimization profile; that of TensorRT 10.3 takes 32 bits."""

    def __init__(self, bits: int) -> None:
        self.limit = 2 ** (bits - 1)
        self.given: list[Any] = []

    def set_shape_input(self, name: str, *ranges: tuple[int, ...]) -> None:
        if any(abs(value) >= self.limit for one in ranges for value in one):
            raise TypeError("set_shape_input(): incompatible function arguments")
        self.given.append((name, *ranges))


class OneInput:
    """A network with one input that is a shape."""

    num_inputs = 1

    def get_input(self, position: int) -> Any:
        return SimpleNamespace(name="size", shape=(2,), is_shape_tensor=True)


def test_values_of_shapes_that_do_not_fit_get_a_clear_error() -> None:
    def fill(bits: int, *values: Any) -> list[Any]:
        profile = Profile(bits)
        assert _fill_profile(OneInput(), profile, [{"size": np.array(one)} for one in values], ())
        return profile.given

    assert fill(32, [4, 9], [2, 12]) == [("size", (2, 9), (4, 9), (4, 12))]
    assert fill(64, [2**40, 1])
    large = refusal(lambda: fill(32, [2**40, 1]))
    assert large.kind is FailureKind.UNSUPPORTED
    assert f"'size' decides a shape and holds {2**40}" in large.message
    assert str(2**31 - 1) in large.message
    for values in ([True, False], [1.5, 2.0]):
        failure = refusal(lambda values=values: fill(64, values))
        assert failure.kind is FailureKind.UNSUPPORTED
        assert "INT32 and INT64" in failure.message


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
    job = BuildJob(mlp_path, tmp_path / "engine", OPTIONS, (tmp_path / "samples.npz",), 60.0)
    assert job.run(state).nbytes > 0
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
        ("Expand", {"target": [2]}),
        ("Reshape", {"target": [2]}),
        ("Tile", {"repeats": [2]}),
        ("Slice", {"starts": [2], "ends": [2]}),
        ("TopK", {"k": [1]}),
        ("Pad", {"pads": [4]}),
        ("Gather", {"rows": [3]}),
        ("GatherElements", {"at": [4, 4]}),
    ],
)
@pytest.mark.parametrize("through", ["", "Cast", "Mul"])
def test_which_inputs_are_shapes_is_known_without_tensorrt(
    library: Library, tmp_path: Path, op: str, values: dict[str, list[int]], through: str
) -> None:
    """What ``build.sh`` writes values of is what TensorRT's parser calls a shape tensor."""
    nodes = [helper.make_node("Relu", ["x"], ["r"])]
    names = list(values)
    if through:
        extra = [] if through == "Cast" else ["one"]
        to = {"to": INT64} if through == "Cast" else {}
        nodes += [helper.make_node(through, [name, *extra], [f"{name}64"], **to) for name in names]
        names = [f"{name}64" for name in names]
    outputs = ["y", "indices"] if op == "TopK" else ["y"]
    nodes.append(helper.make_node(op, ["r", *names], outputs))
    kind = TensorProto.INT32 if through == "Cast" else INT64
    inputs = [info("x", FLOAT, [4, 4]), *(info(name, kind, shape) for name, shape in values.items())]
    one = [numpy_helper.from_array(np.array(1, np.int64), "one")] if through == "Mul" else []
    graph = helper.make_graph(nodes, "g", inputs, [info("y", FLOAT, None)], one)
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
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
