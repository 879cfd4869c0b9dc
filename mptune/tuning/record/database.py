"""Optuna's storage in a database that may restart or lose its connection: calls are tried again, for some minutes."""

from __future__ import annotations

import functools
import logging
import random
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import RDBStorage, get_storage
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, PendingRollbackError

from mptune.errors import RunError
from mptune.files import RESUME_HINT
from mptune.tuning.record import tell_wait

HEARTBEAT_S, GRACE_S = 20, 120
"""Seconds between heartbeats of a worker, and without one, after which it is dead."""

PATIENCE_S = 300.0
"""Seconds for which a call is tried again."""

_CONNECT_ARGS = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
    # A session whose client vanished keeps its locks no longer than this.
    "options": "-c statement_timeout=30s -c idle_in_transaction_session_timeout=60s",
}
"""Of libpq, which both drivers of PostgreSQL use. What the URL itself gives goes before."""

_REFUSALS = ("authentication failed", "does not exist", "no pg_hba.conf entry", "unable to open database file")
"""In messages of servers and drivers that waiting does not change."""

logging.getLogger("sqlalchemy.pool.impl.QueuePool.mptune").setLevel(logging.CRITICAL)  # else tracebacks on stderr
logging.getLogger("optuna.storages._rdb.storage").addFilter(  # The lost connection is told as a wait.
    lambda record: "Caught an error from sqlalchemy" not in record.getMessage()
)


class RetryingStorage:
    """Optuna's storage in a database, whose calls are tried again while it does not answer.

    Has every method of ``BaseStorage`` and of Optuna's heartbeats, by delegation. The answer to a call may be lost
    after the server has carried it out: what is enqueued or begun twice is dropped as a duplicate, or taken up again as
    the trial of a dead worker.
    """

    def __init__(self, url: str, shown: str, reason_of: Callable[[BaseException], str]) -> None:
        """Open it, as patiently as each call.

        ``shown`` is what errors show of the URL, once it has opened; ``reason_of`` what may be shown of an error.
        """
        self._shown, self._reason_of, self._patience_s = shown, reason_of, PATIENCE_S
        self._database: RDBStorage | None = None
        self._database = self._retried(_open, url)
        self._storage = get_storage(self._database)  # with Optuna's cache of finished trials
        self._trials, self._is_closed = deque[int](maxlen=8), threading.Event()  # at least as many as wait at once
        self._beating = threading.Thread(target=self._beat, daemon=True)

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self._retried, getattr(self._storage, name))

    def keep_alive(self, trial_id: int) -> None:
        """Tell the database from now on, again and again, that this process works on a trial."""
        self._trials.append(trial_id)
        self.record_heartbeat(trial_id)
        if not self._beating.is_alive():
            self._beating.start()

    def close(self) -> None:
        """Close all connections. Idempotent."""
        self._is_closed.set()
        if self._beating.is_alive():
            self._beating.join(5.0)
        if self._database is not None:
            self._database.remove_session()
            self._database.engine.dispose()

    def _beat(self) -> None:
        while not self._is_closed.wait(HEARTBEAT_S):
            for trial_id in tuple(self._trials):
                with suppress(Exception):  # A database that is away misses a beat or two; who writes a result raises.
                    self.record_heartbeat(trial_id)
        self.remove_session()  # of this thread

    def _retried(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        deadline, wait_s, is_told = time.monotonic() + self._patience_s, 0.2, False
        try:
            while True:
                try:
                    return call(*args, **kwargs)
                except (StorageInternalError, DBAPIError, PendingRollbackError) as error:
                    if self._database is not None:
                        with suppress(Exception):
                            self._database.remove_session()  # with its broken transaction
                    cause = error.__cause__ if isinstance(error, StorageInternalError) else error
                    reason, left_s = self._reason_of(error.__cause__ or error), deadline - time.monotonic()
                    # Of the connection, not of what was sent on it.
                    is_away = not any(refusal in str(cause) for refusal in _REFUSALS) and (
                        isinstance(cause, OperationalError | InterfaceError | PendingRollbackError)
                        or (isinstance(cause, DBAPIError) and cause.connection_invalidated)
                    )
                    if not is_away or left_s <= 0.0:
                        if self._database is None:  # Whoever opens it says what may be wrong with the URL.
                            raise
                        hint = f"when it is back, {RESUME_HINT}"
                        raise RunError(f"the storage {self._shown} does not answer: {reason}", hint) from error
                    if not is_told:
                        tell_wait.get()(f"the storage does not answer ({reason}): waiting up to {left_s:.0f} s for it")
                        is_told = True
                time.sleep(wait_s * random.uniform(0.5, 1.0))  # jittered back-off
                wait_s = min(2 * wait_s, 10.0)
        except KeyboardInterrupt:
            self._patience_s = 0.0  # Who interrupts does not wait for what is left to write.
            raise


def _open(url: str) -> RDBStorage:
    parsed = make_url(url)
    options: dict[str, Any] = {}
    if parsed.get_backend_name() != "sqlite":
        options["pool_pre_ping"] = True  # A connection that the server closed is replaced before anything is sent.
    if parsed.get_backend_name() == "postgresql" and parsed.get_driver_name() in ("psycopg", "psycopg2"):
        options["connect_args"] = {name: v for name, v in _CONNECT_ARGS.items() if name not in parsed.query}
        options["pool_logging_name"] = "mptune"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)  # heartbeat_interval, since Optuna 2.9
        return RDBStorage(url, engine_kwargs=options, heartbeat_interval=HEARTBEAT_S, grace_period=GRACE_S)
