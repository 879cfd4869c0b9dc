"""The module ``tensorrt`` of each version: its names are those that mptune uses, and its rules are the headers'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.device.blueprint import Blueprint
from tests.device.building import ILogger
from tests.device.cuda import FakeCuda
from tests.device.programs import double
from tests.device.rules import ForbiddenError
from tests.device.tensorrt import make_module
from tests.engines.tensorrt.api.record import names_in_module
from tests.engines.tensorrt.test_api import RECORDED, RTX_ONLY, named, recorded

ASKED_BY_TEXT = {"ICudaEngine.device_memory_size", "ICudaEngine.device_memory_size_v2"}
"""What the code asks for by ``getattr``."""
BUFFER = {f"IHostMemory.{name}" for name in dir(bytes) if not name.startswith("_")}
"""The buffer protocol is no name; before Python 3.12 only a type in C has it, so that ``bytes`` is inherited from."""


class Log(ILogger):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def log(self, severity: Any, message: str) -> None:
        self.lines.append(f"{severity.name}: {message}")


class Runner:
    """A context on one of the small engines."""

    def __init__(self, blueprint: Blueprint) -> None:
        self.cuda, self.log = FakeCuda(), Log()
        self.trt = make_module("10.16.2", self.cuda)
        self.runtime = self.trt.Runtime(self.log)
        self.engine = self.runtime.deserialize_cuda_engine(blueprint.to_bytes())
        self.context = self.engine.create_execution_context()
        self.stream = self.cuda.cudaStreamCreateWithFlags(1)[1]

    def bind(self, **sizes: int) -> None:
        for name, size in sizes.items():
            assert self.context.set_tensor_address(name, self.cuda.cudaMalloc(size)[1])

    def enqueue(self) -> bool:
        return bool(self.context.execute_async_v3(int(self.stream)))


@pytest.fixture
def twice() -> Runner:
    return Runner(double())


@pytest.mark.parametrize("version", RECORDED[1:])  # the machines here have 10.3 and later
def test_its_names_are_those_that_the_code_uses(version: str) -> None:
    found = names_in_module(make_module(f"{version}.0", FakeCuda())) - BUFFER
    assert found <= recorded(version)
    used = named() - RTX_ONLY
    assert found - ASKED_BY_TEXT == used | {name.partition(".")[0] for name in used}


def test_rtxs_names_are_there_too() -> None:
    wanted = {name for name in RTX_ONLY if name.split(".")[0] in ("IRuntimeConfig", "IRuntimeCache", "ICudaEngine")}
    assert wanted <= names_in_module(make_module("1.7.1", FakeCuda(), is_rtx=True))


def test_its_objects_take_no_attributes_of_ones_own(twice: Runner) -> None:
    with pytest.raises(AttributeError, match="no attribute 'nvtx_verbosty'"):
        twice.context.nvtx_verbosty = 1


def test_engines_of_others_are_refused_in_tensorrts_words() -> None:
    runner = Runner(double())
    for change, words in (
        ({"version": "10.3.0"}, "Version tag does not match"),
        ({"capability": (8, 7)}, "expecting compute 8.9 got compute 8.7"),
    ):
        data = Blueprint(**{**vars(double()), **change}).to_bytes()
        assert runner.runtime.deserialize_cuda_engine(data) is None
        assert words in runner.log.lines[-1]
    assert runner.runtime.deserialize_cuda_engine(double().to_bytes()[:-1]) is None
    assert runner.cuda.rules.forbidden == runner.cuda.rules.refused == []


def test_what_is_refused_returns_an_error_and_is_kept(twice: Runner) -> None:
    context, rules = twice.context, twice.cuda.rules
    calls: list[tuple[Callable[[], bool], str]] = [
        (lambda: context.set_input_shape("z", (1, 3)), "z is no input"),
        (lambda: context.set_input_shape("x", (2, 4)), "Static dimension mismatch while setting input shape for x"),
        (lambda: context.set_input_shape("x", (5, 3)), "not satisfy any optimization profiles"),
        (lambda: context.set_tensor_address("x", 0x1001), "not aligned to 256"),
        (twice.enqueue, "Input shapes are not specified for x"),
        (lambda: context.set_input_shape("x", (2, 3)) and twice.enqueue(), "Address is not set for x"),
    ]
    for number, (call, words) in enumerate(calls):
        assert call() is False
        assert words in rules.refused[number]
        assert words in twice.log.lines[number]
    assert rules.forbidden == []


def test_each_forbidden_call_is_found(twice: Runner) -> None:
    context, cuda = twice.context, twice.cuda
    context.set_input_shape("x", (2, 3))
    twice.bind(x=24, y=24, total=4)
    for call, words in (
        (lambda: context.execute_async_v3(0), "the default stream"),
        (lambda: context.execute_async_v3(12345), "the stream was destroyed"),
        (lambda: captured(twice), "captured before an execution with these shapes"),
    ):
        with pytest.raises(ForbiddenError, match=words):
            call()  # type: ignore[no-untyped-call]
    cuda.cudaStreamEndCapture(twice.stream)
    assert twice.enqueue()
    other = cuda.cudaStreamCreateWithFlags(1)[1]
    with pytest.raises(ForbiddenError, match="one context on two streams"):
        context.execute_async_v3(int(other))
    cuda.cudaStreamSynchronize(twice.stream)
    context.set_input_shape("x", (3, 3))
    with pytest.raises(ForbiddenError, match=r"36 bytes from .* reach past the 24 bytes"):
        twice.enqueue()


def captured(runner: Runner) -> Any:
    """The graph of one execution."""
    runner.cuda.cudaStreamBeginCapture(runner.stream, 1)
    assert runner.enqueue()
    graph = runner.cuda.cudaStreamEndCapture(runner.stream)[1]
    return runner.cuda.cudaGraphInstantiate(graph, 0)[1]


def test_a_graph_uses_what_was_bound_when_it_was_captured(twice: Runner) -> None:
    context, cuda = twice.context, twice.cuda
    context.set_input_shape("x", (1, 3))
    twice.bind(x=12, y=12, total=4)
    assert twice.enqueue()
    cuda.cudaStreamSynchronize(twice.stream)
    graph, (x, y, _) = captured(twice), cuda.memory[-3:]
    twice.bind(x=12, y=12)
    context.set_input_shape("x", (1, 3))
    x.data[:] = np.arange(3, dtype=np.float32).view(np.uint8)
    x.version += 1
    cuda.cudaGraphLaunch(graph, twice.stream)
    cuda.cudaStreamSynchronize(twice.stream)
    np.testing.assert_array_equal(y.data.view(np.float32), [0, 2, 4])
    del twice.context, context
    with pytest.raises(ForbiddenError, match="whose address was captured was freed"):
        cuda.cudaGraphLaunch(graph, twice.stream)


def test_an_inspector_does_not_keep_its_context(twice: Runner) -> None:
    inspector = twice.engine.create_engine_inspector()
    inspector.execution_context = twice.context
    assert inspector.get_engine_information(twice.trt.LayerInformationFormat.JSON)
    del twice.context
    with pytest.raises(ForbiddenError, match="its execution context was freed"):
        inspector.get_engine_information(twice.trt.LayerInformationFormat.JSON)
