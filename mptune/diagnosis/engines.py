"""An engine file on a model's samples; where an all-FP32 engine is wrong, the marked output that cures it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from mptune.data.archive import read_outputs, save_samples
from mptune.diagnosis.runner import InWorker, Outputs, Runner
from mptune.engines.backends.tensorrt import why_not_on
from mptune.engines.base import Failure, FailureKind
from mptune.engines.jobs.outputs import value_error
from mptune.engines.tensorrt.builder import BuildOptions
from mptune.engines.tensorrt.jobs import (
    BuildJob,
    EngineLayersJob,
    EngineOutputsJob,
    EngineRepeatJob,
    Layer,
    ModelNames,
    layers_of,
)
from mptune.engines.tensorrt.library import Kind, install_line, is_installed
from mptune.engines.toolchains.marking import judged_outputs
from mptune.errors import BaselineError, ModelError, TargetError
from mptune.finding import Finding
from mptune.graph.writing.observe import write_with_outputs
from mptune.processes.parent import Worker
from mptune.settings import TensorRtSettings
from mptune.targets.memory import default_workspace_mb
from mptune.targets.target import detect_gpus
from mptune.tuning.failures import did_not_run
from mptune.tuning.steps.baseline import FP32_LIMIT
from mptune.tuning.steps.fusion import Deviation, Deviations, find_cure

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
    reasons = {kind: why_not_on(kind, gpus[0]) if is_installed(kind) else f"{kind} is not installed" for kind in _KINDS}
    kinds = tuple(kind for kind in _KINDS if reasons[kind] is None)
    if kinds:
        return kinds
    shown = "; ".join(f"{kind}: {reason}" for kind, reason in reasons.items())
    install = install_line(next((kind for kind in _KINDS if is_installed(kind)), "tensorrt"), gpus)
    raise TargetError(f"{path} is an engine, and cannot be run on {gpus[0].name} ({shown})", f"{install}; or {_RECORD}")


class EngineRunner(InWorker):
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
    ) -> None:
        """Take what may run the engine, the ONNX model's runner, and a folder that does not exist yet."""
        folder.mkdir()
        super().__init__(Worker(folder / "logs"))
        self.name = str(path)
        self._path, self._kinds, self._model, self._folder = path, tuple(kinds), model, folder
        outputs = tuple(output.name for output in model.model.outputs)
        wanted = tuple(output for output in outputs if output not in ignore)
        self._names = ModelNames(tuple(i.name for i in model.model.inputs), outputs, wanted)

    @property
    def wanted(self) -> tuple[str, ...]:
        """The outputs that are compared."""
        return self._names.wanted

    @cached_property
    def exact(self) -> Outputs:
        """The engine's outputs under the model's names, in the types that the engine gives."""
        return self._run[1]

    @cached_property
    def _run(self) -> tuple[Kind, Outputs]:
        """Whose engine it is, and its outputs."""
        into = self._folder / "exact.npz"
        failures = []
        for kind in self._kinds:
            job = EngineOutputsJob(self._path, self._model.samples_path, into, kind, self._names)
            count = self.answer(job)
            if not isinstance(count, Failure):
                return kind, read_outputs(into)
            failures.append(count)
        raise self.error(failures[0])

    def repeated(self, times: int, threads: int) -> tuple[float, Outputs | None]:
        """The largest relative difference of repeated runs from isolated ones, and the outputs of that run."""
        kind, _ = self._run
        worst = self._folder / f"worst_{threads}.npz"
        isolated, samples = self._folder / "exact.npz", self._model.samples_path
        job = EngineRepeatJob(self._path, samples, isolated, times, threads, worst, kind, self._names)
        error = self.answer(job)
        if isinstance(error, Failure):
            raise self.error(error)
        return error, read_outputs(worst) if error > 0 else None

    def built(self, model: Path, samples: Path, marked: Sequence[str] = ()) -> Outputs | Failure:
        """All outputs and marked values of an engine of the same kind, built here of a model; or why there is none."""
        kind, _ = self._run
        gpu = detect_gpus()[0]
        capability = gpu.compute_capability
        options = BuildOptions(
            kind,
            capabilities=(capability,) if kind == "tensorrt-rtx" and capability is not None else (),
            settings=TensorRtSettings(workspace_mb=default_workspace_mb(gpu.memory_gb if gpu.is_jetson else None)),
            timing_cache=self._folder / "timing.cache",
        )
        engine, into = self._folder / "built.engine", self._folder / "built.npz"
        profile, timeout_s = self._model.samples_path, self._limits.build_timeout_s
        built = self.answer(BuildJob(model, engine, options, (profile,), timeout_s, gpu.is_jetson))
        if isinstance(built, Failure):
            return built
        every = (*self._names.outputs, *marked)
        names = replace(self._names, outputs=every, wanted=every)
        count = self.answer(EngineOutputsJob(engine, samples, into, kind, names))
        return count if isinstance(count, Failure) else read_outputs(into)

    def built_layers(self) -> tuple[Layer, ...]:
        """The layers of the engine that was built last."""
        kind, _ = self._run
        layers = self.answer(EngineLayersJob(self._folder / "built.engine", kind))
        return () if isinstance(layers, Failure) else layers

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


def fault_finding(left: Runner, engine: EngineRunner, folder: Path) -> Finding | None:
    """What ``Cure.finding`` says, where the all-FP32 engine of a model is wrong; None where it is right."""
    folder.mkdir()
    bench = _Bench(left, engine)
    whole = bench.outputs((), left.samples_path)
    if isinstance(whole, Failure):
        raise engine.error(whole, "the all-FP32 engine that is built here")
    errors = [bench.errors(outputs, exact) for outputs, exact in zip(whole, left.exact, strict=True)]
    if not bench.judged:
        return None
    sample = max(range(len(errors)), key=lambda k: max(errors[k].values()))
    one_sample = folder / "sample.npz"
    save_samples(one_sample, [left.samples[sample]])
    layers = engine.built_layers()
    unmarked = {name: Deviation(error, FP32_LIMIT) for name, error in errors[sample].items()}
    cure = find_cure(left.grouped, unmarked, lambda values: bench.marked(values, one_sample))
    if cure is None:
        return None
    return cure.finding("compare", "the all-FP32 engine that is built here", layers_of(layers, cure.region), (sample,))


class _Bench:
    """Builds and runs all-FP32 engines of a model with values marked as outputs."""

    def __init__(self, left: Runner, engine: EngineRunner) -> None:
        self._left, self._engine = left, engine
        self.judged = tuple(name for name in judged_outputs(left.workload, ()) if name in engine.wanted)

    def outputs(self, marked: Sequence[str], samples: Path) -> Outputs | Failure:
        """Outputs and marked values of the engine with these marks."""
        return self._engine.built(self._write(marked), samples, marked)

    def marked(self, values: Sequence[str], sample: Path) -> Deviations | Failure:
        """Deviations of the outputs and of marked values on one sample."""
        outputs = self.outputs(values, sample)
        if isinstance(outputs, Failure):
            return outputs
        (exact,) = self._left.run("marked", self._write(values), sample)
        errors = self.errors(outputs[0], exact) | {name: value_error(outputs[0][name], exact[name]) for name in values}
        return {name: Deviation(error, FP32_LIMIT) for name, error in errors.items()}

    def errors(self, outputs: Mapping[str, np.ndarray], exact: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Relative L2 of each output that is judged."""
        return {name: value_error(outputs[name], exact[name]) for name in self.judged}

    def _write(self, marked: Sequence[str]) -> Path:
        path = self._left.scratch("marked")
        outputs = (output.name for output in self._left.model.outputs)
        write_with_outputs(self._left.model, self._left.workload.bank, path, (*outputs, *marked))
        return path
