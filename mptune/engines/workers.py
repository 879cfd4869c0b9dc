"""The worker processes of a run: one that builds, measures and emulates, and one that observes ranges beside it."""

from __future__ import annotations

from pathlib import Path

from mptune.engines.environment import usable_cores
from mptune.engines.ort.cuda_session import NO_TF32
from mptune.engines.ort.session import Provider
from mptune.processes.parent import Worker
from mptune.settings import SearchSettings

_CORES_BESIDE = 4  # fewest cores that have room for what runs beside the first worker


class Workers:
    """Both workers. A process starts at the first job, so that the second one costs nothing where it is not used."""

    def __init__(self, settings: SearchSettings) -> None:
        environment = {} if settings.tf32 else NO_TF32
        self.main, self.observer = (Worker(None, settings.worker, environment) for _ in range(2))

    def log_to(self, folder: Path) -> None:
        self.main.logs_dir = self.observer.logs_dir = folder

    def close(self) -> None:
        self.observer.close()
        self.main.close()


def observes_beside(provider: Provider) -> bool:
    """Whether ranges are observed while the reference is taken: on a GPU; on a CPU both take all cores."""
    return provider == "cuda" and usable_cores() >= _CORES_BESIDE
