"""build.sh and the line of README.txt: trtexec is called as the search built its engines."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mptune.data.archive import save_samples
from mptune.engines.environment import Environment
from mptune.graph.loading.tensors import TensorInfo
from mptune.reporting.chosen import write_chosen
from mptune.reporting.recipe import BuildRecipe, engine_name
from mptune.run_json import FixedSettings, ModelSection, RunFile, TargetSection
from mptune.settings import ShapeRange, TensorRtSettings
from mptune.targets.jetson import JetsonState
from tests.reporting.conftest import Bench, MakeFront


@pytest.fixture
def arguments(tmp_path: Path) -> Callable[..., list[str]]:
    """Runs a build.sh with a trtexec that writes down what it is given."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "trtexec").write_text('#!/bin/sh\npwd\nfor one in "$@"; do printf "%s\\n" "$one"; done\n')
    (tools / "trtexec").chmod(0o755)

    def run(script: Path, *more: str) -> list[str]:
        environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
        command = [str(script), *more]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/", env=environment)
        where, *given = done.stdout.splitlines()
        assert Path(where).resolve() == script.parent.resolve()  # model.onnx is there
        return given

    return run


def run_file(**changes: object) -> RunFile:
    fixed = {"target": "auto", "engine": "auto", "space": "default", "space_sha256": "", "groups_sha256": ""}
    return RunFile(
        model=ModelSection(path="m.onnx", sha256=""),
        fixed_settings=FixedSettings(**{**fixed, "granularity": "fusion", **changes}),
        study="search",
    )


@pytest.mark.parametrize(
    ("tf32", "fp16_groups", "allowed"), [(False, 2, False), (True, 2, True), (True, 0, False), (False, 0, False)]
)
def test_tf32_is_as_in_the_search(
    bench: Bench, make_front: MakeFront, run_dir: Path, arguments: Callable[..., list[str]], tf32, fp16_groups, allowed
) -> None:
    """The baseline never used TF32; candidates only with ``--tf32``."""
    front, _ = make_front()
    evaluation = bench.evaluation(fp16_groups, 1.2, 1e-3)
    recipe = BuildRecipe.of(run_file(tf32=tf32), run_dir, [])
    write_chosen(front, evaluation, bench.grouped, run_dir / "chosen", None, recipe=recipe)
    given = arguments(run_dir / "chosen" / "build.sh", "--verbose")
    assert ("--noTF32" not in given) is allowed
    assert {"--onnx=model.onnx", "--stronglyTyped"} <= set(given)
    assert given[-1] == "--verbose"
    text = (run_dir / "chosen" / "README.txt").read_text()
    assert ("--noTF32" not in text) is allowed
    assert ("clear_flag(trt.BuilderFlag.TF32)" not in text) is allowed


def test_the_measured_engine_is_not_overwritten(bench: Bench, tmp_path: Path, arguments) -> None:
    plan, other = bench.plan(1), bench.plan(2)
    assert engine_name(plan) not in ("model.engine", engine_name(other))
    script = tmp_path / "build.sh"
    script.write_text(BuildRecipe().script(plan))
    script.chmod(0o755)
    assert f"--saveEngine={engine_name(plan)}" in arguments(script)


def test_shapes_are_those_of_the_search(bench: Bench, tmp_path: Path, arguments) -> None:
    """What ``--shapes`` names is as given; the rest as the samples have it; names are quoted for trtexec and sh."""
    data = tmp_path / "data"
    for name, rows in (("search", (3, 1)), ("held_out", (7,))):
        feeds = [{"x:0": np.zeros((n, 4), np.float32), "it's": np.zeros((n,), np.int64)} for n in rows]
        save_samples(data / f"{name}.npz", feeds)
    inputs = [
        TensorInfo("x:0", "float", ("n", 4)),
        TensorInfo("fixed", "float", (1, 4)),
        TensorInfo("it's", "int64", (None,)),
        TensorInfo("gone", "float", ("m",)),
    ]
    given = ShapeRange("it's", (1,), (2,), (9,))
    recipe = BuildRecipe.of(run_file(shapes=(given,)), data, inputs)
    assert recipe.unknown == ("gone",)
    script = tmp_path / "build.sh"
    script.write_text(recipe.script(bench.plan(1)))
    script.chmod(0o755)
    trtexec = arguments(script)
    assert "--minShapes='x:0':1x4,it's:1" in trtexec
    assert "--optShapes='x:0':3x4,it's:2" in trtexec
    assert "--maxShapes='x:0':7x4,it's:9" in trtexec
    assert "'gone' are not known" in script.read_text()


def test_the_search_s_limits_of_the_builder(bench: Bench) -> None:
    section = TensorRtSettings(workspace_mb=512, optimization_level=5)
    options = BuildRecipe.of(run_file(tensorrt=section), Path("none"), []).options(bench.plan(1))
    assert {"--memPoolSize=workspace:512", "--builderOptimizationLevel=5"} <= set(options)
    assert not any("memPool" in option or "Level" in option for option in BuildRecipe().options(bench.plan(1)))


def test_the_limit_that_a_jetson_had_by_default(environment: Environment) -> None:
    jetson = replace(environment, jetson=JetsonState("NVIDIA Jetson Orin Nano", memory_gb=7.8))
    for source, wanted in (("measured", 1859), ("predicted", None)):
        target = TargetSection(name="n", engine="tensorrt", device="d", latency_source=source, error_source="measured")
        file = run_file().model_copy(update={"target": target, "environment": jetson})
        assert BuildRecipe.of(file, Path("none"), []).settings.workspace_mb == wanted
