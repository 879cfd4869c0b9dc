"""Whose fault the failures in a study were: plans that were tried again, and how often the machine fails."""

from __future__ import annotations

from collections.abc import Sequence

from optuna.trial import FrozenTrial, TrialState

from mptune.engines.base import Failure, FailureKind
from mptune.tuning.record.attributes import ATTEMPTS, FAILED_BEFORE, FAILURE, FAULT, FAULTS, read_json


def settled(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """The finished trials, without failures of plans that are, or were, tried again: their last trial counts.

    Args:
        trials: those that are finished, run or wait, in their order; no others.
    """
    again = {t.user_attrs["fingerprint"]: t.number for t in trials if t.user_attrs.get(FAILED_BEFORE)}
    return [
        t for t in trials if t.state.is_finished() and again.get(t.user_attrs.get("fingerprint", ""), -1) <= t.number
    ]


def failed_attempts(trial: FrozenTrial) -> int:
    """In how many processes a plan failed, in ways that do not show whose fault it was; 0 where it did not."""
    document = read_json(trial.user_attrs, FAILURE) if trial.state is TrialState.PRUNED else None
    if document is None or not Failure.from_json(document).is_inconclusive:
        return 0
    return int(trial.user_attrs.get(ATTEMPTS, 1))


def fault_counts(trials: Sequence[FrozenTrial], lost: Sequence[FrozenTrial] = ()) -> tuple[int, int]:
    """Failures that did not come again in a fresh process, those of the machine counted in, and all attempts.

    Args:
        trials: those that are settled.
        lost: those that a fault of the machine ended.
    """
    faults = sum(int(trial.user_attrs.get(FAULTS, 0)) for trial in trials)
    documents = [document for trial in lost if (document := read_json(trial.user_attrs, FAULT)) is not None]
    # A full disk meets every job, and not one now and then.
    faults += sum(Failure.from_json(document).kind is not FailureKind.DISK_FULL for document in documents)
    return faults, len(trials) + faults
