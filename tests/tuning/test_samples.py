"""Samples, references and weights that are lost or damaged between two sessions."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import mptune
from mptune.data.archive import read_samples
from mptune.engines.base import Failure, ReferenceReport, SampleSet
from mptune.errors import DataError, RunError
from mptune.files import whole_file
from mptune.graph.groups import find_groups
from mptune.graph.loading.model import load_model
from tests import fakes
from tests.fakes import Diary, FakeToolchain, Law

pytestmark = pytest.mark.usefixtures("opened_here", "searched")


class Referring(FakeToolchain):
    """A fake that counts how often it takes references."""

    def __init__(self) -> None:
        super().__init__(Law([group.id for group in find_groups(load_model("model.onnx"))]))
        self.references: list[SampleSet] = []

    def reference(self, which: SampleSet) -> ReferenceReport | Failure:
        self.references.append(which)
        return super().reference(which)


def search(budget: int) -> tuple[Referring, Diary]:
    fake, diary = Referring(), Diary()
    fakes.search(fake, budget=budget, listener=diary)
    return fake, diary


DATA = Path("model.mptune/data")


def test_a_run_that_was_half_prepared_is_prepared_again(place: Path) -> None:
    """What the model showed is written last."""
    (DATA / "observed.json").unlink()
    (DATA / "held_out.npz").unlink()
    fake, _ = search(13)
    assert fake.references == ["search", "held_out"]
    assert read_samples(DATA / "held_out.npz")


@pytest.mark.parametrize("name", ["search", "held_out_reference"])
@pytest.mark.parametrize("damage", ["lost", "zeros", "unfolds"])
def test_data_that_are_lost_or_damaged_are_named(place: Path, name: str, damage: str) -> None:
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
    fake, _ = search(13)
    assert fake.references == ["search", "held_out"], "prepared again"


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    real_sync, real_replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda number: events.append("sync") or real_sync(number))
    monkeypatch.setattr(Path, "replace", lambda self, to: events.append("name") or real_replace(self, to))
    with whole_file(tmp_path / "a") as partial:
        partial.write_bytes(b"x")
    assert events[:2] == ["sync", "name"]
