"""The chosen/ directory: what is in it, that it works alone, and that nothing of the user's is lost."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from mptune._version import __version__
from mptune.engines.environment import Environment
from mptune.errors import RunError
from mptune.finding import Finding, Severity, Where
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
from mptune.graph.writing.rewrite import Rewriter, rewrite
from mptune.graph.writing.weights import WeightBank
from mptune.reporting.chosen import write_chosen
from mptune.reporting.text import TF32_SIZE
from mptune.tuning.front import Front
from tests.reporting.conftest import Bench, make_error, make_latency, readme


@pytest.fixture
def chosen_dir(bench: Bench, front: Front, run_dir: Path, environment: Environment) -> Path:
    """``chosen/`` of the usual front."""
    front = replace(front, tf32=replace(front.fp32, latency=make_latency(1.6), error=make_error(5e-4)))
    write_chosen(front, front.chosen, bench.grouped, run_dir / "chosen", environment)
    return run_dir / "chosen"


def opened(path: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def grouped_model(path: Path) -> GroupedModel:
    model = load_model(path)
    return GroupedModel(model, find_groups(model))


def infer(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run infer.py from elsewhere, as a user would."""
    command = [sys.executable, str(directory / "infer.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=directory.parent)


def test_the_folder_holds_a_model_that_keeps_its_interface(chosen_dir: Path, mlp_path: Path, mlp_data: Path) -> None:
    names = ["README.txt", "build.sh", "infer.py", "model.onnx", "plan.json"]
    assert sorted(p.name for p in chosen_dir.iterdir()) == names
    feeds = {"x": np.load(mlp_data)["x"]}
    mixed, original = (opened(path) for path in (chosen_dir / "model.onnx", mlp_path))
    for kind in ("get_inputs", "get_outputs"):
        ours, theirs = ([(m.name, m.type, m.shape) for m in getattr(s, kind)()] for s in (mixed, original))
        assert ours == theirs
    (got,), (wanted,) = mixed.run(None, feeds), original.run(None, feeds)
    assert 0 < np.linalg.norm(got - wanted) / np.linalg.norm(wanted) < 1e-2


def test_the_model_says_what_made_it(chosen_dir: Path, bench: Bench, front: Front, environment: Environment) -> None:
    mixed = onnx.load(chosen_dir / "model.onnx")
    onnx.checker.check_model(mixed, full_check=True)
    entries = {entry.key: entry.value for entry in mixed.metadata_props}
    wanted = {
        "version": __version__, "source_sha256": bench.model.sha256, "plan": front.chosen.plan.fingerprint,
        "error": "0.002", "error_source": "measured", "latency_ms": "1.2", "latency_source": "measured",
        "target": "this-gpu",
    }  # fmt: skip
    assert {f"mptune.{name}": value for name, value in wanted.items()}.items() <= entries.items()
    assert json.loads(entries["mptune.precision"]) == front.chosen.plan.precision
    assert opened(chosen_dir / "model.onnx").get_modelmeta().custom_metadata_map == entries
    bank = WeightBank.write(bench.model, chosen_dir.parent / "weights")
    write_chosen(front, front.chosen, bench.grouped, chosen_dir.parent / "other", environment, bank)
    assert (chosen_dir.parent / "other" / "model.onnx").read_bytes() == (chosen_dir / "model.onnx").read_bytes()


def test_a_model_made_from_a_chosen_one_does_not_say_what_made_that(chosen_dir: Path, tmp_path: Path) -> None:
    source = onnx.load(chosen_dir / "model.onnx")
    source.metadata_props.add(key="author", value="someone")
    onnx.save(source, tmp_path / "again.onnx")
    grouped = grouped_model(tmp_path / "again.onnx")
    plan = grouped.uniform(Precision.FP32)
    rewritten = rewrite(grouped.model, plan, grouped.groups)
    assert [(entry.key, entry.value) for entry in rewritten.metadata_props] == [("author", "someone")]
    exported = Rewriter(grouped).export(plan, tmp_path / "made.onnx", {"plan": "1234"})
    assert [entry.key for entry in onnx.load(exported).metadata_props] == ["author", "mptune.plan"]
    onnx.checker.check_model(str(exported), full_check=True)


def test_plan_names_every_group_and_its_nodes(chosen_dir: Path, bench: Bench, front: Front) -> None:
    document = json.loads((chosen_dir / "plan.json").read_text())
    precision = {group: str(p) for group, p in front.chosen.plan.precision.items()}
    assert (document["model_sha256"], document["precision"]) == (bench.model.sha256, precision)
    nodes = {node: precision[group.id] for group in bench.groups for node in group.nodes}
    assert nodes.items() <= document["nodes"].items()


def test_readme_tells_figures_sources_and_versions(chosen_dir: Path, mlp_path: Path) -> None:
    text = (chosen_dir / "README.txt").read_text()
    for needed in (
        "in TF32          1.600 ms, error 5.0e-04", TF32_SIZE,
        "1.200 ms (median), MEASURED", "1.67x", "2.0e-03 relative_l2, MEASURED", "the fastest with error <= 0.005",
        "onnxruntime      1.31.1", "NVIDIA H200, 140 GiB, driver 580.1", "the calibration data are random",
        "trtexec --onnx=model.onnx --stronglyTyped --noTF32", "config.clear_flag(trt.BuilderFlag.TF32)",
        "Do not give trtexec --fp16", str(mlp_path),
    ):  # fmt: skip
        assert needed in text
    assert "$" not in text
    assert max(map(len, text.splitlines())) <= 160


def test_readme_of_a_cpu_speaks_of_no_engine(bench: Bench, front: Front, run_dir: Path) -> None:
    front = replace(front, target="cpu", engine="onnxruntime", device="AMD EPYC")
    write_chosen(front, front.chosen, bench.grouped, run_dir / "chosen", None)
    text = (run_dir / "chosen" / "README.txt").read_text()
    assert not (run_dir / "chosen" / "build.sh").exists()
    # Nor of the check, as there is no check.npz.
    assert re.findall(r"engine|trtexec|TensorRT|CUDA|GPU|\[|python infer.py --check", text) == []
    assert "runtime          onnxruntime" in text
    assert "python infer.py --data" in text
    done = infer(run_dir / "chosen", "--iterations", "2", "--provider", "cpu")
    assert re.findall("engine|TF32|GPU", done.stdout) == []


def test_readme_has_the_findings_by_code_and_names_the_baseline_as_the_tables_do(front: Front) -> None:
    def finding(code: str, severity: Severity, number: int) -> Finding:
        where = Where(nodes=(f"n{number}",))
        return Finding(code, severity, "search", where, {}, f"text {number} \x1b[2J\n<b>", f"cure {number}")

    findings = (finding("rows-mix", "error", 0), *(finding("overflow", "info", k) for k in range(1, 6)))
    front = replace(front, findings=findings)
    first = next(iter(front.fp16.plan.precision))
    fp16 = replace(front.fp16, plan=front.fp16.plan.replace({first: Precision.FP32}))
    text = readme(replace(front, chosen=fp16, fp16=fp16))
    assert "  - error: rows-mix: text 0 \\x1b[2J\\n<b>; cure 0\n" in text
    assert "  - info: overflow: text 3 " in text
    assert "text 4" not in text
    assert "  - 2 more findings 'overflow' are in front.json\n" in text
    assert "(all-FP16 but 1 pinned)" in text
    assert "the calibration data are random" in text


def test_a_name_of_any_length_is_shortened_in_the_readme(front: Front) -> None:
    name = "n" * 10_000
    finding = Finding("overflow", "warning", "search", Where(nodes=(name,)), {}, f"value {name!r}: Inf", "")
    front = replace(front, findings=(finding,), warnings=(f"node {name} is slow",), device=name)
    text = readme(front)
    assert max(map(len, text.splitlines())) < 800
    assert text.count("nnn...") >= 3
    assert "  - node nnn" in text


def test_files_of_the_user_survive(chosen_dir: Path, bench: Bench, front: Front, environment: Environment) -> None:
    (chosen_dir / "measured").mkdir()
    for name in ("notes.md", "measured/orin.csv"):
        (chosen_dir / name).write_text("mine")
    (chosen_dir / "link").symlink_to("notes.md")
    for plan in (front.points[0], front.chosen):
        write_chosen(front, plan, bench.grouped, chosen_dir, environment)
        assert [(chosen_dir / name).read_text() for name in ("notes.md", "measured/orin.csv")] == ["mine"] * 2
        assert (chosen_dir / "link").readlink() == Path("notes.md")
        written = json.loads((chosen_dir / "plan.json").read_text())["precision"]
        assert written == {group: str(precision) for group, precision in plan.plan.precision.items()}
        assert sorted(p.name for p in chosen_dir.parent.iterdir()) == ["chosen"]
        chosen_dir.rename(chosen_dir.with_name(".chosen.old"))  # killed between the two renames
        chosen_dir.with_name(".chosen.new").mkdir()
    (chosen_dir.parent / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        write_chosen(front, front.chosen, bench.grouped, chosen_dir.parent / "file" / "chosen", environment)


@pytest.mark.smoke
def test_infer_runs_alone(chosen_dir: Path) -> None:
    done = infer(chosen_dir, "--iterations", "3", "--provider", "cpu")
    assert (done.returncode, done.stderr) == (0, "")
    for line in ("input     x  float32  [1, 32]  (random)", "output    y  float32  [1, 8]", "over 3 runs"):
        assert line in done.stdout
    assert "import mptune" not in (chosen_dir / "infer.py").read_text()


def test_infer_switches_tf32_off_as_the_search_did(
    chosen_dir: Path, front: Front, cnn_path: Path, run_dir: Path
) -> None:
    assert 'USE_TF32 = "0"\n' in (chosen_dir / "infer.py").read_text()
    cnn = grouped_model(cnn_path)
    of_cnn = replace(front.chosen, plan=cnn.uniform(Precision.FP16))
    write_chosen(front, of_cnn, cnn, run_dir / "of_cnn", None)
    assert 'USE_TF32 = "1"\n' in (run_dir / "of_cnn" / "infer.py").read_text()
    done = infer(run_dir / "of_cnn", "--iterations", "0", "--provider", "cpu")
    assert done.returncode == 0, done.stderr


def test_infer_runs_given_inputs_and_saves_the_outputs(chosen_dir: Path, mlp_data: Path, tmp_path: Path) -> None:
    out = tmp_path / "outputs.npz"
    done = infer(chosen_dir, "--data", str(mlp_data), "--save", str(out), "--iterations", "0")
    assert done.returncode == 0, done.stderr
    assert "latency" not in done.stdout
    (wanted,) = opened(chosen_dir / "model.onnx").run(None, {"x": np.load(mlp_data)["x"]})
    with np.load(out) as saved:
        assert saved.files == ["y"]
        np.testing.assert_allclose(saved["y"], wanted, rtol=1e-2)
    np.save(tmp_path / "x.npy", np.ones((3, 32)))
    done = infer(chosen_dir, "--data", str(tmp_path / "x.npy"), "--iterations", "0")
    assert "x  float32  [3, 32]  (given)" in done.stdout
    assert "x  float32  [5, 32]  (random)" in infer(chosen_dir, "--shape", "x=5x32", "--iterations", "0").stdout


WRONG = {
    "--model nowhere.onnx": "there is no nowhere.onnx",
    "--data nowhere.npz": "cannot read nowhere.npz",
    "--data other.npz": "has no input x",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_infer_says_what_is_wrong(chosen_dir: Path, arguments: str) -> None:
    says = WRONG[arguments]
    np.savez(chosen_dir.parent / "other.npz", z=np.ones(3))
    done = infer(chosen_dir, "--provider", "cpu", *arguments.split())
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
