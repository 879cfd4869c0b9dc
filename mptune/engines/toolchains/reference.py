"""The untouched model, run by ONNX Runtime in FP32: reference outputs, and observed ranges, ahead where that pays."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Mapping

from mptune.data.archive import read_sample_shapes
from mptune.data.metrics.kept_parts import PARTS_JSON, parts_path
from mptune.data.rollout import Rollout
from mptune.engines.base import Failure, ReferenceReport, SampleSet
from mptune.engines.jobs.ranges import ObservedRanges, TensorRange
from mptune.engines.jobs.reference import ObserveJob, ReferenceJob
from mptune.engines.ort.folding import FoldJob
from mptune.engines.ort.session import Provider
from mptune.engines.toolchains.emulation import Call
from mptune.engines.toolchains.locating import Locator
from mptune.engines.toolchains.run_memory import run_bytes
from mptune.engines.worker.beside import Beside
from mptune.engines.worker.parent import Worker
from mptune.engines.worker.process import end_spares
from mptune.engines.workload import Workload
from mptune.graph.folded import FoldedValues, is_worthwhile, write_without_weights
from mptune.graph.loading.shared_units import shared_units
from mptune.meanwhile import meanwhile


class ReferenceModel:
    """The untouched model, run by ONNX Runtime in FP32: reference outputs and observed ranges."""

    def __init__(
        self,
        workload: Workload,
        provider: Provider,
        call: Call,
        rollout: Rollout | None = None,
        beside: Callable[[], Worker] | None = None,
        timeout_s: float = math.inf,
    ) -> None:
        """Nothing runs before it is asked for.

        Args:
            workload: the model and the run's paths.
            provider: of ONNX Runtime.
            call: runs a job in the worker.
            rollout: outputs that are fed back; None where there are none.
            beside: makes another worker; None observes nothing ahead.
            timeout_s: of a job in it.
        """
        self._beside = beside
        self._timeout_s = timeout_s
        self._ahead: Beside[Mapping[str, TensorRange] | Failure] | None = None
        self._folding = threading.Lock()
        self._folded: FoldedValues | None = None
        self._workload = workload
        self._rollout = rollout
        self._provider = provider
        self._call = call
        self._ranges: Mapping[str, TensorRange] | None = None

    def reference(self, which: SampleSet) -> ReferenceReport | Failure:
        """See ``Toolchain``."""
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
            seen = None if self._ahead is None else self._ahead.result()
            if seen is None or isinstance(seen, Failure):
                seen = self._observe_in(self._call)
            if isinstance(seen, Failure):
                return seen
            self._ranges = seen
            end_spares()  # what follows is timed
        return self._ranges

    def observe_ahead(self) -> None:
        """See ``Toolchain``."""
        if self._beside is not None and self._ranges is None and self._ahead is None:
            self._ahead = Beside(self._beside(), self._observe_beside)

    def finish_ahead(self) -> None:
        """Wait until the process that has observed ahead is gone; one whose answer nobody has asked for goes on."""
        if self._ahead is not None and self._ranges is not None:
            self._ahead.finish()
            self._ahead = None

    def stop_ahead(self) -> bool:
        """End what is observed ahead; whether there was anything."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.stop()
        return ahead is not None

    def _observe_beside(self, worker: Worker) -> Mapping[str, TensorRange] | Failure:
        return self._observe_in(lambda job: worker.call(job, self._timeout_s))

    def _observe_in(self, call: Call) -> Mapping[str, TensorRange] | Failure:
        """What the observing models show; see ``write_observing_model``."""
        seen = self._observed(call)
        if isinstance(seen, Failure):
            return seen
        by_element = self._observed(call, seen.doubtful) if seen.doubtful else ObservedRanges({})
        return by_element if isinstance(by_element, Failure) else seen.looked_at_again(by_element)

    def _observed(self, call: Call, by_element: Collection[str] | None = None) -> ObservedRanges | Failure:
        """What one observing model shows."""
        from mptune.graph.writing.observe import write_observing_model

        model, workspace, precisions = self._workload.model, self._workload.workspace, self._workload.precisions
        path, written = workspace.scratch("observe"), meanwhile(lambda: self._workload.bank)
        try:
            folded, bank = self._fold_in(call), written.result()
            taps = write_observing_model(model, bank, path, by_element=by_element, folded=folded, precisions=precisions)
            run_bytes = self._run_bytes("search")
            return call(ObserveJob(path, taps, workspace.samples("search"), self._provider, run_bytes))
        finally:
            path.unlink(missing_ok=True)

    @property
    def folded_values(self) -> FoldedValues:
        """What no session needs to fold anew; nothing where that would save little, or where it does not work."""
        return self._fold_in(self._call)

    def _fold_in(self, call: Call) -> FoldedValues:
        with self._folding:
            folded = self._folded or self._fold(call)
            if folded is not None or call is self._call:  # what ran ahead may have been ended
                self._folded = folded or FoldedValues()
            return folded or FoldedValues()

    def _fold(self, call: Call) -> FoldedValues | None:
        """None where that does not work."""
        model, workspace = self._workload.model, self._workload.workspace
        if not is_worthwhile(model):
            return FoldedValues()
        paths = workspace.scratch("unfolded"), workspace.scratch("folded")
        try:
            answer = call(FoldJob(write_without_weights(model, paths[0]), paths[1]))
            return None if isinstance(answer, Failure) else FoldedValues.read(paths[1], model)
        finally:
            for path in paths:
                path.unlink(missing_ok=True)

    def _run_bytes(self, which: SampleSet) -> int | None:
        if self._provider != "cpu":
            return None
        return run_bytes(self._workload.model, self._workload.workspace.samples(which))
