"""Errors name arguments to a Python program and options to a person at the command line."""

from __future__ import annotations

import copy
import inspect
import pickle
import traceback
from pathlib import Path

import pytest

import mptune
from mptune.errors import MptuneError, speak_of_options
from tests.test_docs import options_of


@pytest.mark.parametrize(
    ("option", "argument"),
    [
        ("--budget is 0", "budget= is 0"),
        ("give --data", "give data="),
        ("a place of its own with --out DIR, or --fresh", "a place of its own with out=DIR, or fresh=True"),
        ("--batch 3 does not divide", "batch=3 does not divide"),
        ("--max-latency-ms is 0", "max_latency_ms= is 0"),
        ("--max-memory is 0", "max_memory_bytes= is 0"),
        ("--timeout is -1 s", "timeout_s= is -1 s"),
        ("--engine tensorrt-rtx is for NVIDIA GPUs; try another --engine", None),
        ("--keep-fp32 op:Conv matches nothing", "keep_fp32=op:Conv matches nothing"),
        ("give another path with -o", "give another path with out="),
        ("--precisions fp32,fp16,bf16: groups", "precisions=fp32,fp16,bf16: groups"),
        ("--tolerance: there is no output", "tolerance=: there is no output"),
        ("--steps 4 without --feedback", "steps=4 without feedback="),
        ("pip install --upgrade mptune", "pip install --upgrade mptune"),
        (
            "`mptune search MODEL --budget 100` goes on; or --budget",
            "`mptune search MODEL --budget 100` goes on; or budget=",
        ),
        ("no option, a-b, x--y", "no option, a-b, x--y"),
    ],
)
def test_the_words_are_the_callers(option: str, argument: str | None) -> None:
    if argument is None:
        argument = "engine=tensorrt-rtx is for NVIDIA GPUs; try another engine="
    error = MptuneError(option, option)
    assert (error.message, error.hint, str(error)) == (argument, argument, f"{argument}\nhint: {argument}")
    with speak_of_options():
        assert (error.message, error.hint, str(error)) == (option, option, f"{option}\nhint: {option}")
    assert error.message == argument
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        with speak_of_options():
            assert (again.message, again.hint) == (option, option)


@pytest.mark.parametrize("name", ["search", "pick", "report", "confirm", "apply", "compare", "check", "worker"])
def test_every_option_that_is_an_argument_is_spoken_of_as_one(name: str) -> None:
    arguments = inspect.signature(getattr(mptune, name)).parameters
    for option in options_of(name):
        argument = option.removeprefix("--").replace("-", "_")
        if option.startswith("--") and argument in arguments:
            assert MptuneError(f"{option} is wrong").message.startswith(f"{argument}="), option


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"tolerance": {"y": 1e-3, "y[0]": "abs:2"}}, None),
        ({"tolerance": "y=1e-3"}, None),
        ({"precisions": "fp32,bf16"}, None),
        ({"ignore": "y"}, None),
        ({"timeout_s": "8h"}, "timeout_s= is '8h', not a number"),
        ({"max_error": "1%"}, None),
        ({"max_error": "small"}, "max_error= small is not a number"),
        ({"gpus": "01"}, "gpus= is 0,1"),
    ],
)
def test_what_python_programs_give_in_another_form(
    given: dict[str, object], expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is taken, so that the missing model is what is wrong; or it is refused by its name."""
    monkeypatch.chdir(tmp_path)
    error = mptune.ModelError if expected is None else mptune.SettingsError
    with pytest.raises(error, match=expected or "no such file"):
        mptune.search("model.onnx", **given)  # type: ignore[arg-type]


def test_a_traceback_shows_the_hint() -> None:
    error = MptuneError("it is so", "do --budget 3")
    assert str(error) == "it is so\nhint: do budget=3"
    assert "".join(traceback.format_exception_only(error)).count("hint: do budget=3\n") == 1
    assert str(MptuneError("it is so")) == "it is so"
    assert pickle.loads(pickle.dumps(error)).hint == error.hint
