"""Samples, references and weights that are lost or damaged between two sessions."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import mptune
from mptune.data.archive import read_samples
from mptune.engines.base import SampleSet
from mptune.errors import DataError, RunError
from mptune.files import whole_file
from tests.fakes import FakeToolchain, make_toolchain, search

DATA = Path("model.mptune/data")


def references_of_a_search() -> list[SampleSet]:
    """The references that the search takes when it goes on."""
    toolchain, taken = make_toolchain(), []
    toolchain.reference = lambda which: taken.append(which) or FakeToolchain.reference(toolchain, which)
    search(toolchain, budget=13)
    return taken


@pytest.mark.usefixtures("opened_here", "searched")
def test_a_run_that_was_half_prepared_is_prepared_again() -> None:
    """What the model showed is written last."""
    (DATA / "observed.json").unlink()
    (DATA / "held_out.npz").unlink()
    assert references_of_a_search() == ["search", "held_out"]
    assert read_samples(DATA / "held_out.npz")


@pytest.mark.usefixtures("opened_here", "searched")
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


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    real_sync, real_replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda number: events.append("sync") or real_sync(number))
    monkeypatch.setattr(Path, "replace", lambda self, to: events.append("name") or real_replace(self, to))
    with whole_file(tmp_path / "a") as partial:
        partial.write_bytes(b"x")
    assert events[:2] == ["sync", "name"]
