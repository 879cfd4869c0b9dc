"""The system's own CUDA library in place of cuda-python, and what is said where neither works."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from ctypes import CFUNCTYPE, c_int
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mptune.engines.base import EngineError, FailureKind
from mptune.engines.cuda import runtime as cuda
from mptune.engines.cuda import system
from mptune.engines.cuda.system import SystemRuntime, load_system_runtime, system_libraries
from mptune.engines.tensorrt import session as tensorrt_session
from mptune.engines.tensorrt.library import Library
from mptune.engines.tensorrt.session import EngineOptions, TensorRtSession
from tests.device.cuda import FakeCuda
from tests.device.programs import double
from tests.device.tensorrt import make_module


class CLibrary:
    """``FakeCuda`` with the C interface of ``libcudart``: pointers in and out, handles as addresses."""

    def __init__(self, device: FakeCuda, driver: int = 12060, devices: int = 1) -> None:
        self.device = device
        self.driver, self.devices = driver, devices
        for name, (written, given) in system._CALLS.items():
            setattr(self, system._SYMBOLS.get(name, name), self.function(name, written, given))
        self.words = {
            35: b"cudaErrorInsufficientDriver",
            901: b"cudaErrorStreamCaptureInvalidated",
            0: b"words of CUDA",
        }
        kept = {code: ctypes.create_string_buffer(text) for code, text in self.words.items()}
        place = CFUNCTYPE(ctypes.c_void_p, c_int)  # as an address: what a callback returns as text is lost
        self.cudaGetErrorName = place(lambda code: ctypes.addressof(kept[code]))
        self.cudaGetErrorString = place(lambda code: ctypes.addressof(kept[0]))

    def function(self, name: str, written: Any, given: tuple[Any, ...]) -> Any:
        last = name in system._WRITES_LAST
        pointer = [] if written is None else [ctypes.POINTER(written)]
        types = [*given, *pointer] if last else [*pointer, *given]

        def call(*arguments: Any) -> int:
            values = list(arguments)
            place = None if written is None else values.pop(-1 if last else 0)
            code, *made = self.answer(name, values)
            if place is not None and code == 0:
                place[0] = made[0] if isinstance(made[0], float) else int(made[0])
            return int(code)

        return CFUNCTYPE(c_int, *types)(call)

    def answer(self, name: str, values: list[Any]) -> tuple[Any, ...]:
        if name == "cudaGetDeviceCount":
            return (0, self.devices) if self.driver >= 12000 else (35, 0)
        if name in ("cudaDriverGetVersion", "cudaRuntimeGetVersion"):
            return 0, self.driver if name.startswith("cudaDriver") else 12060
        return getattr(self.device, name)(*values)  # type: ignore[no-any-return]


@pytest.fixture
def no_bindings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """cuda-python is not installed."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    cuda.runtime.cache_clear()
    yield
    cuda.runtime.cache_clear()


def bindings(monkeypatch: pytest.MonkeyPatch, *, count: tuple[int, int], versions: tuple[int, int]) -> Any:
    """A ``cuda.bindings.runtime`` that answers so."""

    class Error(int):
        @property
        def name(self) -> str:
            return {0: "cudaSuccess", 35: "cudaErrorInsufficientDriver", 100: "cudaErrorNoDevice"}[self]

    module = SimpleNamespace(
        cudaGetDeviceCount=lambda: (Error(count[0]), count[1]),
        cudaDriverGetVersion=lambda: (Error(0), versions[0]),
        cudaRuntimeGetVersion=lambda: (Error(0), versions[1]),
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(runtime=module))
    monkeypatch.setattr(cuda, "load_system_runtime", lambda: None)
    cuda.runtime.cache_clear()
    return module


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    cuda.runtime.cache_clear()


@pytest.mark.parametrize(
    ("driver", "built_for", "words", "command"),
    [
        (12060, 13050, "the driver supports CUDA 12.6, and cuda-python is built for CUDA 13.5", "'cuda-bindings<13'"),
        (12020, 13000, "the driver supports CUDA 12.2, and cuda-python is built for CUDA 13.0", "'cuda-bindings<13'"),
        (13000, 14000, "the driver supports CUDA 13.0, and cuda-python is built for CUDA 14.0", "'cuda-bindings<14'"),
        (11040, 12090, "the driver supports CUDA 11.4, and cuda-python is built for CUDA 12.9", "update the driver"),
    ],
)
def test_a_driver_that_is_too_old_is_told_with_both_versions(
    monkeypatch: pytest.MonkeyPatch, driver: int, built_for: int, words: str, command: str
) -> None:
    bindings(monkeypatch, count=(35, 0), versions=(driver, built_for))
    reason = cuda.unavailable_reason()
    assert reason is not None
    assert words in reason
    assert command in reason
    assert "no CUDA device" not in reason
    with pytest.raises(EngineError) as caught:
        cuda.device_count()
    assert caught.value.kind is FailureKind.UNSUPPORTED


@pytest.mark.parametrize(("code", "driver"), [(35, 0), (100, 13000), (0, 13000)])
def test_no_driver_and_no_device_are_no_matter_of_versions(
    monkeypatch: pytest.MonkeyPatch, code: int, driver: int
) -> None:
    bindings(monkeypatch, count=(code, 0), versions=(driver, 13000))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cuda.device_count() == 0
    assert cuda.unavailable_reason() == "no CUDA device is visible"
    assert cuda.missing_package() == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cuda.unavailable_reason() == "no CUDA device is visible (CUDA_VISIBLE_DEVICES is '')"


def test_the_systems_library_takes_the_place_of_refused_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    module = bindings(monkeypatch, count=(35, 0), versions=(12060, 13050))
    found = SystemRuntime(CLibrary(FakeCuda()))
    monkeypatch.setattr(cuda, "load_system_runtime", lambda: found)
    assert cuda.runtime() is found
    assert cuda.unavailable_reason() is None
    assert cuda.versions() == (12060, 12060)
    working = bindings(monkeypatch, count=(0, 1), versions=(13000, 13000))
    assert cuda.runtime() is working is not module


@pytest.mark.usefixtures("no_bindings")
def test_without_either_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "load_system_runtime", lambda: None)
    assert "pip install 'cuda-bindings<13'" in (cuda.unavailable_reason() or "")
    assert cuda.missing_package() == "pip install 'cuda-bindings<13'"


@pytest.mark.usefixtures("no_bindings")
def test_an_engine_runs_on_the_systems_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeCuda()
    found = SystemRuntime(CLibrary(device))
    monkeypatch.setattr(cuda, "load_system_runtime", lambda: found)
    trt = make_module("10.16.2", device)
    monkeypatch.setattr(tensorrt_session, "load_library", lambda kind, plugins: Library(kind, trt, "10.16"))
    (tmp_path / "e").write_bytes(double().to_bytes())
    session = TensorRtSession(tmp_path / "e", EngineOptions("tensorrt"))
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.array_equal(session.run({"x": x})["y"], 2 * x)
    watch = session.stopwatch({"x": x})
    assert (device.captures, device.launches) == (1, 1)
    assert watch.value_ms(3) == pytest.approx(1.0)
    session.close()
    assert device.leaks == []
    assert device.rules.forbidden == device.rules.refused == []


@pytest.mark.usefixtures("no_bindings")
def test_errors_have_cudas_name_and_words(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeCuda()
    monkeypatch.setattr(cuda, "load_system_runtime", lambda: SystemRuntime(CLibrary(device)))
    stream = cuda.Stream()
    with pytest.raises(EngineError, match="failed with cudaErrorStreamCaptureInvalidated: words of CUDA"):
        cuda.Graph(stream, lambda: device.cudaMalloc(1))


def test_every_call_that_is_made_is_there() -> None:
    """The calls of ``runtime.py`` and ``stopwatch.py``, read from their text."""
    import re

    folder = Path(cuda.__file__).parent
    named = set(re.findall(r"\bcuda[A-Z]\w+(?=\()", "".join(p.read_text() for p in folder.glob("[rs]*.py"))))
    assert {"cudaMalloc", "cudaGraphLaunch"} <= named
    assert named <= system._CALLS.keys() | {"cudaGetErrorString", "cudaError"}


def test_libraries_are_tried_newest_first(tmp_path: Path) -> None:
    for name in (
        "usr/local/cuda/lib64/libcudart.so.12.6.68",
        "usr/local/cuda/targets/aarch64-linux/lib/libcudart.so.13.0.48",
        "usr/lib/aarch64-linux-gnu/libcudart.so.11.4",
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"no library")
    versions = [Path(name).name for name in system_libraries(tmp_path)][:3]
    assert versions == ["libcudart.so.13.0.48", "libcudart.so.12.6.68", "libcudart.so.11.4"]
    found = load_system_runtime(tmp_path)  # those that are no libraries are passed over
    assert found is None or cuda.unavailable_reason() is None


def test_a_real_library_has_every_symbol() -> None:
    """Wherever one is: of the system, or of NVIDIA's package ``nvidia-cuda-runtime``."""
    folders = [Path(place) / "nvidia" for place in sys.path if place]
    packages = [str(p) for f in folders for p in f.glob("**/libcudart.so.*")]
    for name in (*packages, *system_libraries()):
        runtime = SystemRuntime(ctypes.CDLL(name))
        code, version = runtime.cudaRuntimeGetVersion()
        assert (code, code.name) == (0, "cudaSuccess")
        assert version >= 11040
        code, _ = runtime.cudaGetDeviceCount()
        assert code == 0 or code.name.startswith("cudaError")
        return
    pytest.skip("no libcudart here")


@pytest.mark.parametrize(
    ("requires", "begins"), [(["cuda-bindings==13.0.3"], "update the driver, or, in"), ([], "pip ")]
)
def test_what_torch_brought_is_not_made_older(
    requires: list[str], begins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: requires)
    bindings(monkeypatch, count=(35, 0), versions=(12060, 13000))
    assert cuda.missing_package().startswith(begins)
    assert cuda.missing_package().endswith("pip install 'cuda-bindings<13'")


@pytest.mark.parametrize(("code", "sms"), [(0, 4), (35, None)])
def test_the_multiprocessors_that_cuda_reports(code: int, sms: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = bindings(monkeypatch, count=(0, 1), versions=(12060, 12060))
    module.cudaDeviceAttr = SimpleNamespace(cudaDevAttrMultiProcessorCount=16)
    module.cudaDeviceGetAttribute = lambda attribute, device: (code, {16: 4}[attribute])  # driver_types.h
    module.cudaGetErrorString = lambda code: (0, b"words")
    assert cuda.multiprocessors() == sms
