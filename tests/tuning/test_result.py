"""Calls that a limit ends before all-FP32 is measured: no error, no front, one line and how to go on."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mptune import EndedEarlyError
from mptune.api import searching
from mptune.cli import main
from tests.fakes import FakeToolchain, make_toolchain

pytestmark = pytest.mark.usefixtures("opened_here")

COMMAND = ["search", "model.onnx", "--data", "data.npz", "--target", "cpu", "--budget", "3"]


@pytest.fixture
def fake(place: Path, monkeypatch: pytest.MonkeyPatch) -> FakeToolchain:
    """What measures, in place of the CPU."""
    toolchain = make_toolchain()
    monkeypatch.setattr(searching, "search", partial(searching.search, open_toolchain=toolchain.open))
    return toolchain


def written() -> dict[str, Any]:
    return json.loads(Path("model.mptune/front.json").read_text())


@pytest.mark.parametrize("limit", [("--timeout", "0.001"), ("--max-disk", "1")])
def test_a_limit_before_all_fp32_is_no_error_but_writes_no_model(
    fake: FakeToolchain, capsys: pytest.CaptureFixture[str], limit: tuple[str, str]
) -> None:
    assert main([*COMMAND, *limit, "--max-error", "1e-3"]) == 3
    captured = capsys.readouterr()
    message, hint = captured.err.splitlines()[-2:]
    assert message.endswith("and all-FP32 was not measured yet: there is no front, and no plan is chosen")
    assert "error" not in message
    assert hint.startswith("hint: what was computed is kept in model.mptune: the same command resumes it")
    assert captured.out == ""
    assert not fake.calls
    assert main([*COMMAND, *limit, "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert document == written()
    assert document["points"] == []
    assert document["chosen"] is document["choice"] is None
    assert main(COMMAND) == 0
    assert written()["chosen"]
    assert written().keys() == document.keys(), "every key is always there"


def test_a_limit_of_a_later_call_leaves_the_front(fake: FakeToolchain) -> None:
    assert main(COMMAND) == 0
    before = [(point["plan"], point["latency"]) for point in written()["points"]]
    assert main([*COMMAND, "--budget", "9", "--timeout", "0.001"]) == 0
    assert [(point["plan"], point["latency"]) for point in written()["points"]] == before


@pytest.mark.parametrize(
    ("limit", "text"),
    [({"timeout_s": 1e-3}, "the time is over"), ({"max_disk_bytes": 1}, "has reached --max-disk")],
)
def test_a_program_is_told_by_an_exception(fake: FakeToolchain, limit: dict[str, Any], text: str) -> None:
    with pytest.raises(EndedEarlyError, match=text) as caught:
        searching.search("model.onnx", data="data.npz", target="cpu", **limit)
    assert "--timeout" in caught.value.hint
