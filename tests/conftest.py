"""Shared fixtures: small real ONNX models, samples for them, and the ``gpu`` marker."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
import scipy.linalg  # noqa: F401 - its BLAS is not NumPy's, and is limited below only where it is loaded
from hypothesis import settings
from onnx import TensorProto, helper, numpy_helper
from threadpoolctl import threadpool_limits

if TYPE_CHECKING:
    from mptune.tuning.front import Front

OPSET = 17

DIGITS = Path(__file__).parent.parent / "benchmarks" / "models" / "digits_vit.onnx"
DIGITS_DATA = DIGITS.with_name("digits_calib.npz")

# No test may fail because the machine is busy. CI tries the same examples each time; elsewhere each run tries others.
settings.register_profile("mptune", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("mptune")


# Tests run beside each other: threads of BLAS, which gain nothing on small matrices, would wait for each other.
threadpool_limits(limits=1, user_api="blas")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU or TensorRT-RTX where there is none, and say so."""
    marked = {name: [item for item in items if item.get_closest_marker(name)] for name in ("gpu", "tensorrt_rtx")}
    from mptune.engines.tensorrt.library import is_installed

    if marked["tensorrt_rtx"] and not is_installed("tensorrt-rtx"):
        _skip(marked["tensorrt_rtx"], "tensorrt-rtx is not installed (pip install tensorrt-rtx)")
    if marked["gpu"]:
        from mptune.targets.detect import detect_gpus

        if not detect_gpus():
            _skip(marked["gpu"], "needs an NVIDIA GPU; nvidia-smi shows none here")


def _skip(items: list[pytest.Item], reason: str) -> None:
    for item in items:
        item.add_marker(pytest.mark.skip(reason=reason))


def _weight(name: str, *shape: int, scale: float = 0.2) -> TensorProto:
    generator = np.random.default_rng(sum(name.encode()))
    return numpy_helper.from_array(generator.normal(0, scale, shape).astype(np.float32), name)


def _constant(name: str, values: np.ndarray) -> TensorProto:
    return numpy_helper.from_array(values.astype(np.float32), name)


def _save(
    path: Path,
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    weights: list[TensorProto],
) -> Path:
    graph = helper.make_graph(nodes, path.stem, inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
    return path


def save_mlp(path: Path) -> Path:
    """Two blocks of LayerNormalization, Gemm, Relu, Gemm; Softmax; Gemm. Dynamic batch, 32 features in, 8 out."""
    nodes: list[onnx.NodeProto] = []
    weights: list[TensorProto] = []
    value = "x"
    for block in ("block0", "block1"):
        norm, wide, relu, narrow = (f"{block}.{part}" for part in ("norm", "wide", "relu", "narrow"))
        weights += [_constant(f"{block}.gain", np.ones(32)), _constant(f"{block}.shift", np.zeros(32))]
        weights += [_weight(f"{block}.w1", 32, 64), _weight(f"{block}.b1", 64)]
        weights += [_weight(f"{block}.w2", 64, 32), _weight(f"{block}.b2", 32)]
        nodes += [
            helper.make_node(
                "LayerNormalization", [value, f"{block}.gain", f"{block}.shift"], [norm], f"{block}/norm", epsilon=1e-5
            ),
            helper.make_node("Gemm", [norm, f"{block}.w1", f"{block}.b1"], [wide], f"{block}/fc1/Gemm"),
            helper.make_node("Relu", [wide], [relu], f"{block}/fc1/Relu"),
            helper.make_node("Gemm", [relu, f"{block}.w2", f"{block}.b2"], [narrow], f"{block}/fc2/Gemm"),
        ]
        value = narrow
    nodes += [
        helper.make_node("Softmax", [value], ["shares"], "mixing/Softmax", axis=-1),
        helper.make_node("Gemm", ["shares", "head.w", "head.b"], ["y"], "head/Gemm"),
    ]
    weights += [_weight("head.w", 32, 8), _weight("head.b", 8)]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 32])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 8])]
    return _save(path, nodes, inputs, outputs, weights)


def save_cnn(path: Path) -> Path:
    """Two convolutions with batch norm and Relu, global pooling, Gemm; static batch of 2, 3 x 16 x 16 in, 10 out."""
    nodes: list[onnx.NodeProto] = []
    weights: list[TensorProto] = []
    value, channels = "image", 3
    for index, width in enumerate((8, 16)):
        scope = f"stem{index}"
        weights += [_weight(f"{scope}.w", width, channels, 3, 3), _weight(f"{scope}.b", width)]
        weights += [_constant(f"{scope}.scale", np.ones(width)), _constant(f"{scope}.mean", np.zeros(width))]
        weights += [_constant(f"{scope}.shift", np.zeros(width)), _constant(f"{scope}.var", np.ones(width))]
        names = [f"{scope}.{part}" for part in ("conv", "norm", "relu")]
        nodes += [
            helper.make_node(
                "Conv", [value, f"{scope}.w", f"{scope}.b"], [names[0]], f"{scope}/Conv", pads=[1] * 4, strides=[2, 2]
            ),
            helper.make_node(
                "BatchNormalization",
                [names[0], f"{scope}.scale", f"{scope}.shift", f"{scope}.mean", f"{scope}.var"],
                [names[1]],
                f"{scope}/BatchNormalization",
            ),
            helper.make_node("Relu", [names[1]], [names[2]], f"{scope}/Relu"),
        ]
        value, channels = names[2], width
    nodes += [
        helper.make_node("GlobalAveragePool", [value], ["pooled"], "pool/GlobalAveragePool"),
        helper.make_node("Flatten", ["pooled"], ["flat"], "pool/Flatten"),
        helper.make_node("Gemm", ["flat", "head.w", "head.b"], ["logits"], "head/Gemm"),
    ]
    weights += [_weight("head.w", 16, 10), _weight("head.b", 10)]
    inputs = [helper.make_tensor_value_info("image", TensorProto.FLOAT, [2, 3, 16, 16])]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [2, 10])]
    return _save(path, nodes, inputs, outputs, weights)


@pytest.fixture(scope="session")
def mlp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of ``save_mlp``'s model; do not write beside it."""
    return save_mlp(tmp_path_factory.mktemp("models") / "mlp.onnx")


@pytest.fixture(scope="session")
def cnn_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of ``save_cnn``'s model; do not write beside it."""
    return save_cnn(tmp_path_factory.mktemp("models") / "cnn.onnx")


@pytest.fixture(scope="session")
def mlp_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight samples for the MLP, as .npz."""
    path = tmp_path_factory.mktemp("data") / "mlp.npz"
    np.savez(path, x=np.random.default_rng(7).normal(size=(8, 32)).astype(np.float32))
    return path


def run_mptune(*arguments: object, where: Path) -> subprocess.CompletedProcess[str]:
    """Run ``mptune`` in a folder, as a process."""
    command = [sys.executable, "-m", "mptune", *map(str, arguments)]
    return subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the README's command ran, with a smaller budget; do not change its run."""
    folder = tmp_path_factory.mktemp("digits")
    options = ("--data", DIGITS_DATA, "--budget", 16, "--target", "jetson-orin-nano-8gb")
    done = run_mptune("search", DIGITS, *options, where=folder)
    assert done.returncode == 0, done.stderr
    assert "pred. ms" in done.stdout
    return folder


@pytest.fixture
def place(tmp_path: Path, mlp_data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with model.onnx and data.npz."""
    save_mlp(tmp_path / "model.onnx")
    shutil.copy(mlp_data, tmp_path / "data.npz")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def opened_here() -> Iterator[None]:
    """What a search or a pick writes is opened in this process: one of its own takes a third to half of a search."""
    from mptune.engines import loading
    from mptune.engines.base import EngineError, Failure, Stage
    from mptune.processes.child import WorkerState

    class Here(AbstractContextManager["Here"]):
        def call(self, job: loading.OpenJob, timeout_s: float) -> Failure | None:
            try:
                job.run(WorkerState())
            except EngineError as error:
                return Failure(Stage.BUILD, error.kind, error.message)
            return None

        def __exit__(self, *exception: object) -> None:
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "Worker", Here)
        yield


def searched_folder(folder: Path, data: Path, search: Callable[[], object]) -> Path:
    """The folder, with model.onnx, data.npz, and what a search leaves that is started in it."""
    save_mlp(folder / "model.onnx")
    shutil.copy(data, folder / "data.npz")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        search()
    return folder


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, mlp_data: Path) -> Path:
    """A run directory of 12 plans on the fake toolchain; copy it."""
    from tests.fakes import make_toolchain, search

    folder = tmp_path_factory.mktemp("finished")
    return searched_folder(folder, mlp_data, lambda: search(make_toolchain())) / "model.mptune"


@pytest.fixture
def searched(place: Path, finished: Path) -> Front:
    """The front of a copy of it in the working directory."""
    from mptune import report

    shutil.copytree(finished, place / "model.mptune")
    for name in ("run.json", "front.json"):
        path = place / "model.mptune" / name
        path.write_text(path.read_text().replace(str(finished.parent), str(place)))
    return report("model.mptune")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """An empty run directory."""
    path = tmp_path / "model.mptune"
    path.mkdir()
    return path


@pytest.fixture
def spends_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search goes on although nothing better is expected."""
    for name in ("ENOUGH", "PATIENCE"):
        monkeypatch.setattr(f"mptune.tuning.tuner.{name}", 10**6)
