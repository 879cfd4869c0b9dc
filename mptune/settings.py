"""Every setting and its default, in one place. Units stand in the names."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mptune.errors import SettingsError

EngineChoice = Literal["auto", "tensorrt", "tensorrt-rtx", "onnxruntime"]


@dataclass(frozen=True)
class LatencySettings:
    """How one latency is taken (trtexec's GPU compute time; see ``mptune.engines.latency``).

    Attributes:
        warmup_ms: untimed executions before the first timed one, at least this long.
        duration_ms: timed executions go on for at least this long.
        min_iterations: and there are at least this many of them.
        bootstrap_samples: resamples for the 95 % confidence interval of the median.
        confidence: the interval's coverage.
        max_cv: a coefficient of variation above this is a warning.
        cuda_graph: replay a captured CUDA graph where capture works.
    """

    warmup_ms: float = 200.0
    duration_ms: float = 400.0
    min_iterations: int = 10
    bootstrap_samples: int = 1000
    confidence: float = 0.95
    max_cv: float = 0.025
    cuda_graph: bool = True


@dataclass(frozen=True)
class WorkerSettings:
    """Deadlines that the parent enforces on the worker process.

    Attributes:
        build_timeout_s: one build of one engine.
        measure_timeout_s: loading, running and timing one engine over all search samples.
        start_timeout_s: a fresh worker until it answers.
        memory_limit_bytes: address space of the worker; None leaves it unlimited.
        max_jobs: a worker is replaced after this many jobs, so that leaks cannot add up; None never.
        retries: how often a job that failed through a fault of the machine is tried again.
    """

    build_timeout_s: float = 1800.0
    measure_timeout_s: float = 600.0
    start_timeout_s: float = 120.0
    memory_limit_bytes: int | None = None
    max_jobs: int | None = 200
    retries: int = 2


@dataclass(frozen=True)
class DataSettings:
    """Calibration samples.

    Attributes:
        batch: rows per sample for a model with a dynamic batch.
        random_samples: how many samples are drawn when the user gave no data.
        random_int_range: half-open range of random integers (checked against embedding sizes by the user).
        held_out_fraction: share of the samples that the search never sees.
        max_search_samples: at most this many search samples are evaluated per plan; None takes all.
    """

    batch: int = 1
    random_samples: int = 16
    random_int_range: tuple[int, int] = (0, 2)
    held_out_fraction: float = 0.25
    max_search_samples: int | None = 64


@dataclass(frozen=True)
class SearchSettings:
    """What one ``mptune search`` does. The same settings on the same run directory resume it.

    Attributes:
        budget: evaluations, seeds and failures counted in; duplicates cost nothing.
        data: calibration data, or None for random inputs (with a warning that stays).
        out: run directory; None means ``MODEL-stem.mptune`` in the working directory.
        target: ``auto``, a profile's name, or the path of a TOML file.
        space: a search-space file's name or path.
        engine: toolchain family, or ``auto``.
        max_error: choose the fastest plan whose error is at most this.
        max_latency_ms: choose the most exact plan that is at most this slow.
        metric: name of the objective statistic (``mptune.data.accuracy.METRICS``).
        timeout_s: no new evaluation starts after this long; None is unlimited.
        storage: Optuna storage URL; None keeps a journal file in the run directory.
        seed: of the split, the sampler and random inputs.
        fresh: start over: what the run directory holds is moved aside, never deleted.
        tf32: let the FP32 groups of candidates use TF32 (the reference never does).
        sampler: who proposes plans.
        confirm_rounds: fresh processes in which each point of the front is measured again.
    """

    budget: int = 50
    data: Path | None = None
    out: Path | None = None
    target: str = "auto"
    space: str = "default"
    engine: EngineChoice = "auto"
    max_error: float | None = None
    max_latency_ms: float | None = None
    metric: str = "relative_l2"
    timeout_s: float | None = None
    storage: str | None = None
    seed: int = 0
    fresh: bool = False
    tf32: bool = False
    sampler: str = "precision"
    confirm_rounds: int = 3
    data_settings: DataSettings = field(default_factory=DataSettings)
    latency: LatencySettings = field(default_factory=LatencySettings)
    worker: WorkerSettings = field(default_factory=WorkerSettings)

    def __post_init__(self) -> None:
        """Refuse values that cannot be meant.

        Raises:
            SettingsError: a value is out of range.
        """
        if self.budget < 1:
            raise SettingsError(f"--budget is {self.budget}", "give at least 1; 50 is the default")
        if self.data_settings.batch < 1:
            raise SettingsError(f"--batch is {self.data_settings.batch}", "give at least 1")
        for name, value in (("--max-error", self.max_error), ("--max-latency-ms", self.max_latency_ms)):
            if value is not None and not value > 0:
                raise SettingsError(f"{name} is {value}", "give a number above 0")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise SettingsError(f"--timeout is {self.timeout_s:g} s", "give a duration above 0, such as 8h or 90m")
        if self.seed < 0:
            raise SettingsError(f"--seed is {self.seed}", "give 0 or a positive integer")
