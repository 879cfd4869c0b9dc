"""Every attribute of TensorRT that the code names exists: in the packages here, and in recorded versions.

Nothing here runs TensorRT proper, and much of the code needs a GPU: a misspelt name would otherwise show on a user's
machine only. The device of the tests has the names and values of CUDA and TensorRT that mptune uses, and no others.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from mptune.engines.cuda import CALLS, SystemRuntime
from tests.device import handles
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
    found = set()
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        aliases = dict(CLASSES)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = _name(node.value, aliases)
                if name is not None and name[:1].isupper() and "." not in name:
                    aliases[node.targets[0].id] = name  # strategies = trt.SomeEnum
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                name = _name(node, aliases)
                if name is not None:
                    found.add(name)
    return frozenset(found)


def _name(node: ast.expr, aliases: dict[str, str]) -> str | None:
    """``config.progress_monitor`` -> ``IBuilderConfig.progress_monitor``; None for what is not TensorRT's."""
    if not isinstance(node, ast.Attribute):
        return None
    owner = node.value
    if isinstance(owner, ast.Attribute) and owner.attr.lstrip("_") not in aliases:
        inner = _name(owner, aliases)
        return None if inner is None or not inner[:1].isupper() else f"{inner}.{node.attr}"
    variable = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
    variable = variable.lstrip("_")
    if variable not in aliases:
        return None
    scope = aliases[variable]
    return f"{scope}.{node.attr}" if scope else node.attr


def recorded(version: str) -> set[str]:
    lines = (HERE / f"{version}.txt").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    return set(lines[1:])


def test_the_code_names_what_it_should() -> None:
    """The walk finds names of every kind, on plain variables, attributes, aliases and nested enums."""
    assert {
        "Builder",
        "NetworkDefinitionCreationFlag.STRONGLY_TYPED",
        "IBuilderConfig.progress_monitor",
        "IBuilderConfig.avg_timing_iterations",
        "IExecutionContext.execute_async_v3",
        "DynamicShapesKernelSpecializationStrategy.EAGER",
        "IOutputAllocator",
        "init_libnvinfer_plugins",
        "IPluginRegistry.load_library",
    } <= named()
    assert named() >= RTX_ONLY


@pytest.mark.tensorrt_rtx
def test_tensorrt_rtx_has_every_name() -> None:
    import tensorrt_rtx as trt

    assert sorted(named() - names_in_module(trt)) == []


@pytest.mark.parametrize("version", RECORDED)
def test_recorded_versions_have_every_name(version: str) -> None:
    assert sorted(named() - RTX_ONLY - recorded(version)) == []


ASKED_BY_TEXT = {"ICudaEngine.device_memory_size", "ICudaEngine.device_memory_size_v2"}
"""What the code asks for by ``getattr``."""
BUFFER = {f"IHostMemory.{name}" for name in dir(bytes) if not name.startswith("_")}
"""The buffer protocol is no name; before Python 3.12 only a type in C has it, so that ``bytes`` is inherited from."""


def test_cudas_names_and_values() -> None:
    names = {name for name in dir(FakeCuda) if name.startswith("cuda")}
    assert names == {*CALLS, "cudaGetErrorString", *(name for name in vars(SystemRuntime) if name.startswith("cuda"))}
    bindings = pytest.importorskip("cuda.bindings.runtime", reason="needs cuda-python")
    assert names <= set(dir(bindings))
    for ours in (handles.cudaError_t, handles.cudaMemcpyKind, handles.cudaStreamCaptureMode):
        theirs = getattr(bindings, ours.__name__)
        assert {one.name: int(one) for one in ours} == {one.name: int(getattr(theirs, one.name)) for one in ours}
    assert FakeCuda.cudaStreamNonBlocking == bindings.cudaStreamNonBlocking


@pytest.mark.parametrize("version", RECORDED[1:])  # the machines here have 10.3 and later
def test_tensorrts_names(version: str) -> None:
    found = names_in_module(make_module(f"{version}.0", FakeCuda())) - BUFFER
    assert found <= recorded(version)
    used = named() - RTX_ONLY
    assert found - ASKED_BY_TEXT == used | {name.partition(".")[0] for name in used}


def test_rtxs_names_are_there_too() -> None:
    wanted = {name for name in RTX_ONLY if name.split(".")[0] in ("IRuntimeConfig", "ICudaEngine")}
    assert wanted <= names_in_module(make_module("1.7.1", FakeCuda(), is_rtx=True))
