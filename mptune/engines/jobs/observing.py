"""The job that runs the untouched model on data and reduces its values to ranges, and to facts about single nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mptune.engines.base import EngineError, Stage
from mptune.engines.environment import usable_cores
from mptune.engines.jobs.samples import Feed, cached_samples
from mptune.engines.ort.cuda_session import open_session
from mptune.engines.ort.session import OrtSession, Provider, SessionOptions
from mptune.engines.ort.side_by_side import SideBySide
from mptune.graph.hazards.observed_values import NodeFacts, TensorRange
from mptune.graph.hazards.probes import facts_on, range_of
from mptune.graph.plan import DEFAULT_PRECISIONS, Precision
from mptune.graph.writing.observe import ObservedPart
from mptune.processes.child import WorkerState


@dataclass(frozen=True)
class ObserveJob:
    """Run a model whose outputs are those of one part over the samples, and reduce them sample by sample."""

    model: Path
    part: ObservedPart
    samples: Path
    provider: Provider
    precisions: tuple[str, ...] = DEFAULT_PRECISIONS
    run_bytes: int | None = None
    most_samples: int | None = None

    def run(self, state: WorkerState) -> dict[str, TensorRange]:
        """Value -> its range over the first ``most_samples``; None takes all."""
        samples = cached_samples(state, self.samples)[: self.most_samples]
        side_by_side = SideBySide.for_runs(len(samples), self.run_bytes)
        session = self._open(state, side_by_side.threads)
        reduced = [row for row in map(Precision.named, self.precisions) if row is not Precision.FP32]
        asked = [(probed, row) for row in reduced if row.is_rounded_by_casts for probed in self.part.nodes]

        def observe(sample: Feed) -> list[Any]:
            values = session.run(sample, is_transient=True)
            ranges = [partial(range_of, values[tensor], axes) for tensor, axes in self.part.rows.items()]
            facts = [partial(facts_on, probed, values, precision) for probed, precision in asked]
            return SideBySide(max(1, usable_cores() // side_by_side.count)).run([*ranges, *facts])

        state.enter(Stage.RUN)
        every = side_by_side.run([partial(observe, sample) for sample in samples])
        by_value = list(zip(*every, strict=True))
        probes: dict[str, list[NodeFacts]] = {}
        for (probed, precision), on_samples in zip(asked, by_value[len(self.part.rows) :], strict=True):
            names = [name for name in on_samples[0] if all(name in facts for facts in on_samples)]
            facts = {name: tuple(numbers[name] for numbers in on_samples) for name in names}
            probes.setdefault(probed.key, []).append(NodeFacts(probed.node.name, facts, precision))
        return {
            tensor: TensorRange.over_samples(each, probes.get(tensor, ()))
            for tensor, each in zip(self.part.rows, by_value, strict=False)
        }

    def _open(self, state: WorkerState, threads: int | None) -> OrtSession:
        options = SessionOptions(self.provider, "values", threads=threads)
        try:
            return state.transient(partial(open_session, self.model, options))
        except EngineError:  # some kernels exist for what the optimiser writes only
            return state.transient(partial(open_session, self.model, replace(options, preset="reference")))
