"""Which nodes leave their provider in FP16: by ONNX Runtime's own record on the CPU, by a double for the GPU's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from onnx import helper

from mptune.engines.base import MissingKernel
from mptune.engines.ort import fusions as placement
from mptune.engines.ort.cuda_session import open_session
from mptune.engines.ort.fusions import PlacementJob
from mptune.engines.ort.session import PROVIDERS, SessionOptions
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
from mptune.graph.writing.rewrite import Rewriter
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


def test_on_the_cpu_every_node_stays_where_it_is(tmp_path: Path) -> None:
    model = load_model(save_sampling(tmp_path))
    grouped = GroupedModel(model, find_groups(model))
    rewriter, paths = Rewriter(grouped), []
    for precision in (Precision.FP16, Precision.FP32):
        paths.append(rewriter.export(grouped.uniform(precision), tmp_path / f"{precision}.onnx"))
        session = open_session(paths[-1], SessionOptions())
        placed = session.placement()
        session.close()
        assert placed["sample/GridSample"] == ("GridSample", CPU)
        assert {node.name for node in model.nodes} <= placed.keys()
    assert run_here(PlacementJob(paths[0], paths[1], "cpu")) == ()
