"""Every attribute of TensorRT that the code names exists: in the packages here, and in recorded versions.

Nothing here runs TensorRT proper, and much of the code needs a GPU: a misspelt name would otherwise show on a user's
machine only.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.engines.tensorrt.api.record import HERE, names_in_module

SOURCES = sorted((Path(__file__).resolve().parents[3] / "mptune" / "engines" / "tensorrt").glob("*.py"))

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
    "runtime_cache": "IRuntimeCache",
}
"""Variable (``trt`` or ``self._runtime`` alike) -> the class whose attributes are looked up on it."""

RTX_ONLY = {
    "ComputeCapability",
    "DynamicShapesKernelSpecializationStrategy",
    "DynamicShapesKernelSpecializationStrategy.EAGER",
    "IBuilderConfig.num_compute_capabilities",
    "IBuilderConfig.set_compute_capability",
    "ICudaEngine.create_runtime_config",
    "IRuntimeCache.deserialize",
    "IRuntimeCache.serialize",
    "IRuntimeConfig.create_runtime_cache",
    "IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy",
    "IRuntimeConfig.set_runtime_cache",
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
        "OnnxParser.parse_from_file",
        "ParserError.node_operator",
        "ITimingCache.combine",
        "IExecutionContext.execute_async_v3",
        "EngineInspector.get_engine_information",
        "DynamicShapesKernelSpecializationStrategy.EAGER",
        "IRuntimeCache.serialize",
        "IOutputAllocator",
        "init_libnvinfer_plugins",
    } <= named()
    assert {"IPluginRegistry.load_library", "IBuilderConfig.avg_timing_iterations"} <= named()
    assert named() >= RTX_ONLY


def test_nothing_that_is_gone_in_11_is_named() -> None:
    gone = {name for name in recorded("10.16") - recorded("11.4") if "." in name or name[:1].isupper()}
    assert not gone & named()


@pytest.mark.tensorrt_rtx
def test_tensorrt_rtx_has_every_name() -> None:
    import tensorrt_rtx as trt

    assert sorted(named() - names_in_module(trt)) == []


@pytest.mark.parametrize("version", RECORDED)
def test_recorded_versions_have_every_name(version: str) -> None:
    assert sorted(named() - RTX_ONLY - recorded(version)) == []
