"""What Optuna's journal storage keeps in memory, with one object for what many trials have in common.

Optuna decodes a distribution of its own for each parameter of each trial: 40,000 in a study of a thousand plans with
forty groups, which differ in nothing.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from optuna.distributions import BaseDistribution, json_to_distribution
from optuna.storages.journal._storage import JournalStorageReplayResult
from optuna.trial import FrozenTrial, TrialState

_FINISHED = tuple(state for state in TrialState if state.is_finished())


class SharingReplay(JournalStorageReplayResult):
    """Optuna's replay, whose trials share their distributions, and the names and choices of their parameters."""

    def __init__(self, worker_id_prefix: str) -> None:
        """Empty; the argument is Optuna's."""
        super().__init__(worker_id_prefix)
        self._decoded: dict[str, BaseDistribution] = {}
        self._created: dict[tuple[str, ...], dict[str, BaseDistribution]] = {}
        self._shared: dict[tuple[tuple[str, int], ...], dict[str, BaseDistribution]] = {}
        # By study: its trials as they were last given, and the positions of those that were not finished then.
        self._given: dict[int, tuple[list[FrozenTrial], list[int]]] = {}

    def get_all_trials(self, study_id: int, states: Container[TrialState] | None) -> list[FrozenTrial]:
        """As Optuna's. Finished trials, which never change, are not looked at again."""
        if study_id not in self._studies:
            return super().get_all_trials(study_id, states)
        ids = self._study_id_to_trial_ids[study_id]
        given, unfinished = self._given.get(study_id, ([], []))
        for position in unfinished:
            given[position] = self._trials[ids[position]]
        new = range(len(given), len(ids))
        given += [self._trials[ids[position]] for position in new]
        unfinished = [position for position in (*unfinished, *new) if not given[position].state.is_finished()]
        self._given[study_id] = given, unfinished
        if states is None:
            return given.copy()
        if not any(state in states for state in _FINISHED):
            return [given[position] for position in unfinished if given[position].state in states]
        return [trial for trial in given if trial.state in states]

    def _distribution(self, text: str) -> BaseDistribution:
        if text not in self._decoded:
            self._decoded[text] = json_to_distribution(text)
        return self._decoded[text]

    def _together(self, distributions: dict[str, BaseDistribution]) -> dict[str, BaseDistribution]:
        """The dictionary that trials with these distributions share. They are of ``_decoded``, so that ids tell."""
        return self._shared.setdefault(tuple((name, id(one)) for name, one in distributions.items()), distributions)

    def _apply_create_trial(self, log: dict[str, Any]) -> None:
        if not log.get("distributions"):
            super()._apply_create_trial(log)
            return
        number = len(self._trials)
        super()._apply_create_trial({**log, "distributions": {}, "params": {}})
        if number not in self._trials:  # Its study is gone.
            return
        trial = self._trials[number]
        texts = log["distributions"]
        key = (*texts, *texts.values())  # few in a study: names and texts come again with each trial
        if key not in self._created:
            self._created[key] = self._together({k: self._distribution(v) for k, v in texts.items()})
        trial.distributions = self._created[key]
        trial.params = {k: trial.distributions[k].to_external_repr(v) for k, v in log["params"].items()}

    def _apply_set_trial_param(self, log: dict[str, Any]) -> None:
        super()._apply_set_trial_param(log)
        trial, name = self._trials.get(log["trial_id"]), log["param_name"]
        if trial is None or trial.state.is_finished() or name not in trial.distributions:
            return
        # The dictionaries are the trial's own: Optuna has just copied them. What it refused is not there, or equal.
        distribution = self._distribution(log["distribution"])
        if trial.distributions[name] == distribution:
            trial.distributions[name] = distribution
            trial.params[name] = distribution.to_external_repr(log["param_value_internal"])

    def _apply_set_trial_state_values(self, log: dict[str, Any]) -> None:
        super()._apply_set_trial_state_values(log)
        trial = self._trials.get(log["trial_id"])
        if trial is not None and trial.state.is_finished():
            trial.distributions = self._together(trial.distributions)
