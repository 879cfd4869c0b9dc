"""Samples, references and weights that are lost or damaged between two sessions."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import mptune
from mptune.data.archive import read_samples
from mptune.engines.base import Failure, ReferenceReport, SampleSet
from mptune.errors import RunError
from mptune.files import whole_file
from mptune.graph.grouping.groups import find_groups
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


def lose(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize(
    ("name", "damage"),
    [("search", lose), ("search", empty), ("held_out", zero), ("search_reference", zero), ("held_out_reference", lose)],
)
def test_data_that_are_lost_or_damaged_are_prepared_again(
    place: Path, name: str, damage: Callable[[Path], None]
) -> None:
    path = DATA / f"{name}.npz"
    before = read_samples(path)
    damage(path)
    fake, diary = search(13)
    assert [list(sample) for sample in read_samples(path)] == [list(sample) for sample in before]
    assert np.array_equal(*(next(iter(samples[0].values())) for samples in (read_samples(path), before)))
    assert fake.references == ["search", "held_out"]
    assert f"{path} is missing or damaged: the data are prepared again" in "\n".join(diary.warnings)
    again, diary = search(14)
    assert not again.references
    assert not [text for text in diary.warnings if "missing or damaged" in text], "it is as it should be now"


def test_a_run_that_was_half_prepared_is_prepared_again(place: Path) -> None:
    """What the model showed is written last."""
    (DATA / "observed.json").unlink()
    (DATA / "held_out.npz").unlink()
    fake, diary = search(13)
    assert fake.references == ["search", "held_out"]
    assert not [text for text in diary.warnings if "missing or damaged" in text]
    assert read_samples(DATA / "held_out.npz")


def test_samples_that_would_unfold_are_not_read(place: Path) -> None:
    np.savez_compressed(DATA / "search.npz", header=np.zeros(1 << 20, np.uint8))
    with pytest.raises(RunError, match=r"search.npz is missing or damaged"):
        mptune.export("model.mptune", "out.tar.gz")


@pytest.mark.parametrize("name", ["search", "held_out_reference"])
def test_where_the_data_are_not_at_hand_it_is_refused(place: Path, name: str) -> None:
    zero(DATA / f"{name}.npz")
    with pytest.raises(RunError, match=f"{name}.npz is missing or damaged"):
        mptune.export("model.mptune", "out.tar.gz")
    assert not Path("out.tar.gz").exists()
    with pytest.raises(RunError, match=f"{name}.npz is missing or damaged"):
        mptune.confirm("model.mptune", open_toolchain=Referring().open)


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    real_sync, real_replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda number: events.append("sync") or real_sync(number))
    monkeypatch.setattr(Path, "replace", lambda self, to: events.append("name") or real_replace(self, to))
    with whole_file(tmp_path / "a") as partial:
        partial.write_bytes(b"x")
    assert events[:2] == ["sync", "name"]
