"""The untouched model in FP32: reference outputs and observed ranges."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property, partial

from mptune.data.archive import read_sample_shapes
from mptune.data.metrics.row_sets import row_axes
from mptune.data.metrics.table import number_of
from mptune.engines.base import Failure, ReferenceReport, SampleSet
from mptune.engines.context import RunContext
from mptune.engines.environment import usable_cores
from mptune.engines.ort.cuda_session import NO_TF32
from mptune.engines.ort.fusions import FoldJob
from mptune.engines.ort.session import Provider, SideBySide
from mptune.engines.toolchains.blame import locate
from mptune.engines.toolchains.emulation import run_bytes
from mptune.engines.toolchains.jobs import ObserveJob, ReferenceJob
from mptune.graph.folded import FoldedValues, folded_model, is_worthwhile, read_folded, write_without_weights
from mptune.graph.hazards.hazard import TensorRange
from mptune.graph.loading.shapes import StaticShapes, static_shapes
from mptune.graph.writing.variants import ObservedPart, observed_parts, write_with_outputs
from mptune.processes.parent import Worker
from mptune.settings import SearchSettings

_OBSERVED_BYTES = 1 << 33
"""Values that are read to observe ranges, bytes about: those of a GPU come to the host. A SegFormer at 512 x 512 has
1.6 GB a sample."""
LEAST_OBSERVED = 4
"""Fewest samples that ranges are observed on, where there are as many, whatever their values take."""
_OBSERVERS_BYTES = 2 << 30  # of weights, in the processes that observe ranges
MOST_BESIDE = 7
"""Processes beside the first, at most. On an H200 with 16 cores eight took 6.0 s to open a ConvNeXt each, one 4.3."""
_CORES_BESIDE, _MOST_OBSERVERS = 4, 4  # fewest cores that have room for what runs beside the first worker


def has_room_beside(provider: Provider) -> bool:
    """Whether another process may work, or start, beside the first one: on a GPU; on a CPU both take all cores."""
    return provider == "cuda" and usable_cores() >= _CORES_BESIDE


class Workers:
    """The worker processes of a run: one that builds, measures and emulates, some that observe ranges beside it, one
    whose environment allows TF32, and some in which plans are opened ahead. A process starts at its first job.
    """

    def __init__(self, settings: SearchSettings) -> None:
        environment = {} if settings.tf32 else NO_TF32
        cores = usable_cores()
        counts = 1, min(_MOST_OBSERVERS, max(1, cores // _CORES_BESIDE)), min(MOST_BESIDE, cores // 2)
        (self.main,), self.observers, self.beside = (
            tuple(Worker(None, settings.worker, environment) for _ in range(count)) for count in counts
        )
        self.tf32 = Worker(None, settings.worker)

    def serve(self, context: RunContext) -> None:
        """Log to the run's folder, and answer what jobs ask of a metric that is a function of the calling program."""
        for worker in self._every:
            worker.logs_dir = context.logs_dir
        function = context.settings.metric_function
        if function is not None:
            self.main.on_question = self.tf32.on_question = partial(number_of, context.settings.metric, function)

    def close(self) -> None:
        SideBySide(len(self._every)).run([worker.close for worker in self._every])  # a process takes a while to end

    @property
    def _every(self) -> tuple[Worker, ...]:
        return (*self.observers, self.tf32, *self.beside, self.main)


@dataclass(eq=False)
class ReferenceModel:
    """Reference outputs and observed ranges of one model. Nothing runs before it is asked for."""

    context: RunContext
    provider: Provider
    worker: Worker
    observers: Sequence[Worker] = ()  # observe ranges beside the first reference, where there is room for both
    _observing: Future[Mapping[str, TensorRange] | Failure] | None = field(default=None, init=False)
    _ranges: Mapping[str, TensorRange] | None = field(init=False)

    def __post_init__(self) -> None:
        self._ranges = self.context.ranges

    def reference(self, which: SampleSet) -> ReferenceReport | Failure:
        """See ``Toolchain``; with the search samples ranges are observed beside it, where there is room for both."""
        is_first = which == "search" and self._ranges is None and self._observing is None
        if is_first and self.observers and has_room_beside(self.provider):
            observers = self.observers[: max(1, _OBSERVERS_BYTES // max(1, self.context.bank.fp32_bytes))]
            pool = ThreadPoolExecutor(1, thread_name_prefix="mptune-observing")
            self._observing = pool.submit(self._observe, observers, self.folded_values)
            self._observing.add_done_callback(lambda done: list(map(Worker.close, observers)))  # to free the device
            pool.shutdown(wait=False)
        context, is_search = self.context, which == "search"
        job = ReferenceJob(
            context.model_path,
            context.samples(which),
            context.reference(which),
            self.provider,
            frozenset(output.name for output in context.row_outputs if not output.is_selection),
            context.settings.rollout,
            is_held_out=not is_search,
            run_bytes=run_bytes(context.model, context.samples(which), self.provider),
            row_axes=row_axes(context.row_outputs),
        )
        report = self.worker.call(job)
        if isinstance(report, Failure):
            return report
        return locate(context, self.provider, self.worker, report, which)

    def observe(self, stage: Callable[[str], object] | None = None) -> Mapping[str, TensorRange] | Failure:
        """See ``Toolchain``; observed once."""
        if self._ranges is None:
            ranges = None if self._observing is None else self._observing.result()
            self._observing = None
            self._end_observers()
            if ranges is None or isinstance(ranges, Failure):
                ranges = self._observe((self.worker,), self.folded_values, stage)
            if isinstance(ranges, Failure):
                return ranges
            self._ranges = ranges
        return self._ranges

    def stop_observing(self) -> None:
        """End what is observed beside other jobs; ``observe`` begins anew."""
        if self._observing is not None and not self._observing.done():
            self._end_observers()
            wait([self._observing])
            self._observing = None

    def _end_observers(self) -> None:
        SideBySide(len(self.observers)).run([observer.close for observer in self.observers])

    @cached_property
    def static(self) -> StaticShapes:
        """Shapes that follow from those of the largest sample, without a run."""
        every = read_sample_shapes(self.context.samples("search"))
        return static_shapes(self.context.model, given=max(every, key=lambda each: sum(map(math.prod, each.values()))))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Concrete shapes of the FP32 values; empty where they cannot be observed."""
        ranges = self.observe()
        return {} if isinstance(ranges, Failure) else {name: value.shape for name, value in ranges.items()}

    def _observe(
        self, workers: Sequence[Worker], folded: FoldedValues, stage: Callable[[str], object] | None = None
    ) -> Mapping[str, TensorRange] | Failure:
        """The ranges, in parts that workers share."""
        context, samples = self.context, self.context.samples("search")
        parts = observed_parts(context.model, self.static.shapes, len(workers))
        count = sum(len(part.rows) for part in parts)
        most = max(LEAST_OBSERVED, _OBSERVED_BYTES // max(1, sum(part.sample_bytes for part in parts)))
        one_run = run_bytes(context.model, samples, self.provider)
        model = folded_model(context.grouped, folded, {name for part in parts for name in part.outputs}).model
        ranges, free = dict[str, TensorRange](), list(workers)

        def observe(part: ObservedPart) -> Failure | None:
            if stage is not None and len(parts) > 1:
                stage(f"observing the ranges of values: {len(ranges)} of {count}")
            worker = free.pop()
            path = context.scratch(f"observe-{workers.index(worker)}")
            try:
                write_with_outputs(model, context.bank, path, part.outputs)
                answer = worker.call(ObserveJob(path, part, samples, self.provider, context.precisions, one_run, most))
                if isinstance(answer, Failure):
                    return answer
                ranges.update(answer)
            finally:
                path.unlink(missing_ok=True)
                free.append(worker)
            return None

        with ThreadPoolExecutor(len(workers), thread_name_prefix="mptune-observing") as pool:
            failure = next(filter(None, (map if len(workers) == 1 else pool.map)(observe, parts)), None)
        return {name: ranges[name] for part in parts for name in part.rows} if failure is None else failure

    @cached_property
    def folded_values(self) -> FoldedValues:
        """What no session needs to fold anew; nothing where that would save little, or where it does not work."""
        context, model = self.context, self.context.model
        if not is_worthwhile(model):
            return {}
        paths = context.scratch("unfolded"), context.scratch("folded")
        try:
            answer = self.worker.call(FoldJob(write_without_weights(context.grouped, paths[0]), paths[1]))
            return {} if isinstance(answer, Failure) else read_folded(paths[1], model)
        finally:
            for path in paths:
                path.unlink(missing_ok=True)
