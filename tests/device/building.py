"""TensorRT's builder: TensorRT-RTX's real one, which needs no GPU; it parses, refuses and builds the network.

What comes out is an engine of this device (``blueprint``): the model that was parsed, and the settings that change what
it computes.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from typing import Any

import tensorrt_rtx

from tests.device.blueprint import Blueprint, Tensor
from tests.device.program import load_model

_RTX_CAPABILITIES = {(8, 7): "SM86", (8, 6): "SM86", (8, 9): "SM89", (9, 0): "SM89"}
"""What TensorRT-RTX builds for in place of a GPU; for an Orin and an H200 the nearest."""
NAMES = (
    "BuilderFlag",
    "ILogger",
    "IProgressMonitor",
    "MemoryPoolType",
    "NetworkDefinitionCreationFlag",
    "ProfilingVerbosity",
    "get_plugin_registry",
    "init_libnvinfer_plugins",
)
"""What TensorRT's module takes from TensorRT-RTX's as it is."""
_MODELS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Network -> the model that was parsed into it."""


class IHostMemory(bytes):
    @property
    def nbytes(self) -> int:
        return len(self)


class _Deleted:
    """Without the ``__del__`` of TensorRT-RTX's classes, which warns that it is deprecated."""

    def __del__(self) -> None:
        pass


class OnnxParser(_Deleted, tensorrt_rtx.OnnxParser):  # type: ignore[misc]
    def __init__(self, network: Any, logger: Any) -> None:
        super().__init__(network, logger)
        self._network = weakref.ref(network)

    def parse_from_file(self, path: str) -> bool:
        is_parsed = bool(super().parse_from_file(path))
        if is_parsed:
            _MODELS[self._network()] = load_model(path)
        return is_parsed


class ITimingCache:
    def __init__(self, version: str, tactics: Sequence[str] = ()) -> None:
        self.version, self.tactics = version, set(tactics)

    def combine(self, input_cache: ITimingCache, ignore_mismatch: bool) -> bool:
        self.tactics |= input_cache.tactics
        return True

    def serialize(self) -> IHostMemory:
        return IHostMemory(json.dumps([self.version, sorted(self.tactics)]).encode())


class IBuilderConfig:
    """TensorRT-RTX's but for the timing cache, which would stay empty there."""

    _rtx: Any
    _version: str
    _profile: Any
    _timing_cache: ITimingCache | None

    def __init__(self, rtx: Any, version: str) -> None:
        vars(self).update(_rtx=rtx, _version=version, _profile=None, _timing_cache=None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rtx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._rtx, name, value)

    def add_optimization_profile(self, profile: Any) -> int:
        vars(self).update(_profile=profile)
        return int(self._rtx.add_optimization_profile(profile))

    def create_timing_cache(self, serialized_timing_cache: bytes) -> ITimingCache:
        try:
            return ITimingCache(*json.loads(serialized_timing_cache))
        except ValueError:  # TensorRT warns of it, and an empty one takes its place.
            return ITimingCache(self._version)

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        is_usable = cache.version == self._version or ignore_mismatch
        vars(self).update(_timing_cache=cache if is_usable else self._timing_cache)
        return is_usable

    def get_timing_cache(self) -> ITimingCache | None:
        return self._timing_cache


class Builder(_Deleted, tensorrt_rtx.Builder):  # type: ignore[misc]
    def __init__(self, module: Any, logger: Any) -> None:
        super().__init__(logger)
        self._module, self._is_typed = module, False

    def create_network(self, flags: int = 0) -> Any:
        """From 11 on all networks are strongly typed: "deprecated and ignored" (kSTRONGLY_TYPED, NvInfer.h)."""
        typed = 1 << int(tensorrt_rtx.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        self._is_typed = bool(flags & typed) or self._module.number >= (11,)
        return super().create_network(typed)

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig(super().create_builder_config(), self._module.__version__)

    def build_serialized_network(self, network: Any, config: IBuilderConfig) -> IHostMemory | None:
        module, model = self._module, _MODELS[network]
        config.num_compute_capabilities = 1
        capability = getattr(tensorrt_rtx.ComputeCapability, _RTX_CAPABILITIES[module.capability])
        config.set_compute_capability(capability, 0)
        if super().build_serialized_network(network, config._rtx) is None:
            return None
        inputs = [network.get_input(k) for k in range(network.num_inputs)]
        outputs = [network.get_output(k) for k in range(network.num_outputs)]
        blueprint = Blueprint(
            tuple(
                Tensor(each.name, is_input, each.dtype.name, tuple(each.shape), each.is_shape_tensor)
                for is_input, tensors in ((True, inputs), (False, outputs))
                for each in tensors
            ),
            model.SerializeToString(),
            version=module.__version__,
            capability=module.capability,
            tf32=config.get_flag(tensorrt_rtx.BuilderFlag.TF32),
            is_typed=self._is_typed,
            averaged=config.avg_timing_iterations,
            is_detailed=config.profiling_verbosity == tensorrt_rtx.ProfilingVerbosity.DETAILED,
            shapes={
                each.name: tuple(map(tuple, config._profile.get_shape(each.name)))
                for each in inputs
                if -1 in tuple(each.shape)
            },
            values={
                each.name: tuple(map(tuple, config._profile.get_shape_input(each.name)))
                for each in inputs
                if each.is_shape_tensor
            },
        )
        if config._timing_cache is not None:
            config._timing_cache.tactics |= {f"{node.op_type} {blueprint.tf32}" for node in model.graph.node}
        return IHostMemory(blueprint.to_bytes())
