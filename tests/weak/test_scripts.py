"""The exported scripts on recorded surfaces of TensorRT 8.4 to 10.3, with faults of builds that users met."""

from __future__ import annotations

import ast
import ctypes
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")

import mptune
from mptune.errors import ModelError, PlanError, RunError, SettingsError
from mptune.graph.plan import Precision
from mptune.reporting.text import read_template
from mptune.tuning.front import Front
from tests.device.cuda import FakeCuda
from tests.engines.tensorrt.test_api import names_in, recorded
from tests.weak import surface
from tests.weak.machine import Faults, Library, make_module

SCRIPTS = ("constraints.py", "build.py", "time.py")
FOR = {"8.5.3": "tensorrt-8", "8.6.1": "tensorrt-8.6", "10.3.0": "tensorrt-10-weak"}

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def plan(searched: Front) -> str:
    """A plan with layers in each precision."""
    mixed = [e for e in searched.points if e.plan.fp16_groups and e.plan.fp32_groups]
    return mixed[0].plan.fingerprint


@pytest.fixture
def run(
    plan: str, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    """Run a script of an export for a version; returns the exit code and what it wrote."""

    def run(script: str, version: str, faults: Faults | None = None, *arguments: str) -> tuple[int, str, Any]:
        weak = place / "weak"
        if not weak.exists():
            mptune.export("model.mptune", weak, for_=FOR.get(version, "tensorrt-8"), plan=plan)
        cuda = FakeCuda()
        module = make_module(version, cuda, faults)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: Library(cuda))
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        code = 0
        try:
            code = surface.load_script(weak / script, module, monkeypatch).main() or 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
            sys.stderr.write(f"{end.code}\n")
        assert not cuda.rules.forbidden
        assert not cuda.rules.refused
        return code, "".join(capfd.readouterr()), module

    return run


def precisions(place: Path) -> dict[str, str]:
    document = json.loads((place / "weak" / "precisions.json").read_text())
    return {node["name"]: node["precision"] for node in document["nodes"]}


@pytest.mark.parametrize("version", FOR)
def test_build_and_time(version: str, run: Run, place: Path) -> None:
    code, text, module = run("build.py", version)
    assert code == 0, text
    assert "the types of" in text
    report = json.loads((place / "weak" / "build.json").read_text())
    assert report["is_plan"]
    assert report["wrong"] == report["unowned"] == report["refused"] == []
    assert set(report["checked"]) == precisions(place).keys()
    flags = {flag.name for flag in module._configs[0]._flags}
    assert flags == {"FP16", "OBEY_PRECISION_CONSTRAINTS"}
    assert module._configs[0].avg_timing_iterations == 8
    code, text, _ = run("time.py", version, None, "--iterations", "10", "--warmup", "2")
    assert code == 0, text
    document = json.loads((place / "weak" / "time.json").read_text())
    assert document["is_plan"] is True
    assert document["cuda_graph"]
    assert document["latency"]["median_ms"] > 0
    assert document["latency"]["ci95_ms"][0] <= document["latency"]["median_ms"] <= document["latency"]["ci95_ms"][1]
    assert 0 < document["error"]["value"] < 1e-2


def test_a_layer_whose_precision_is_ignored(run: Run, place: Path) -> None:
    run("build.py", "8.6.1")
    name = next(node for node, kind in precisions(place).items() if kind == "fp32")
    (place / "weak" / "model.engine").unlink()
    code, text, _ = run("build.py", "8.6.1", Faults(ignored=frozenset({name})))
    assert code == 3
    assert re.search(rf"WRONG +{name} \(", text)
    assert "NOT DONE" in text
    assert not (place / "weak" / "model.engine").exists()
    assert (place / "weak" / "model.engine.not-the-plan").exists()


@pytest.mark.parametrize("version", FOR)
def test_an_engine_that_came_out_in_fp32(version: str, run: Run) -> None:
    code, text, _ = run("build.py", version, Faults(is_fp32=True))
    assert code == 3
    assert "no tensor of the engine is FP16" in text


def test_obey_fails_because_of_shuffles(run: Run) -> None:
    """The network has no shuffles that are told types: OBEY works at once, or at the second attempt."""
    code, text, module = run("build.py", "8.6.1", Faults(obey="shuffles"))
    assert code == 0, text
    assert len(module._configs) == (2 if "failed:" in text else 1)


def test_obey_fails(run: Run) -> None:
    code, text, module = run("build.py", "8.6.1", Faults(obey="always"))
    assert code == 0, text
    assert text.count("failed: Error Code 10") == 2
    assert "preferred, not obeyed" in text
    assert {flag.name for flag in module._configs[2]._flags} == {"FP16", "PREFER_PRECISION_CONSTRAINTS"}


def test_a_layer_that_takes_no_precision(run: Run, place: Path) -> None:
    run("build.py", "8.6.1")
    name = next(node for node, kind in precisions(place).items() if kind == "fp16")
    code, text, _ = run("build.py", "8.6.1", Faults(deaf=frozenset({name})))
    assert code == 3
    assert f"REFUSED   {name} (" in text


def test_an_engine_that_shows_no_types(run: Run) -> None:
    code, text, _ = run("build.py", "8.6.1", Faults(is_blind=True))
    assert code == 3
    assert "nothing says that the engine is the plan" in text


def test_versions_that_the_files_are_not_for(run: Run) -> None:
    code, text, _ = run("build.py", "8.4.3")
    assert code == 1
    assert "run build.sh" in text
    code, text, _ = run("build.py", "10.3.0")
    assert code == 1
    assert "written for TensorRT 8.5 and 8.6" in text


def test_time_without_an_engine(run: Run) -> None:
    code, text, _ = run("time.py", "8.5.3")
    assert code == 1
    assert "python build.py writes it" in text


def test_a_fused_region_hides_its_nodes(plan: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies inside is not called checked; what comes out of it is held against the plan by its tensor."""
    mptune.export("model.mptune", place / "weak", for_="tensorrt-8", plan=plan)
    build = surface.load_script(place / "weak" / "build.py", make_module("8.5.3", FakeCuda()), monkeypatch)
    outcome = build.constraints.Outcome()
    outcome.nodes, outcome.types = {"n0001": "FP16", "n0002": "FP32", "n0003": "FP16"}, {"b": "FP32", "y": "FP16"}

    def layer(name: str, tensor: str, kind: str) -> dict[str, Any]:
        return {
            "Name": name,
            "Inputs": [],
            "Outputs": [{"Name": tensor, "Format/Datatype": f"Row major linear {kind}"}],
        }

    plan_document = {"inputs": ["x"], "prefix": "n", "nodes": []}
    region = "{ForeignNode[n0001...n0002]}"
    checked, unseen, wrong = build.verify(
        [layer(region, "b", "FP32"), layer("n0003_7", "y", "FP16 format")], plan_document, outcome
    )
    assert (checked, unseen, wrong) == (["n0003"], ["n0001", "n0002"], [])
    *_, wrong = build.verify([layer(region, "b", "FP16"), layer("PWN(n0003)", "y", "FP16")], plan_document, outcome)
    assert wrong == ["n0001, n0002: b is FP16, not FP32"]


@pytest.mark.parametrize("target", ["tensorrt-8", "tensorrt-8.6", "tensorrt-8.4", "tensorrt-10-weak"])
def test_the_folder(target: str, plan: str, place: Path) -> None:
    mptune.export("model.mptune", place / "weak", for_=target, plan=plan)
    has_scripts = target != "tensorrt-8.4"
    names = {
        "model.onnx",
        "precisions.json",
        "build.sh",
        "README.txt",
        *((*SCRIPTS, "reference.npz") if has_scripts else ()),
    }
    assert {path.name for path in (place / "weak").iterdir()} == names
    for path in (place / "weak").glob("*.py"):
        ast.parse(path.read_text(), feature_version=(3, 6))
        assert not re.search(r"^from __future__|:=", path.read_text(), re.MULTILINE)
        modules = {
            n.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import) for n in node.names
        }
        own = {
            "argparse",
            "constraints",
            "ctypes",
            "glob",
            "json",
            "math",
            "numpy",
            "os",
            "platform",
            "re",
            "sys",
            "tensorrt",
        }
        assert modules <= own
    readme = (place / "weak" / "README.txt").read_text()
    assert len(readme.splitlines()) < 40
    assert "$" not in readme
    assert "[" not in readme
    assert max(map(len, readme.splitlines())) <= 120
    assert plan in readme
    assert ("build.py" in readme) == has_scripts


@pytest.mark.parametrize("version", ["8.5", "8.6", "10.3"])
def test_recorded_versions_have_every_name(version: str, plan: str, place: Path) -> None:
    mptune.export("model.mptune", place / "weak", for_="tensorrt-8", plan=plan)
    named = names_in(tuple(place / "weak" / name for name in SCRIPTS))
    assert {"ILayer.set_output_type", "INetworkDefinition.get_layer", "IBuilderConfig.set_flag"} <= named
    later = {"IBuilderConfig.builder_optimization_level"} if version == "8.5" else set()  # only as precisions.json says
    gone = {"NetworkDefinitionCreationFlag.EXPLICIT_BATCH"} if version == "11.4" else set()
    assert sorted(named - recorded(version) - later - gone) == []


def test_what_export_refuses(plan: str, place: Path) -> None:
    with pytest.raises(SettingsError, match="tensorrt-7 is unknown"):
        mptune.export("model.mptune", for_="tensorrt-7")
    with pytest.raises(SettingsError, match="plan goes with"):
        mptune.export("model.mptune", plan=plan)
    with pytest.raises(PlanError):
        mptune.export("model.mptune", for_="tensorrt-8", plan="ffffffffffff")
    folder = mptune.export("model.mptune", for_="tensorrt-8")
    assert folder == Path("model.mptune/weak")
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="holds model.onnx already"):
        mptune.export("model.mptune", for_="tensorrt-8.4")
    mptune.export("model.mptune", for_="tensorrt-8.4", force=True)
    assert (folder / "notes.txt").read_text() == "mine"
    assert not (folder / "time.py").exists()
