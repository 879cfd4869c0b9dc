"""Whether a Jetson throttled while it was timed: its own clocks, event counters and temperatures.

nvidia-smi answers N/A there. Sources: Jetson Linux Developer Guide, "Platform Power and Performance" (``oc*_event_cnt``
of the driver ``soctherm_oc``: OC1 is under-voltage, OC2 average and OC3 instantaneous over-current) and "Thermal
management"; the Linux kernel's documentation of devfreq and of thermal zones.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mptune.targets.jetson import Clocks, gpu_clocks, read_number, read_text

_CLOCK_TOLERANCE = 0.05
_EVENTS = {"oc1": "under-voltage", "oc2": "average over-current", "oc3": "instantaneous over-current"}
_TRIPS = re.compile(r"trip_point_(\d+)_type")


@dataclass(frozen=True)
class Throttling:
    """A Jetson's state at one moment, as far as its files show it."""

    clocks: Clocks
    events: Mapping[str, int]
    """Event counter, such as ``oc3`` -> events since the device was started."""
    too_hot: Mapping[str, float]
    """Thermal zone -> degrees Celsius, of those where the kernel lowers clocks."""


def read_throttling(root: Path = Path("/")) -> Throttling | None:
    """Read the files; None where this is no Jetson. Never raises."""
    clocks = gpu_clocks(root)
    return None if clocks == Clocks() else Throttling(clocks, _events(root), _too_hot(root))


def throttling_warnings(now: Throttling, before: Throttling, first: Throttling) -> tuple[str, ...]:
    """What lowered the clocks during a timing, one line each, ending with what to do.

    ``before`` is read before the timing, ``now`` right after it, before the GPU is idle, ``first`` as ``now`` of the
    first timing.
    """
    warnings = []
    for name, count in now.events.items():
        more = count - before.events.get(name, count)
        if more > 0:
            what = _EVENTS.get(name, "hardware")
            warnings.append(
                f"the Jetson throttled while it was timed ({what}, {name}: {more} times): use a stronger supply or a"
                " lower power mode, and measure again"
            )
    for zone, degrees in now.too_hot.items():
        warnings.append(f"{zone} is at {degrees:.0f} degrees, where the kernel lowers the clocks: cool the Jetson")
    clocks = now.clocks
    is_locked = clocks.gpu_mhz is not None and clocks.gpu_min_mhz == clocks.gpu_max_mhz
    wanted = clocks.gpu_max_mhz if is_locked else first.clocks.gpu_mhz
    if wanted and clocks.gpu_mhz and clocks.gpu_mhz < (1 - _CLOCK_TOLERANCE) * wanted:
        since = "although it is locked" if is_locked else "since the first timing"
        warnings.append(
            f"the GPU's clock fell from {wanted:.0f} to {clocks.gpu_mhz:.0f} MHz {since}: cool the Jetson, or lock the"
            " clocks of the power mode that will be deployed (sudo jetson_clocks)"
        )
    return tuple(warnings)


def _events(root: Path) -> dict[str, int]:
    events: dict[str, int] = defaultdict(int)
    for path in sorted((root / "sys/class/hwmon").glob("hwmon*/oc*_event_cnt")):
        count = read_number(path)
        if count is not None:
            events[path.name.removesuffix("_event_cnt")] += int(count)
    return events


def _too_hot(root: Path) -> dict[str, float]:
    too_hot = {}
    for zone in sorted((root / "sys/class/thermal").glob("thermal_zone*")):
        now = read_number(zone / "temp")
        limits = [
            read_number(zone / path.name.replace("_type", "_temp"))
            for path in zone.glob("trip_point_*_type")
            if _TRIPS.fullmatch(path.name) and read_text(path).strip() == "passive"
        ]
        lowest = min((limit for limit in limits if limit is not None and limit > 0), default=None)
        if now is not None and lowest is not None and now >= lowest:
            too_hot[read_text(zone / "type").strip() or zone.name] = now / 1000
    return too_hot
