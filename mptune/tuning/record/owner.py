"""Which process works on a trial, so that the trials of dead ones can be taken up."""

from __future__ import annotations

import os
import socket
from datetime import datetime, timedelta
from typing import Any

import psutil  # type: ignore[import-untyped]
from optuna.trial import FrozenTrial

from mptune.tuning.record.attributes import OWNER, read_json


def this_process() -> dict[str, Any]:
    """Host, process id and start of this process, as JSON types."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}


def is_dead(trial: FrozenTrial, stale_after_s: float) -> bool:
    """Whether nobody works on a running trial any more.

    Args:
        trial: that runs.
        stale_after_s: of another host, one that has run longer than this is taken for dead.
    """
    owner = read_json(trial.user_attrs, OWNER)
    if owner is not None and owner["host"] == socket.gethostname():
        try:
            return bool(abs(psutil.Process(owner["pid"]).create_time() - owner["started"]) > 1.0)
        except psutil.NoSuchProcess:
            return True
    started = trial.datetime_start
    return started is not None and datetime.now(started.tzinfo) - started > timedelta(seconds=stale_after_s)
