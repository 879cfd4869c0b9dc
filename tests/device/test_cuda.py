"""The device in host memory: its names and values are CUDA's, and each rule is held."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mptune.engines.cuda import runtime as cuda
from mptune.engines.cuda.system import CALLS, SystemRuntime
from tests.device import handles as fake
from tests.device.cuda import FakeCuda
from tests.device.rules import ForbiddenError

FLOATS = np.dtype(np.float32)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    device = FakeCuda(memory_bytes=1 << 20)
    monkeypatch.setattr(cuda, "runtime", lambda: device)
    return device


def filled(value: float) -> np.ndarray:
    return np.full(4, value, FLOATS)


def test_its_names_are_those_that_the_code_uses() -> None:
    used = {*CALLS, "cudaGetErrorString", *(name for name in vars(SystemRuntime) if name.startswith("cuda"))}
    assert {name for name in dir(FakeCuda) if name.startswith("cuda")} == used


def test_its_values_are_cudas() -> None:
    bindings = pytest.importorskip("cuda.bindings.runtime", reason="needs cuda-python")
    assert {name for name in dir(FakeCuda) if name.startswith("cuda")} <= set(dir(bindings))
    for ours in (fake.cudaError_t, fake.cudaMemcpyKind, fake.cudaStreamCaptureMode):
        theirs = getattr(bindings, ours.__name__)
        assert {one.name: int(one) for one in ours} == {one.name: int(getattr(theirs, one.name)) for one in ours}
    assert FakeCuda.cudaStreamNonBlocking == bindings.cudaStreamNonBlocking


def test_what_is_enqueued_is_done_at_the_synchronisation(device: FakeCuda) -> None:
    stream, buffer = cuda.Stream(), cuda.DeviceBuffer((4,), FLOATS)
    assert np.isnan(buffer.download(stream)).all()
    host, kind = filled(1.0), device.cudaMemcpyKind.cudaMemcpyHostToDevice
    device.cudaMemcpyAsync(buffer.address, host.ctypes.data, 16, kind, stream.handle)
    assert not (device.memory[0].data == host.view(np.uint8)).all()
    stream.synchronize()
    assert (device.memory[0].data == host.view(np.uint8)).all()
    np.testing.assert_array_equal(buffer.download(stream), host)
    buffer.close()
    stream.close()
    assert device.leaks == []
    assert device.rules.forbidden == device.rules.refused == []


def _upload(device: FakeCuda, address: int, host: int, size: int, stream: Any) -> Any:
    return device.cudaMemcpyAsync(address, host, size, device.cudaMemcpyKind.cudaMemcpyHostToDevice, stream)


def test_each_forbidden_call_is_found(device: FakeCuda) -> None:
    host = filled(1.0)
    source = host.ctypes.data
    stream, buffer, other, event = cuda.Stream(), cuda.DeviceBuffer((4,), FLOATS), cuda.Stream(), cuda.Event()
    address, gone, gone_event = buffer.address, other.handle, event.handle
    other.close()
    event.close()
    freed = cuda.DeviceBuffer((4,), FLOATS)
    freed_address = freed.address
    freed.close()
    graph = cuda.Graph(stream, lambda: _upload(device, address, source, 16, stream.handle))
    in_use = cuda.DeviceBuffer((4,), FLOATS)
    _upload(device, in_use.address, source, 16, stream.handle)
    for call, words in (
        (lambda: _upload(device, address, source, 16, 0), "the default stream"),
        (lambda: device.cudaStreamCreateWithFlags(0), "waits for the default stream"),
        (lambda: _upload(device, address, source, 17, stream.handle), "17 bytes from .* reach past the 16 bytes"),
        (lambda: _upload(device, source, source, 16, stream.handle), "is no device memory"),
        (lambda: _upload(device, address, address, 16, stream.handle), "is no memory of the host"),
        (lambda: _upload(device, freed_address, source, 16, stream.handle), "was freed"),
        (lambda: _upload(device, address, source, 16, gone), "the stream was destroyed"),
        (lambda: device.cudaEventRecord(gone_event, stream.handle), "it was destroyed"),
        (lambda: device.cudaFree(freed_address), "nothing is allocated"),
        (lambda: device.cudaFree(address + 4), "nothing is allocated"),
        (lambda: device.cudaMalloc(0), "0 bytes"),
        (in_use.close, "has not been synchronised"),
    ):
        before = len(device.rules.forbidden)
        with pytest.raises(ForbiddenError, match=words):
            call()  # type: ignore[no-untyped-call]
        assert len(device.rules.forbidden) == before + 1
    stream.synchronize()
    buffer.close()
    with pytest.raises(ForbiddenError, match="whose address was captured was freed"):
        graph.launch(stream)
    graph.close()
    stream.close()
