"""Mistakes in mptune's own code, planted line by line: the device finds each."""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from mptune.engines.cuda import runtime as cuda
from mptune.engines.cuda.runtime import StreamStopwatch
from mptune.engines.tensorrt import builder, session
from mptune.engines.tensorrt.library import is_installed
from mptune.engines.tensorrt.session import TensorRtSession
from mptune.graph.plan import Precision, PrecisionPlan
from tests.device.bench import Bench
from tests.device.machines import ADA

pytestmark = pytest.mark.skipif(not is_installed("tensorrt-rtx"), reason="tensorrt-rtx is not installed")

FUTURE = __future__.annotations.compiler_flag
SESSION, STOPWATCH = TensorRtSession, StreamStopwatch
BOUND, BUFFER = session._Bound, cuda.DeviceBuffer
NEW_OUTPUT = "cuda.DeviceBuffer(shape, self.tensor_type(name))"

MISTAKES: dict[str, tuple[Any, str, str, str, str]] = {
    "captured before it ran": (
        *(SESSION, "_launcher", "    self._enqueue()\n    stream.synchronize()\n", ""),
        "captured before an execution",
    ),
    "freed while it is used": (
        *(SESSION, "run", "self._enqueue()", "self._enqueue(); bound.inputs['x'].close()"),
        "has not been synchronised",
    ),
    "a graph that outlives its buffers": (BOUND, "close", "self.graph.close()", "pass", "graphexec not freed"),
    "memory that is never freed": (BOUND, "close", "place.close()", "pass", "bytes not freed"),
    "an address that is not set": (
        *(SESSION, "_bind_anew", f"{NEW_OUTPUT}\n                self._place(name, bound.outputs[name])", NEW_OUTPUT),
        "Address is not set for y",
    ),
    "too small a buffer": (
        *(SESSION, "_bind_anew", NEW_OUTPUT, "cuda.DeviceBuffer((1,), self.tensor_type(name))"),
        "reach past the 4 bytes",
    ),
    "a profile that is too narrow": (
        *(builder, "_fill_profile", "chosen.usual, chosen.largest)", "chosen.usual, chosen.usual)"),
        "not satisfy any optimization profiles",
    ),
    "no profile": (
        *(builder, "build_engine", "config.add_optimization_profile(profile) < 0", "False"),
        "no optimization profile has been defined",
    ),
    "TF32 left on": (builder, "_configure", "if not options.tf32:", "if False:", "Not equal to tolerance"),
    "types of the graph not obeyed": (
        *(builder, "parse_network", "1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)", "0"),
        "Not equal to tolerance",
    ),
    "the default stream": (
        *(SESSION, "_enqueue", "context.execute_async_v3(stream.address)", "context.execute_async_v3(0)"),
        "the default stream",
    ),
    "read before it is there": (BUFFER, "download", "stream.synchronize()", "pass", "Not equal to tolerance"),
    "inputs of the run before": (
        *(SESSION, "_bind", "place.upload(arrays[name], stream)", "pass"),
        "Not equal to tolerance",
    ),
    "events read too early": (STOPWATCH, "value_ms", "self._stream.synchronize()", "pass", "cudaErrorNotReady"),
    "events that are never destroyed": (STOPWATCH, "value_ms", "event.close()", "pass", "event not freed"),
    "a stream that is not destroyed": (SESSION, "close", "self._stream.close()", "pass", "stream not freed"),
}
"""What is wrong -> owner and name of a function, a line of it, what stands there instead, and what is found."""


SAMPLES = [{"x": np.random.default_rng(rows).normal(size=(rows, 8)).astype(np.float32)} for rows in (2, 3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two products, each a group of its own."""
    generator = np.random.default_rng(0)
    weights = [numpy_helper.from_array(generator.normal(size=(8, 8)).astype(np.float32), name) for name in "ab"]
    nodes = [helper.make_node("MatMul", ["x", "a"], ["h"], "one"), helper.make_node("MatMul", ["h", "b"], ["y"], "two")]
    infos = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 8])] for name in "xy"]
    graph = helper.make_graph(nodes, "g", *infos, weights)
    path = tmp_path_factory.mktemp("model") / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The engine of the plan: building takes most of the time, and is the same for all mistakes that are not in it."""
    with Bench(ADA, model, tmp_path_factory.mktemp("engine")) as bench:
        return bench.build(mixed(bench), SAMPLES)


@pytest.fixture
def bench(model: Path, tmp_path: Path) -> Iterator[Bench]:
    with Bench(ADA, model, tmp_path) as bench:
        yield bench


def mixed(bench: Bench) -> PrecisionPlan:
    first, second = (group.id for group in bench.groups)
    return PrecisionPlan(bench.model.sha256, {first: Precision.FP32, second: Precision.FP16})


def plant(patch: pytest.MonkeyPatch, owner: Any, name: str, line: str, mistake: str) -> None:
    """Replace one line of a function."""
    function = inspect.unwrap(inspect.getattr_static(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(line) == 1, f"{name} has no such line, or several"
    scope = dict(vars(inspect.getmodule(function)))
    exec(compile(source.replace(line, mistake), f"<{name}>", "exec", dont_inherit=True, flags=FUTURE), scope)
    patch.setattr(owner, name, scope[name])


def test_without_a_mistake_nothing_is_found(bench: Bench, engine: bytes) -> None:
    bench.run(mixed(bench), SAMPLES, engine)


@pytest.mark.parametrize("title", MISTAKES)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:an engine of TensorRT is still")
def test_each_mistake_is_found(title: str, bench: Bench, engine: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, line, mistake, words = MISTAKES[title]
    plant(monkeypatch, owner, name, line, mistake)
    with pytest.raises(Exception) as caught:
        bench.run(mixed(bench), SAMPLES, None if owner is builder else engine)
    rules = bench.cuda.rules
    assert words in "\n".join((str(caught.value), *rules.forbidden, *rules.refused))
