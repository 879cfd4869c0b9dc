"""The plans that failed, each with the first line of its log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mptune.engines.base import Failure
from mptune.graph.plan import PrecisionPlan
from mptune.tuning.evaluation import Origin

MOST = 100
"""So many failures are listed; the page says how many more there are."""

_LONGEST = 400
"""Characters of a line."""


def failure_documents(failures: Sequence[tuple[PrecisionPlan, Origin, Failure]]) -> list[dict[str, Any]]:
    """Plan, origin, stage, kind, message, and the name and first line of the log, of the first ``MOST`` failures."""
    return [
        {
            "plan": plan.fingerprint,
            "origin": origin.label,
            "stage": failure.stage.value,
            "kind": failure.kind.value,
            "message": failure.message[:_LONGEST],
            "log": None if failure.log_path is None else failure.log_path.name,
            "line": first_line(failure.log_path),
        }
        for plan, origin, failure in failures[:MOST]
    ]


def first_line(path: Path | None) -> str:
    """The first line of a log that says something; empty where the log is gone or says nothing."""
    if path is None:
        return ""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            text = next((line.strip() for line in lines if line.strip()), "")
    except OSError:
        return ""
    return text[:_LONGEST]
