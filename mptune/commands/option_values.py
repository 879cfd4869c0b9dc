"""How the values of options are read: durations, sizes, GPUs."""

from __future__ import annotations

import re

from mptune.errors import SettingsError

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?:(?P<unit>[KMGT])(?P<binary>i?)B?|B)?", re.IGNORECASE)
_DURATION = re.compile(r"(?:(?P<h>\d+(?:\.\d+)?)h)?(?:(?P<m>\d+(?:\.\d+)?)m)?(?:(?P<s>\d+(?:\.\d+)?)s?)?")


def parse_duration(text: str, option: str = "--timeout") -> float:
    """Read ``8h``, ``90m``, ``1h30m``, ``30s`` or plain seconds.

    Returns:
        Seconds.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None or not any(match.groups()):
        raise SettingsError(f"{option} {text} is not a duration", "write 8h, 90m, 1h30m, 30s or plain seconds")
    hours, minutes, seconds = (float(match[unit] or 0) for unit in "hms")
    return hours * 3600 + minutes * 60 + seconds


def parse_gpus(text: str) -> tuple[int, ...]:
    """Read GPU numbers such as ``0,1``."""
    numbers = [part.strip() for part in text.split(",")]
    if not all(number.isdecimal() for number in numbers):
        raise SettingsError(f"--gpus {text} is not understood", "write numbers with commas between them, such as 0,1")
    return tuple(int(number) for number in numbers)


def parse_size(text: str, option: str = "--max-disk") -> int:
    """Read ``20GiB``, ``500MB`` or plain bytes.

    Returns:
        Bytes.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise SettingsError(f"{option} {text} is not a size", "write 20GiB, 500MB or plain bytes")
    power = 0 if match["unit"] is None else 1 + "KMGT".index(match["unit"].upper())
    return int(float(match["number"]) * (1024 if match["binary"] else 1000) ** power)
