"""Runs what a comparison needs: a model, its emulations in FP16 and TF32, repetitions; each in a worker process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mptune.data.archive import read_samples, save_samples
from mptune.data.metrics.accuracy import OutputError
from mptune.data.samples import Feed
from mptune.engines.base import Failure
from mptune.engines.context import RunContext
from mptune.engines.failures import did_not_run
from mptune.engines.jobs.outputs import OutputsJob, RepeatJob
from mptune.engines.ort.cuda_session import NO_TF32, OrtEngine
from mptune.engines.ort.session import SessionOptions
from mptune.engines.toolchains.emulation import Emulation
from mptune.engines.toolchains.reference import ReferenceModel
from mptune.errors import BaselineError
from mptune.graph.casting.value_types import ValueTypes, unsupported
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.hazards.find import find_hazards, pinned_by_hazards
from mptune.graph.hazards.hazard import Hazard
from mptune.graph.hazards.observed_values import ObservedValues
from mptune.graph.loading.model import Model
from mptune.graph.plan import PRECISIONS, REDUCED, Precision, PrecisionPlan
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.widened import Rounding, uses_products, write_changed, write_tf32, write_widened
from mptune.processes.child import Job
from mptune.processes.parent import Worker
from mptune.settings import DataSettings, SearchSettings

T = TypeVar("T")
R = TypeVar("R", bound="InWorker")

Outputs = tuple[Mapping[str, np.ndarray], ...]
"""One dictionary per sample, arrays by output name."""


class InWorker:
    """What runs in a worker process of its own, which ends with the block."""

    def __init__(self, worker: Worker) -> None:
        """Take the worker, whose process starts at the first call."""
        self.worker = worker

    def __enter__(self: R) -> R:
        return self

    def __exit__(self, *error: object) -> None:
        self.worker.close()


class Runner(InWorker):
    """One model on one set of samples. Nothing runs before it is asked for; results are kept.

    Methods raise BaselineError where ONNX Runtime does not run the model on the samples.
    """

    def __init__(
        self,
        model: Model,
        samples: Sequence[Mapping[str, np.ndarray]],
        folder: Path,
        batch: int,
        name: str = "",
        stage: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Take one feed per sample, a folder for temporary files, and who is told what is being done."""
        self._tell, self._stage = stage, ""
        self.model = model
        self.name = name or str(model.path)
        self.grouped = GroupedModel(model, find_groups(model))
        folder.mkdir(exist_ok=True)
        settings = SearchSettings(data_settings=DataSettings(batch=batch), precisions=tuple(map(str, PRECISIONS)))
        self.context = RunContext.in_folder(self.grouped, folder, settings)
        super().__init__(Worker(self.context.logs_dir, environment=NO_TF32))
        self.samples_path = self.context.samples("search")
        self.samples = samples
        save_samples(self.samples_path, samples)
        self._kept: dict[str, Outputs] = {}

    def begin(self, stage: str) -> None:
        """Say what is being done, once for what is done many times."""
        if stage != self._stage:
            self._stage = stage
            self._tell(stage)

    def call(self, job: Job[T]) -> T:
        """Run a job in the worker."""
        result = self.worker.call(job)
        if isinstance(result, Failure):
            raise did_not_run(f"{self.name} does not run on these data", replace(result, log_path=None), self.model)
        return result

    @property
    def exact(self) -> Outputs:
        """Outputs in true FP32; FP16 values of the model itself are rounded as they stand."""
        if "exact" not in self._kept:
            self.begin(f"running {self.name}")
        return self._outputs("exact", lambda: self.widened)

    @cached_property
    def widened(self) -> Path:
        """The model as the CPU is to run it."""
        return write_widened(self.model, self.context.bank, self.context.scratch("widened"))

    @cached_property
    def planned_fp16(self) -> PrecisionPlan:
        """All-FP16 as a search on these samples plans it: what limits and figures of FP16 are taken from."""
        return self._wherever_possible(Precision.FP16, self.hazards)

    def throughout(self, precision: Precision) -> PrecisionPlan:
        """A reduced precision wherever the model can have it, as other tools convert: values may overflow."""
        return self._wherever_possible(precision, self.constant_hazards)

    def _wherever_possible(self, precision: Precision, hazards: Sequence[Hazard]) -> PrecisionPlan:
        lacking = unsupported(ValueTypes(self.grouped), precision)
        pinned = [group.id for group in self.grouped.groups if group.pinned is not None]
        kept = {*pinned, *lacking, *pinned_by_hazards(hazards, precision, is_measured=True)}
        return self.grouped.uniform(precision).replace(dict.fromkeys(kept, Precision.FP32))

    @cached_property
    def constant_hazards(self) -> tuple[Hazard, ...]:
        """What speaks against FP16 in the model alone, such as constants beyond it."""
        return find_hazards(self.grouped)

    @cached_property
    def hazards(self) -> tuple[Hazard, ...]:
        """What speaks against FP16, in the model and on the samples."""
        return find_hazards(self.grouped, self.observed)

    def emulated(self, plan: PrecisionPlan) -> Outputs:
        """Outputs with the roundings of a plan."""
        if plan.fingerprint not in self._kept:
            self.begin(f"emulating {' and '.join(p.name for p in REDUCED if plan.groups_in(p)) or 'FP32'}")
        return self._outputs(plan.fingerprint, lambda: self.emulation(plan))

    def emulation(self, plan: PrecisionPlan) -> Path:
        """Write the model with the roundings of a plan."""
        return self._emulator.write(plan, self.scratch(plan.fingerprint))

    @cached_property
    def _emulator(self) -> Emulator:
        return Emulator(self.grouped, self.context.bank)

    def tf32(self, rounding: Rounding) -> Outputs | None:
        """Outputs with the roundings of TF32; None where TF32 changes nothing, or the emulation does not run."""
        if not uses_products(self.model):
            return None
        path = self.scratch(rounding)
        if rounding not in self._kept:
            self.begin("emulating TF32")
        try:
            return self._outputs(rounding, lambda: write_tf32(self.model, self.context.bank, path, rounding))
        except BaselineError:
            return None

    def on(self, name: str, feeds: Sequence[Feed]) -> Outputs:
        """Outputs in true FP32 on other samples; ``name`` is theirs alone."""
        self.begin("trying other inputs")
        samples = self.context.data_dir / f"{name}-samples.npz"
        save_samples(samples, feeds)
        return self.run(f"{name}-outputs", self.widened, samples)

    def run(self, name: str, model: Path, samples: Path | None = None) -> Outputs:
        """Outputs of a model's file as it stands, on the samples of this run or others; ``name`` is of their file."""
        into = self.context.data_dir / f"{name}.npz"
        self.call(OutputsJob(OrtEngine(model, SessionOptions()), samples or self.samples_path, into))
        return read_samples(into)

    def one_by_one(self, plans: Sequence[PrecisionPlan]) -> tuple[OutputError, ...]:
        """Emulated errors of plans against ``exact``; on the first sample where more would take long."""
        self.begin(f"emulating {len(plans)} groups, each alone")
        save_samples(self.context.reference("search"), self.exact)
        used = {str(precision) for plan in plans for precision in plan.precision.values()}
        context = self.context.with_settings(precisions=tuple(sorted(used)))  # a switch that nobody turns costs time
        emulation = Emulation(context, self.grouped, "cpu", self.worker, self.shapes)
        errors = emulation.errors(plans, part=emulation.samples.parts[0])
        if isinstance(errors, Failure):
            raise did_not_run(f"{self.name} cannot be emulated", replace(errors, log_path=None))
        return errors

    def changed(self, constants: Mapping[str, np.ndarray], attributes: Sequence[tuple[str, str, Any]]) -> Outputs:
        """Outputs in true FP32 with other constants and attributes of the main graph (``write_changed``)."""
        self.begin("trying what the two models differ in")
        write_changed(self.widened, self.scratch("changed"), constants, attributes)
        return self.run("changed", self.scratch("changed"))

    def repeated(self, times: int, threads: int) -> tuple[float, Outputs | None]:
        """The largest relative difference of repeated runs from isolated ones, and the outputs of that run."""
        self.begin(f"running {self.name} {times} times, threads: {threads}")
        isolated, worst = (self.context.data_dir / f"{name}.npz" for name in ("isolated", f"worst_{threads}"))
        save_samples(isolated, self.exact)
        engine = OrtEngine(self.widened, SessionOptions())
        error = self.call(RepeatJob(engine, self.samples_path, isolated, times, threads, worst))
        return error, read_samples(worst) if error > 0 else None

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Value -> its shape on the first sample; empty where the values cannot be observed."""
        return self.observed.shapes

    @cached_property
    def observed(self) -> ObservedValues:
        """What the values were on the samples; empty where they cannot be observed."""
        self.begin("observing the ranges of values")
        ranges = ReferenceModel(self.context, "cpu", self.worker).observe()
        return ObservedValues() if isinstance(ranges, Failure) else ObservedValues(ranges)

    def scratch(self, name: str) -> Path:
        """A path for a model beside the weight bank."""
        return self.context.scratch(f"compared-{name}")

    def _outputs(self, name: str, write: Callable[[], Path]) -> Outputs:
        if name not in self._kept:
            self._kept[name] = self.run(name, write())
        return self._kept[name]
