"""What TensorRT-RTX's runtime has beside TensorRT's: the settings of a context."""

from __future__ import annotations

from typing import Any

from tests.device.engine import ICudaEngine as _ICudaEngine
from tests.device.engine import IExecutionContext
from tests.device.native import Native, enumeration

NAMES = ("DynamicShapesKernelSpecializationStrategy", "ICudaEngine", "IRuntimeConfig")

DynamicShapesKernelSpecializationStrategy = enumeration(
    "DynamicShapesKernelSpecializationStrategy", _LAZY=0, EAGER=1, _NONE=2
)


class IRuntimeConfig(Native):
    dynamic_shapes_kernel_specialization_strategy: Any = DynamicShapesKernelSpecializationStrategy._LAZY


class ICudaEngine(_ICudaEngine):
    def create_runtime_config(self) -> IRuntimeConfig:
        return IRuntimeConfig()

    def create_execution_context(self, runtime_config: IRuntimeConfig | None = None) -> IExecutionContext | None:
        context = super().create_execution_context()
        if context is not None and runtime_config is not None:
            context._runtime_config = runtime_config
        return context
