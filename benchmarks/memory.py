"""Peak memory of this process."""

from __future__ import annotations

from pathlib import Path


def peak_mib() -> float:
    """The most that was resident so far, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024
