"""Optuna's storage in a database that may restart or lose its connection: calls are tried again, for some minutes."""

from __future__ import annotations

import functools
import logging
import random
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from optuna.exceptions import ExperimentalWarning, StorageInternalError, UpdateFinishedTrialError
from optuna.storages import RDBStorage, get_storage
from optuna.trial import TrialState

from mptune.tuning.record.waiting import tell_wait

HEARTBEAT_S = 20
"""Seconds between heartbeats of a worker."""

GRACE_S = 120
"""Seconds without a heartbeat after which a worker is dead."""

PATIENCE_S = 300.0
"""Seconds for which a call is tried again."""

_STALL_S = 30
"""Seconds after which a connection without an answer is given up, and the server ends a statement."""

_CONNECT_ARGS = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 1000 * _STALL_S,
    # A session whose client vanished keeps its locks no longer than this.
    "options": f"-c statement_timeout={_STALL_S}s -c idle_in_transaction_session_timeout={2 * _STALL_S}s",
}
"""Of libpq, which both drivers of PostgreSQL use. What the URL itself gives goes before."""

_REFUSALS = ("authentication failed", "does not exist", "no pg_hba.conf entry", "unable to open database file")
"""In messages of servers and drivers that waiting does not change."""

_POOL = "mptune"
logging.getLogger(f"sqlalchemy.pool.impl.QueuePool.{_POOL}").setLevel(logging.CRITICAL)  # else tracebacks on stderr
logging.getLogger("optuna.storages._rdb.storage").addFilter(  # The lost connection is told as a wait.
    lambda record: "Caught an error from sqlalchemy" not in record.getMessage()
)


class RetryingStorage:
    """Optuna's storage in a database, whose calls are tried again while it does not answer.

    Has every method of ``BaseStorage`` and of Optuna's heartbeats, by delegation. The answer to a call may be lost
    after the server has carried it out: what is enqueued or begun twice is dropped as a duplicate, or is taken up
    again as the trial of a dead worker.
    """

    def __init__(self, url: str, reason_of: Callable[[BaseException], str] = str) -> None:
        """Open it, as patiently as each call. ``reason_of``: what may be shown of an error."""
        self._reason_of = reason_of
        self._patience_s = PATIENCE_S
        self._database: RDBStorage | None = None
        self._database = self._retried(_open, url)
        self._storage = get_storage(self._database)  # with Optuna's cache of finished trials

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self._retried, getattr(self._storage, name))

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        """As Optuna's. Where the answer to an earlier try was lost, the trial is in that state already."""
        try:
            return bool(self._retried(self._storage.set_trial_state_values, trial_id, state, values))
        except UpdateFinishedTrialError:
            if self.get_trial(trial_id).state != state:
                raise
            return True

    def remove_session(self) -> None:
        """Give this thread's connection back."""
        if self._database is not None:
            self._database.remove_session()

    def dispose(self) -> None:
        """Close all connections. Idempotent."""
        self.remove_session()
        if self._database is not None:
            self._database.engine.dispose()

    def _retried(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        deadline, wait_s, is_told = time.monotonic() + self._patience_s, 0.2, False
        try:
            while True:
                try:
                    return call(*args, **kwargs)
                except Exception as error:
                    if not _is_away(error):
                        raise
                    with suppress(Exception):
                        self.remove_session()  # with its broken transaction
                    if time.monotonic() >= deadline:
                        raise error if isinstance(error, StorageInternalError) else StorageInternalError from error
                    if not is_told:
                        is_told, reason = True, self._reason_of(error.__cause__ or error)
                        left_s = deadline - time.monotonic()
                        tell_wait(f"the storage does not answer ({reason}): waiting up to {left_s:.0f} s for it")
                time.sleep(wait_s * random.uniform(0.5, 1.0))  # jittered back-off
                wait_s = min(2 * wait_s, 10.0)
        except KeyboardInterrupt:
            self._patience_s = 0.0  # Who interrupts does not wait for what is left to write.
            raise


def _open(url: str) -> RDBStorage:
    from sqlalchemy.engine import make_url

    parsed = make_url(url)
    options: dict[str, Any] = {}
    if parsed.get_backend_name() != "sqlite":
        options["pool_pre_ping"] = True  # A connection that the server closed is replaced before anything is sent.
    if parsed.get_backend_name() == "postgresql" and parsed.get_driver_name() in ("psycopg", "psycopg2"):
        options["connect_args"] = {name: v for name, v in _CONNECT_ARGS.items() if name not in parsed.query}
        options["pool_logging_name"] = _POOL
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)  # heartbeat_interval, since Optuna 2.9
        return RDBStorage(url, engine_kwargs=options, heartbeat_interval=HEARTBEAT_S, grace_period=GRACE_S)


def _is_away(error: Exception) -> bool:
    """Whether the error is of the connection, not of what was sent on it."""
    from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, PendingRollbackError

    cause = error.__cause__ if isinstance(error, StorageInternalError) else error
    if any(refusal in str(cause) for refusal in _REFUSALS):
        return False
    return isinstance(cause, OperationalError | InterfaceError | PendingRollbackError) or (
        isinstance(cause, DBAPIError) and cause.connection_invalidated
    )
