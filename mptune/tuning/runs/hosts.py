"""Whether figures that are taken on one host can be compared with those of another: target, engine, versions."""

from __future__ import annotations

import hashlib
import json

from mptune.engines.environment import Environment
from mptune.errors import RunError
from mptune.run_json import TargetSection
from mptune.tuning.record.record import StudyRecord

_COMPARED = frozenset(
    {"mptune", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-lean", "tensorrt-rtx", "cuda driver"}
)
"""Versions that change figures."""

_DIGITS = 6

_STALE_AFTER_S = 3600.0
"""A trial of another host, without a heartbeat, that has run so long is taken for dead."""

_TARGET_NOTE = "target"
"""Under which a study keeps what its figures are taken on."""


def difference(there: TargetSection, prepared: Environment | None, here: TargetSection, found: Environment) -> str:
    """What differs between the host that a search was prepared on and this one, one line; empty where nothing does.

    Args:
        there: what the search's figures are taken on.
        prepared: versions and driver there; None where they were not recorded.
        here: what this host's figures would be taken on.
        found: versions and driver here.
    """
    prefix = "this host differs from the one that the search was prepared on"
    if there != here:
        return f"{prefix}: another target ({_named(there)} there, {_named(here)} here)"
    if prepared is None:
        return ""
    before, now = versions(prepared), versions(found)
    differing = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    if not differing:
        return ""
    name = differing[0]
    return f"{prefix}: {name} {before.get(name, 'is missing')} there, {now.get(name, 'is missing')} here"


def check_study(record: StudyRecord, target: TargetSection | None) -> None:
    """Refuse to add figures to a study that holds another device's; the first to measure writes its own down.

    Two searches with their own run directories may share a study by a database.

    Raises:
        RunError: target, engine or device differ.
    """
    assert target is not None  # The toolchain is open.
    here = target.model_dump()
    known = record.note(_TARGET_NOTE)
    if known == here:
        return
    record.heal(_STALE_AFTER_S)
    if known is None or not (record.spent or record.running):  # A study without a figure pins nothing.
        record.set_note(_TARGET_NOTE, here)
    else:
        raise RunError(
            f"the study is searched on another target ({_named(TargetSection.model_validate(known))} there, "
            f"{_named(target)} here)",
            "give this search a run directory of another name with --out DIR, or join the other one with "
            "`mptune worker RUN --allow-mixed`",
        )


def versions(environment: Environment) -> dict[str, str]:
    """The versions that change figures, and the drivers of the GPUs."""
    drivers = sorted({gpu.driver for gpu in environment.gpus if gpu.driver})
    found = {name: version for name, version in environment.versions.items() if name in _COMPARED}
    return {**found, "driver": ", ".join(drivers)} if drivers else found


def versions_suffix(prepared: Environment | None, found: Environment) -> str:
    """Digits that tell hosts of one device with other versions apart; empty where the versions are the search's."""
    now = versions(found)
    if prepared is None or versions(prepared) == now:
        return ""
    return "-" + hashlib.sha256(json.dumps(now, sort_keys=True).encode()).hexdigest()[:_DIGITS]


def _named(target: TargetSection) -> str:
    predicted = "" if target.latency_source == "measured" else ", predicted"
    return f"{target.name}: {target.engine} on {target.device}{predicted}"
