"""An error names an argument to a Python program, and its option to a person at the command line."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path

import pytest

import mptune
from mptune.cli import explain
from mptune.errors import EXIT_STOPPED, BaselineError, MptuneError
from mptune.finding import Finding, OutputColumns, Where
from mptune.settings import option_name
from tests.test_docs import options_of


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
