"""The system's own CUDA library in place of cuda-python, and what is said where neither works."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from ctypes import CFUNCTYPE, c_int
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mptune.engines import cuda
from mptune.engines import cuda as system
from mptune.engines.base import EngineError, FailureKind
from mptune.engines.cuda import SystemRuntime, load_system_runtime, system_libraries
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
        for name, types in system.CALLS.items():
            setattr(self, system.SYMBOLS.get(name, name), self.function(name, types))
        self.words = {
            35: b"cudaErrorInsufficientDriver",
            901: b"cudaErrorStreamCaptureInvalidated",
            0: b"words of CUDA",
        }
        kept = {code: ctypes.create_string_buffer(text) for code, text in self.words.items()}
        place = CFUNCTYPE(ctypes.c_void_p, c_int)  # as an address: what a callback returns as text is lost
        self.cudaGetErrorName = place(lambda code: ctypes.addressof(kept[code]))
        self.cudaGetErrorString = place(lambda code: ctypes.addressof(kept[0]))

    def function(self, name: str, types: tuple[Any, ...]) -> Any:
        def call(*arguments: Any) -> int:
            written = [value for value, kind in zip(arguments, types, strict=True) if hasattr(kind, "contents")]
            given = [value for value, kind in zip(arguments, types, strict=True) if not hasattr(kind, "contents")]
            code, *made = self.answer(name, given)
            if written and code == 0:
                written[0][0] = made[0] if isinstance(made[0], float) else int(made[0])
            return int(code)

        return CFUNCTYPE(c_int, *types)(call)

    def answer(self, name: str, values: list[Any]) -> tuple[Any, ...]:
        if name == "cudaGetDeviceCount":
            return (0, self.devices) if self.driver >= 12000 else (35, 0)
        if name == "cudaDriverGetVersion":
            return 0, self.driver
        return getattr(self.device, name)(*values)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    cuda.runtime.cache_clear()
    yield
    cuda.runtime.cache_clear()


@pytest.fixture
def no_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda-python is not installed."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)


def bindings(monkeypatch: pytest.MonkeyPatch, *, count: tuple[int, int], driver: int) -> Any:
    """A ``cuda.bindings.runtime`` that answers so."""

    class Error(int):
        @property
        def name(self) -> str:
            return {0: "cudaSuccess", 35: "cudaErrorInsufficientDriver", 100: "cudaErrorNoDevice"}[self]

    module = SimpleNamespace(
        cudaGetDeviceCount=lambda: (Error(count[0]), count[1]), cudaDriverGetVersion=lambda: (Error(0), driver)
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(runtime=module))
    monkeypatch.setattr(cuda, "load_system_runtime", lambda: None)
    cuda.runtime.cache_clear()
    return module


def test_a_driver_that_is_too_old_is_told_with_the_package_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings(monkeypatch, count=(35, 0), driver=12060)
    monkeypatch.setattr(cuda, "detect_gpus", lambda: ())
    with pytest.raises(EngineError, match="the driver is older than the CUDA of cuda-python: ") as caught:
        cuda.require_device()
    assert caught.value.kind is FailureKind.DRIVER
    assert cuda.INSTALL[12] in caught.value.message


@pytest.mark.parametrize(("code", "driver"), [(35, 0), (100, 13000), (0, 13000)])
def test_no_driver_and_no_device_are_no_matter_of_packages(
    monkeypatch: pytest.MonkeyPatch, code: int, driver: int
) -> None:
    bindings(monkeypatch, count=(code, 0), driver=driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(EngineError) as caught:
        cuda.require_device()
    assert (caught.value.kind, caught.value.message) == (FailureKind.DEVICE_LOST, "no CUDA device is visible")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cuda.unavailable_reason() == "no CUDA device is visible (CUDA_VISIBLE_DEVICES is '')"


def test_the_systems_library_takes_the_place_of_refused_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    module = bindings(monkeypatch, count=(35, 0), driver=12060)
    found = SystemRuntime(CLibrary(FakeCuda()))
    monkeypatch.setattr(cuda, "load_system_runtime", lambda: found)
    assert cuda.runtime() is found
    assert cuda.unavailable_reason() is None
    working = bindings(monkeypatch, count=(0, 1), driver=13000)
    assert cuda.runtime() is working is not module
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)  # without either the package is named
    cuda.runtime.cache_clear()
    assert "pip install 'cuda-bindings<13'" in (cuda.unavailable_reason() or "")


@pytest.mark.usefixtures("no_bindings")
def test_an_engine_runs_on_the_systems_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its errors have CUDA's name and words."""
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
    stream = cuda.Stream()
    with pytest.raises(EngineError, match="failed with cudaErrorStreamCaptureInvalidated: words of CUDA"):
        cuda.Graph(stream, lambda: device.cudaMalloc(1))


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


@pytest.mark.parametrize(("code", "sms"), [(0, 4), (35, None)])
def test_the_multiprocessors_that_cuda_reports(code: int, sms: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = bindings(monkeypatch, count=(0, 1), driver=12060)
    module.cudaDeviceAttr = SimpleNamespace(cudaDevAttrMultiProcessorCount=16)
    module.cudaDeviceGetAttribute = lambda attribute, device: (code, {16: 4}[attribute])  # driver_types.h
    module.cudaGetErrorString = lambda code: (0, b"words")
    assert cuda.multiprocessors() == sms
