"""Recordings within twice FP16's error: what no rounding gives is looked into, and sound ones are not warned of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mptune
from mptune.cli import main
from tests.diagnosis.fragile import FAULTY, SOUND, data, fragile
from tests.graph.models import save


def compared(name: str, folder: Path) -> mptune.Comparison:
    path = save(fragile(), folder)
    make = SOUND[name] if name in SOUND else FAULTY[name][0]
    np.savez(folder / "recorded.npz", **make(path, folder))
    np.savez(folder / "data.npz", **data())
    found = mptune.compare(path, data=folder / "data.npz", outputs=folder / "recorded.npz")
    assert found.outputs["y"]["error"] < found.outputs["y"]["limit"]
    return found


@pytest.mark.parametrize("name", SOUND)
def test_what_a_sound_engine_gives_is_not_warned_of(name: str, tmp_path: Path) -> None:
    found = compared(name, tmp_path)
    assert found.verdict == "agrees"
    assert [(each.code, each.severity) for each in found.findings] == [("agrees", "info")]


@pytest.mark.parametrize("name", FAULTY)
def test_what_is_no_rounding_is_named_or_warned_of(name: str, tmp_path: Path) -> None:
    found = compared(name, tmp_path)
    (finding,) = found.findings
    assert (finding.code, finding.severity) == (FAULTY[name][1], "warning")
    assert found.verdict == ("agrees" if finding.code == "agrees" else "differs")
    assert ("as large as FP16 rounding, but not FP16 rounding" in finding.text) == found.agrees


@pytest.mark.parametrize(("name", "code"), [("inputs times 15/16", 3), ("noise", 0)])
def test_exit_codes(name: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compared(name, tmp_path)
    files = [str(tmp_path / each) for each in ("model.onnx", "data.npz", "recorded.npz")]
    assert main(["compare", files[0], "--data", files[1], "--outputs", files[2]]) == code
    shown = " ".join(capsys.readouterr().out.split())
    assert ("as large as FP16 rounding, but not FP16 rounding" in shown) == (code == 0)
