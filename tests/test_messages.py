"""What mptune says of frequent mistakes: what is wrong with what was given, and what to give instead."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mptune
from mptune.cli import main
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import REDUCED, Precision
from mptune.graph.writing.rewrite import Rewriter


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, error and hint; nothing else may be said."""
    code = main(arguments)
    captured = capsys.readouterr()
    assert captured.out == ""
    error, hint = captured.err.splitlines()
    return code, error.removeprefix("error: "), hint.removeprefix("hint: ")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlp_path: Path, cnn_path: Path) -> Path:
    """A working directory with models, files that are none, and run directories that are damaged."""
    monkeypatch.chdir(tmp_path)
    for name, model in (("mlp", mlp_path), ("cnn", cnn_path)):
        (tmp_path / f"{name}.onnx").symlink_to(model)
    (tmp_path / "short.onnx").write_bytes(b"\x08")
    for name, content in (("garbage", "{no json"), ("list", "[1, 2]"), ("other", '{"format": 6}')):
        (tmp_path / f"{name}.mptune").mkdir()
        (tmp_path / f"{name}.mptune" / "run.json").write_text(content)
    np.savez(tmp_path / "d.npz", x=np.zeros(1))
    (tmp_path / "seen.onnx").touch()
    (tmp_path / "seen.mptune").mkdir()
    return tmp_path


_NAMES = "`mptune inspect MODEL` lists the names; op:NAME and kind:NAME mean operators and kinds"
_RESTORE = "restore it from a copy, or search with --fresh: that moves the directory aside (nothing is deleted)"


@pytest.mark.parametrize(
    ("arguments", "code", "error", "hint"),
    [
        (
            ["report", "mlp.onnx"],
            1,
            "mlp.onnx is no run directory: there is no run.json in it",
            "`mptune search MODEL` makes one: MODEL.mptune in the working directory",
        ),
        (
            ["report", "garbage.mptune"],
            1,
            "garbage.mptune/run.json is damaged: Expecting property name enclosed in double quotes: line 1 column 2 "
            "(char 1)",
            _RESTORE,
        ),
        (["confirm", "list.mptune"], 1, "list.mptune/run.json is damaged: the file: Input should be a valid "
         "dictionary or instance of RunFile", _RESTORE),
        (["export", "other.mptune"], 1, "other.mptune/run.json is damaged: model: Field required", _RESTORE),
        (["pick", "run", "--max-error", "small"], 2, "--max-error small is not a number", "write 1e-2, 0.01 or 1%"),
        (["search", "mlp.onnx", "--metric", "l2"], 2, "unknown metric 'l2'",
         "there are worst_part, relative_l2, max_abs, mean_abs, median_abs, p99_abs, max_rel, sqnr_db, non_finite, "
         "top1_disagreement, endpoint_error, top1_accuracy, top5_accuracy, map, miou; your own: script.py:function"),
        (["export", "seen.mptune", "-o", "missing/run.tar.gz"], 1, "seen.mptune is no run directory: there is no "
         "run.json in it", "`mptune search MODEL` makes one: MODEL.mptune in the working directory"),
        (
            ["apply", "mlp.onnx", "--keep-fp32", "kind:nrom", "-o", "out.onnx"],
            1,
            "--keep-fp32 kind:nrom matches nothing in mlp.onnx",
            f"did you mean kind:norm? {_NAMES}",
        ),
        (
            ["apply", "mlp.onnx", "--keep-fp32", "op:softmax", "-o", "out.onnx"],
            1,
            "--keep-fp32 op:softmax matches nothing in mlp.onnx",
            f"did you mean op:Softmax? {_NAMES}",
        ),
        (
            ["inspect", "short.onnx"],
            1,
            "short.onnx is not an ONNX model, or it is truncated",
            "export it again (a PyTorch module: torch.onnx.export), or compare the copy with the original",
        ),
        (["search", "mlp.onnx", "--shapes", "z:1x32"], 2, "--shapes z:1x32 fits no input of the model",
         "inputs of any size: x (batch, 32); give every dimension, the fixed ones as they are"),
        (["search", "mlp.onnx", "--shapes", "x:1x32x3"], 2, "--shapes x:1x32x3 fits no input of the model",
         "inputs of any size: x (batch, 32); give every dimension, the fixed ones as they are"),
        (["search", "mlp.onnx", "--shapes", "x:1x32,2x32,4x33"], 2,
         "--shapes x:1x32,2x32,4x33 fits no input of the model",
         "inputs of any size: x (batch, 32); give every dimension, the fixed ones as they are"),
        (["search", "cnn.onnx", "--shapes", "image:2x3x16x16"], 2,
         "--shapes image:2x3x16x16 fits no input of the model",
         "inputs of any size: none; give every dimension, the fixed ones as they are"),
        (["search", "cnn.onnx", "--batch", "4"], 2, "--batch is 4, but the model's batch is fixed (image (2, 3, 16, "
         "16))", "leave it out, or export the model with a dynamic batch"),
        (["search", "mlp.onnx", "--target", "orin-nx"], 2, "there is no target 'orin-nx'",
         "did you mean jetson-orin-nx-16gb or jetson-orin-nx-16gb-super or jetson-orin-nx-8gb or "
         "jetson-orin-nx-8gb-super? `mptune targets` lists them all; a TOML file of your own works too"),
        (["search", "mlp.onnx", "--limit", "mapp>=0.4"], 2, "--limit mapp>=0.4: the metrics are worst_part",
         "did you mean map?"),
        (["search", "mlp.onnx", "--max-error", "1 %%"], 2, "--max-error 1 %% is not a number",
         "write 1e-2, 0.01 or 1%"),
    ],
)  # fmt: skip
def test_a_frequent_mistake(
    arguments: list[str], code: int, error: str, hint: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(here.rglob("*"))
    assert said(arguments, capsys) == (code, error, hint)
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize(("text", "value"), [("1%", 0.01), ("0.5 %", 0.005), ("1e-2", 0.01), (0.01, 0.01)])
def test_a_limit_on_the_error_may_be_a_percentage(text: str | float, value: float) -> None:
    assert mptune.SearchSettings(max_error=text).max_error == pytest.approx(value)  # type: ignore[arg-type]


def test_check_refuses_exchanged_models(here: Path) -> None:
    model = load_model("mlp.onnx")
    grouped = GroupedModel(model, find_groups(model))
    Rewriter(grouped).export(grouped.uniform(Precision.FP16), here / "mixed.onnx")
    data = {"another name": np.ones((2, 32), np.float32)}
    with pytest.raises(mptune.ModelError, match=r"has FP16 or BF16 values, and MIXED has none") as raised:
        mptune.check("mlp.onnx", against="mixed.onnx", data=data, max_error="1%")
    assert raised.value.hint == "exchange them: MIXED is mixed.onnx, and --against mlp.onnx"


def test_help_fits_one_screen_and_names_where_the_rest_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["search", "--help"]) == 0
    short = capsys.readouterr().out
    assert len(short.splitlines()) <= 24
    assert max(map(len, short.splitlines())) <= 80
    assert "`mptune search --help-all` shows every option." in short
    assert main(["search", "--help-all"]) == 0
    every = capsys.readouterr().out
    assert "Advanced:" in every
    for option in ("--max-error", "--budget", "--explain", "--quiet"):
        assert option in short
        assert option in every


@pytest.mark.parametrize(
    ("wrong", "words"), [(["--budget", "abc"], "--budget"), (["--engine=trt"], "tensorrt-rtx"), (["d.npz"], "d.npz")]
)
def test_what_typer_refuses_is_said_in_its_words(
    wrong: list[str], words: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, error, hint = said(["search", "mlp.onnx", *wrong], capsys)
    assert (code, hint) == (2, "`mptune search --help` shows what is expected")
    assert words in error


@pytest.mark.parametrize("precision", REDUCED)
def test_a_model_that_is_mixed_already_is_told_with_counts(
    precision: Precision, mlp_path: Path, tmp_path: Path
) -> None:
    model = load_model(mlp_path)
    grouped = GroupedModel(model, find_groups(model))
    half = [group.id for group in grouped.groups][:3]  # norm, Gemm with Relu, Gemm
    plan = grouped.uniform(Precision.FP32).replace(dict.fromkeys(half, precision))
    mixed = Rewriter(grouped).export(plan, tmp_path / "mixed.onnx")
    (finding,) = [each for each in mptune.inspect(mixed).findings if each.code == "already-mixed"]
    left = len(grouped.groups) - len(half)
    assert finding.text.startswith(f"4 of 10 layers are {precision.name} already, ")
    assert f"only the other {left} groups are searched" in finding.text
    assert finding.cure == "give the FP32 model that it was made from"
    evidence = finding.evidence
    assert (finding.severity, evidence[f"{precision}_layers"], evidence["other_groups"]) == ("warning", 4, left)
    assert finding.where.nodes == ("block0/norm", "block0/fc1/Gemm", "block0/fc1/Relu", "block0/fc2/Gemm")
    assert 0.4 < float(finding.evidence["flops_share"]) < 0.6
    assert not [each for each in mptune.inspect(mlp_path).findings if each.code == "already-mixed"], "the sound twin"


def test_a_model_that_computes_in_bf16_and_does_not_run_says_what_to_give(mlp_path: Path, tmp_path: Path) -> None:
    model = load_model(mlp_path)
    grouped = GroupedModel(model, find_groups(model))
    mixed = Rewriter(grouped).export(grouped.uniform(Precision.BF16), tmp_path / "mixed.onnx")
    samples = {info.name: np.zeros((2, *(info.shape or ())[1:]), np.float32) for info in model.inputs}
    with pytest.raises(mptune.MptuneError, match="cannot be observed") as caught:
        mptune.inspect(mixed, data=samples)
    assert "ONNX Runtime has few BF16 kernels: give the FP32 model that it was made from" in str(caught.value.hint)
