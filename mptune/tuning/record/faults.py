"""Whose fault the failures in a study were: plans that were tried again, and how often the machine fails."""

from __future__ import annotations

from collections.abc import Sequence

from optuna.trial import FrozenTrial, TrialState

from mptune.engines.base import Failure, FailureKind
from mptune.tuning.record.attributes import ATTEMPTS, FAILED_BEFORE, FAILURE, FAULT, FAULTS

_FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)


def settled(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """The finished trials, without failures of plans that are, or were, tried again: their last trial counts.

    Args:
        trials: those that are finished, run or wait, in their order; no others.
    """
    finished = [trial for trial in trials if trial.state in _FINISHED]
    again = {t.user_attrs["fingerprint"]: t.number for t in trials if FAILED_BEFORE in t.user_attrs}
    if not again:
        return finished
    return [t for t in finished if again.get(t.user_attrs.get("fingerprint", ""), -1) <= t.number]


def failed_attempts(trial: FrozenTrial) -> int:
    """In how many processes a plan failed, in ways that do not show whose fault it was; 0 where it did not."""
    document = trial.user_attrs.get(FAILURE) if trial.state is TrialState.PRUNED else None
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
    # A full disk meets every job, and not one now and then.
    kinds = [Failure.from_json(trial.user_attrs[FAULT]).kind for trial in lost]
    faults += sum(kind is not FailureKind.DISK_FULL for kind in kinds)
    return faults, len(trials) + faults
