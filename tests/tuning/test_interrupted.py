"""Calls that a limit ends before all-FP32 is measured, and samples that are lost or damaged between two sessions."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mptune
from mptune import EndedEarlyError
from mptune.api import searching
from mptune.cli import main
from mptune.data.archive import read_samples
from mptune.engines.base import SampleSet
from mptune.errors import DataError, RunError
from tests.fakes import FakeToolchain, make_toolchain, search

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


DATA = Path("model.mptune/data")


def references_of_a_search() -> list[SampleSet]:
    """The references that the search takes when it goes on."""
    toolchain, taken = make_toolchain(), []
    toolchain.reference = lambda which: taken.append(which) or FakeToolchain.reference(toolchain, which)
    search(toolchain, budget=13)
    return taken


@pytest.mark.usefixtures("searched")
def test_a_run_that_was_half_prepared_is_prepared_again() -> None:
    """What the model showed is written last."""
    (DATA / "observed.json").unlink()
    (DATA / "held_out.npz").unlink()
    assert references_of_a_search() == ["search", "held_out"]
    assert read_samples(DATA / "held_out.npz")


@pytest.mark.usefixtures("searched")
@pytest.mark.parametrize("name", ["search", "held_out_reference"])
@pytest.mark.parametrize("damage", ["lost", "zeros", "unfolds"])
def test_data_that_are_lost_or_damaged_are_named(name: str, damage: str) -> None:
    path = DATA / f"{name}.npz"
    size = path.stat().st_size
    path.unlink()
    if damage == "zeros":
        path.write_bytes(bytes(size))
    elif damage == "unfolds":
        np.savez_compressed(path, header=np.zeros(1 << 20, np.uint8))
    with pytest.raises(DataError, match=rf"{name}\.npz (cannot be read|is not a NumPy|was not written)"):
        read_samples(path)
    if damage == "lost":
        with pytest.raises(RunError, match=rf"{name}\.npz is missing"):
            mptune.export("model.mptune", "out.tar.gz")
        assert not Path("out.tar.gz").exists()
        shutil.rmtree(DATA)
        assert references_of_a_search() == ["search", "held_out"], "prepared again"
