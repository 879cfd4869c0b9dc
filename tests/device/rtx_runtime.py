"""What TensorRT-RTX's runtime has beside TensorRT's: the settings of a context and the kernels that were compiled."""

from __future__ import annotations

from typing import Any

from tests.device.engine import ICudaEngine as _ICudaEngine
from tests.device.native import Native, enumeration

NAMES = ("DynamicShapesKernelSpecializationStrategy", "ICudaEngine", "IRuntimeCache", "IRuntimeConfig")

DynamicShapesKernelSpecializationStrategy = enumeration(
    "DynamicShapesKernelSpecializationStrategy", _LAZY=0, EAGER=1, _NONE=2
)


class IRuntimeCache(Native):
    def __init__(self) -> None:
        self._read: list[bytes] = []

    def deserialize(self, data: bytes) -> bool:
        self._read.append(data)
        return True

    def serialize(self) -> bytes:
        return b"kernels"


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
    _runtime_config: IRuntimeConfig | None = None

    def create_runtime_config(self) -> IRuntimeConfig:
        self._runtime_config = IRuntimeConfig()
        return self._runtime_config
