"""Shared fixtures: small real ONNX models, samples for them, and the ``gpu`` marker."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
import scipy.linalg  # noqa: F401 - its BLAS is not NumPy's, and is limited below only where it is loaded
from hypothesis import settings
from threadpoolctl import threadpool_limits

from tests.graph.models import constant, model, node, save, value

if TYPE_CHECKING:
    from mptune.tuning.front import Front

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


def _weights(shapes: Mapping[str, Sequence[int]]) -> list[onnx.TensorProto]:
    """Scales and variances are ones, shifts and means zeros, and all else small normal values."""
    constants = {"gain": np.ones, "scale": np.ones, "var": np.ones, "shift": np.zeros, "mean": np.zeros}
    return [
        constant(name, np.random.default_rng(sum(name.encode())).normal(0, 0.2, shape))
        if (part := name.rpartition(".")[2]) not in constants
        else constant(name, constants[part](shape))
        for name, shape in shapes.items()
    ]


def save_mlp(path: Path) -> Path:
    """Two blocks of LayerNormalization, Gemm, Relu, Gemm; Softmax; Gemm. Dynamic batch, 32 features in, 8 out."""
    nodes, shapes, x = list[onnx.NodeProto](), dict[str, Sequence[int]](), "x"
    for b in ("block0", "block1"):
        shapes |= {f"{b}.gain": (32,), f"{b}.shift": (32,)}
        shapes |= {f"{b}.w1": (32, 64), f"{b}.b1": (64,), f"{b}.w2": (64, 32), f"{b}.b2": (32,)}
        nodes += [
            node("LayerNormalization", [x, f"{b}.gain", f"{b}.shift"], f"{b}.norm", f"{b}/norm", epsilon=1e-5),
            node("Gemm", [f"{b}.norm", f"{b}.w1", f"{b}.b1"], f"{b}.wide", f"{b}/fc1/Gemm"),
            node("Relu", [f"{b}.wide"], f"{b}.relu", f"{b}/fc1/Relu"),
            node("Gemm", [f"{b}.relu", f"{b}.w2", f"{b}.b2"], x := f"{b}.narrow", f"{b}/fc2/Gemm"),
        ]
    nodes.append(node("Softmax", [x], "shares", "mixing/Softmax", axis=-1))
    nodes.append(node("Gemm", ["shares", "head.w", "head.b"], "y", "head/Gemm"))
    weights = _weights(shapes | {"head.w": (32, 8), "head.b": (8,)})
    return _save(path, model(nodes, [value("x", ["batch", 32])], [value("y", ["batch", 8])], weights))


def save_cnn(path: Path) -> Path:
    """Two convolutions with batch norm and Relu, global pooling, Gemm; static batch of 2, 3 x 16 x 16 in, 10 out."""
    nodes, shapes, x, channels = list[onnx.NodeProto](), dict[str, Sequence[int]](), "image", 3
    for s, width in (("stem0", 8), ("stem1", 16)):
        norm = [f"{s}.{part}" for part in ("scale", "shift", "mean", "var")]
        shapes |= {f"{s}.w": (width, channels, 3, 3), **dict.fromkeys((f"{s}.b", *norm), (width,))}
        nodes += [
            node("Conv", [x, f"{s}.w", f"{s}.b"], f"{s}.conv", f"{s}/Conv", pads=[1] * 4, strides=[2, 2]),
            node("BatchNormalization", [f"{s}.conv", *norm], f"{s}.norm", f"{s}/BatchNormalization"),
            node("Relu", [f"{s}.norm"], x := f"{s}.relu", f"{s}/Relu"),
        ]
        channels = width
    nodes += [
        node("GlobalAveragePool", [x], "pooled", "pool/GlobalAveragePool"),
        node("Flatten", ["pooled"], "flat", "pool/Flatten"),
        node("Gemm", ["flat", "head.w", "head.b"], "logits", "head/Gemm"),
    ]
    weights = _weights(shapes | {"head.w": (16, 10), "head.b": (10,)})
    return _save(path, model(nodes, [value("image", [2, 3, 16, 16])], [value("logits", [2, 10])], weights))


def _save(path: Path, proto: onnx.ModelProto) -> Path:
    proto.graph.name = path.stem
    del proto.opset_import[1:]
    return save(proto, path.parent, path.name)


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
        monkeypatch.setattr(f"mptune.tuning.stopping.{name}", 10**6)
