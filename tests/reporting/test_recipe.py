"""build.sh and the line of README.txt: trtexec is called as the search built its engines."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mptune.data.archive import save_samples
from mptune.engines.environment import Environment
from mptune.graph.loading.tensors import TensorInfo
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.reporting.chosen import write_chosen
from mptune.reporting.recipe import NO_TRTEXEC, TRTEXEC_OF_PACKAGE, BuildRecipe
from mptune.run_json import ModelSection, RunFile, SearchSection, TargetSection
from mptune.settings import SearchSettings, ShapeRange, TensorRtSettings
from mptune.targets.detect import JetsonState
from mptune.tuning.front import Front
from tests.reporting import trtexec
from tests.reporting.conftest import Bench
from tests.tuning.factory import make_fixed_settings, make_run_file


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


def written(recipe: BuildRecipe, plan: PrecisionPlan, folder: Path) -> Path:
    """The script of a recipe."""
    script = folder / "build.sh"
    script.write_text(recipe.script(plan))
    script.chmod(0o755)
    return script


def run_file(**changes: object) -> RunFile:
    settings = SearchSettings()
    fixed = make_fixed_settings(settings).model_copy(update=changes)
    return make_run_file(settings, ModelSection(path="m.onnx", sha256=""), fixed)


@pytest.mark.parametrize("fp16_groups", [2, 0])
@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_is_as_in_the_search(bench: Bench, front: Front, run_dir: Path, arguments, tf32, fp16_groups) -> None:
    """The baseline never used TF32; candidates only with ``--tf32``."""
    allowed = tf32 and fp16_groups > 0
    evaluation = bench.evaluation(fp16_groups, 1.2, 1e-3)
    recipe = BuildRecipe.for_run(run_file(tf32=tf32), run_dir, [])
    write_chosen(front, evaluation, bench.grouped, run_dir / "chosen", None, recipe=recipe)
    given = arguments(run_dir / "chosen" / "build.sh", "--verbose")
    assert ("--noTF32" not in given) is allowed
    assert {"--onnx=model.onnx", "--stronglyTyped"} <= set(given)
    assert given[-1] == "--verbose"
    assert f"--saveEngine=model.{evaluation.plan.fingerprint}.engine" in given, "not over the measured one"
    text = " ".join((run_dir / "chosen" / "README.txt").read_text().split())
    assert ("--noTF32" not in text) is allowed
    assert ("clear_flag(trt.BuilderFlag.TF32)" not in text) is allowed
    line = text[text.index("sh build.sh --useCudaGraph") :].split(" (its")[0]
    assert set(trtexec.read_options(line.split()[2:])) == {"--useCudaGraph", "--noDataTransfers", "--useSpinWait"}
    assert "do not build without --stronglyTyped" in text
    assert NO_TRTEXEC in text


def test_shapes_are_those_of_the_search(bench: Bench, tmp_path: Path, arguments) -> None:
    """What ``--shapes`` names is as given; the rest as the samples have it; sh leaves the names as they are."""
    data = tmp_path / "data"
    for name, rows in (("search", (3, 1)), ("held_out", (7,))):
        feeds = [{"x:0 $HOME": np.zeros((n, 4), np.float32), "its": np.zeros(n, np.float32)} for n in rows]
        save_samples(data / f"{name}.npz", feeds)
    shapes = {"x:0 $HOME": ("n", 4), "fixed": (1, 4), "its": (None,), "gone": ("m",)}
    inputs = [TensorInfo(name, "float", shape) for name, shape in shapes.items()]
    given = ShapeRange("its", (1,), (2,), (9,))
    recipe = BuildRecipe.for_run(run_file(shapes=(given,)), data, inputs)
    assert recipe.unknown == ("gone",)
    script = written(recipe, bench.plan(1), tmp_path)
    declared = {"x:0 $HOME": (-1, 4), "fixed": (1, 4), "its": (-1,), "gone": (-1,)}
    wanted = {"x:0 $HOME": ((1, 4), (3, 4), (7, 4)), "its": ((1,), (2,), (9,)), "gone": ((1,), (1,), (1,))}
    assert trtexec.profile(arguments(script), declared) == wanted
    assert "Input 'gone' is not in the command" in script.read_text()


def test_values_of_a_shape_tensor_are_the_observed_ones(bench: Bench, tmp_path: Path) -> None:
    for name, targets in (("search", ([8, 4], [2, 9])), ("held_out", ([3, -1],))):
        feeds = [{"target": np.array(t, np.int64), "scale": np.array(t[0], np.int32)} for t in targets]
        save_samples(tmp_path / f"{name}.npz", feeds)
    inputs = [TensorInfo("target", "int64", (2,)), TensorInfo("scale", "int32", ())]
    recipe = BuildRecipe.for_run(run_file(), tmp_path, inputs, ["target", "scale"])
    declared, decide = {"target": (2,), "scale": ()}, ["target", "scale"]
    read = trtexec.profile(recipe.options(bench.plan(1)), declared, decide)
    assert read == {"target": ((2, -1), (8, 4), (8, 9)), "scale": ((2,), (8,), (8,))}
    without = BuildRecipe.for_run(run_file(), tmp_path, inputs).options(bench.plan(1))
    assert trtexec.profile(without, declared, decide)["target"] == ((1, 1),) * 3


names = st.text("ab:,'*=x -é\n", min_size=1, max_size=6)
PLAN = PrecisionPlan.uniform("", ["g001"], Precision.FP16)
bounds = st.lists(st.integers(0, 9), min_size=3, max_size=3).map(sorted)


@given(st.dictionaries(names, bounds, min_size=1, max_size=4))
def test_every_name_is_passed_or_named(ranges: dict[str, list[int]]) -> None:
    """Of any set of names, an engine is built for the right ranges, or the script says which input is left out."""
    shapes = tuple(ShapeRange(name, *((size, 4) for size in of_name)) for name, of_name in ranges.items())
    infos = [TensorInfo(name, "float", ("n", 4)) for name in ranges]
    recipe = BuildRecipe.for_run(run_file(shapes=shapes), Path("none"), infos)
    read = trtexec.profile(shlex.split(recipe.command(PLAN))[1:], dict.fromkeys(ranges, (-1, 4)))
    for name, of_name in ranges.items():
        if name not in recipe.unknown:
            assert read[name] == tuple((size, 4) for size in of_name)
    assert all({*name} & {*",'\n"} for name in recipe.unknown)
    assert len(recipe.warnings) == len(recipe.unknown)
    assert all(line.startswith("#") for line in recipe.script(PLAN).splitlines()[: 3 + len(recipe.unknown)])


def test_the_timing_cache_goes_along_as_a_copy(bench: Bench, front: Front, run_dir: Path, arguments) -> None:
    (run_dir / "engines").mkdir(exist_ok=True)
    (run_dir / "engines" / "timing.cache").write_bytes(b"measured")
    recipe = BuildRecipe.for_run(run_file(), run_dir / "data", [])
    write_chosen(front, bench.evaluation(2, 1.2, 1e-3), bench.grouped, run_dir / "chosen", None, recipe=recipe)
    given = trtexec.read_options(arguments(run_dir / "chosen" / "build.sh"))
    assert given["--timingCacheFile"] == ["timing.cache"]
    (run_dir / "chosen" / "timing.cache").write_bytes(b"trtexec adds to it")
    assert (run_dir / "engines" / "timing.cache").read_bytes() == b"measured"
    assert "timing.cache TensorRT's tactic timings" in (run_dir / "chosen" / "README.txt").read_text()
    assert "--timingCacheFile" not in str(BuildRecipe().options(bench.plan(1)))


def test_where_trtexec_is_not_found_the_script_says_where_it_is(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "-a folder's"
    folder.mkdir()
    (folder / "build.sh").write_text(BuildRecipe().script(bench.plan(1)).replace(TRTEXEC_OF_PACKAGE, "/nowhere"))
    command = ["/bin/sh", str(folder / "build.sh")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 127
    assert done.stderr == f"error: trtexec was not found\nhint: {NO_TRTEXEC}\n"


def test_plugins_are_loaded_as_in_the_workers(bench: Bench, tmp_path: Path, arguments) -> None:
    itself, asked = str(tmp_path / "a b's.so"), str(tmp_path / "c.so")
    Path(asked).write_bytes(b"\x7fELF\0setLoggerFinder\0getCreators\0")
    settings = SearchSettings(plugins=(Path(itself), Path(asked)))
    file = run_file().model_copy(update={"search": SearchSection.from_settings(settings)})
    options = trtexec.read_options(arguments(written(BuildRecipe.for_run(file, tmp_path, []), bench.plan(1), tmp_path)))
    assert options["--staticPlugins"] == [itself, asked]
    assert options["--dynamicPlugins"] == [asked]


def test_the_limits_of_the_builder(bench: Bench, environment: Environment) -> None:
    section = TensorRtSettings(workspace_mb=512, optimization_level=5)
    options = BuildRecipe.for_run(run_file(tensorrt=section), Path("none"), []).options(bench.plan(1))
    assert {"--memPoolSize=workspace:512", "--builderOptimizationLevel=5"} <= set(options)
    assert not any("memPool" in option or "Level" in option for option in BuildRecipe().options(bench.plan(1)))
    jetson = replace(environment, jetson=JetsonState("NVIDIA Jetson Orin Nano", memory_gb=7.8))
    for source, wanted in (("measured", 1859), ("predicted", None)):  # what it had by default
        target = TargetSection(name="n", engine="tensorrt", device="d", latency_source=source, error_source="measured")
        file = run_file().model_copy(update={"target": target, "environment": jetson})
        assert BuildRecipe.for_run(file, Path("none"), []).settings.workspace_mb == wanted
