"""The device's names and values are those of CUDA and TensorRT that mptune uses: what runs here runs there."""

from __future__ import annotations

import pytest

from mptune.engines.cuda.system import CALLS, SystemRuntime
from tests.device import handles
from tests.device.cuda import FakeCuda
from tests.device.tensorrt import make_module
from tests.engines.tensorrt.api.record import names_in_module
from tests.engines.tensorrt.test_api import RECORDED, RTX_ONLY, named, recorded

ASKED_BY_TEXT = {"ICudaEngine.device_memory_size", "ICudaEngine.device_memory_size_v2"}
"""What the code asks for by ``getattr``."""
BUFFER = {f"IHostMemory.{name}" for name in dir(bytes) if not name.startswith("_")}
"""The buffer protocol is no name; before Python 3.12 only a type in C has it, so that ``bytes`` is inherited from."""


def test_cudas_names_and_values() -> None:
    names = {name for name in dir(FakeCuda) if name.startswith("cuda")}
    assert names == {*CALLS, "cudaGetErrorString", *(name for name in vars(SystemRuntime) if name.startswith("cuda"))}
    bindings = pytest.importorskip("cuda.bindings.runtime", reason="needs cuda-python")
    assert names <= set(dir(bindings))
    for ours in (handles.cudaError_t, handles.cudaMemcpyKind, handles.cudaStreamCaptureMode):
        theirs = getattr(bindings, ours.__name__)
        assert {one.name: int(one) for one in ours} == {one.name: int(getattr(theirs, one.name)) for one in ours}
    assert FakeCuda.cudaStreamNonBlocking == bindings.cudaStreamNonBlocking


@pytest.mark.parametrize("version", RECORDED[1:])  # the machines here have 10.3 and later
def test_tensorrts_names(version: str) -> None:
    found = names_in_module(make_module(f"{version}.0", FakeCuda())) - BUFFER
    assert found <= recorded(version)
    used = named() - RTX_ONLY
    assert found - ASKED_BY_TEXT == used | {name.partition(".")[0] for name in used}


def test_rtxs_names_are_there_too() -> None:
    wanted = {name for name in RTX_ONLY if name.split(".")[0] in ("IRuntimeConfig", "IRuntimeCache", "ICudaEngine")}
    assert wanted <= names_in_module(make_module("1.7.1", FakeCuda(), is_rtx=True))
