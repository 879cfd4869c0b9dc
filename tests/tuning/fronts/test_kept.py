"""The front that is kept for ``report``: the same as the record gives, and used only while nothing has changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

import mptune
from mptune.errors import RunError
from mptune.rundir import read_run
from mptune.tuning.explanation import GroupWorth
from mptune.tuning.front import Front
from mptune.tuning.fronts.kept import kept_front
from mptune.tuning.runs import result
from tests.fakes import FakeToolchain, Law


@pytest.fixture(scope="module")
def searched(mlp_path: Path, mlp_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory, never changed."""
    out = tmp_path_factory.mktemp("kept") / "a run"

    def open_toolchain(workload: object, settings: object) -> FakeToolchain:
        return FakeToolchain(Law([group.id for group in workload.groups]))  # type: ignore[attr-defined]

    mptune.search(
        mlp_path, data=mlp_data, out=out, budget=8, target="cpu", open_toolchain=open_toolchain, confirm_points=2
    )
    return out


@pytest.fixture
def run(searched: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be changed."""
    return Path(shutil.copytree(searched, tmp_path / "copy"))


def kept(run: Path) -> Front | None:
    return kept_front(*read_run(run))


def without_kept(run: Path, **options: object) -> Front:
    """The front by the record."""
    path = read_run(run)[0].kept_front_json
    path.rename(path.with_suffix(".aside"))
    try:
        return mptune.report(run, **options)  # type: ignore[arg-type]
    finally:
        path.with_suffix(".aside").rename(path)


def test_it_is_what_the_record_gives_wherever_the_run_lies(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    for place in (run, Path(run.name)):
        found, wanted = kept(place), without_kept(place)
        assert found is not None
        assert found.explanation.groups
        assert found == wanted
        assert found.to_json() == wanted.to_json()
        assert repr(found) == repr(wanted)
        assert str(place) in str(found.run_dir)


def test_report_does_not_open_the_record(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise RunError("the record was opened", "")

    wanted = mptune.report(run)
    monkeypatch.setattr(result, "read_record", refuse)
    assert mptune.report(run) == wanted
    with pytest.raises(RunError, match="was opened"):
        mptune.report(run, ignore=["y"])


def _append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def _same_length(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"sampler", b"samplar", 1))


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def _explain(run: Path, field: str, value: object) -> None:
    path = run / "data" / "kept_front.json"
    document = json.loads(path.read_text())
    document["explanation"]["groups"][0][[one.name for one in fields(GroupWorth)].index(field)] = value
    path.write_text(json.dumps(document))


CHANGES: dict[str, Callable[[Path], None]] = {
    "the journal is longer": lambda run: _append(run / "study.journal"),
    "a word of the journal": lambda run: _same_length(run / "study.journal"),
    "the journal is gone": lambda run: (run / "study.journal").unlink(),
    "run.json": lambda run: _replace(run / "run.json", '"max_error": null', '"max_error": 0.5'),
    "the grounds of explanations": lambda run: (run / "data" / "explain.json").write_text("{}"),
    "the hash is another": lambda run: _replace(run / "data" / "kept_front.json", '"made_from":"', '"made_from":"0'),
    "no JSON": lambda run: (run / "data" / "kept_front.json").write_text("{"),
    "a list": lambda run: (run / "data" / "kept_front.json").write_text("[]"),
    "no such point": lambda run: _replace(run / "data" / "kept_front.json", '"fp32":0', '"fp32":99'),
    "no baseline": lambda run: _replace(run / "data" / "kept_front.json", '"fp32":0', '"fp32":null'),
    "no number": lambda run: _replace(run / "data" / "kept_front.json", '"median_ms":', '"median_ms":"x","m":'),
    "the choice": lambda run: _replace(run / "run.json", '"reason": "', '"reason": "not '),
    "no number in an explanation": lambda run: _explain(run, "one_group_error", "much"),
    "no reason": lambda run: _replace(run / "data" / "kept_front.json", '"kept":{', '"kept":{"x":[["g","n","why"]],'),
    "deep": lambda run: (run / "data" / "kept_front.json").write_text("[" * 100_000),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_it_is_not_used_once_anything_has_changed(run: Path, change: Callable[[Path], None]) -> None:
    assert kept(run) is not None
    change(run)
    assert kept(run) is None


def test_a_run_whose_kept_front_is_damaged_is_read_from_its_record(run: Path) -> None:
    wanted = mptune.report(run)
    CHANGES["no such point"](run)
    assert mptune.report(run) == wanted


def test_pick_keeps_the_front_with_its_choice(run: Path) -> None:
    fp16 = mptune.report(run).fp16
    assert fp16 is not None
    mptune.pick(run, plan=fp16.plan.fingerprint)
    found = kept(run)
    assert found is not None
    assert found.chosen is not None
    assert (found.chosen.plan, found.choice.kind) == (fp16.plan, "plan")
    assert found == without_kept(run)


def test_a_journal_that_grew_while_the_front_was_made_keeps_none(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = result.build_front

    def build_while_others_write(*arguments: object, **options: object) -> Front:
        front = build(*arguments, **options)  # type: ignore[arg-type]
        _append(run / "study.journal")
        return front

    monkeypatch.setattr(result, "build_front", build_while_others_write)
    before = (run / "data" / "kept_front.json").read_bytes()
    mptune.pick(run, knee=True)
    assert (run / "data" / "kept_front.json").read_bytes() == before
    assert kept(run) is None


def test_what_is_not_finite_is_kept(run: Path) -> None:
    _explain(run, "one_group_error", float("inf"))
    found = kept(run)
    assert found is not None
    assert found.explanation.groups[0].one_group_error == float("inf")
