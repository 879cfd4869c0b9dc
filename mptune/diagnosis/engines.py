"""An engine file on a model's samples; where an all-FP32 engine is wrong, the marked output that cures it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from mptune.data.archive import read_outputs, save_samples
from mptune.diagnosis.comparison import finding
from mptune.diagnosis.runner import InWorker, Outputs, Runner
from mptune.engines.backends.tensorrt import why_not_on
from mptune.engines.base import Failure, FailureKind
from mptune.engines.jobs.outputs import value_error
from mptune.engines.tensorrt.builder import BuildOptions
from mptune.engines.tensorrt.jobs import BuildJob, EngineOutputsJob, EngineRepeatJob, ModelNames
from mptune.engines.tensorrt.library import Kind, install_line, is_installed
from mptune.engines.worker.parent import Worker
from mptune.errors import BaselineError, ModelError, TargetError
from mptune.finding import Finding, OutputColumns, Where
from mptune.findings.wording import listed
from mptune.graph.loading.model import Model
from mptune.graph.writing.observe import write_with_outputs
from mptune.settings import TensorRtSettings
from mptune.targets.memory import default_workspace_mb
from mptune.targets.target import detect_gpus
from mptune.tuning.failures import did_not_run
from mptune.tuning.steps.baseline import ENGINE_CODE, FP32_LIMIT

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


MOST_BUILDS = 48
"""So many engines are built; bisecting 2,000 values takes about 11, and the rest tries what is left one by one."""

_MOST_NAMES = 4


def fault_finding(left: Runner, engine: EngineRunner, folder: Path) -> Finding | None:
    """``engine-differs``, where the all-FP32 engine of a model is wrong; None where it is right.

    Names the first region that is wrong, and the value whose marking as an output cures it, where there is one.
    """
    folder.mkdir()
    bench = _Bench(left, engine)
    whole = bench.outputs((), left.samples_path)
    if isinstance(whole, Failure):
        raise engine.error(whole, "the all-FP32 engine that is built here")
    errors = [bench.errors(outputs, exact) for outputs, exact in zip(whole, left.exact, strict=True)]
    if not bench.judged:
        return None
    sample = max(range(len(errors)), key=lambda k: max(errors[k].values()))
    wrong = {name: error for name, error in errors[sample].items() if not error <= FP32_LIMIT}
    if not wrong:
        return None
    worst = max(wrong, key=lambda name: wrong[name])
    one_sample = folder / "sample.npz"
    save_samples(one_sample, [left.samples[sample]])
    search = _Search(left.model, worst)
    cure, region, cured = "", search.region, math.inf
    while not cure and bench.builds < MOST_BUILDS and (value := search.next()) is not None:
        errors_marked = bench.marked(value, one_sample)
        if errors_marked is None:
            search.tried.add(value)
        elif errors_marked[1] <= FP32_LIMIT:
            cure, region, cured = value, search.around(value), errors_marked[1]
        else:
            search.learn(value, is_wrong=not errors_marked[0] <= FP32_LIMIT)
            region = search.region
    evidence: dict[str, int | float | str] = {
        "relative_l2": wrong[worst],
        "limit": FP32_LIMIT,
        "output": worst,
        "engines_built": bench.builds,
    }
    if cure:
        evidence |= {"marked": cure, "relative_l2_marked": cured}
    groups = tuple(dict.fromkeys(left.grouped.owners[node] for node in region if node in left.grouped.owners))
    return finding(
        ENGINE_CODE,
        "fusion" if cure else "no cure",
        tuple(OutputColumns(name) for name in wrong),
        evidence,
        Where(region, groups, (cure,) if cure else (), samples=(sample,)),
        region=listed([repr(node) for node in region], _MOST_NAMES),
    )


def _lineage(model: Model) -> list[int]:
    """For each node the nodes that it is computed from, itself among them, as bits."""
    of_node: list[int] = []
    for index, node in enumerate(model.nodes):
        bits = 1 << index
        for name in (*node.inputs, *node.captures):
            if name in model.producer:
                bits |= of_node[model.producer[name]]
        of_node.append(bits)
    return of_node


@dataclass
class _Search:
    """Narrows down the nodes among which the first fault lies.

    A value that is wrong is computed from it; one that is right, while the outputs stay wrong, is not.
    """

    model: Model
    output: str

    def __post_init__(self) -> None:
        self._lineage = _lineage(self.model)
        self.suspects = self._lineage[self.model.producer[self.output]]
        self.tried = {output.name for output in self.model.outputs}

    @property
    def region(self) -> tuple[str, ...]:
        return self._names(self.suspects)

    def next(self) -> str | None:
        """The value that halves the suspects best; then those that suspects read and write; None where none is left."""
        return max(self._values, key=self._worth, default=None)

    def learn(self, value: str, *, is_wrong: bool) -> None:
        self.tried.add(value)
        before = self._lineage[self.model.producer[value]]
        left = self.suspects & (before if is_wrong else ~before)
        self.suspects = left or self.suspects  # A fault that moves with what is marked leaves what is known.

    def around(self, value: str) -> tuple[str, ...]:
        """The suspects that write and read a value."""
        near = 1 << self.model.producer[value]
        for index in self.model.consumers.get(value, ()):
            near |= 1 << index
        return self._names(near & self.suspects) or self._names(near)

    @property
    def _values(self) -> list[str]:
        names: dict[str, None] = {}
        for index, node in enumerate(self.model.nodes):
            if self.suspects >> index & 1:
                names |= dict.fromkeys((*node.outputs, *node.inputs))
        return [name for name in names if name not in self.tried and self._can_be_marked(name)]

    def _can_be_marked(self, name: str) -> bool:
        if not name or name not in self.model.producer or name in self.model.initializers:
            return False
        return self.model.info(name).is_float32

    def _worth(self, value: str) -> int:
        before = self._lineage[self.model.producer[value]] & self.suspects
        count = before.bit_count()
        return min(count, self.suspects.bit_count() - count)

    def _names(self, bits: int) -> tuple[str, ...]:
        return tuple(node.name for index, node in enumerate(self.model.nodes) if bits >> index & 1)


class _Bench:
    """Builds and runs all-FP32 engines of a model with values marked as outputs."""

    def __init__(self, left: Runner, engine: EngineRunner) -> None:
        self._left, self._engine = left, engine
        self.builds = 0

    def outputs(self, marked: Sequence[str], samples: Path) -> Outputs | Failure:
        """Outputs and marked values of the engine with these marks."""
        self.builds += 1
        return self._engine.built(self._write(marked), samples, marked)

    def marked(self, value: str, sample: Path) -> tuple[float, float] | None:
        """Errors of a marked value, and of the worst output, on one sample; None where that engine has none."""
        outputs = self.outputs((value,), sample)
        if isinstance(outputs, Failure):
            return None
        (exact,) = self._left.run("marked", self._write((value,)), sample)
        return value_error(outputs[0][value], exact[value]), max(self.errors(outputs[0], exact).values())

    def errors(self, outputs: Mapping[str, np.ndarray], exact: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Relative L2 of each output that is judged."""
        return {name: value_error(outputs[name], exact[name]) for name in self.judged}

    @cached_property
    def judged(self) -> tuple[str, ...]:
        """The outputs that are compared and are floats, but for those whose rows come and go with a threshold."""
        model, dependent = self._left.model, {output.name for output in self._left.workload.dependent_outputs}
        names = (name for name in self._engine.wanted if name not in dependent and name in model.producer)
        return tuple(name for name in names if model.info(name).is_float32)

    def _write(self, marked: Sequence[str]) -> Path:
        path = self._left.scratch("marked")
        outputs = (output.name for output in self._left.model.outputs)
        write_with_outputs(self._left.model, self._left.workload.bank, path, (*outputs, *marked))
        return path
