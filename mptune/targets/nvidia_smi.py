"""Runs nvidia-smi, and other programs that NVIDIA's driver or JetPack come with. Nothing else in mptune starts them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

TIMEOUT_S = 10.0
"""A driver that hangs is given up after this long."""


def ask_nvidia_smi(*arguments: str, timeout_s: float = TIMEOUT_S) -> str | None:
    """What nvidia-smi prints.

    Returns:
        Its standard output; None where there is no nvidia-smi, or it fails or does not answer in time.
    """
    program = shutil.which("nvidia-smi")
    return None if program is None else output_of(Path(program), *arguments, timeout_s=timeout_s)


def output_of(program: Path, *arguments: str, timeout_s: float = TIMEOUT_S) -> str | None:
    """The standard output of a program; None where it is missing, fails or does not answer in time."""
    try:
        done = subprocess.run(
            [str(program), *arguments],
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
