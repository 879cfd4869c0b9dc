"""A database that goes away for a while: every operation is tried again, for some minutes, before it is an error."""

from __future__ import annotations

import functools
import random
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from optuna.exceptions import ExperimentalWarning, StorageInternalError, UpdateFinishedTrialError
from optuna.storages import RDBStorage, get_storage
from optuna.trial import TrialState
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, PendingRollbackError

HEARTBEAT_S = 20
"""Seconds between heartbeats of a worker."""

GRACE_S = 200
"""Seconds without a heartbeat after which a worker is dead; a database that is away for two minutes kills nobody."""

PATIENCE_S = 300.0
"""Seconds for which an operation is tried again."""

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0


class PatientStorage:
    """Optuna's storage in a database, with each operation tried again while the server restarts.

    Has every method of ``BaseStorage`` and of Optuna's heartbeats, by delegation.
    """

    def __init__(self, url: str) -> None:
        """Open it once: a server that is not there at the start is an error at once."""
        # A connection that the server closed is noticed and replaced, before anything is sent on it.
        options = {} if url.startswith("sqlite") else {"pool_pre_ping": True}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)  # heartbeat_interval, since Optuna 2.9
            self._database = RDBStorage(
                url, engine_kwargs=options, heartbeat_interval=HEARTBEAT_S, grace_period=GRACE_S
            )
        self._storage = get_storage(self._database)  # with Optuna's cache of finished trials
        self._patience_s = PATIENCE_S

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self._patiently, getattr(self._storage, name))

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        """As Optuna's. The answer to an earlier try may have been lost: a trial that is in that state already is."""
        try:
            done: bool = self._patiently(self._storage.set_trial_state_values, trial_id, state, values)
        except UpdateFinishedTrialError:
            if self.get_trial(trial_id).state != state:
                raise
            done = True
        return done

    def remove_session(self) -> None:
        """Give this thread's connection back."""
        self._database.remove_session()

    def dispose(self) -> None:
        """Close all connections. Idempotent."""
        self.remove_session()
        self._database.engine.dispose()

    def _patiently(self, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        deadline, wait_s = time.monotonic() + self._patience_s, _FIRST_WAIT_S
        try:
            while True:
                try:
                    return operation(*args, **kwargs)
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


def _is_away(error: Exception) -> bool:
    """Whether the error is of the connection, not of what was sent on it."""
    cause = error.__cause__ if isinstance(error, StorageInternalError) else error
    return isinstance(cause, OperationalError | InterfaceError | PendingRollbackError) or (
        isinstance(cause, DBAPIError) and cause.connection_invalidated
    )
