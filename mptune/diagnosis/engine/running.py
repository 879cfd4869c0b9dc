"""Runs an engine file of TensorRT or TensorRT-RTX on a model's samples, on the device that is here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from mptune.data.archive import read_outputs
from mptune.diagnosis.runner import Outputs, Runner
from mptune.engines.base import Failure, FailureKind
from mptune.engines.tensorrt.builder import BuildOptions
from mptune.engines.tensorrt.jobs import BuildJob
from mptune.engines.tensorrt.library import INSTALL, Kind, is_installed
from mptune.engines.tensorrt.outputs import EngineOutputsJob, EngineRepeatJob, ModelNames
from mptune.engines.toolchains.choose import why_not_on
from mptune.engines.worker.child import Job
from mptune.engines.worker.parent import Worker
from mptune.errors import BaselineError, ModelError, TargetError
from mptune.settings import TensorRtSettings, WorkerSettings
from mptune.targets.memory import default_workspace_mb
from mptune.targets.target import Gpu, detect_gpus
from mptune.tuning.failures import did_not_run

T = TypeVar("T")

_SUFFIXES = frozenset({".engine", ".plan", ".trt"})
_MAGIC = b"ftrt"
"""The first bytes of an engine file of TensorRT (``Magic tag does not match`` of its runtime is about them)."""

_KINDS: tuple[Kind, ...] = ("tensorrt", "tensorrt-rtx")
_RECORD = "record its outputs where it runs, and give them: --outputs FILE"


def is_engine(path: Path) -> bool:
    """Whether a file is an engine, by its suffix or its first bytes."""
    if path.suffix.lower() in _SUFFIXES:
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def engine_kinds(path: Path) -> tuple[Kind, ...]:
    """What can run an engine file here: TensorRT, TensorRT-RTX, or either, where no suffix tells them apart."""
    if not path.is_file():
        raise ModelError(f"{path}: there is no such file", "give the path of an engine or of an ONNX model")
    gpus = detect_gpus()
    if not gpus:
        raise TargetError(f"{path} is an engine, and no NVIDIA GPU is here to run it", _RECORD)
    reasons = {kind: why_not(kind, gpus[0]) for kind in _KINDS}
    kinds = tuple(kind for kind in _KINDS if reasons[kind] is None)
    if kinds:
        return kinds
    shown = "; ".join(f"{kind}: {reason}" for kind, reason in reasons.items())
    install = next((INSTALL[kind] for kind in _KINDS if is_installed(kind)), INSTALL["tensorrt"])
    raise TargetError(f"{path} is an engine, and cannot be run on {gpus[0].name} ({shown})", f"{install}; or {_RECORD}")


def why_not(kind: Kind, gpu: Gpu) -> str | None:
    """Why engines of a kind cannot be run on a GPU that is here; None where they can."""
    return why_not_on(kind, gpu) if is_installed(kind) else f"{kind} is not installed"


class EngineRunner:
    """One engine file on a model's samples. Nothing runs before it is asked for; results are kept.

    Methods raise BaselineError where the engine cannot be loaded, or does not run on the samples.
    """

    def __init__(
        self,
        path: Path,
        kinds: Sequence[Kind],
        model: Runner,
        folder: Path,
        ignore: Collection[str] = (),
        name: str = "",
    ) -> None:
        """Take what may run the engine, the ONNX model's runner, and a folder that does not exist yet."""
        folder.mkdir()
        self.name = name or str(path)
        self._path, self._kinds, self._model, self._folder = path, tuple(kinds), model, folder
        outputs = tuple(output.name for output in model.model.outputs)
        wanted = tuple(output for output in outputs if output not in ignore)
        self._names = ModelNames(tuple(i.name for i in model.model.inputs), outputs, wanted)
        self._settings = WorkerSettings()
        self._worker = Worker(folder / "logs", self._settings)

    def __enter__(self) -> EngineRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.close()

    @property
    def wanted(self) -> tuple[str, ...]:
        """The outputs that are compared."""
        return self._names.wanted

    @cached_property
    def exact(self) -> Outputs:
        """The engine's outputs under the model's names, in the types that the engine gives."""
        return self._found[1]

    @cached_property
    def _found(self) -> tuple[Kind, Outputs]:
        """Whose engine it is, and its outputs."""
        into = self._folder / "exact.npz"
        failures = []
        for kind in self._kinds:
            job = EngineOutputsJob(self._path, self._model.samples_path, into, kind, self._names)
            count = self._call(job)
            if not isinstance(count, Failure):
                return kind, read_outputs(into)
            failures.append(count)
        raise self.error(failures[0])

    def repeated(self, times: int, threads: int) -> tuple[float, Outputs | None]:
        """The largest relative difference of repeated runs from isolated ones, and the outputs of that run."""
        kind, _ = self._found
        worst = self._folder / f"worst_{threads}.npz"
        isolated, samples = self._folder / "exact.npz", self._model.samples_path
        job = EngineRepeatJob(self._path, samples, isolated, times, threads, worst, kind, self._names)
        error = self._call(job)
        if isinstance(error, Failure):
            raise self.error(error)
        return error, read_outputs(worst) if error > 0 else None

    def build_and_run(
        self, model: Path, engine: Path, profile: Path, samples: Path, outputs: Path, marked: Sequence[str] = ()
    ) -> int | Failure:
        """Build an engine of the same kind and run it; the number of samples, or why there is no result."""
        kind, _ = self._found
        gpu = detect_gpus()[0]
        capability = gpu.compute_capability
        options = BuildOptions(
            kind,
            capabilities=(capability,) if kind == "tensorrt-rtx" and capability is not None else (),
            settings=TensorRtSettings(workspace_mb=default_workspace_mb(gpu.memory_gb if gpu.is_jetson else None)),
            timing_cache=self._folder / "timing.cache",
        )
        built = self._call(BuildJob(model, engine, options, (profile,), self._settings.build_timeout_s, gpu.is_jetson))
        if isinstance(built, Failure):
            return built
        every = (*self._names.outputs, *marked)
        names = replace(self._names, outputs=every, wanted=every)
        return self._call(EngineOutputsJob(engine, samples, outputs, kind, names))

    def _call(self, job: Job[T]) -> T | Failure:
        limits = self._settings
        return self._worker.call(job, limits.build_timeout_s + limits.measure_timeout_s)

    def error(self, failure: Failure, what: str = "") -> BaselineError:
        """The error for an engine that gave no result; ``what`` names another engine than this one."""
        error = did_not_run(f"{what or self.name} does not run on these data", replace(failure, log_path=None))
        if failure.kind is not FailureKind.ERROR or what:
            return error
        return BaselineError(
            error.message,
            "an engine runs with the version of TensorRT and on the kind of GPU that it was built with, and takes the"
            " shapes that it was built for (--batch N: rows of a sample)",
        )
