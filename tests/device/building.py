"""TensorRT's builder on TensorRT-RTX's real one, which needs no GPU: it parses, refuses and builds the network.

What comes out is an engine of this device (``blueprint``): the model that was parsed, the settings that change what it
computes, and TensorRT-RTX's own engine. Lifetimes are those of pyCore.cpp and pyOnnx.cpp.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.device.blueprint import Blueprint, Range, Tensor
from tests.device.engine import ProfilingVerbosity
from tests.device.native import Native, Overridable, enumeration, require_made
from tests.device.program import load_model

_RTX_CAPABILITIES = {(8, 7): "SM86", (8, 6): "SM86", (8, 9): "SM89", (9, 0): "SM89"}
"""What TensorRT-RTX builds for in place of a GPU; for an Orin and an H200 the nearest."""

BuilderFlag = enumeration("BuilderFlag", TF32=6)
MemoryPoolType = enumeration("MemoryPoolType", WORKSPACE=0)
NetworkDefinitionCreationFlag = enumeration("NetworkDefinitionCreationFlag", _EXPLICIT_BATCH=0, STRONGLY_TYPED=1)
NetworkDefinitionCreationFlag11 = enumeration("NetworkDefinitionCreationFlag", STRONGLY_TYPED=0)
"""From 11 on all networks are strongly typed: "The kSTRONGLY_TYPED flag is deprecated and ignored" (NvInfer.h)."""
Severity = enumeration("Severity", _INTERNAL_ERROR=0, ERROR=1, WARNING=2, INFO=3, _VERBOSE=4)
_SEVERITIES = (Severity._INTERNAL_ERROR, Severity.ERROR, Severity.WARNING, Severity.INFO, Severity._VERBOSE)


class ILogger(Overridable):
    ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO

    def _say(self, severity: str, text: str) -> None:
        self.log(getattr(Severity, severity), text)  # type: ignore[attr-defined]


class IProgressMonitor(Overridable):
    """Told of phases and steps; stops the build by its answer."""


class IHostMemory(bytes):
    @property
    def nbytes(self) -> int:
        return len(self)


class ITensor(Native):
    """Belongs to its network, which it does not keep alive."""

    def __init__(self, network: INetworkDefinition, tensor: Any) -> None:
        self._network = weakref.ref(network)
        self._found = tensor.name, tuple(tensor.shape), bool(tensor.is_shape_tensor)
        self._rules = network._builder._module._cuda.rules

    def _fact(self, position: int) -> Any:
        if self._network() is None:
            self._rules.forbid("ITensor: its network was freed")
        return self._found[position]

    name = property(lambda self: self._fact(0))
    shape = property(lambda self: self._fact(1))
    is_shape_tensor = property(lambda self: self._fact(2))


class INetworkDefinition(Native):
    def __init__(self, builder: Builder, flags: int) -> None:
        self._builder = builder  # py::keep_alive<0, 1> of create_network
        self._flags = flags
        trt = builder._library
        self._rtx = builder._rtx.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        self._model: Any = None
        self._parser: Any = None

    @property
    def num_inputs(self) -> int:
        return self._rtx.num_inputs

    def get_input(self, index: int) -> ITensor:
        return ITensor(self, self._rtx.get_input(index))


class ParserError(Native):
    """Belongs to its parser, which keeps it no longer than itself."""

    def __init__(self, parser: OnnxParser, error: Any) -> None:
        self._parser, self._rules = weakref.ref(parser), parser._rules
        self._found = error.code(), error.desc(), error.node_name(), error.node_operator(), error.func()

    def _fact(self, position: int) -> Any:
        if self._parser() is None:
            self._rules.forbid("ParserError: its parser was freed")
        return self._found[position]

    def code(self) -> Any:
        return self._fact(0)

    def desc(self) -> str:
        return self._fact(1)

    def node_name(self) -> str:
        return self._fact(2)

    def node_operator(self) -> str:
        return self._fact(3)

    def func(self) -> str:
        return self._fact(4)


class OnnxParser(Native):
    def __init__(self, network: INetworkDefinition, logger: ILogger) -> None:
        require_made(logger, ILogger)
        builder = network._builder
        self._log = logger  # py::keep_alive<1, 3>
        network._parser = self  # py::keep_alive<2, 1>: the network's weights lie in the parser
        self._network = weakref.ref(network)
        self._rules = builder._module._cuda.rules
        self._rtx = builder._library.OnnxParser(network._rtx, builder._rtx_log)

    @property
    def num_errors(self) -> int:
        return self._rtx.num_errors

    def get_error(self, index: int) -> ParserError:
        return ParserError(self, self._rtx.get_error(index))

    def parse_from_file(self, path: str) -> bool:
        network = self._network()
        if network is None:
            self._rules.forbid("OnnxParser: its network was freed")
        is_parsed = bool(self._rtx.parse_from_file(path))
        if is_parsed:
            network._model = load_model(path)
        return is_parsed


class IOptimizationProfile(Native):
    def __init__(self, builder: Builder) -> None:
        self._builder = builder  # reference_internal
        self._shapes: dict[str, Range] = {}
        self._values: dict[str, Range] = {}

    def set_shape(self, input: str, min: Sequence[int], opt: Sequence[int], max: Sequence[int]) -> None:
        found = tuple(tuple(int(size) for size in one) for one in (min, opt, max))
        if not all(a <= b <= c for a, b, c in zip(*found, strict=True)):
            raise ValueError(f"Shapes of {input} are no range: {found}")  # pyCore.cpp, set_shape
        self._shapes[input] = found

    def set_shape_input(self, input: str, min: Sequence[int], opt: Sequence[int], max: Sequence[int]) -> None:
        found = tuple(tuple(int(value) for value in one) for one in (min, opt, max))
        limit = np.iinfo(np.int64 if self._builder._module._number >= (10, 11) else np.int32).max
        if any(abs(value) > limit for one in found for value in one):
            raise TypeError("set_shape_input(): incompatible function arguments")
        self._values[input] = found


class ITimingCache(Native):
    def __init__(self, version: str, tactics: Sequence[str] = ()) -> None:
        self._version, self._tactics = version, set(tactics)

    def combine(self, input_cache: ITimingCache, ignore_mismatch: bool) -> bool:
        self._tactics |= input_cache._tactics
        return True

    def serialize(self) -> IHostMemory:
        return IHostMemory(json.dumps([self._version, sorted(self._tactics)]).encode())


class IBuilderConfig(Native):
    profiling_verbosity: Any = ProfilingVerbosity._LAYER_NAMES_ONLY
    builder_optimization_level: int = 3
    avg_timing_iterations: int = 1  # "the default number of averaging iterations is 1" (NvInfer.h)
    progress_monitor: Any = None

    def __init__(self, builder: Builder) -> None:
        self._builder = builder  # py::keep_alive<0, 1> of create_builder_config
        self._flags = {BuilderFlag.TF32}  # "kTF32 ... is enabled by default"
        self._profile: IOptimizationProfile | None = None  # py::keep_alive<1, 2>
        self._timing_cache: ITimingCache | None = None  # py::keep_alive<1, 2>

    def clear_flag(self, flag: Any) -> None:
        self._flags.discard(flag)

    def set_memory_pool_limit(self, pool: Any, pool_size: int) -> None:
        assert pool == MemoryPoolType.WORKSPACE

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        self._profile = profile
        return 0

    def create_timing_cache(self, serialized_timing_cache: Any) -> ITimingCache:
        data, version = bytes(serialized_timing_cache), self._builder._module.__version__
        if not data:
            return ITimingCache(version)
        try:
            return ITimingCache(*json.loads(data))
        except (ValueError, TypeError):
            self._builder._log._say("WARNING", "The timing cache cannot be read: an empty one takes its place")
            return ITimingCache(version)

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        if cache._version != self._builder._module.__version__ and not ignore_mismatch:
            return False
        self._timing_cache = cache
        return True

    def get_timing_cache(self) -> ITimingCache | None:
        return self._timing_cache


class Builder(Native):
    _module: Any = None

    def __init__(self, logger: ILogger) -> None:
        require_made(logger, ILogger)
        import tensorrt_rtx

        self._log = logger  # py::keep_alive<1, 2>
        self._library = tensorrt_rtx
        self._rtx_log = _forwarding_log(tensorrt_rtx, logger)
        self._rtx = tensorrt_rtx.Builder(self._rtx_log)

    def create_network(self, flags: int = 0) -> INetworkDefinition:
        return INetworkDefinition(self, flags)

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig(self)

    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile(self)

    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> IHostMemory | None:
        module = self._module
        inputs = [network._rtx.get_input(k) for k in range(network.num_inputs)]
        is_typed = module._number >= (11,) or bool(network._flags & _STRONGLY_TYPED)
        if config._profile is None and any(-1 in tuple(one.shape) or one.is_shape_tensor for one in inputs):
            self._log._say(
                "ERROR",
                "IBuilder::buildSerializedNetwork: Error Code 4: API Usage Error (Network has dynamic or shape inputs,"
                " but no optimization profile has been defined.)",
            )
            return None
        memory = self._rtx.build_serialized_network(network._rtx, self._rtx_config(config))
        if memory is None:
            return None
        profile, rtx = config._profile, network._rtx
        tensors = [Tensor(*_facts(rtx.get_input(k), is_input=True)) for k in range(rtx.num_inputs)]
        tensors += [Tensor(*_facts(rtx.get_output(k), is_input=False)) for k in range(rtx.num_outputs)]
        blueprint = Blueprint(
            tuple(tensors),
            network._model.SerializeToString(),
            version=module.__version__,
            capability=module._capability,
            tf32=BuilderFlag.TF32 in config._flags,
            is_typed=is_typed,
            averaged=config.avg_timing_iterations,
            is_detailed=config.profiling_verbosity == ProfilingVerbosity.DETAILED,
            shapes={} if profile is None else profile._shapes,
            values={} if profile is None else profile._values,
            rtx=bytes(memoryview(memory)),
        )
        if config._timing_cache is not None:
            config._timing_cache._tactics |= {f"{node.op_type} {blueprint.tf32}" for node in network._model.graph.node}
        return IHostMemory(blueprint.to_bytes())

    def _rtx_config(self, config: IBuilderConfig) -> Any:
        trt, made = self._library, self._rtx.create_builder_config()
        if BuilderFlag.TF32 not in config._flags:
            made.clear_flag(trt.BuilderFlag.TF32)
        made.builder_optimization_level = config.builder_optimization_level
        made.num_compute_capabilities = 1
        made.set_compute_capability(getattr(trt.ComputeCapability, _RTX_CAPABILITIES[self._module._capability]), 0)
        if config.progress_monitor is not None:
            made.progress_monitor = _forwarding_monitor(trt, config.progress_monitor)
        if config._profile is not None:
            profile = self._rtx.create_optimization_profile()
            for name, shapes in config._profile._shapes.items():
                profile.set_shape(name, *shapes)
            for name, values in config._profile._values.items():
                profile.set_shape_input(name, *values)
            made.add_optimization_profile(profile)
        return made


_STRONGLY_TYPED = 1 << int(NetworkDefinitionCreationFlag.STRONGLY_TYPED)


def _facts(tensor: Any, *, is_input: bool) -> tuple[str, bool, str, tuple[int, ...], bool]:
    return tensor.name, is_input, tensor.dtype.name, tuple(tensor.shape), bool(tensor.is_shape_tensor)


def _forwarding_log(library: Any, logger: ILogger) -> Any:
    class Log(library.ILogger):  # type: ignore[misc]
        def log(self, severity: Any, message: str) -> None:
            logger.log(_SEVERITIES[int(severity)], message)  # type: ignore[attr-defined]

    return Log()


def _forwarding_monitor(library: Any, monitor: Any) -> Any:
    require_made(monitor, IProgressMonitor)

    class Monitor(library.IProgressMonitor):  # type: ignore[misc]
        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            monitor.phase_start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            return monitor.step_complete(phase_name, step)

        def phase_finish(self, phase_name: str) -> None:
            monitor.phase_finish(phase_name)

    return Monitor()
