"""A device in host memory on which TensorRT's sessions open."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mptune.engines.cuda import runtime as cuda
from mptune.engines.tensorrt import session as tensorrt_session
from mptune.engines.tensorrt.library import MODULES, Library
from tests.device.cuda import FakeCuda
from tests.device.tensorrt import make_module


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """The device; in the end nothing is left on it, and no rule of TensorRT's was broken."""
    device = FakeCuda()
    monkeypatch.setattr(cuda, "runtime", lambda: device)
    modules = {kind: make_module("10.16.2", device, is_rtx=kind != "tensorrt") for kind in MODULES}
    monkeypatch.setattr(tensorrt_session, "load_library", lambda kind, plugins: Library(kind, modules[kind], "10.16"))
    yield device
    assert device.leaks == []
    assert device.rules.forbidden == []
