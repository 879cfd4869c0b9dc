"""An engine file on a model's samples."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from mptune.data.archive import read_samples
from mptune.diagnosis.runner import Outputs, Runner
from mptune.engines.base import Failure, FailureKind
from mptune.engines.failures import did_not_run
from mptune.engines.outputs import OutputsJob, RepeatJob
from mptune.engines.tensorrt.backend import why_not_on
from mptune.engines.tensorrt.library import Kind, install_line, is_installed
from mptune.engines.tensorrt.session import EngineOptions, TensorRtEngine
from mptune.errors import BaselineError, ModelError, TargetError
from mptune.processes.parent import Worker
from mptune.targets.detect import detect_gpus

_SUFFIXES = frozenset({".engine", ".plan", ".trt"})
_KINDS: tuple[Kind, ...] = ("tensorrt", "tensorrt-rtx")
_RECORD = "record its outputs where it runs, and give them: --outputs FILE"


def is_engine(path: Path) -> bool:
    """Whether a file is an engine, by its suffix."""
    return path.suffix.lower() in _SUFFIXES


def engine_kinds(path: Path) -> tuple[Kind, ...]:
    """What can run an engine file here: TensorRT, TensorRT-RTX, or either, where no suffix tells them apart."""
    if not path.is_file():
        raise ModelError(f"{path}: there is no such file", "give the path of an engine or of an ONNX model")
    gpus = detect_gpus()
    if not gpus:
        raise TargetError(f"{path} is an engine, and no NVIDIA GPU is here to run it", _RECORD)
    reasons = {kind: why_not_on(kind, gpus[0]) if is_installed(kind) else f"{kind} is not installed" for kind in _KINDS}
    kinds = tuple(kind for kind in _KINDS if reasons[kind] is None)
    if not kinds:
        shown = "; ".join(f"{kind}: {reason}" for kind, reason in reasons.items())
        install = install_line(next((kind for kind in _KINDS if is_installed(kind)), "tensorrt"), gpus)
        text = f"{path} is an engine, and cannot be run on {gpus[0].name} ({shown})"
        raise TargetError(text, f"{install}; or {_RECORD}")
    return kinds


class EngineRunner:
    """One engine file on a model's samples. Nothing runs before it is asked for; results are kept.

    Methods raise BaselineError where the engine cannot be loaded, or does not run on the samples.
    """

    def __init__(
        self, path: Path, kinds: Sequence[Kind], model: Runner, folder: Path, ignore: Collection[str] = ()
    ) -> None:
        """Take what may run the engine, the ONNX model's runner, and a folder that does not exist yet."""
        folder.mkdir()
        self.worker, self.name = Worker(folder / "logs"), str(path)
        self._path, self._kinds, self._samples, self._folder = path, tuple(kinds), model.samples_path, folder
        self._wanted = tuple(output.name for output in model.model.outputs if output.name not in ignore)

    @property
    def exact(self) -> Outputs:
        """The engine's outputs under the model's names, in the types that the engine gives."""
        return self._run[1]

    @cached_property
    def _run(self) -> tuple[TensorRtEngine, Outputs]:
        """The engine as what runs it, and its outputs."""
        into, failures = self._folder / "exact.npz", list[Failure]()
        for kind in self._kinds:
            engine = TensorRtEngine(self._path, EngineOptions(kind))
            count = self.worker.call(OutputsJob(engine, self._samples, into, self._wanted))
            if not isinstance(count, Failure):
                return engine, read_samples(into)
            failures.append(count)
        raise self._error(failures[0])

    def repeated(self, times: int, threads: int) -> tuple[float, Outputs | None]:
        """The largest relative difference of repeated runs from isolated ones, and the outputs of that run."""
        engine, _ = self._run
        isolated, worst = self._folder / "exact.npz", self._folder / f"worst_{threads}.npz"
        error = self.worker.call(RepeatJob(engine, self._samples, isolated, times, threads, worst, self._wanted))
        if isinstance(error, Failure):
            raise self._error(error)
        return error, read_samples(worst) if error > 0 else None

    def _error(self, failure: Failure) -> BaselineError:
        error = did_not_run(f"{self.name} does not run on these data", replace(failure, log_path=None))
        hint = (
            "an engine runs with the version of TensorRT and on the kind of GPU that it was built with, and takes the"
        )
        hint += " the shapes that it was built for (--batch N: rows of a sample)"
        return BaselineError(error.message, hint) if failure.kind is FailureKind.ERROR else error
