"""A database that goes away for a while: every operation is tried again, for some minutes, before it is an error.

A connection that is open but silent is dropped: by the system (keepalives, ``tcp_user_timeout``), or, where something
between acknowledges what it does not pass on, by a thread that shuts the sockets of a stalled call down.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from optuna.exceptions import ExperimentalWarning, StorageInternalError, UpdateFinishedTrialError
from optuna.storages import RDBStorage, get_storage
from optuna.trial import TrialState
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, PendingRollbackError

from mptune.tuning.record.backends.waiting import tell_wait

HEARTBEAT_S = 20
"""Seconds between heartbeats of a worker."""

GRACE_S = 200
"""Seconds without a heartbeat after which a worker is dead; a database that is away for two minutes kills nobody."""

PATIENCE_S = 300.0
"""Seconds for which an operation is tried again."""

STALL_S = 30.0
"""Seconds after which a call that has no answer is dropped, and tried again on a new connection."""

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0

_LIBPQ_DRIVERS = ("psycopg", "psycopg2")

_REFUSALS = ("authentication failed", "does not exist", "no pg_hba.conf entry", "unable to open database file")
"""In messages of servers and drivers that waiting does not change."""

_POOL = "mptune"
logging.getLogger(f"sqlalchemy.pool.impl.QueuePool.{_POOL}").setLevel(logging.CRITICAL)  # else tracebacks on stderr
logging.getLogger("optuna.storages._rdb.storage").addFilter(  # The lost connection is told as a wait.
    lambda record: "Caught an error from sqlalchemy" not in record.getMessage()
)


class PatientStorage:
    """Optuna's storage in a database, with each operation tried again while the server restarts.

    Has every method of ``BaseStorage`` and of Optuna's heartbeats, by delegation.
    """

    def __init__(self, url: str, reason_of: Callable[[BaseException], str] = str) -> None:
        """Open it, as patiently as each call. ``reason_of``: what may be shown of an error."""
        self._reason_of = reason_of
        self._patience_s = PATIENCE_S
        self._sockets: list[Any] = []  # of the driver's connections
        parsed = make_url(url)
        self._is_watched = parsed.get_backend_name() == "postgresql" and parsed.get_driver_name() in _LIBPQ_DRIVERS
        self._database: RDBStorage | None = None
        self._database = self._patiently(self._open, url)
        self._storage = get_storage(self._database)  # with Optuna's cache of finished trials

    def _open(self, url: str) -> RDBStorage:
        # A connection that the server closed is noticed and replaced, before anything is sent on it.
        options: dict[str, Any] = {} if url.startswith("sqlite") else {"pool_pre_ping": True}
        if self._is_watched:
            given = make_url(url).query
            options["connect_args"] = {name: v for name, v in _libpq_options().items() if name not in given}
            options["pool_logging_name"] = _POOL
            options["pool_events"] = [(lambda connection, _: self._sockets.append(connection), "connect")]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)  # heartbeat_interval, since Optuna 2.9
            return RDBStorage(url, engine_kwargs=options, heartbeat_interval=HEARTBEAT_S, grace_period=GRACE_S)

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
        if self._database is not None:
            self._database.remove_session()

    def dispose(self) -> None:
        """Close all connections. Idempotent."""
        self.remove_session()
        if self._database is not None:
            self._database.engine.dispose()

    def _patiently(self, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        deadline, wait_s, is_told = time.monotonic() + self._patience_s, _FIRST_WAIT_S, False
        try:
            while True:
                try:
                    with self._dropped_where_stalled():
                        return operation(*args, **kwargs)
                except (StorageInternalError, DBAPIError, PendingRollbackError) as error:
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
                time.sleep(wait_s * random.uniform(0.5, 1.0))
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        except KeyboardInterrupt:
            self._patience_s = 0.0  # Who interrupts does not wait for what is left to write.
            raise

    @contextmanager
    def _dropped_where_stalled(self) -> Iterator[None]:
        """Shut this storage's sockets down each time that the block has lasted ``STALL_S``; other calls try again."""
        if not self._is_watched:
            yield
            return
        is_done = threading.Event()

        def watch() -> None:
            while not is_done.wait(STALL_S):
                for connection in list(self._sockets):
                    _shut_down(connection)

        threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            is_done.set()
            for connection in [c for c in self._sockets if c.closed]:
                with suppress(ValueError):  # Another thread was faster.
                    self._sockets.remove(connection)


def _libpq_options() -> dict[str, Any]:
    """How soon a silent connection ends: on this host by the system, on the server by its own timeouts."""
    stall_ms = int(1000 * STALL_S)
    return {
        "connect_timeout": 10,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": stall_ms,
        # A session whose client vanished keeps its locks no longer than this.
        "options": f"-c statement_timeout={stall_ms} -c idle_in_transaction_session_timeout={2 * stall_ms}",
    }


def _shut_down(connection: Any) -> None:
    """End a driver's connection from another thread: the call that waits on it raises."""
    with suppress(Exception), socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
        duplicate.shutdown(socket.SHUT_RDWR)


def _is_away(error: Exception) -> bool:
    """Whether the error is of the connection, not of what was sent on it."""
    cause = error.__cause__ if isinstance(error, StorageInternalError) else error
    if any(refusal in str(cause) for refusal in _REFUSALS):
        return False
    return isinstance(cause, OperationalError | InterfaceError | PendingRollbackError) or (
        isinstance(cause, DBAPIError) and cause.connection_invalidated
    )
