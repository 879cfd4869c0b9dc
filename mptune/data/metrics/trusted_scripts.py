"""Which metric scripts may run: those that the user names, and those that the user named before.

A run directory records its metric as ``script.py:function``, and it may come from a stranger. So a script that is only
recorded runs if the SHA-256 of its content stands in the user's ``trusted_scripts.json``. It is written there when the
user gives ``--metric script.py:function``. A script inside a run directory is never run.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from mptune.errors import RunError
from mptune.files import write_text

FILE_NAME = "trusted_scripts.json"

_FORMAT = 1


def configuration_folder() -> Path:
    """The user's configuration folder of mptune: below ``XDG_CONFIG_HOME`` where it is set, else the platform's."""
    given = os.environ.get("XDG_CONFIG_HOME", "")
    if given and Path(given).is_absolute():  # the XDG specification says to ignore relative ones
        return Path(given) / "mptune"
    if sys.platform == "win32":
        return Path(os.environ.get("APPDATA") or Path.home() / "AppData" / "Roaming") / "mptune"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "mptune"
    return Path.home() / ".config" / "mptune"


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
    """Refuse a script that lies in a run directory, also by a link in either direction.

    Raises:
        RunError: it does.
    """
    script = script_of(metric)
    if script is None:
        return
    places = (script.absolute(), script.parent.resolve() / script.name, script.resolve())
    if any(place.is_relative_to(root) for place in places for root in (run.absolute(), run.resolve())):
        raise RunError(
            f"the metric's script {script} lies in the run directory {run}: such a script is never run",
            "read it; if you trust it, copy it elsewhere and give that copy with --metric script.py:function",
        )


def trust(metric: str) -> None:
    """Remember a script that the user named. Where the configuration folder cannot be written, nothing is kept."""
    script = script_of(metric)
    with contextlib.suppress(OSError, RunError):
        if script is None:
            return
        folders = _read()
        known = folders.setdefault(_sha256(script), [])
        folder = str(script.resolve().parent)
        if folder not in known:
            known.append(folder)
            place = configuration_folder() / FILE_NAME
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_text(place, json.dumps({"format": _FORMAT, "scripts": folders}, indent=2) + "\n", mode=0o600)


def check_recorded(metric: str, run: Path, command: str = "confirm") -> None:
    """Refuse a script that only a run directory names, unless the user has named it before.

    Raises:
        RunError: with the command that names it.
    """
    refuse_inside(metric, run)
    script = script_of(metric)
    if script is None or _is_trusted(script):
        return
    naming = shlex.join(["mptune", command, str(run), "--metric", metric])
    raise RunError(
        f"the run's metric is the Python script {script}, which is not run unless you name it",
        f"read the script; if you trust it: `{naming}`",
    )


def _is_trusted(script: Path) -> bool:
    try:
        content = script.read_bytes() if script.is_file() else b""
        folders = _read().get(hashlib.sha256(content).hexdigest())
        if folders is None:
            return False
        folder = script.resolve().parent
        # The same script elsewhere may find other neighbours to import.
        return str(folder) in folders or not _imports_neighbours(content, folder)
    except (OSError, ValueError, SyntaxError, RecursionError):
        return False


def _imports_neighbours(content: bytes, folder: Path) -> bool:
    neighbours = {entry.name.partition(".")[0] for entry in folder.iterdir()}
    for node in ast.walk(ast.parse(content)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        if any(name.partition(".")[0] in neighbours for name in names):
            return True
    return False


def _sha256(script: Path) -> str:
    return hashlib.sha256(script.read_bytes()).hexdigest()


def _read() -> dict[str, list[str]]:
    """SHA-256 -> folders in which the user named the script; empty where nothing can be read."""
    try:
        document: Any = json.loads((configuration_folder() / FILE_NAME).read_text(encoding="utf-8"))
        return {str(sha256): [str(folder) for folder in folders] for sha256, folders in document["scripts"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
