"""Whether figures that are taken on one host can be compared with those of another: target, engine, versions."""

from __future__ import annotations

import hashlib
import json

from mptune.engines.environment import Environment, engine_packages
from mptune.identity import target_text
from mptune.run_json import TargetSection

_DIGITS = 6


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
        return f"{prefix}: another target ({target_text(there)} there, {target_text(here)} here)"
    if prepared is None:
        return ""
    before, now = versions(prepared), versions(found)
    differing = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    if not differing:
        return ""
    name = differing[0]
    return f"{prefix}: {name} {before.get(name, 'is missing')} there, {now.get(name, 'is missing')} here"


def versions(environment: Environment) -> dict[str, str]:
    """The versions that change figures, and the drivers of the GPUs."""
    drivers = sorted({gpu.driver for gpu in environment.gpus if gpu.driver})
    compared = {"mptune", "cuda driver", *engine_packages()}
    found = {name: version for name, version in environment.versions.items() if name in compared}
    return {**found, "driver": ", ".join(drivers)} if drivers else found


def versions_suffix(prepared: Environment | None, found: Environment) -> str:
    """Digits that tell hosts of one device with other versions apart; empty where the versions are the search's."""
    now = versions(found)
    if prepared is None or versions(prepared) == now:
        return ""
    return "-" + hashlib.sha256(json.dumps(now, sort_keys=True).encode()).hexdigest()[:_DIGITS]
