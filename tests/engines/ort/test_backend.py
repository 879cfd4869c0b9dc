"""Which nodes leave their provider in FP16 or BF16, by ONNX Runtime's record; the backend where there is a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from onnx import helper

import mptune
from mptune.engines.base import Failure, MissingKernel
from mptune.engines.context import RunContext
from mptune.engines.ort import fusions as placement
from mptune.engines.ort.backend import ONNXRUNTIME
from mptune.engines.ort.fusions import PlacementJob
from mptune.engines.ort.session import PROVIDERS, SessionOptions
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
from mptune.targets.target import load_target
from mptune.tuning.facts import MissingKernels
from tests.engines.conftest import QUICK
from tests.engines.engine_support import run_here, save_graph

CPU, CUDA = PROVIDERS["cpu"], PROVIDERS["cuda"]


def save_sampling(folder: Path) -> Path:
    """A convolution, a GridSample at fixed places, and another convolution."""
    grid = np.random.default_rng(0).uniform(-1, 1, (1, 8, 8, 2)).astype(np.float32)
    constants = {"w": np.full((4, 4, 3, 3), 0.1, np.float32), "grid": grid}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], "before/Conv", pads=[1] * 4),
        helper.make_node("GridSample", ["a", "grid"], ["b"], "sample/GridSample"),
        helper.make_node("Conv", ["b", "w"], ["y"], "after/Conv", pads=[1] * 4),
    ]
    return save_graph(folder / "sampling.onnx", nodes, [1, 4, 8, 8], constants, [1, 4, 8, 8])


def test_nodes_that_leave_the_provider_in_fp16_alone_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fp16 = {"a/Conv": CUDA, "b/GridSample": CPU, "c/Gather": CPU, "d/Fused": CPU, "e/Cast": CUDA}
    fp32 = {"a/Conv": CUDA, "b/GridSample": CUDA, "c/Gather": CPU, "other/Fused": CUDA}
    placed = {"fp16.onnx": fp16, "fp32.onnx": fp32}
    asked: list[SessionOptions] = []
    closed: list[str] = []

    def open_one(model: Path, options: SessionOptions) -> Any:
        asked.append(options)
        placement = {name: (name.split("/")[-1], provider) for name, provider in placed[model.name].items()}
        return SimpleNamespace(placement=lambda: placement, close=lambda: closed.append(model.name))

    monkeypatch.setattr(placement, "open_session", open_one)
    found = run_here(PlacementJob(Path("fp16.onnx"), Path("fp32.onnx"), "cuda"))
    assert found == (MissingKernel("b/GridSample", "GridSample", CUDA, CPU),)
    assert all(options == SessionOptions("cuda") for options in asked)
    assert set(closed) == placed.keys()


@pytest.mark.gpu
def test_many_measurements_on_a_gpu_crash_no_worker(mlp_context: RunContext) -> None:
    """Sessions that outlived their streams ended one of about twenty measurements in SIGSEGV on an H200."""
    target = load_target("h200")
    with Toolchain(ONNXRUNTIME, target, mlp_context, "cuda") as toolchain:
        assert not isinstance(toolchain.reference("search"), Failure)
        plans = [mlp_context.grouped.uniform(precision) for precision in (Precision.FP32, Precision.FP16)]
        pids = set()
        for number in range(150):
            result = toolchain.evaluate(plans[number % 2])
            assert not isinstance(result, Failure), result
            pids.add(toolchain.worker.pid)
    assert len(pids) == 1, "the worker died between two jobs"


@pytest.mark.gpu
def test_a_search_on_a_gpu_keeps_grid_sample_in_fp32(tmp_path: Path) -> None:
    path = save_sampling(tmp_path)
    samples = np.random.default_rng(1).normal(size=(8, 1, 4, 8, 8)).astype(np.float32)
    folder = tmp_path / "data"
    folder.mkdir()
    for number, sample in enumerate(samples):
        np.savez(folder / f"{number}.npz", x=sample)
    front = mptune.search(path, data=folder, engine="onnxruntime", budget=8, latency=QUICK, out=tmp_path / "run")
    model = load_model(path)
    group = GroupedModel(model, find_groups(model)).owners["sample/GridSample"]
    assert front.fp16.plan.precision[group] is Precision.FP32
    assert front.fp16.plan.fp16_groups
    assert [finding.where.groups for finding in front.findings if finding.code == "no-fp16-kernel"] == [(group,)]


def test_operators_that_no_provider_runs_in_bf16_are_named(mlp_context: RunContext) -> None:
    """By the CPU provider, which has next to no BF16 kernels: its session names one node after the other."""
    with Toolchain(ONNXRUNTIME, load_target("cpu"), mlp_context, "cpu") as toolchain:
        assert toolchain.missing_kernels(Precision.BF16) == ()
        found = toolchain.builder.nodes_without_kernel(Precision.BF16)
    assert not isinstance(found, Failure), found
    assert {"MatMul", "Gemm"} & {node.op_type for node in found}
    assert {(node.wanted, node.actual) for node in found} == {("CPUExecutionProvider", "")}
    nodes = {node.name: node.op_type for node in mlp_context.model.nodes}
    assert all(nodes[node.node] == node.op_type for node in found)
    kernels = MissingKernels({Precision.BF16: found})
    pins = kernels.pins(mlp_context.grouped, Precision.BF16)
    assert kernels.pins(mlp_context.grouped) == {}
    assert pins.keys() == {mlp_context.grouped.owners[node.node] for node in found}
    about = kernels.findings(mlp_context.grouped)
    assert {finding.code for finding in about} == {"no-bf16-kernel"}
    assert {finding.evidence["operator"] for finding in about} == {node.op_type for node in found}
