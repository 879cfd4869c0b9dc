"""Recordings of sound deployments of a model that FP16 makes coarse: they agree, and nothing is warned of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mptune
from tests.diagnosis.fragile import SOUND, data, fragile
from tests.graph.models import save


@pytest.mark.parametrize("name", SOUND)
def test_what_a_sound_engine_gives_is_not_warned_of(name: str, tmp_path: Path) -> None:
    path = save(fragile(), tmp_path)
    np.savez(tmp_path / "recorded.npz", **SOUND[name](path, tmp_path))
    found = mptune.compare(path, data=data(), outputs=tmp_path / "recorded.npz")
    assert found.verdict == "agrees"
    assert [(each.code, each.severity) for each in found.findings] == [("agrees", "info")]
