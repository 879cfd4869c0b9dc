"""Runs nvidia-smi, the driver's own tool. Nothing else in mptune starts it."""

from __future__ import annotations

import shutil
import subprocess

TIMEOUT_S = 10.0
"""A driver that hangs is given up after this long."""


def ask_nvidia_smi(*arguments: str, timeout_s: float = TIMEOUT_S) -> str | None:
    """What nvidia-smi prints.

    Args:
        *arguments: of the command line.
        timeout_s: the call is given up after this long.

    Returns:
        Its standard output; None where there is no nvidia-smi, or it fails or does not answer in time.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
