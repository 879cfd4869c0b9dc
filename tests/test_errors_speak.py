"""Errors name arguments to a Python program and options to a person at the command line."""

from __future__ import annotations

import copy
import pickle
import sys
import traceback
from pathlib import Path

import pytest

import mptune
from mptune.cli import main
from mptune.errors import MptuneError, speak_of_options


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
    assert (error.message, error.hint, str(error)) == (argument, argument, argument)
    with speak_of_options():
        assert (error.message, error.hint, str(error)) == (option, option, option)
    assert error.message == argument
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        with speak_of_options():
            assert (again.message, again.hint) == (option, option)


def test_the_same_mistake_in_python_and_at_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(mptune.SettingsError, match="budget= is 0"):
        mptune.search("model.onnx", budget=0)
    assert main(["search", "model.onnx", "--budget", "0"]) == 2
    assert "--budget is 0" in capsys.readouterr().err
    with pytest.raises(mptune.SettingsError, match="budget= is 0"):
        mptune.search("model.onnx", budget=0)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes came with Python 3.11")
def test_a_traceback_shows_the_hint() -> None:
    shown = "".join(traceback.format_exception_only(MptuneError("it is so", "do --budget 3")))
    assert shown.endswith("it is so\nhint: do budget=3\n")
