"""The module ``tensorrt`` of a version, for one device: the names that mptune uses of it, and no others."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from tests.device import building, engine
from tests.device.blueprint import Blueprint
from tests.device.cuda import FakeCuda
from tests.device.native import Native, require_made

_OF_ENGINES = (
    "EngineInspector",
    "ICudaEngine",
    "IExecutionContext",
    "IOutputAllocator",
    "IProfiler",
    "LayerInformationFormat",
    "ProfilingVerbosity",
    "TensorIOMode",
    "TensorLocation",
    "nptype",
)
_OF_BUILDING = (
    "BuilderFlag",
    "IBuilderConfig",
    "IHostMemory",
    "ILogger",
    "INetworkDefinition",
    "IOptimizationProfile",
    "IProgressMonitor",
    "ITensor",
    "ITimingCache",
    "MemoryPoolType",
    "NetworkDefinitionCreationFlag",
    "OnnxParser",
    "ParserError",
)


class _Runtime(Native):
    _module: Any = None

    def __init__(self, logger: Any) -> None:
        require_made(logger, building.ILogger)
        self._log = logger  # py::keep_alive<1, 2>

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> Any:
        module, blueprint = self._module, Blueprint.from_bytes(serialized_engine)
        if blueprint is None or blueprint.version != module.__version__:
            self._log._say(
                "ERROR",
                "IRuntime::deserializeCudaEngine: Error Code 1: Serialization (Serialization assertion stdVersionRead"
                " == kSERIALIZATION_VERSION failed.Version tag does not match. Note: Current Version: 240)",
            )
            return None
        if blueprint.capability != module._capability:
            self._log._say(
                "ERROR",
                "IRuntime::deserializeCudaEngine: Error Code 6: API Usage Error (The engine plan file is generated on"
                f" an incompatible device, expecting compute {'.'.join(map(str, module._capability))} got compute"
                f" {'.'.join(map(str, blueprint.capability))}, please rebuild.)",
            )
            return None
        weights = module._cuda.allocate(len(blueprint.model))
        if weights is None:
            self._log._say("ERROR", "IRuntime::deserializeCudaEngine: Error Code 2: OutOfMemory")
            return None
        found = module.ICudaEngine(blueprint, module._cuda, self._log, weights)
        found._runtime = self  # py::keep_alive<0, 1>: the runtime must outlive it
        return found


class _Engine10(engine.ICudaEngine):
    """Until 11 the size had a name without a version, too."""

    @property
    def device_memory_size(self) -> int:
        return self.device_memory_size_v2


_Engine10.__name__ = "ICudaEngine"


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
    module._number = tuple(map(int, version.split(".")[:2]))
    module._cuda, module._capability = cuda, capability
    for source, names in ((engine, _OF_ENGINES), (building, _OF_BUILDING)):
        for name in names:
            setattr(module, name, getattr(source, name))
    if module._number < (11,):
        module.ICudaEngine = _Engine10
    else:
        module.NetworkDefinitionCreationFlag = building.NetworkDefinitionCreationFlag11
    if is_rtx:
        module.ICudaEngine, module.IRuntimeConfig = engine.RtxEngine, engine.IRuntimeConfig
        strategies = engine.DynamicShapesKernelSpecializationStrategy
        module.DynamicShapesKernelSpecializationStrategy = strategies
    module.Builder = type("Builder", (building.Builder,), {"_module": module})
    module.Runtime = type("Runtime", (_Runtime,), {"_module": module})
    module.IPluginRegistry, module.get_plugin_registry = IPluginRegistry, lambda: IPluginRegistry()
    module.init_libnvinfer_plugins = _init_libnvinfer_plugins
    return module


class IPluginRegistry(Native):
    """TensorRT-RTX's, where plugins are registered."""

    def load_library(self, plugin_path: str) -> Any:
        import tensorrt_rtx

        return tensorrt_rtx.get_plugin_registry().load_library(plugin_path)


def _init_libnvinfer_plugins(logger: Any, namespace: str) -> bool:
    """Registers TensorRT-RTX's plugins where it is installed: it parses and builds."""
    require_made(logger, building.ILogger)
    try:
        import tensorrt_rtx
    except ImportError:
        return True
    log = building._forwarding_log(tensorrt_rtx, logger)
    _KEPT.append(log)  # The registry is global and keeps none alive.
    return bool(tensorrt_rtx.init_libnvinfer_plugins(log, namespace))


_KEPT: list[Any] = []
