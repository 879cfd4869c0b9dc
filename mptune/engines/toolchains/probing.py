"""What the worker of a search finds: its environment variables, whether CUDA works, room for another one beside it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from mptune.engines.base import Failure
from mptune.engines.cuda.no_tf32 import NO_TF32
from mptune.engines.environment import usable_cores
from mptune.engines.ort.probe import ProbeJob
from mptune.engines.ort.session import Provider
from mptune.engines.worker.once import run_once

PROBE_TIMEOUT_S = 120.0

_CORES_BESIDE = 4
"""So many cores have room for what runs beside the first worker."""


def observes_beside(provider: Provider) -> bool:
    """Whether ranges are observed while the reference is taken: on a GPU, where opening both is the host's work.

    On a CPU both take all cores.
    """
    return provider == "cuda" and usable_cores() >= _CORES_BESIDE


def worker_environment(*, tf32: bool) -> Mapping[str, str]:
    """More environment variables of a search's worker process."""
    return {} if tf32 else NO_TF32


@cache
def probe(provider: Provider) -> str | None:
    """Run a tiny model in a worker; None where that works, else the reason. Cached for the process."""
    return run_once(ProbeJob(provider), PROBE_TIMEOUT_S, _logged_reason)


def _logged_reason(failure: Failure) -> str:
    """What ONNX Runtime logged about a library that does not load; its exception names no cause."""
    if failure.log_path is None:
        return ""
    for line in failure.log_path.read_text(encoding="utf-8", errors="replace").splitlines():
        if "cannot open shared object file" in line or "Failed to load library" in line:
            return line[line.rfind("error:") + len("error:") :].strip() if "error:" in line else line.strip()
    return ""
