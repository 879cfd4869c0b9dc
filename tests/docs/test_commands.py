"""Every command and every piece of Python in the pages is run, in a folder with a small model and its samples.

What cannot be run here (it needs a GPU, a device, a network or PyTorch) is listed below with its reason; the options
that it names are checked by ``tests/test_docs.py`` against the program.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from mptune.cli import main
from tests.docs.pages import PAGES, ROOT, Block, blocks_of, commands_of, read

HERE = Path(__file__).resolve().parent
ONNX = (HERE / "denoiser.onnx").read_bytes()

TUTORIAL = "docs/guide/tutorial.md"
"""The page whose reader begins with an empty folder."""

NOT_RUN = {
    r"pip install|python3 -m venv|\. \S+/activate|sudo apt|git clone": "installs packages from a network",
    r"sh \S+/chosen/build\.sh|trtexec ": "needs TensorRT and a GPU",
    r"scp |sudo |tar xzf run\.tar\.gz|srun |sbatch ": "is for another machine",
    r"export MPTUNE_STORAGE|.*--storage|mptune worker": "needs a PostgreSQL server, and more machines",
    r"mptune search .*--gpus": "needs GPUs",
    r"mptune confirm|mptune pick \S+/confirmed/": "needs the device",
    r"mptune export .*--for": "the model here has LayerNormalization, which TensorRT 8.5 lacks",
    r".*--engine (tensorrt|tensorrt-rtx)\b|mptune search .*--shapes": "needs TensorRT",
    r"python -m benchmarks\.": "takes minutes; tests/test_docs.py checks that the script exists",
    r"mkdocs ": "is run by tests/docs/test_site.py",
    r"pytest |ruff |mypy": "is the test suite",
    r"mptune doctor --selftest": "is run by tests/test_selftest.py",
    r"mptune demo": "is run by .ci/run, from a built wheel",
    r"python -m modelopt|polygraphy |optuna-dashboard ": "is another project's tool, shown for comparison",
    r"mptune search \S+ --data \S+ --target h200": "needs a large model",
}
"""Patterns that match the beginning of a command, and why such commands are not run."""

NOT_HERE = re.compile(r"--gpus|--storage|worker|confirm|--for|--engine|--shapes|h200|--selftest|mptune demo")
"""What a command of mptune names that cannot be run here."""

EXIT_CODE = re.compile(r"exit code (\d+)")

READS_ONLY = re.compile(r"mptune (inspect|compare|check|report|targets|spaces|doctor) ")
"""Commands that change nothing: one that stands on several pages is run once in a process."""

_DONE: set[str] = set()

PAGES_WITH_COMMANDS = [page for page in PAGES if any(block.language == "bash" for block in blocks_of(read(page)))]


def write_samples(folder: Path, name: str = "samples.npz", count: int = 4) -> None:
    """Images as the tutorial makes them, but fewer."""
    images = np.random.default_rng(count).uniform(0, 4095, (count, 1, 48, 64))
    np.savez(folder / name, image=images.astype(np.float32))


@pytest.fixture(scope="session")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``model.onnx``, ``samples.npz`` and the finished run ``model.mptune``; copy it."""
    folder = tmp_path_factory.mktemp("searched")
    (folder / "model.onnx").write_bytes(ONNX)
    write_samples(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["search", "model.onnx", "--data", "samples.npz", "--budget", "3"]) == 0
    return folder


def copy_for_a_reader(searched: Path, folder: Path) -> Path:
    """The working directory of a reader."""
    shutil.copytree(searched, folder)
    shutil.copy(folder / "model.onnx", folder / "other.onnx")
    shutil.copy(folder / "model.mptune/chosen/model.onnx", folder / "mixed.onnx")
    for name in ("validation.npz", "val.npz", "other.npz"):
        write_samples(folder, name, 3)
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    session = onnxruntime.InferenceSession(ONNX, providers=["CPUExecutionProvider"])
    np.savez(folder / "deployed.npz", clean=session.run(None, {"image": np.load(folder / "val.npz")["image"]})[0])
    return folder


def why_not(command: str) -> str | None:
    """Why a command cannot be run here; None where it can."""
    return next((reason for pattern, reason in NOT_RUN.items() if re.match(pattern, command)), None)


def run(command: str, line: str) -> None:
    """Run one command; the line of the page may name the exit code that it has."""
    expected = int(match[1]) if (match := EXIT_CODE.search(line)) else 0
    words = shlex.split(re.split(r"\s(?:\||>)\s", command)[0])
    if words[0] == "mptune":
        few = ["--budget", "3"] if words[1] == "search" else []
        assert main([*words[1:], *few]) == expected, command
        return
    assert words[0] == "python", f"nothing runs `{command}`, and NOT_RUN gives no reason"
    if importlib.util.find_spec("torch") is None and "torch" in Path(words[1]).read_text():
        Path("model.onnx").write_bytes(ONNX)
        return
    done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == expected, done.stderr


def follow(block: Block, names: dict[str, object]) -> None:
    """Do what a block says."""
    if block.title is not None:
        Path(block.title).parent.mkdir(exist_ok=True)
        Path(block.title).write_text(block.body)
    elif block.language == "python":
        exec(compile(block.body, "block", "exec"), names)
    elif block.language == "bash":
        for command in commands_of(block):
            if why_not(command) is None and command not in _DONE:
                line = next((line for line in block.body.splitlines() if line.startswith(command)), command)
                run(command, line)
                if READS_ONLY.match(command) and Path("model.onnx").read_bytes() == ONNX:
                    _DONE.add(command)


_GUIDES = ("coming-from", "jetson", "metrics", "report", "spaces-and-targets", "tensorrt-11", "troubleshooting")
LONG = {"docs/examples/text.md", *(f"docs/guide/{name}.md" for name in _GUIDES)}
"""Whose models are larger, or whose commands others run in much the same way: with what is marked ``slow``."""


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] if page in LONG else []) for page in PAGES_WITH_COMMANDS]
)
def test_a_reader_can_follow_a_page(page: str, searched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path if page == TUTORIAL else copy_for_a_reader(searched, tmp_path / "work"))
    if page == "README.md":
        Path("mixed.onnx").unlink()  # it makes its own
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks_of(read(page)):
        if page != "README.md" or block.language == "bash":  # its Python needs images; tests/test_docs.py reads it
            follow(block, names)


@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS)
def test_most_of_what_is_not_run_is_no_command_of_mptune(page: str) -> None:
    """NOT_RUN must not grow over what could be run: whatever it matches names a thing that is not here."""
    for block in blocks_of(read(page)):
        if block.language == "bash":
            for command in commands_of(block):
                if command.startswith("mptune") and why_not(command):
                    assert NOT_HERE.search(command), command


def test_the_stored_network_is_what_the_tutorial_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PyTorch the tutorial goes on with ``denoiser.onnx``; where PyTorch is, it must be the same network."""
    pytest.importorskip("torch", reason="exports with PyTorch: pip install '.[bench]'")
    monkeypatch.chdir(tmp_path)
    (block,) = [block for block in blocks_of(read(TUTORIAL)) if block.title == "export.py"]
    follow(block, {})
    run("python export.py", "")
    exported, stored = onnx.load("model.onnx").graph, onnx.load(HERE / "denoiser.onnx").graph
    assert [node.op_type for node in exported.node] == [node.op_type for node in stored.node]
    for ours, other in zip(exported.initializer, stored.initializer, strict=True):
        np.testing.assert_allclose(numpy_helper.to_array(ours), numpy_helper.to_array(other))
