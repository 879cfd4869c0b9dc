"""What a search needs first, begun before anything else is loaded: the worker process, and a probe of the GPU.

Imports little: the rest of mptune takes a second to load, in which the process starts and CUDA with it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING

from mptune.engines.cuda.no_tf32 import NO_TF32
from mptune.engines.environment import usable_cores
from mptune.engines.worker.failure import Failure
from mptune.engines.worker.once import run_once
from mptune.engines.worker.process import add_spare, spare, spare_environment
from mptune.targets.detect import detect_gpus

if TYPE_CHECKING:
    from mptune.engines.ort.session import Provider

PROBE_TIMEOUT_S = 120.0

_CORES_BESIDE = 4
"""So many cores have room for what runs beside the first worker."""

_probing = threading.Lock()


def observes_beside(provider: Provider) -> bool:
    """Whether ranges are observed while the reference is taken: on a GPU, where opening both is the host's work.

    On a CPU both take all cores.
    """
    return provider == "cuda" and usable_cores() >= _CORES_BESIDE


def worker_environment(*, tf32: bool) -> Mapping[str, str]:
    """More environment variables of a search's worker process."""
    return {} if tf32 else NO_TF32


@contextlib.contextmanager
def started_ahead(target: str, *, tf32: bool) -> Iterator[None]:
    """Begin what a toolchain needs first, beside whatever the caller does: the worker process, and a probe of the GPU.

    Nothing of it shows before a toolchain is opened, faults included; what nobody took is ended.

    Args:
        target: of the search, as it was named.
        tf32: of the search.
    """
    with spare(worker_environment(tf32=tf32)):
        # It ends by itself, and nobody waits for it where the search ends first.
        threading.Thread(target=_probe_gpu, args=(target,), name="mptune-probe", daemon=True).start()
        yield


def _probe_gpu(target: str) -> None:
    """Probe CUDA in the process that works for the search then, and where there is another in that, too."""
    with contextlib.suppress(Exception):  # whoever asks again gets it
        if _is_cpu(target) or not detect_gpus():
            return
        if observes_beside("cuda"):
            add_spare(2)
            threading.Thread(target=_run_probe, args=("cuda",), name="mptune-probe-2", daemon=True).start()
        probe("cuda")


def _is_cpu(target: str) -> bool:
    if target == "auto":
        return False
    from mptune.targets.target import load_target

    return load_target(target).kind == "cpu"


def probe(provider: Provider) -> str | None:
    """Run a tiny model in a worker; None where that works, else the reason. Cached for the process.

    While another thread does so (``started_ahead``) its answer is waited for.
    """
    with _probing:
        return probed(provider)


@cache
def probed(provider: Provider) -> str | None:
    """See ``probe``."""
    return _run_probe(provider)


def _run_probe(provider: Provider) -> str | None:
    from mptune.engines.ort.probe import ProbeJob  # loads NumPy

    report = run_once(ProbeJob(provider), PROBE_TIMEOUT_S, _logged_reason, spare_environment())
    return report if isinstance(report, str) else None


def _logged_reason(failure: Failure) -> str:
    """What ONNX Runtime logged about a library that does not load; its exception names no cause."""
    if failure.log_path is None:
        return ""
    for line in failure.log_path.read_text(encoding="utf-8", errors="replace").splitlines():
        if "cannot open shared object file" in line or "Failed to load library" in line:
            return line[line.rfind("error:") + len("error:") :].strip() if "error:" in line else line.strip()
    return ""
