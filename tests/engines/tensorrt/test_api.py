"""Every attribute of TensorRT that the code names exists: in the packages here, and in recorded versions.

Nothing here runs TensorRT proper, and much of the code needs a GPU: a misspelt name would otherwise show on a user's
machine only. The device of the tests has no names or values of its own.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from mptune.engines.cuda import CALLS, SystemRuntime
from tests.device import cuda, engine
from tests.device.cuda import FakeCuda
from tests.device.tensorrt import make_module
from tests.engines.tensorrt.api.record import HERE, names_in_module

FOLDER = Path(__file__).resolve().parents[3] / "mptune" / "engines" / "tensorrt"
SOURCES = sorted(path for path in FOLDER.glob("*.py") if path.name != "backend.py")
"""Of the worker; the backend is in the parent, and touches no TensorRT."""

CLASSES = {
    "trt": "",
    "builder": "Builder",
    "config": "IBuilderConfig",
    "network": "INetworkDefinition",
    "tensor": "ITensor",
    "profile": "IOptimizationProfile",
    "parser": "OnnxParser",
    "parser_error": "ParserError",
    "memory": "IHostMemory",
    "timing_cache": "ITimingCache",
    "runtime": "Runtime",
    "engine": "ICudaEngine",
    "context": "IExecutionContext",
    "inspector": "EngineInspector",
    "registry": "IPluginRegistry",
    "runtime_config": "IRuntimeConfig",
}
"""Variable (``trt`` or ``self._runtime`` alike) -> the class whose attributes are looked up on it."""

RTX_ONLY = {
    "ComputeCapability",
    "DynamicShapesKernelSpecializationStrategy",
    "DynamicShapesKernelSpecializationStrategy.EAGER",
    "IBuilderConfig.num_compute_capabilities",
    "IBuilderConfig.set_compute_capability",
    "ICudaEngine.create_runtime_config",
    "IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy",
}
"""Named only where ``library.is_rtx``; TensorRT has some of them too, in its later versions."""

RECORDED = ("10.0", "10.3", "10.16", "11.4")


@cache
def named() -> frozenset[str]:
    """``Class.member`` of every attribute that the code takes from TensorRT's module or from one of its objects."""
    names = set()
    for text in (path.read_text(encoding="utf-8") for path in SOURCES):
        aliases = dict(re.findall(r"(\w+) = trt\.([A-Z]\w+)$", text, re.MULTILINE))  # names = trt.SomeEnum
        for variable, scope in {**CLASSES, **aliases}.items():
            attributes = re.findall(rf"\b_?{variable}\.((?:[A-Z]\w*\.)?[A-Za-z]\w*)", text)
            names |= {f"{scope}.{attribute}".lstrip(".") for attribute in attributes}
    return frozenset(names)


def recorded(version: str) -> set[str]:
    first, *names = (HERE / f"{version}.txt").read_text(encoding="utf-8").splitlines()
    assert first.startswith("# ")
    return set(names)


def test_the_code_names_what_it_should() -> None:
    """The search finds names of every kind, on plain variables, attributes, aliases and nested enums."""
    assert named() >= RTX_ONLY | {
        "Builder",
        "NetworkDefinitionCreationFlag.STRONGLY_TYPED",
        "IBuilderConfig.progress_monitor",
        "IExecutionContext.execute_async_v3",
        "init_libnvinfer_plugins",
        "IPluginRegistry.load_library",
    }


@pytest.mark.tensorrt_rtx
def test_tensorrt_rtx_has_every_name() -> None:
    import tensorrt_rtx as trt

    assert sorted(named() - names_in_module(trt)) == []


@pytest.mark.parametrize("version", RECORDED)
def test_recorded_versions_have_every_name(version: str) -> None:
    assert sorted(named() - RTX_ONLY - recorded(version)) == []


def test_the_devices_cuda_has_cudas_names_and_values() -> None:
    names = {name for name in dir(FakeCuda) if name.startswith("cuda")}
    assert names == {*CALLS, "cudaGetErrorString", *(name for name in vars(SystemRuntime) if name.startswith("cuda"))}
    bindings = pytest.importorskip("cuda.bindings.runtime", reason="needs cuda-python")
    assert names <= set(dir(bindings))
    for ours in (cuda.cudaError_t, cuda.cudaMemcpyKind, cuda.cudaStreamCaptureMode):
        theirs = getattr(bindings, ours.__name__)
        assert {each.name: int(each) for each in ours} == {each.name: int(getattr(theirs, each.name)) for each in ours}
    assert FakeCuda.cudaStreamNonBlocking == bindings.cudaStreamNonBlocking


@pytest.mark.parametrize("version", RECORDED[1:])  # the machines here have 10.3 and later
def test_the_devices_engines_have_tensorrts_names(version: str) -> None:
    module = make_module(f"{version}.0", FakeCuda())
    ours = {name for name in vars(module) if getattr(getattr(module, name), "__module__", "") == engine.__name__}
    names = {name for name in names_in_module(module) if name.partition(".")[0] in ours}
    assert {"ICudaEngine.get_tensor_name", "IExecutionContext.execute_async_v3"} <= names <= recorded(version)
