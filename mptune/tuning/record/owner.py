"""Which process works on a trial, and whether it still does: so the trials of dead ones can be taken up."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

import psutil  # type: ignore[import-untyped]
from optuna.storages import BaseStorage, JournalStorage
from optuna.trial import FrozenTrial

from mptune.tuning.record.attributes import OWNER

_NAMELESS_S = 60.0
"""A running trial names its process within milliseconds; one that names none for so long lost it before."""

_LAST_BEAT_S = 5.0
"""So long the end of a search waits for a heartbeat that is being written."""


def this_process() -> dict[str, Any]:
    """Host, process id and start of this process, as JSON types."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}


def is_alive(owner: dict[str, Any]) -> bool | None:
    """Whether a process that ``this_process`` described lives; None where it is of another host."""
    if owner["host"] != socket.gethostname():
        return None
    try:
        return bool(abs(psutil.Process(owner["pid"]).create_time() - owner["started"]) <= 1.0)
    except psutil.NoSuchProcess:
        return False


class Heartbeats:
    """Tells a database, again and again, that this process works on its trial; and which trials nobody works on.

    A journal has no heartbeat: its workers are on one host, where a process can be looked up.
    """

    def __init__(self, storage: BaseStorage, study_id: int) -> None:
        self._storage: Any = None if isinstance(storage, JournalStorage) else storage
        self._study_id = study_id
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def owner(self, trial_id: int) -> dict[str, Any]:
        """Begin to work on a trial; what to note as its owner. The heartbeats of the trial before end."""
        self.stop()
        if self._storage is None:
            return this_process()
        self._storage.record_heartbeat(trial_id)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(self._storage, trial_id, self._stopped), daemon=True)
        self._thread.start()
        return {**this_process(), "heartbeat": True}

    def stop(self) -> None:
        """End the heartbeats. Idempotent."""
        self._stopped.set()

    def close(self) -> None:
        """End the heartbeats and wait until their thread has given its connection back. Idempotent."""
        self.stop()
        if self._thread is not None:
            self._thread.join(_LAST_BEAT_S)
            self._thread = None

    def stale(self) -> set[int]:
        """The ids of the running trials whose heartbeats have stopped."""
        return set() if self._storage is None else set(self._storage._get_stale_trial_ids(self._study_id))

    @staticmethod
    def _beat(storage: Any, trial_id: int, stopped: threading.Event) -> None:
        interval_s = storage.get_heartbeat_interval()
        while not stopped.wait(interval_s):
            # A database that is away for a moment misses a beat or two; whoever writes a result raises the error.
            with suppress(Exception):
                storage.record_heartbeat(trial_id)
        with suppress(Exception):
            storage.remove_session()  # of this thread


def is_dead(trial: FrozenTrial, stale: set[int], stale_after_s: float) -> bool:
    """Whether nobody works on a running trial any more."""
    owner = trial.user_attrs.get(OWNER)
    alive = None if owner is None else is_alive(owner)
    if alive is not None:
        return not alive
    if trial._trial_id in stale:
        return True
    if owner is not None and owner.get("heartbeat"):
        return False
    started = trial.datetime_start
    limit_s = _NAMELESS_S if owner is None else stale_after_s
    return started is not None and datetime.now(started.tzinfo) - started > timedelta(seconds=limit_s)
