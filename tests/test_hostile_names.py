"""Names in a model, and texts in a run, that would drive a terminal or forge lines: on every way out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import onnx
import pytest

import mptune
from mptune.cli import main
from mptune.engines.base import Failure, FailureKind, Stage
from mptune.printable import printable
from mptune.reporting.terminal.front import print_confirmation
from mptune.reporting.terminal.progress import TerminalListener
from mptune.tuning.evaluation import Origin
from tests.conftest import save_mlp
from tests.fakes import FAST, FakeToolchain, make_plan, make_toolchain

pytestmark = pytest.mark.usefixtures("opened_here")

HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202e\u2066\r\x9b31m\nFORGED"


def is_clean(text: str) -> bool:
    lines = text.split("\n")
    return all(line.isprintable() and not line.lstrip().startswith("FORGED") for line in lines)


def hostile_toolchain() -> FakeToolchain:
    return make_toolchain(device=f"GPU {HOSTILE}", name=f"engine{HOSTILE}")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, mlp_data: Path) -> Path:
    """A folder with a model whose nodes and weights have hostile names, and a run whose record has such texts."""
    folder = tmp_path_factory.mktemp("hostile")
    proto = onnx.load(save_mlp(folder / "model.onnx"))
    names = {weight.name for weight in proto.graph.initializer} | {o for node in proto.graph.node for o in node.output}
    names.discard("y")
    for weight in proto.graph.initializer:
        weight.name += HOSTILE
    for node in proto.graph.node:
        node.name += HOSTILE
        node.input[:] = [name + HOSTILE * (name in names) for name in node.input]
        node.output[:] = [name + HOSTILE * (name in names) for name in node.output]
    onnx.save(proto, folder / "model.onnx")
    shutil.copy(mlp_data, folder / "data.npz")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        mptune.search("model.onnx", data="data.npz", budget=6, latency=FAST, open_toolchain=hostile_toolchain().open)
    run_json = folder / "model.mptune" / "run.json"
    document = json.loads(run_json.read_text())
    document["warnings"] = [f"warned {HOSTILE}"]
    run_json.write_text(json.dumps(document))
    return folder


@pytest.fixture
def place(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it as the working directory."""
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        *(f"report model.mptune{options}" for options in ("", " --explain", " --json", " --explain --json")),
        *(f"pick model.mptune {options}" for options in ("--knee", "--plan none")),
        *("export model.mptune", "confirm model.mptune --target none"),
        *(f"inspect model.onnx{options}" for options in ("", " --data data.npz", " --json")),
        "apply model.onnx --fp16-all --keep-fp32 none -o out.onnx",
        "apply model.onnx --fp16-all -o out.onnx",
        "search model.onnx --data data.npz --target none",
    ],
)
def test_every_command(
    place: Path, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # every column is shown
    main(command.split())
    out, err = capsys.readouterr()
    assert out + err
    assert is_clean(out)
    assert is_clean(err)


def test_a_confirmation(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_confirmation(mptune.confirm("model.mptune", open_toolchain=hostile_toolchain().open))
    assert is_clean(capsys.readouterr().out)
    (page,) = Path("model.mptune/confirmed").glob("*/report.html")
    assert is_clean(page.read_text().replace("FORGED", ""))


def test_files_and_python(place: Path) -> None:
    front = mptune.pick("model.mptune", max_error=1e-9)
    shown = [Path("model.mptune/chosen/README.txt").read_text(), repr(front), *map(repr, front.points)]
    shown.append(Path("model.mptune/report.html").read_text().replace("FORGED", ""))  # line breaks mean nothing there
    assert any("owned" in text for text in shown)
    assert "plans evaluated" in shown[-1]
    assert [is_clean(text) for text in shown] == [True] * len(shown)


def test_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with TerminalListener() as listener:
        listener.stage(HOSTILE)
        listener.warning(HOSTILE)
        failure = Failure(Stage.BUILD, FailureKind.ERROR, HOSTILE)
        listener.failed(make_plan("01"), Origin("seed", HOSTILE), failure, 1, 2)
    told = capsys.readouterr().err
    assert told.count("owned") == 4
    assert is_clean(told)


def test_a_name_of_a_run_and_what_is_printable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", f"none{HOSTILE}"]) == 1
    assert is_clean(capsys.readouterr().err)
    assert printable("a\nb\x1b[0m\u202e\u00e4") == "a\\nb\\x1b[0m\\u202e\u00e4"
