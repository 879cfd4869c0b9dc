"""What mptune says of frequent mistakes: what is wrong with what was given, and what to give instead."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import shlex
from pathlib import Path

import numpy as np
import pytest

import mptune
from mptune.cli import explain, main
from mptune.errors import EXIT_STOPPED, BaselineError, MptuneError
from mptune.finding import Finding, OutputColumns, Where
from mptune.graph.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import REDUCED, Precision, PrecisionPlan
from mptune.settings import option_name
from tests.fakes import Diary
from tests.test_docs import options_of


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlp_path: Path, cnn_path: Path) -> Path:
    """A working directory with models, a plan, files that are none, and run directories that are damaged."""
    monkeypatch.chdir(tmp_path)
    for name, path in (("mlp", mlp_path), ("cnn", cnn_path)):
        Path(f"{name}.onnx").symlink_to(path)
    model = load_model(mlp_path)
    plan = PrecisionPlan.uniform(model.sha256, [group.id for group in find_groups(model)], Precision.FP16)
    Path("plan.json").write_text(json.dumps(plan.to_json()))
    Path("short.onnx").write_bytes(b"\x08")
    for name, content in (("garbage", "{no json"), ("list", "[1, 2]"), ("other", '{"format": 7}')):
        Path(f"{name}.mptune").mkdir()
        Path(f"{name}.mptune/run.json").write_text(content)
    np.savez("d.npz", x=np.zeros(1))
    return tmp_path


_NO_RUN = "is no run directory: there is no run.json in it"
_SEARCH = "`mptune search MODEL` makes one: MODEL.mptune in the working directory"
_RESTORE = "restore it from a copy, or search with --fresh: that moves the directory aside (nothing is deleted)"
_NAMES = "`mptune inspect MODEL` lists the names; op:NAME and kind:NAME mean operators and kinds"
_SIZES = "inputs of any size: x (batch, 32); give every dimension, the fixed ones as they are"
_ORIN = "did you mean jetson-orin-nx-16gb or jetson-orin-nx-16gb-super or jetson-orin-nx-8gb or "
_METRICS = "there are worst_part, relative_l2, max_abs, mean_abs, median_abs, p99_abs, max_rel, sqnr_db, non_finite, "
_METRICS += "top1_disagreement, endpoint_error, top1_accuracy, top5_accuracy, map, map:cxcywh, map:xyxy, miou; "
_METRICS += "your own: script.py:function"
_HELP = "`mptune search --help` shows what is expected"
_EXCLUDE = "limits, the knee and a plan's id exclude"
MISTAKES = [
    ("report mlp.onnx", 1, f"mlp.onnx {_NO_RUN}", _SEARCH),
    ("report nowhere.mptune", 1, "nowhere.mptune", _SEARCH),
    ("export nowhere.mptune -o missing/run.tar.gz", 1, f"nowhere.mptune {_NO_RUN}", _SEARCH),
    ("report garbage.mptune", 1, "garbage.mptune/run.json is damaged: Expecting property name enclosed", _RESTORE),
    ("confirm list.mptune", 1, "list.mptune/run.json is damaged: the file: Input should be a valid dict", _RESTORE),
    ("export other.mptune", 1, "other.mptune/run.json is damaged: model: Field required", _RESTORE),
    ("inspect short.onnx", 1, "short.onnx is not an ONNX model, or it is truncated", "export it again (a PyTorch mod"),
    ("inspect nowhere.onnx", 1, "nowhere.onnx", ""),
    ("search mlp.onnx --data nowhere.npz", 1, "nowhere.npz", ""),
    ("apply mlp.onnx nowhere.json -o out.onnx", 1, "nowhere.json", ""),
    ("apply mlp.onnx mlp.onnx -o out.onnx", 1, "plan", ""),
    ("apply mlp.onnx plan.json -o .", 1, "is a directory", ""),
    ("apply mlp.onnx plan.json -o cnn.onnx", 1, "exists already", ""),
    ("apply cnn.onnx plan.json -o out.onnx", 1, "another model", ""),
    ("apply mlp.onnx --fp16-all -o plan.json/out.onnx", 1, "plan.json", ""),
    ("apply mlp.onnx --keep-fp32 op:Conv -o out.onnx", 1, "--keep-fp32 op:Conv matches nothing in mlp.onnx", _NAMES),
    ("apply mlp.onnx --keep-fp32 kind:nrom -o o.onnx", 1, "kind:nrom matches", f"did you mean kind:norm? {_NAMES}"),
    ("apply mlp.onnx --keep-fp32 op:softmax -o o.onnx", 1, "op:softmax match", f"did you mean op:Softmax? {_NAMES}"),
    ("--debug", 2, "Missing command", ""),
    ("serch", 2, "No such command", ""),
    ("search", 2, "Missing argument 'MODEL'", _HELP),
    ("search mlp.onnx d.npz", 2, "d.npz", _HELP),
    ("search m.onnx --bugdet 3", 2, "No such option", _HELP),
    ("search m.onnx --budget many", 2, "--budget", _HELP),
    ("search m.onnx --engine=trt", 2, "tensorrt-rtx", _HELP),
    ("search m.onnx --timeout soon", 2, "'soon' is not a duration", _HELP),
    ("search m.onnx --max-disk much", 2, "'much' is not a size", _HELP),
    ("search m.onnx --budget 0", 2, "--budget is 0", ""),
    ("search m.onnx --batch 0", 2, "--batch is 0", ""),
    ("search m.onnx --seed -1", 2, "--seed is -1", ""),
    ("search m.onnx --timeout 0s", 2, "--timeout is 0", ""),
    ("search m.onnx --max-disk 0GiB", 2, "--max-disk is 0", ""),
    ("search m.onnx --max-error -1", 2, "--max-error is -1", ""),
    ("search mlp.onnx --max-error '1 %%'", 2, "--max-error 1 %% is not a number", "write 1e-2, 0.01 or 1%"),
    ("search m.onnx --sampler bayes", 2, "no sampler 'bayes'", ""),
    ("search mlp.onnx --metric l2", 2, "unknown metric 'l2'", _METRICS),
    ("search mlp.onnx --limit 'mapp>=0.4'", 2, "--limit mapp>=0.4: the metrics are worst_part", "did you mean map?"),
    ("search mlp.onnx --space defualt", 2, "defualt", "default"),
    ("search m.onnx --target mine.toml", 2, "there is no file 'mine.toml'", ""),
    ("search mlp.onnx --target orin-nx", 2, "there is no target 'orin-nx'", _ORIN),
    ("search mlp.onnx --shapes z:1x32", 2, "--shapes z:1x32 fits no input of the model", _SIZES),
    ("search mlp.onnx --shapes x:1x32x3", 2, "--shapes x:1x32x3 fits no input of the model", _SIZES),
    ("search mlp.onnx --shapes x:1x32,2x32,4x33", 2, "--shapes x:1x32,2x32,4x33 fits no input", _SIZES),
    ("search cnn.onnx --shapes image:2x3x16x16", 2, "fits no input of the model", "inputs of any size: none; give"),
    ("search cnn.onnx --batch 4", 2, "the model's batch is fixed (image (2, 3, 16, 16))", "leave it out, or export"),
    ("inspect m.onnx --batch 0", 2, "--batch is 0", ""),
    ("targets h20", 2, "there is no target 'h20'", ""),
    ("pick run", 2, "give a limit or --knee", ""),
    ("pick run --max-error small", 2, "--max-error small is not a number", "write 1e-2, 0.01 or 1%"),
    ("pick run --knee --plan 3f2a", 2, _EXCLUDE, ""),
    ("pick run --max-error 1 --knee", 2, _EXCLUDE, ""),
    ("pick run --max-latency-ms 0", 2, "--max-latency-ms is 0", ""),
    ("apply m.onnx plan.json", 2, "Missing option '--out'", ""),
    ("apply m.onnx -o out.onnx", 2, "no plan given", ""),
    ("apply m.onnx plan.json --fp16-all -o out.onnx", 2, "PLAN and --fp16-all exclude", ""),
]
BEGUN = ("search mlp.onnx --data nowhere.npz", "search mlp.onnx --space defualt")
"""What is wrong is read once the run directory is there."""


@pytest.mark.parametrize(("command", "code", "error", "hint"), MISTAKES)
def test_a_mistake_is_an_error_and_a_hint_and_changes_nothing(
    command: str, code: int, error: str, hint: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(here.rglob("*"))
    assert main(shlex.split(command)) == code
    out, err = capsys.readouterr()
    assert out == ""
    first, last = err.splitlines()[-2:]
    assert first.startswith("error: ")
    assert error in first
    assert last.startswith("hint: ")
    assert hint in last
    assert len(err.splitlines()) == 2 or "search" in command or "inspect" in command, "progress may stand before"
    assert sorted(here.rglob("*")) == before or command in BEGUN


def test_check_refuses_exchanged_models(here: Path) -> None:
    mptune.apply("mlp.onnx", None, here / "mixed.onnx")
    data = {"another name": np.ones((2, 32), np.float32)}
    with pytest.raises(mptune.ModelError, match=r"has FP16 or BF16 values, and MIXED has none") as raised:
        mptune.check("mlp.onnx", against="mixed.onnx", data=data, max_error="1%")
    assert raised.value.hint == "exchange them: MIXED is mixed.onnx, and --against mlp.onnx"


def test_check_names_an_option_that_it_has(here: Path, mlp_data: Path) -> None:
    mptune.apply("mlp.onnx", None, here / "mixed.onnx")
    checked = mptune.check("mixed.onnx", against="mlp.onnx", data=mlp_data, max_error=1e-9, explain=True)
    (finding,) = [each for each in checked.findings if each.code == "precision"]
    assert finding.cure == "no plan with FP16 groups keeps the limit: allow more with --max-error, or stay in FP32"


class First(Diary):
    def evaluated(self, evaluation: object, done: int, budget: int) -> None:
        self.failures += [("told before", text) for text in self.warnings if done == 1]


def test_what_no_plan_changes_is_told_once_and_before_the_first_plan(
    here: Path, mlp_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = mptune.apply("mlp.onnx", None, here / "mixed.onnx", keep_fp32=["block1/*"])
    again = []
    for budget in (1, 2):
        mptune.search(mixed, data=mlp_data, target="jetson-orin-nano-8gb", budget=budget, listener=(diary := First()))
        again.append(
            [sum(part in text for _, text in diary.failures) for part in ("FP16 already", "not measured here")]
        )
    assert again == [[1, 1], [0, 0]]
    assert main(["report", "mixed.mptune"]) == 0
    printed = capsys.readouterr().out
    assert "not measured here" not in printed, "the search said it"
    assert "FP16 already" in printed


@pytest.mark.parametrize("precision", REDUCED)
def test_a_model_that_is_mixed_already_is_told_with_counts(
    precision: Precision, mlp_path: Path, tmp_path: Path
) -> None:
    fp32 = ["block1/*", "mixing/*", "head/*"]
    mixed = mptune.apply(mlp_path, None, tmp_path / "mixed.onnx", reduced=str(precision), keep_fp32=fp32)
    (finding,) = [each for each in mptune.inspect(mixed).findings if each.code == "already-mixed"]
    assert finding.text.startswith(f"4 of 10 layers are {precision.name} already, ")
    assert "only the other 5 groups are searched" in finding.text
    assert finding.cure == "give the FP32 model that it was made from"
    evidence = finding.evidence
    assert (finding.severity, evidence[f"{precision}_layers"], evidence["other_groups"]) == ("warning", 4, 5)
    assert finding.where.nodes == ("block0/norm", "block0/fc1/Gemm", "block0/fc1/Relu", "block0/fc2/Gemm")
    assert 0.4 < float(finding.evidence["flops_share"]) < 0.6
    assert not [each for each in mptune.inspect(mlp_path).findings if each.code == "already-mixed"], "the sound twin"


def test_a_model_that_computes_in_bf16_and_does_not_run_says_what_to_give(mlp_path: Path, tmp_path: Path) -> None:
    mixed = mptune.apply(mlp_path, None, tmp_path / "mixed.onnx", reduced="bf16")
    with pytest.raises(mptune.MptuneError, match="cannot be observed") as caught:
        mptune.inspect(mixed, data=np.zeros((2, 32), np.float32))
    assert "ONNX Runtime has few BF16 kernels: give the FP32 model that it was made from" in str(caught.value.hint)


def test_a_setting_is_named_as_the_caller_wrote_it() -> None:
    assert str(MptuneError("it is so")) == "it is so"
    error = MptuneError("is 0", "give at least 1", setting="max_disk_bytes")
    for each in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert each.message == "max_disk_bytes= is 0"
        assert str(each) == "max_disk_bytes= is 0\nhint: give at least 1"
        assert explain(each) == ("--max-disk is 0", "give at least 1", 1)


@pytest.mark.parametrize("name", ["search", "pick", "report", "confirm", "apply", "compare", "check", "worker"])
def test_every_option_that_is_an_argument_has_its_name(name: str) -> None:
    options = options_of(name)
    for argument in inspect.signature(getattr(mptune, name)).parameters:
        if argument.replace("_", "-") in {option.removeprefix("--") for option in options}:
            assert option_name(argument) in options


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        *(({"tolerance": tolerance}, "") for tolerance in ({"y": 1e-3, "y[0]": "abs:2"}, "y=1e-3")),
        *(({name: text}, "") for name, text in (("precisions", "fp32,bf16"), ("ignore", "y"), ("max_error", "1%"))),
        ({"timeout_s": "8h"}, "timeout_s= is '8h', not a number"),
        ({"max_error": "small"}, "max_error= small is not a number"),
        ({"gpus": "01"}, "gpus= is 0,1"),
        ({"gpus": (1, 1)}, "gpus="),
        ({"budget": 2.5}, "budget= is 2.5, not a whole number"),
        ({"seed": "1"}, "seed= is '1', not a whole number"),
        ({"model": b"model.onnx", "out": "m"}, "the model cannot be a bytes"),
    ],
)
def test_what_python_programs_give_in_another_form(
    given: dict[str, object], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is taken, so that the missing model is what is wrong; or it is refused by its name."""
    monkeypatch.chdir(tmp_path)
    error = mptune.SettingsError if expected else mptune.ModelError
    with pytest.raises(error, match=expected or "no such file") as caught:
        mptune.search(**{"model": "model.onnx", **given})  # type: ignore[arg-type]
    assert caught.value.hint


def test_a_broken_baseline_keeps_its_findings_in_another_process() -> None:
    finding = Finding.from_code("reference-zero", "search", Where(outputs=(OutputColumns("y"),)), {})
    again = pickle.loads(pickle.dumps(BaselineError("it is zero", "look", [finding])))
    assert (again.findings, again.hint, again.exit_code) == ((finding,), "look", EXIT_STOPPED)
