"""What TensorRT-RTX's runtime has beside TensorRT's: the settings of a context and the kernels that were compiled."""

from __future__ import annotations

from typing import Any

from tests.device.engine import ICudaEngine as _ICudaEngine
from tests.device.engine import IExecutionContext
from tests.device.native import Native, enumeration

NAMES = ("DynamicShapesKernelSpecializationStrategy", "ICudaEngine", "IRuntimeCache", "IRuntimeConfig")

DynamicShapesKernelSpecializationStrategy = enumeration(
    "DynamicShapesKernelSpecializationStrategy", _LAZY=0, EAGER=1, _NONE=2
)


class IRuntimeCache(Native):
    """Kernels by name."""

    def __init__(self) -> None:
        self._kernels: set[str] = set()

    def deserialize(self, data: bytes) -> bool:
        self._kernels = set(data.decode().split())
        return True

    def serialize(self) -> bytes:
        return " ".join(sorted(self._kernels)).encode()


class IRuntimeConfig(Native):
    dynamic_shapes_kernel_specialization_strategy: Any = DynamicShapesKernelSpecializationStrategy._LAZY

    def __init__(self) -> None:
        self._cache: IRuntimeCache | None = None

    def create_runtime_cache(self) -> IRuntimeCache:
        return IRuntimeCache()

    def set_runtime_cache(self, cache: IRuntimeCache) -> bool:
        self._cache = cache
        return True


class ICudaEngine(_ICudaEngine):
    def create_runtime_config(self) -> IRuntimeConfig:
        return IRuntimeConfig()

    def create_execution_context(self, runtime_config: IRuntimeConfig | None = None) -> IExecutionContext | None:
        """Its first execution compiles the kernels that the cache of the configuration lacks."""
        context = super().create_execution_context()
        if context is not None and runtime_config is not None:
            context._runtime_config = runtime_config
            context._runtime_cache = runtime_config._cache
        return context
