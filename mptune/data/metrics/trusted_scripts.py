"""Metric scripts, ``script.py:function``, and which of them may run: those that the caller names.

A run directory records its metrics by name, and it may come from a stranger. So a script that only a run directory
names is never run: it has to be named on the command line, or in the Python call, that runs it. A script inside a run
directory is refused even then.
"""

from __future__ import annotations

from pathlib import Path

from mptune.errors import RunError

TO_MAXIMISE = ":max"
"""Ends the name of a script's function whose value is larger for better plans."""


def undirected(metric: str) -> str:
    """``script.py:function`` of ``script.py:function:max``; any other metric as it is."""
    shorter = metric.removesuffix(TO_MAXIMISE)
    return shorter if Path(shorter.rpartition(":")[0]).suffix == ".py" else metric


def script_of(metric: str) -> Path | None:
    """The path of the script in ``script.py:function`` or ``script.py:function:max``; None for other metrics."""
    file, _, name = undirected(metric).rpartition(":")
    # By the path's own suffix, as ``load_metric`` takes it: "a.py/" is a.py, too.
    return Path(file) if Path(file).suffix == ".py" and name else None


def refuse_inside(metric: str, run: Path) -> None:
    """Refuse a script that lies in a run directory, also by a link in either direction."""
    script = script_of(metric)
    if script is None:
        return
    places = (script.absolute(), script.parent.resolve() / script.name, script.resolve())
    if any(place.is_relative_to(root) for place in places for root in (run.absolute(), run.resolve())):
        raise RunError(
            f"the metric's script {script} lies in the run directory {run}: such a script is never run",
            "read it; if you trust it, copy it elsewhere and give that copy with --metric script.py:function",
        )
