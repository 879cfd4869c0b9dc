"""What Optuna's own tools show of a study: metric names, readable parameters, JSON last."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import create_trial

from mptune.engines.base import Failure, FailureKind, Stage
from mptune.settings import SearchSettings
from mptune.tuning.listener import Silent
from mptune.tuning.record.attributes import (
    ParameterNames,
    by_group,
    note_key,
    read_notes,
)
from mptune.tuning.sampler.posterior import Prior
from mptune.tuning.space import SearchSpace
from mptune.tuning.steps.tuner import Tuner
from tests.fakes import FakeToolchain, Law, make_groups
from tests.tuning.conftest import OpenRecord
from tests.tuning.factory import propose_with


@pytest.fixture
def study(open_record: OpenRecord, space: SearchSpace, tmp_path: Path) -> optuna.Study:
    """A search of six plans, opened as Optuna's tools open it."""
    record = open_record()
    propose_with(record, Prior(space.free))
    Tuner(record, space, FakeToolchain(Law(list(space.free))), SearchSettings(budget=6), Silent()).run()
    proposal = record.ask()
    record.tell_failure(proposal, Failure(Stage.BUILD, FailureKind.ERROR, "no kernel for this"))
    storage = JournalStorage(JournalFileBackend(str(tmp_path / "study.journal")))
    return optuna.load_study(study_name="test/relative_l2", storage=storage)


def test_metrics_and_parameters_have_readable_names(study: optuna.Study, space: SearchSpace) -> None:
    assert study.metric_names == ["latency (ms)", "error (relative_l2)"]
    names = {f"{group.id} {group.name}" for group in space.groups}
    assert all(set(trial.params) == names for trial in study.trials)
    assert {trial.user_attrs["origin"] for trial in study.trials[:2]} == {"seed: all-fp32", "seed: all-fp16"}


def test_short_attributes_come_first_and_json_last(study: optuna.Study) -> None:
    for trial in study.trials:
        marked = [name.startswith("~") for name in sorted(trial.user_attrs)]
        assert marked == sorted(marked)
        for name, value in trial.user_attrs.items():
            assert name.startswith("~") or isinstance(value, str | int | float), name
    assert study.trials[1].user_attrs["FP16 groups"] == len(study.trials[1].params)
    assert study.trials[-1].user_attrs["failure"] == "build, error: no kernel for this"


def test_optunas_command_line_reads_it(study: optuna.Study, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; from optuna.cli import main; sys.exit(main())", "best-trials"]
    command += ["--study-name", "test/relative_l2", "-f", "json"]
    command += ["--storage", str(tmp_path / "study.journal"), "--storage-class", "JournalFileBackend"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {trial["number"] for trial in json.loads(done.stdout)} == {trial.number for trial in study.best_trials}


def test_parameters_are_named_after_their_groups() -> None:
    groups = make_groups(2)
    name = f"g001 {groups[1].name}"
    trial = create_trial(
        values=[1.0, 0.0],
        params={name: "fp16"},
        distributions={name: optuna.distributions.CategoricalDistribution(("fp32", "fp16"))},
    )
    for names in (ParameterNames(groups, []), ParameterNames((), [trial])):
        assert names.of("g001") == name
    assert names.of("g999") == "g999"
    assert by_group({name: "b"}) == {"g001": "b"}


def test_notes_are_read_however_they_were_kept() -> None:
    assert (note_key("a", 1.0), note_key("a", {}), note_key("a", [])) == ("a", "~a", "~a")
    assert read_notes({"~confirm:1": {}, "first": 2.0}) == {"confirm:1": {}, "first": 2.0}
