"""The untouched model, run by ONNX Runtime in FP32: reference outputs and observed ranges."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import cached_property

from mptune.data.archive import read_sample_shapes
from mptune.data.metrics.kept_parts import PARTS_JSON, parts_path
from mptune.data.rollout import Rollout
from mptune.engines.base import Failure, SampleSet
from mptune.engines.jobs.ranges import ObservedRanges, TensorRange
from mptune.engines.jobs.reference import ObserveJob, ReferenceJob
from mptune.engines.jobs.reference_report import ReferenceReport
from mptune.engines.ort.folding import FoldJob
from mptune.engines.ort.session import Provider
from mptune.engines.toolchains.emulation import Call
from mptune.engines.toolchains.locating import Locator
from mptune.engines.toolchains.probing import observes_beside
from mptune.engines.toolchains.run_memory import run_bytes
from mptune.engines.worker.beside import Beside
from mptune.engines.worker.parent import Worker
from mptune.engines.workload import Workload
from mptune.graph.folded import FoldedValues, is_worthwhile, write_without_weights
from mptune.graph.loading.shared_units import shared_units


class ReferenceModel:
    """Reference outputs and observed ranges of one model. Nothing runs before it is asked for."""

    def __init__(
        self,
        workload: Workload,
        provider: Provider,
        call: Call,
        rollout: Rollout | None = None,
        timeout_s: float = math.inf,
        other_worker: Callable[[], Worker] | None = None,
    ) -> None:
        """``call`` runs a job in the worker; ``other_worker`` makes another one, whose jobs have ``timeout_s``."""
        self._other_worker = other_worker
        self._timeout_s = timeout_s
        self._observing: Beside[Mapping[str, TensorRange] | Failure] | None = None
        self._workload = workload
        self._rollout = rollout
        self._provider = provider
        self._call = call
        self._ranges: Mapping[str, TensorRange] | None = None

    def reference(self, which: SampleSet) -> ReferenceReport | Failure:
        """See ``Toolchain``; with the search samples ranges are observed beside it, where there is room for both."""
        make_worker, timeout_s = self._other_worker, self._timeout_s
        is_first = which == "search" and self._ranges is None and self._observing is None
        if is_first and make_worker is not None and observes_beside(self._provider):
            folded = self.folded_values
            self._observing = Beside(
                make_worker(), lambda worker: self._observe(lambda job: worker.call(job, timeout_s), folded)
            )
        paths = self._workload.workspace
        dependent = frozenset(output.name for output in self._workload.dependent_outputs)
        files = paths.model_path, paths.samples(which), paths.reference(which)
        is_search = which == "search"
        # What is a part is decided by what the search saw, for held-out samples, too.
        searched = paths.reference("search").with_name(PARTS_JSON)
        job = ReferenceJob(
            *files,
            self._provider,
            dependent,
            unoptimised=is_search,
            rollout=self._rollout,
            parts=parts_path(paths.reference(which)),
            searched_parts=None if is_search else searched,
            units=shared_units(self._workload.model, read_sample_shapes(paths.samples(which))[0]) if is_search else {},
            run_bytes=self._run_bytes(which),
        )
        report = self._call(job)
        if isinstance(report, Failure):
            return report
        return Locator(self._workload, self._provider, self._call).locate(report, which)

    def observe(self) -> Mapping[str, TensorRange] | Failure:
        """See ``Toolchain``; observed once."""
        if self._ranges is None:
            ranges = None if self._observing is None else self._observing.result()
            self._observing = None
            if ranges is None or isinstance(ranges, Failure):
                ranges = self._observe(self._call, self.folded_values)
            if isinstance(ranges, Failure):
                return ranges
            self._ranges = ranges
        return self._ranges

    def stop_observing(self) -> bool:
        """End what is observed beside other jobs; whether there was anything."""
        observing, self._observing = self._observing, None
        if observing is not None:
            observing.stop()
        return observing is not None

    def _observe(self, call: Call, folded: FoldedValues) -> Mapping[str, TensorRange] | Failure:
        """What the observing models show; see ``write_observing_model``."""
        seen = self._observe_once(call, folded)
        if isinstance(seen, Failure):
            return seen
        by_element = self._observe_once(call, folded, seen.doubtful) if seen.doubtful else ObservedRanges({})
        return by_element if isinstance(by_element, Failure) else seen.looked_at_again(by_element)

    def _observe_once(
        self, call: Call, folded: FoldedValues, by_element: Collection[str] | None = None
    ) -> ObservedRanges | Failure:
        from mptune.graph.writing.observe import write_observing_model

        workload, workspace = self._workload, self._workload.workspace
        path = workspace.scratch("observe")
        try:
            taps = write_observing_model(
                workload.model,
                workload.bank,
                path,
                by_element=by_element,
                folded=folded,
                precisions=workload.precisions,
            )
            run_bytes = self._run_bytes("search")
            return call(ObserveJob(path, taps, workspace.samples("search"), self._provider, run_bytes))
        finally:
            path.unlink(missing_ok=True)

    @cached_property
    def folded_values(self) -> FoldedValues:
        """What no session needs to fold anew; nothing where that would save little, or where it does not work."""
        model, workspace = self._workload.model, self._workload.workspace
        if not is_worthwhile(model):
            return FoldedValues()
        paths = workspace.scratch("unfolded"), workspace.scratch("folded")
        try:
            answer = self._call(FoldJob(write_without_weights(model, paths[0]), paths[1]))
            return FoldedValues() if isinstance(answer, Failure) else FoldedValues.read(paths[1], model)
        finally:
            for path in paths:
                path.unlink(missing_ok=True)

    def _run_bytes(self, which: SampleSet) -> int | None:
        if self._provider != "cpu":
            return None
        return run_bytes(self._workload.model, self._workload.workspace.samples(which))
