"""``--sampler local``, ``nsga2`` and ``random`` are refused with a hint; runs of 0.1.0 that used them still open."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import mptune
from mptune.cli import main
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from tests.fakes import FakeToolchain, Law

OLD_RUNS = Path(__file__).parent / "old_runs" / "0.1.0"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory that version 0.1.0 made with ``--sampler local``."""
    return Path(shutil.copytree(OLD_RUNS / "local", tmp_path / "local"))


@pytest.mark.parametrize("name", ["local", "nsga2", "random"])
def test_asking_for_one_is_one_line_and_a_hint(mlp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", str(mlp_path), "--sampler", name]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    line, hint = said.err.splitlines()
    assert line == f"error: the sampler '{name}' was removed"
    assert hint.startswith("hint: choose one of precision, tpe")


def test_an_old_run_is_reported_and_picked_from(run: Path) -> None:
    front = mptune.report(run)
    assert front.evaluations == 8
    assert front.points
    fastest = min(front.points, key=lambda point: point.latency.median_ms)
    assert mptune.pick(run, max_latency_ms=fastest.latency.median_ms).chosen == fastest


def test_an_old_run_is_confirmed(run: Path) -> None:
    groups = [group.id for group in find_groups(load_model(OLD_RUNS / "model.onnx"))]
    fake = FakeToolchain(Law(groups, base_ms=20.0))
    confirmation = mptune.confirm(run, open_toolchain=fake.open)
    assert {p.plan.fingerprint for p in mptune.report(run).points} <= set(fake.built)
    assert confirmation.front.evaluations == len(set(fake.built))
