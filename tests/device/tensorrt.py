"""The module ``tensorrt`` of a version, for one device: the names that mptune uses of it, and few others."""

from __future__ import annotations

from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from tests.device import engine
from tests.device.cuda import FakeCuda


def make_module(version: str, cuda: FakeCuda, capability: tuple[int, int] = (8, 9), *, is_rtx: bool = False) -> Any:
    """The module.

    Args:
        version: such as ``10.3.0``.
        cuda: the device that it runs on.
        capability: of the device.
        is_rtx: TensorRT-RTX's runtime instead: it has no builder here, there is the real one.
    """
    module: Any = ModuleType("tensorrt")
    module.__version__, module.__spec__ = version, ModuleSpec("tensorrt", None)
    module.number = tuple(map(int, version.split(".")[:2]))
    module.cuda, module.capability = cuda, capability
    special = (engine.Engine10, engine.RtxEngine, engine.IRuntimeConfig)
    special += (engine.DynamicShapesKernelSpecializationStrategy,)
    for name, value in vars(engine).items():
        if getattr(value, "__module__", "") == engine.__name__ and name[0] != "_" and (is_rtx or value not in special):
            setattr(module, name, value)
    if is_rtx:
        module.ICudaEngine = engine.RtxEngine
    elif module.number < (11,):
        module.ICudaEngine = engine.Engine10
    module.Runtime = partial(engine.Runtime, module)
    module.init_libnvinfer_plugins = lambda logger, namespace: True
    if find_spec("tensorrt_rtx") is not None:
        from tests.device import building

        for name in building.NAMES:
            setattr(module, name, getattr(building.tensorrt_rtx, name))
        module.Builder, module.OnnxParser = partial(building.Builder, module), building.OnnxParser
    return module
