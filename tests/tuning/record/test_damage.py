"""Damage in the middle of a journal is named by its line; other damaged files of a run are named, or made anew."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from mptune.cli import main
from mptune.errors import RunError
from tests.fakes import make_toolchain, search

pytestmark = pytest.mark.usefixtures("opened_here", "searched")

RUN = Path("model.mptune")
JOURNAL = RUN / "study.journal"
CREATE_TRIAL = 4
"""Optuna's code of the operation that gives the next trial its number."""

DISTRIBUTION = '{"name": "CategoricalDistribution", "attributes": {"choices": ["fp32", "fp16"]}}'


def refused(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    """The message of a command that fails, and not through a fault of mptune."""
    assert main(list(command)) == 1
    message = capsys.readouterr().err
    assert "unexpected" not in message
    return message


@pytest.mark.parametrize(
    "odd",
    [
        b"\0" * 40,
        b'{"op_code":8,"wor',
        b"[" * 100_000,
        b"[1, 2]",
        b"\xff\xfe",
        {"op_code": True},
        {"op_code": 8, "user_attr": None},
        {"op_code": 6, "state": 1, "values": [1.0, 2.0], "datetime_complete": "yesterday"},
        {"op_code": 5, "param_name": "p", "param_value_internal": 0, "distribution": '{"name": "os", "attributes":{}}'},
        {"op_code": 5, "param_name": "g000", "param_value_internal": math.inf, "distribution": DISTRIBUTION},
    ],
)
def test_a_line_that_is_no_operation_is_named_and_nothing_is_changed(
    place: Path, odd: bytes | dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    lines, trial = JOURNAL.read_bytes().splitlines(), 3
    number = [k for k, line in enumerate(lines, 1) if json.loads(line)["op_code"] == CREATE_TRIAL][trial]
    if isinstance(odd, dict):
        odd = json.dumps({"worker_id": "w", "trial_id": trial, **odd}, separators=(",", ":")).encode()
    lines.insert(number, odd)  # as the trial runs
    JOURNAL.write_bytes(b"\n".join([*lines, b""]))
    spoiled, named = JOURNAL.read_bytes(), f"line {number + 1} of {JOURNAL} is damaged"
    with pytest.raises(RunError, match=named):
        search(make_toolchain(), budget=13)
    error, hint = refused(capsys, "report", str(RUN)).splitlines()
    assert error == f"error: {named}"
    assert "restore it from a copy" in hint
    assert JOURNAL.read_bytes() == spoiled


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"latency":{', '"latenzy":{'),
        ('"relative_l2":[', '"relative_l2":["text",'),
        ('"relative_l2":[', f'"relative_l2":[{10**400},'),
    ],
)
def test_an_evaluation_that_is_none_is_named(
    place: Path, old: str, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before, evaluation, after = JOURNAL.read_text().rpartition('"outcome"')
    JOURNAL.write_text(before + evaluation + after.replace(old, new, 1))
    error, hint = refused(capsys, "report", str(RUN)).splitlines()
    assert error == f"error: {JOURNAL} is damaged: the outcome of trial 11 cannot be read"
    assert "restore it from a copy" in hint


@pytest.mark.parametrize("text", ['{"a":' * 100_000, "[]"], ids=["nested", "list"])
def test_other_files_of_a_run_may_hold_anything(place: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What they hold is taken for lost, or the file is named; nothing is called a fault of mptune."""
    for path in sorted((*RUN.glob("data/*.json"), *RUN.glob("weights/*.json"), RUN / "front.json")):
        before = path.read_bytes()
        path.write_text(text)
        main(["report", str(RUN)])
        assert "unexpected" not in capsys.readouterr().err, path.name
        path.write_bytes(before)


def test_paths_that_no_file_can_have(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["report"], ["search", "model.onnx", "--out"], ["inspect"]):
        assert "hint: " in refused(capsys, *command, "x" * 300)
    JOURNAL.unlink()
    JOURNAL.mkdir()
    for command in (["report", str(RUN)], ["pick", str(RUN), "--knee"]):
        assert f"{JOURNAL}: Is a directory" in refused(capsys, *command)
