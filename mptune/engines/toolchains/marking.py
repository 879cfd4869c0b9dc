"""Engines with values inside the model as further outputs: what they compute, against the model in FP32."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Protocol, runtime_checkable

from mptune.data.archive import read_outputs, read_samples, save_samples
from mptune.engines.backends.backend import Bench
from mptune.engines.backends.tensorrt import TensorRtBuilder
from mptune.engines.base import Failure
from mptune.engines.jobs.layer_times import EngineLayers
from mptune.engines.jobs.outputs import OutputsJob, value_error
from mptune.engines.marks import Marks
from mptune.engines.tensorrt.jobs import EngineLayersJob, EngineOutputsJob, ModelNames, layers_of
from mptune.engines.toolchains.emulation import Emulation
from mptune.engines.workload import Workload
from mptune.files import scratch_name
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.plan import PrecisionPlan
from mptune.graph.writing.observe import write_with_outputs
from mptune.processes.child import Job


class Marking:
    """Builds engines of plans with values marked, and says what is marked in the engines of a run."""

    def __init__(self, bench: Bench, builder: TensorRtBuilder, emulation: Emulation) -> None:
        self._bench, self._builder, self._emulation = bench, builder, emulation
        self._space = bench.workload.workspace

    @property
    def grouped(self) -> GroupedModel:
        """The model whose values are marked."""
        return self._bench.workload.grouped

    @property
    def marks(self) -> Marks:
        """What the engines of the run have as further outputs."""
        return Marks.load(self._space.engines_dir)

    def keep(self, marks: Marks) -> None:
        """Build the engines of the run so from now on."""
        marks.save(self._space.engines_dir)

    @cached_property
    def judged(self) -> tuple[str, ...]:
        """See ``judged_outputs``."""
        return judged_outputs(self._bench.workload, self._bench.settings.ignore)

    def errors(
        self, plan: PrecisionPlan, values: Sequence[str], sample: int
    ) -> Mapping[str, tuple[float, float]] | Failure:
        """Relative L2, measured and emulated, of the outputs that are judged and of values that are marked for it.

        On one search sample, against the model in true FP32. The values are of the main graph and FP32 there; one that
        the plan has in BF16 is a failure, as NumPy has no BF16.
        """
        workload, rewriter = self._bench.workload, self._bench.workload.rewriter
        names = rewriter.computed_names(plan, values)
        engine = self._space.engines_dir / scratch_name("marked", ".engine")
        feed, ours, exact, emulated = (self._space.data_dir / scratch_name(f"marked-{k}", ".npz") for k in range(4))
        typed, model = (self._space.scratch(name) for name in ("marked-emulated", "marked"))
        outputs = tuple(output.name for output in workload.model.outputs)
        try:
            built = self._builder.build_marked(plan, values, engine)
            if isinstance(built, Failure):
                return built
            save_samples(feed, [read_samples(self._space.samples("search"))[sample]])
            every = (*outputs, *names.values())
            io = ModelNames(tuple(i.name for i in workload.model.inputs), every, (*self.judged, *names.values()))
            write_with_outputs(workload.model, workload.bank, model, (*outputs, *values))
            jobs: list[Job[int]] = [
                EngineOutputsJob(engine, feed, ours, self._builder.kind, io),
                OutputsJob(model, feed, exact),
            ]
            if plan.reduced_groups:
                jobs.append(OutputsJob(self._emulation.write_marked(plan, typed, values), feed, emulated))
            for job in jobs:
                answer = self._bench.call(job)
                if isinstance(answer, Failure):
                    return answer
            (seen,), (wanted,) = read_outputs(ours), read_outputs(exact)
            (rounded,) = read_outputs(emulated) if plan.reduced_groups else (wanted,)
            return {
                value: (
                    value_error(seen[names.get(value, value)], wanted[value]),
                    value_error(rounded[value], wanted[value]),
                )
                for value in (*self.judged, *values)
            }
        finally:
            for path in (engine, feed, ours, exact, emulated, typed, model):
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def engine_file(self, plan: PrecisionPlan) -> Path | None:
        """The engine of a plan as the run builds it; None where that fails."""
        built = self._builder.build(plan)
        return None if isinstance(built, Failure) else built.engine.path

    def layers_of(self, engine: Path, nodes: Collection[str]) -> tuple[str, ...]:
        """Names of the layers of an engine that compute any of these nodes; empty where it does not load."""
        layers = self._bench.call(EngineLayersJob(engine, self._builder.kind))
        return () if isinstance(layers, Failure) else layers_of(layers, nodes)

    def discard(self, engine: Path) -> None:
        """Delete an engine that another one takes the place of."""
        for path in (engine, EngineLayers.path(engine)):
            with suppress(OSError):
                path.unlink(missing_ok=True)


@runtime_checkable
class MarksValues(Protocol):
    """What a toolchain may have: engines with values inside the model as further outputs."""

    @property
    def marking(self) -> Marking | None:
        """What builds and runs such engines; None where the backend cannot."""
        ...


def judged_outputs(workload: Workload, ignored: Collection[str]) -> tuple[str, ...]:
    """The outputs that show whether an engine is right: computed floats, in rows that do not come and go."""
    model, left_out = workload.model, {*ignored, *(output.name for output in workload.dependent_outputs)}
    names = (output.name for output in model.outputs if output.name not in left_out)
    return tuple(name for name in names if name in model.producer and model.info(name).is_float32)
