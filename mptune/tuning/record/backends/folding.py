"""Records of an Optuna journal, the operations of each trial joined into the one that creates it.

The records and the numbers of their operations are those that Optuna has written since version 3.1, and must go on to
read. What is not known here is passed on as it is, and everything after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from sys import intern
from typing import Any

from optuna.trial import TrialState

Record = dict[str, Any]


class Operation(IntEnum):
    """What a record does, in Optuna's journals."""

    CREATE_STUDY = 0
    SET_STUDY_USER_ATTR = 2
    SET_STUDY_SYSTEM_ATTR = 3
    CREATE_TRIAL = 4
    SET_TRIAL_PARAM = 5
    SET_TRIAL_STATE_VALUES = 6
    SET_TRIAL_INTERMEDIATE_VALUE = 7
    SET_TRIAL_USER_ATTR = 8
    SET_TRIAL_SYSTEM_ATTR = 9


_OF_TRIALS = frozenset(int(code) for code in Operation if code > Operation.CREATE_TRIAL)
_FINISHED = frozenset(state.value for state in TrialState if state.is_finished())
_OF_STUDIES = frozenset(int(code) for code in Operation if code < Operation.CREATE_TRIAL)
_FINISHING = frozenset((int(Operation.CREATE_TRIAL), int(Operation.SET_TRIAL_STATE_VALUES)))


Parameter = tuple[str, float, str]
"""Name, internal value and distribution of a parameter, as Optuna's record of it has them."""


@dataclass(frozen=True, slots=True)
class ParameterRun:
    """Records that set parameters of one trial, one after the other.

    Attributes:
        head: what they have in common.
        parameters: the rest of each. Equal ones are one object, which lives as long as what reads the journal.
    """

    head: Record
    parameters: list[Parameter]

    def records(self) -> Iterator[Record]:
        """One by one."""
        for name, value, distribution in self.parameters:
            yield {**self.head, "param_name": name, "param_value_internal": value, "distribution": distribution}


def fold(records: Iterable[Record | ParameterRun]) -> Iterator[Record]:
    """Join the operations of each trial; a storage that is empty comes to hold the same from either.

    Records of trials come in the order in which these were created, each as soon as its trial is finished, and of
    all trials before it; those of studies come at once.

    Args:
        records: of a journal, from its beginning.
    """
    waiting: dict[int, Record] = {}  # Trials that are not given yet, in their order, by their ids.
    distributions: dict[tuple[int, str], str] = {}
    checked: set[tuple[int, int]] = set()  # study, and which parameter
    count = 0
    rest = iter(records)
    for record in rest:
        if isinstance(record, ParameterRun):
            trial = waiting.get(record.head["trial_id"])
            if trial is None or _is_finished(trial):
                continue
            keys = {(trial["study_id"], id(parameter)) for parameter in record.parameters}
            if not keys <= checked and not all(_is_known(one, trial, distributions) for one in record.records()):
                yield from (*waiting.values(), *record.records())
                yield from singly(rest)
                return
            checked |= keys
            params, of = trial["params"], trial["distributions"]
            for name, value, distribution in record.parameters:
                params[name], of[name] = value, distribution
            continue
        code = record.get("op_code")
        if code in _OF_TRIALS:
            trial = waiting.get(record["trial_id"])
            # Nothing can be set on a finished trial: Optuna reads over it, too.
            if trial is not None and not _is_finished(trial):
                if not _is_known(record, trial, distributions):
                    yield from (*waiting.values(), record)
                    yield from singly(rest)
                    return
                _apply(record, trial)
        elif code == Operation.CREATE_TRIAL:
            waiting[count] = _begin(record)
            count += 1
        elif code in _OF_STUDIES:
            yield record
        else:
            yield from (*waiting.values(), record)
            yield from singly(rest)
            return
        while code in _FINISHING and waiting and _is_finished(waiting[oldest := next(iter(waiting))]):
            yield waiting.pop(oldest)
    yield from waiting.values()


def is_step_of_open_trial(record: Record) -> bool:
    """Whether a record begins a trial, or adds to it, and does not finish it."""
    code = record["op_code"]
    return (code == Operation.CREATE_TRIAL or code in _OF_TRIALS) and record.get("state") not in _FINISHED


def singly(records: Iterable[Record | ParameterRun]) -> Iterator[Record]:
    """The records one by one."""
    for record in records:
        if isinstance(record, ParameterRun):
            yield from record.records()
        else:
            yield record


def _begin(record: Record) -> Record:
    """A record that creates a trial, with a place for everything that may be set on it."""
    empty = ("params", "distributions", "user_attrs", "system_attrs", "intermediate_values")
    return {"state": TrialState.RUNNING.value, **{name: {} for name in empty}, **record}


def _is_finished(trial: Record) -> bool:
    return trial["state"] in _FINISHED


def _is_known(record: Record, trial: Record, distributions: dict[tuple[int, str], str]) -> bool:
    """False for a parameter whose distribution is not that of earlier trials: which of them counts, Optuna decides."""
    if record["op_code"] != Operation.SET_TRIAL_PARAM:
        return True
    key = (trial["study_id"], record["param_name"])
    known = distributions.setdefault(key, record["distribution"])
    return bool(known == record["distribution"])


def _apply(record: Record, trial: Record) -> None:
    """Do to the record that creates a trial what another record does to the trial."""
    code = record["op_code"]
    if code == Operation.SET_TRIAL_PARAM:
        name = intern(record["param_name"])
        trial["params"][name] = record["param_value_internal"]
        trial["distributions"][name] = record["distribution"]
    elif code == Operation.SET_TRIAL_USER_ATTR:
        trial["user_attrs"].update(record["user_attr"])
    elif code == Operation.SET_TRIAL_SYSTEM_ATTR:
        trial["system_attrs"].update(record["system_attr"])
    elif code == Operation.SET_TRIAL_INTERMEDIATE_VALUE:
        trial["intermediate_values"][str(record["step"])] = record["intermediate_value"]
    elif record["state"] != TrialState.RUNNING.value or trial["state"] != TrialState.RUNNING.value:
        trial["state"] = record["state"]
        if record["state"] == TrialState.RUNNING.value:
            trial["datetime_start"] = record["datetime_start"]
        if _is_finished(trial):
            trial["datetime_complete"] = record["datetime_complete"]
        if record["values"] is not None:
            trial.update(value=None, values=record["values"])
