"""Runs what a comparison needs: a model, its emulations in FP16 and TF32, repetitions; in a worker process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mptune.data.archive import read_samples, save_samples
from mptune.engines import base, failures
from mptune.engines.context import RunContext
from mptune.engines.ort import cuda_session, session
from mptune.engines.outputs import OutputsJob, RepeatJob
from mptune.engines.toolchains.reference import ReferenceModel
from mptune.errors import BaselineError
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.hazards import find, hazard
from mptune.graph.loading.model import Model
from mptune.graph.plan import PRECISIONS, REDUCED, Precision, PrecisionPlan
from mptune.graph.value_types import ValueTypes, unsupported
from mptune.graph.writing import emulate, rewrite, variants
from mptune.processes import child, parent
from mptune.settings import DataSettings, SearchSettings

_MOST_STEPPED = 1 << 21  # values of a sample, of a model that NumPy runs within seconds
T = TypeVar("T")
Outputs = tuple[Mapping[str, np.ndarray], ...]  # one dictionary per sample, arrays by output name


class Runner:
    """One model on one set of samples. Nothing runs before it is asked for; results are kept. Close ``worker`` after.

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
        self.model, self.name = model, name or str(model.path)
        self.grouped = GroupedModel(model, find_groups(model))
        folder.mkdir(exist_ok=True)
        settings = SearchSettings(data_settings=DataSettings(batch=batch), precisions=tuple(map(str, PRECISIONS)))
        self.context = RunContext.in_folder(self.grouped, folder, settings)
        self.worker = parent.Worker(self.context.logs_dir, environment=cuda_session.NO_TF32)
        self.samples, self.samples_path = samples, self.context.samples("search")
        save_samples(self.samples_path, samples)
        self._tell, self._stage = stage, ""
        self._kept: dict[str, Outputs] = {}
        self._stepped: dict[tuple[str, int], dict[str, np.ndarray]] = {}

    def begin(self, stage: str) -> None:
        """Say what is being done, once for what is done many times."""
        if stage != self._stage:
            self._stage = stage
            self._tell(stage)

    def call(self, job: child.Job[T]) -> T:
        """Run a job in the worker."""
        result = self.worker.call(job)
        if isinstance(result, base.Failure):
            raise failures.did_not_run(
                f"{self.name} does not run on these data", replace(result, log_path=None), self.model
            )
        return result

    def run(self, name: str, model: Path, samples: Path | None = None) -> Outputs:
        """Outputs of a model's file as it stands, on the samples of this run or others; ``name`` is of their file."""
        into = self.context.data_dir / f"{name}.npz"
        engine = cuda_session.OrtEngine(model, session.SessionOptions())
        self.call(OutputsJob(engine, samples or self.samples_path, into))
        return read_samples(into)

    def _once(self, name: str, stage: str, write: Callable[[], Path]) -> Outputs:
        if name not in self._kept:
            self.begin(stage)
            self._kept[name] = self.run(name, write())
        return self._kept[name]

    def _tried(self, name: str, stage: str, write: Callable[[], Path]) -> Outputs | None:
        with suppress(BaselineError):
            return self._once(name, stage, write)
        return None

    @cached_property
    def widened(self) -> Path:
        """The model as the CPU is to run it; its own FP16 values are rounded as they stand."""
        return variants.write_widened(self.model, self.context.bank, self.context.scratch("widened"))

    @property
    def exact(self) -> Outputs:
        """Outputs in true FP32."""
        return self._once("exact", f"running {self.name}", lambda: self.widened)

    @property
    def as_given(self) -> Outputs | None:
        """Outputs of the file itself, in a session with all optimisations; None where a CPU has not all its kernels."""
        return self._tried("as-given", f"running {self.name} as it is", lambda: self.model.path)

    @cached_property
    def emulator(self) -> emulate.Emulator:
        """Writes the model with the roundings of a plan."""
        return emulate.Emulator(self.grouped, self.context.bank)

    def emulated(self, plan: PrecisionPlan) -> Outputs:
        """Outputs with the roundings of a plan."""
        stage = f"emulating {' and '.join(p.name for p in REDUCED if plan.groups_in(p)) or 'FP32'}"
        path = self.context.scratch(plan.fingerprint)
        return self._once(plan.fingerprint, stage, lambda: self.emulator.write(plan, path))

    def tf32(self, rounding: variants.Rounding) -> Outputs | None:
        """Outputs with the roundings of TF32; None where TF32 changes nothing, or the emulation does not run."""
        if not variants.uses_products(self.model):
            return None
        model, bank, path = self.model, self.context.bank, self.context.scratch(rounding)
        return self._tried(rounding, "emulating TF32", lambda: variants.write_tf32(model, bank, path, rounding))

    def on(self, name: str, feeds: Sequence[Mapping[str, np.ndarray]]) -> Outputs:
        """Outputs in true FP32 on other samples; ``name`` is theirs alone."""
        self.begin("trying other inputs")
        samples = self.context.data_dir / f"{name}-samples.npz"
        save_samples(samples, feeds)
        return self.run(f"{name}-outputs", self.widened, samples)

    def changed(self, constants: Mapping[str, np.ndarray], attributes: Sequence[tuple[str, str, Any]]) -> Outputs:
        """Outputs in true FP32 with other constants and attributes of the main graph (``write_widened``)."""
        self.begin("trying what the two models differ in")
        path, bank = self.context.scratch("changed"), self.context.bank
        return self.run("changed", variants.write_widened(self.model, bank, path, None, constants, attributes))

    def step_by_step(self, plan: PrecisionPlan, number: int) -> dict[str, np.ndarray]:
        """Outputs of a sample, sums rounded term by term in NumPy; none of a large model, or one that it cannot run."""
        from onnx.reference import ReferenceEvaluator  # slow to import

        key = (plan.fingerprint, number)
        if key not in self._stepped:
            self._stepped[key] = {}
            with suppress(Exception), np.errstate(all="ignore"):  # whatever an operator raises that has no FP16 there
                if sum(map(math.prod, self.observed.shapes.values())) <= _MOST_STEPPED:
                    path = rewrite.Rewriter(self.grouped).export(plan, self.context.scratch("typed"))
                    session = ReferenceEvaluator(str(path))
                    values: Any = session.run(None, dict(self.samples[number]))
                    self._stepped[key] = dict(zip(session.output_names, values, strict=True))
        return self._stepped[key]

    def repeated(self, times: int, threads: int) -> tuple[float, Outputs | None]:
        """The largest relative difference of repeated runs from isolated ones, and the outputs of that run."""
        self.begin(f"running {self.name} {times} times, threads: {threads}")
        isolated, worst = (self.context.data_dir / f"{name}.npz" for name in ("isolated", f"worst_{threads}"))
        save_samples(isolated, self.exact)
        engine = cuda_session.OrtEngine(self.widened, session.SessionOptions())
        error = self.call(RepeatJob(engine, self.samples_path, isolated, times, threads, worst))
        return error, read_samples(worst) if error > 0 else None

    @cached_property
    def observed(self) -> hazard.ObservedValues:
        """What the values were on the samples; empty where they cannot be observed."""
        self.begin("observing the ranges of values")
        ranges = ReferenceModel(self.context, "cpu", self.worker).observe()
        return hazard.ObservedValues() if isinstance(ranges, base.Failure) else hazard.ObservedValues(ranges)

    @cached_property
    def hazards(self) -> tuple[hazard.Hazard, ...]:
        """What speaks against FP16, in the model and on the samples."""
        return find.find_hazards(self.grouped, self.observed)

    def throughout(self, precision: Precision, hazards: Sequence[hazard.Hazard] | None = None) -> PrecisionPlan:
        """A reduced precision wherever the model can have it, as other tools convert: values may overflow.

        With ``hazards``, those on the samples, it is as a search on these plans it.
        """
        hazards = find.find_hazards(self.grouped) if hazards is None else hazards
        pinned = [group.id for group in self.grouped.groups if group.pinned is not None]
        pinned += find.pinned_by_hazards(hazards, precision, is_measured=True)
        fp32_groups = {*pinned, *unsupported(ValueTypes(self.grouped), precision)}
        return self.grouped.uniform(precision).replace(dict.fromkeys(fp32_groups, Precision.FP32))
