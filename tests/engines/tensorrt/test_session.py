"""TensorRT's sessions, held against its rules on a device in host memory (``tests.device``), and an engine's layers, as
the inspector and the profiler tell them. The contract of all sessions is ``test_sessions``.

The inspector's documents have the form of 10 by NVIDIA's guide and public engine dumps, of 11 by its guide "Migrating
IEngineInspector Usage from TensorRT 10.x to 11.x".
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from mptune.data.archive import save_samples
from mptune.data.metrics.accuracy import OutputError
from mptune.engines import cuda
from mptune.engines.base import EngineError, Failure, FailureKind, Measurement, Stage
from mptune.engines.context import RunContext
from mptune.engines.latency import Latency
from mptune.engines.tensorrt.builder import parse_network
from mptune.engines.tensorrt.layers import LayerTime, group_times, layer_times, read_layers, with_group_times
from mptune.engines.tensorrt.library import Kind, load_library
from mptune.engines.tensorrt.session import (
    EngineOptions,
    EngineProfileJob,
    TensorRtEngine,
    TensorRtSession,
    host_memory,
)
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
from mptune.graph.writing.rewrite import Rewriter
from tests.device.cuda import FakeCuda
from tests.device.programs import PROGRAMS
from tests.engines.engine_support import build_here, run_here, timed


class Device:
    """A device, and the sessions that are opened on it."""

    def __init__(self, folder: Path, fake_cuda: FakeCuda) -> None:
        self.folder, self.cuda, self.sessions = folder, fake_cuda, ExitStack()

    def open(self, program: str, kind: Kind = "tensorrt", *, cuda_graph: bool = True) -> TensorRtSession:
        path = self.folder / f"{program}.engine"
        path.write_bytes(PROGRAMS[program]().to_bytes())
        return self.sessions.enter_context(closing(TensorRtSession(path, EngineOptions(kind, cuda_graph))))


@pytest.fixture
def device(tmp_path: Path, fake_cuda: FakeCuda) -> Iterator[Device]:
    device = Device(tmp_path, fake_cuda)
    with device.sessions:
        yield device


def rows(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).normal(size=(count, 3)).astype(np.float32)}


def test_a_graph_is_captured_once_a_shape_and_replayed(device: Device) -> None:
    session = device.open("double")
    latency = timed(session, rows(2))
    assert latency.raw_ms == (1.0,) * 10
    # Tried; then a value to warm up and ten that are timed, each behind an execution of its own.
    assert (device.cuda.captures, device.cuda.launches) == (1, 23)
    timed(session, rows(2, seed=1))
    assert device.cuda.captures == 1
    timed(session, rows(3))
    assert device.cuda.captures == 2
    feeds = rows(2, seed=5)
    np.testing.assert_array_equal(session.run(feeds)["y"], feeds["x"] * 2)
    assert len(device.cuda.memory) == 5, "of the engine, of its context, and of three tensors"
    timed(session, rows(2))
    assert device.cuda.captures == 3
    assert session.warnings == ()
    session.close()
    with pytest.raises(EngineError, match="closed"):
        session.information()


def test_without_a_graph_the_engine_is_enqueued(device: Device) -> None:
    session = device.open("branching")
    assert timed(session, rows(2)).raw_ms == (1.0,) * 10
    assert (device.cuda.captures, device.cuda.launches) == (0, 0)
    (warning,) = session.warnings
    assert warning.startswith("no CUDA graph (the engine could not be enqueued: ")
    assert "not permitted when stream is capturing" in warning
    other = device.open("double", cuda_graph=False)
    timed(other, rows(2))
    assert other.warnings == ()
    dynamic = device.open("nonzero")
    timed(dynamic, {"x": np.array([0, 1, 2, 0], np.float32)})
    assert device.cuda.captures == 0
    (warning,) = dynamic.warnings
    assert "the shape of output 'where' depends on values" in warning


def test_inputs_that_shapes_are_computed_from_lie_on_the_host(device: Device) -> None:
    session = device.open("reshape")
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    for shape in ((3, 4), (12, 1), (3, 4)):
        feeds = {"x": x, "shape": np.array(shape, np.int64)}
        np.testing.assert_array_equal(session.run(feeds)["y"], x.reshape(shape))
        timed(session, feeds)
    assert device.cuda.captures == 3


def test_feeds_that_do_not_fit_are_engine_errors_in_tensorrts_words(device: Device) -> None:
    """Of FP64 inputs, which TensorRT's parser declares FP32, it has no word. ``infer_shapes`` raises (pyCore.cpp)."""
    double, reshape = device.open("double"), device.open("reshape")
    beyond = {"x": np.zeros((2, 6), np.float32), "shape": np.array([24, 1], np.int64)}
    for session, feeds, words in (
        (double, {}, "no value is given for input 'x'"),
        (double, {"x": np.zeros((2, 3), np.int64)}, "of type float32, and int64 was given"),
        (double, rows(5), "not satisfy any optimization profiles"),
        (reshape, beyond, r"do not fit together, or cannot be inferred: values \[24, 1\] of shape are out of"),
    ):
        with pytest.raises(EngineError, match=words):
            session.run(feeds)
    for dtype in (np.float32, np.float64):
        feeds = {"x": rows(2)["x"].astype(dtype)}
        np.testing.assert_array_equal(double.run(feeds)["y"], rows(2)["x"] * 2)
        assert timed(double, feeds).median_ms > 0.0


def test_files_that_are_no_engine(device: Device, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.engine"
    damaged.write_bytes(b"damaged")
    for path, words in (
        (damaged, r"damaged\.engine cannot be loaded: Serialization: Version tag does not match"),
        (tmp_path / "none" / "none.engine", r"the engine none\.engine cannot be read: No such file"),
    ):
        with pytest.raises(EngineError, match=words):
            TensorRtSession(path, EngineOptions("tensorrt"))


def test_a_context_that_is_kept_keeps_its_stream_and_is_reported(device: Device) -> None:
    session = device.open("double")
    session.run(rows(2))
    kept = session._context
    with pytest.warns(RuntimeWarning, match="TensorRT is still alive"):
        session.close()
    (stream,) = device.cuda.streams
    del kept
    device.cuda.cudaStreamDestroy(stream)


def test_tensorrt_rtx_compiles_at_once(device: Device) -> None:
    session = device.open("double", "tensorrt-rtx")
    config, strategies = session._context._runtime_config, session.library.trt.DynamicShapesKernelSpecializationStrategy
    assert config.dynamic_shapes_kernel_specialization_strategy is strategies.EAGER
    # Engines are built for inspection, and run without its cost.
    assert session._context.nvtx_verbosity is session.library.trt.ProfilingVerbosity.NONE


def test_nothing_is_released_while_the_device_still_works(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timing that fails in the middle leaves executions on the stream; their memory may not be freed before them."""
    for cuda_graph in (True, False):
        session = device.open("double", cuda_graph=cuda_graph)
        watch = session.stopwatch(rows(2))
        with monkeypatch.context() as patch:
            patch.setattr(cuda.Event, "record", lambda event, stream: cuda.check((2,), "cudaEventRecord"))
            for _ in range(2):
                with pytest.raises(EngineError, match="cudaEventRecord failed"):
                    watch.value_ms(3)
        assert device.cuda.streams[-1].queue
        session.run(rows(3))  # other shapes bind other memory
        session.stopwatch(rows(3)).enqueue()
        session.close()


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 2)])
def test_memory_on_the_host_is_aligned(shape: tuple[int, ...]) -> None:
    """TensorRT takes no address of less than 256-byte alignment (NvInferRuntime.h, setTensorAddress)."""
    for count in range(5):
        place = host_memory(shape, np.dtype(np.int64))
        assert place.ctypes.data % 256 == 0
        place[...] = count
        np.testing.assert_array_equal(place, np.full(shape, count))


DIGITS = Path(__file__).parents[3] / "benchmarks" / "models" / "digits_vit.onnx"


def job(folder: Path, program: str, kind: Kind = "tensorrt") -> EngineProfileJob:
    engine, samples = folder / f"{program}.engine", folder / "samples.npz"
    engine.write_bytes(PROGRAMS[program]().to_bytes())
    shape = (4,) if program == "nonzero" else (2, 3)
    save_samples(samples, ({"x": np.ones(shape, np.float32)},))
    return EngineProfileJob(TensorRtEngine(engine, EngineOptions(kind)), samples)


@pytest.mark.parametrize("kind", ["tensorrt", "tensorrt-rtx"])
def test_each_layer_is_timed_and_traced_to_its_nodes(kind: Kind, fake_cuda: FakeCuda, tmp_path: Path) -> None:
    found = run_here(job(tmp_path, "fused", kind))
    assert found == (
        LayerTime(("/a/MatMul", "/a/Relu"), 0.5, "/a/MatMul_myl0_0"),
        LayerTime((), 0.25, "Reformatting CopyNode for Input Tensor 0 to /b/Conv"),
        LayerTime(("/b/Conv",), 2.0, "/b/Conv_myl0_1"),
    )
    assert (fake_cuda.captures, fake_cuda.launches) == (0, 0)


def test_an_engine_that_tells_no_layers_is_an_error(fake_cuda: FakeCuda, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="the profiler reports no layers") as caught:
        run_here(job(tmp_path, "nonzero"))
    assert caught.value.kind is FailureKind.UNSUPPORTED


def test_the_longest_execution_is_left_out_and_what_is_skipped_counts_nothing() -> None:
    executions = [{"a": 1.0, "b": 4.0}, {"a": 90.0}, {"a": 2.0}]
    layers = [LayerTime(("m",), 0.0, "a"), LayerTime(("n",), 0.0, "a")]
    assert layer_times(executions, layers) == (LayerTime(("m", "n"), 1.5, "a"), LayerTime((), 0.0, "b"))


@pytest.mark.tensorrt_rtx
@pytest.mark.parametrize("every", [0, 2])
def test_layers_of_a_real_network_lead_to_every_group(every: int, tmp_path: Path) -> None:
    """What the parser writes into a layer's metadata is what the inspector says of it; an engine needs a GPU."""
    library = load_library("tensorrt-rtx")
    model = load_model(DIGITS)
    grouped = GroupedModel(model, find_groups(model))
    half = [group.id for group in grouped.groups[::every] if group.pinned is None] if every else []
    plan = grouped.uniform(Precision.FP32).replace(dict.fromkeys(half, Precision.FP16))
    typed = Rewriter(grouped).export(plan, tmp_path / "typed.onnx")
    _builder, network, _parser = parse_network(library, typed)
    parsed = [network.get_layer(index) for index in range(network.num_layers)]
    described = [{"Name": layer.name, "Metadata": layer.metadata} for layer in parsed]
    layers = read_layers(json.dumps({"Layers": described}))
    found = layer_times([{layer.name: 1.0 for layer in layers}], layers)
    assert group_times(found, grouped.owners).keys() == {group.id for group in grouped.groups}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["tensorrt", "tensorrt-rtx"])
def test_a_gpu_tells_what_its_layers_take(kind: Kind, mlp_path: Path, mlp_context: RunContext, tmp_path: Path) -> None:
    path = build_here(kind, mlp_path, tmp_path / "x.engine", [{"x": np.zeros((3, 32), np.float32)}])
    found = run_here(EngineProfileJob(TensorRtEngine(path, EngineOptions(kind)), mlp_context.samples("search")))
    assert sum(group_times(found, mlp_context.grouped.owners).values()) > 0


HALF, SINGLE = Precision.FP16, Precision.FP32


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("Two wide channel vectorized row major FP16 format", HALF),
        ("Row major linear FP32", SINGLE),
        ("Float", SINGLE),
        ("Half", HALF),
        ("BFloat16", Precision.BF16),
        ("Row major linear BF16", Precision.BF16),
        ("Row major Int32 format", None),
        ("Thirty-two wide channel vectorized row major Int8 format.", None),
        ("N/A due to dynamic shapes", None),
        ("Bool", None),
    ],
)
def test_the_types_in_tensorrts_words(text: str, precision: Precision | None) -> None:
    for key in ("Format/Datatype", "Datatype", "DataType"):
        entry = {"Name": "l", "Inputs": [], "Outputs": [{"Name": "y", key: text}]}
        (layer,) = read_layers(json.dumps({"Layers": [entry]}))
        assert layer.types == (() if precision is None else (precision,))


@pytest.mark.parametrize("text", ["", "no JSON", "[]", '{"Layers": ["a name only", "another"]}', '{"Bindings": []}'])
def test_what_tells_no_types_gives_no_layers(text: str) -> None:
    assert read_layers(text) == ()


OWNERS = {"a/MatMul": "g0", "a/Add": "g0", "b/Norm": "g1", "c/Conv": "g2", "d/Mul": "g3"}


@pytest.mark.parametrize(
    ("layers", "minor", "expected"),
    [
        ({"a/MatMul": 2.0, "a/Add": 0.5, "b/Norm": 1.0}, "", {"g0": 2.5, "g1": 1.0}),
        ({"a/MatMul b/Norm c/Conv": 9.0}, "", {}),  # nothing tells them apart
        ({"a/MatMul b/Norm c/Conv": 9.0, "d/Mul": 1.0}, "", {"g3": 1.0}),
        ({"a/MatMul b/Norm": 2.0, "a/Add": 5.0}, "", {"g0": 6.0}),  # mostly alone: it keeps its share of the rest
        ({"a/Add b/Norm": 3.0}, "a/Add", {"g0": 0.0, "g1": 3.0}),  # what only goes along takes no share, but is seen
        ({"a/MatMul": 40.0, "a/Add b/Norm": 3.0}, "a/Add", {"g0": 40.0, "g1": 3.0}),
        ({"a/Add d/Mul": 3.0}, "a/Add d/Mul", {"g0": 1.5, "g3": 1.5}),
    ],
)
def test_the_layers_of_a_group_add_up(layers: dict[str, float], minor: str, expected: dict[str, float]) -> None:
    times = [LayerTime(tuple(nodes.split()), ms) for nodes, ms in layers.items()]
    assert group_times(times, OWNERS, minor=set(minor.split())) == expected


def test_a_profile_becomes_group_times_scaled_as_the_latency_and_a_failed_one_a_warning(
    mlp_context: RunContext,
) -> None:
    grouped, latency = mlp_context.grouped, Latency.predicted(1.0)
    measured = Measurement(latency, None, 0.5, OutputError({}), "measured", 0.0, warnings=("a: b",))
    failure = Failure(Stage.TIME, FailureKind.CRASH, "killed by SIGSEGV", Path("/logs/7-EngineProfileJob.log"))
    failed = with_group_times(measured, failure, grouped)
    assert failed.group_times_ms is None
    kept, warning = failed.warnings
    assert kept == "a: b"
    assert warning.startswith("the engine's layers could not be profiled (crash: killed by SIGSEGV): ")
    assert "\n" not in warning
    layers = [LayerTime(("head/Gemm",), 2.0)]
    (head,) = (group.id for group in grouped.groups if "head/Gemm" in group.nodes)
    profiled = with_group_times(measured, layers, grouped)
    assert profiled.group_times_ms == {head: 1.0}
    assert profiled.warnings == ("a: b",)
