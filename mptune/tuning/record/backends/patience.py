"""A database that goes away for a while: every operation is tried again, for some minutes, before it is an error."""

from __future__ import annotations

import functools
import random
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError, UpdateFinishedTrialError
from optuna.storages import RDBStorage
from optuna.trial import TrialState
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, PendingRollbackError

HEARTBEAT_S = 20
"""How often a worker says that it lives."""

GRACE_S = 200
"""After so long without a heartbeat a worker is dead. A database that is away for a minute or two kills nobody."""

PATIENCE_S = 300.0
"""So long an operation is tried again."""

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0


class PatientStorage(RDBStorage):
    """Optuna's storage in a database, that waits for a server which restarts."""

    def __init__(self, url: str) -> None:
        """Open it once: a server that is not there at the start is an error at once."""
        self._retrying = threading.local()
        self._retrying.is_inside = True
        # A connection that the server closed is noticed and replaced, before anything is sent on it.
        options = {"pool_pre_ping": True}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)  # heartbeat_interval, since Optuna 2.9
            super().__init__(
                url,
                engine_kwargs={} if url.startswith("sqlite") else options,
                heartbeat_interval=HEARTBEAT_S,
                grace_period=GRACE_S,
            )
        self._retrying.is_inside = False
        self._patience_s = PATIENCE_S

    def _patiently(self, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if getattr(self._retrying, "is_inside", False):
            return operation(self, *args, **kwargs)
        self._retrying.is_inside = True
        deadline, wait_s = time.monotonic() + self._patience_s, _FIRST_WAIT_S
        try:
            while True:
                try:
                    return operation(self, *args, **kwargs)
                except (StorageInternalError, DBAPIError, PendingRollbackError) as error:
                    if not _is_away(error):
                        raise
                    with suppress(Exception):
                        self.remove_session()  # with its broken transaction
                    if time.monotonic() >= deadline:
                        raise error if isinstance(error, StorageInternalError) else StorageInternalError from error
                time.sleep(wait_s * random.uniform(0.5, 1.0))
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        except KeyboardInterrupt:
            self._patience_s = 0.0  # Who interrupts does not wait for what is left to write.
            raise
        finally:
            self._retrying.is_inside = False

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        """As Optuna's. The answer to an earlier try may have been lost: a trial that is in that state already is."""
        try:
            done: bool = self._patiently(RDBStorage.set_trial_state_values, trial_id, state, values)
        except UpdateFinishedTrialError:
            if self.get_trial(trial_id).state != state:
                raise
            done = True
        return done


def _is_away(error: Exception) -> bool:
    """Whether the error is of the connection, not of what was sent on it."""
    cause = error.__cause__ if isinstance(error, StorageInternalError) else error
    return isinstance(cause, OperationalError | InterfaceError | PendingRollbackError) or (
        isinstance(cause, DBAPIError) and cause.connection_invalidated
    )


def _patient(operation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operation)
    def call(self: PatientStorage, *args: Any, **kwargs: Any) -> Any:
        return self._patiently(operation, *args, **kwargs)

    return call


for _name in sorted(
    optuna.storages.BaseStorage.__abstractmethods__
    | {"record_heartbeat", "_get_stale_trial_ids", "_create_new_trial", "_get_trials", "_set_trial_param"}
):
    if _name in vars(RDBStorage) and _name not in vars(PatientStorage):
        setattr(PatientStorage, _name, _patient(getattr(RDBStorage, _name)))
