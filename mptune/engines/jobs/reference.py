"""The jobs that run the untouched model: its reference outputs, and the ranges of its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mptune.data.archive import save_samples
from mptune.data.metrics.parts import PARTS_JSON, cover_held_out, find_parts, load_parts, parts_path, save_parts
from mptune.data.samples import Rollout, outputs_of
from mptune.engines.base import EngineError, ReferenceReport, Stage
from mptune.engines.environment import usable_cores
from mptune.engines.jobs.outputs import value_error
from mptune.engines.jobs.rows import check_rows, first_other
from mptune.engines.jobs.samples import Feed, batch_sizes, cached_samples
from mptune.engines.ort.cuda_session import open_session
from mptune.engines.ort.session import PROVIDERS, Provider, SessionOptions, SideBySide
from mptune.graph.hazards.hazard import NodeFacts, TensorRange
from mptune.graph.hazards.probes import facts_on, range_of
from mptune.graph.plan import DEFAULT_PRECISIONS, Precision
from mptune.graph.writing.variants import ObservedPart
from mptune.processes.child import WorkerState


@dataclass(frozen=True)
class ReferenceJob:
    """Run the untouched model over samples in FP32 without TF32; its outputs go to a file, their parts beside it."""

    model: Path
    samples: Path
    outputs: Path
    provider: Provider
    dependent: frozenset[str] = frozenset()  # outputs whose shape depends on values
    rollout: Rollout | None = None
    is_held_out: bool = False
    """The parts are those of the search samples, with which the optimisations of ONNX Runtime were looked at, too."""
    run_bytes: int | None = None  # memory that one run takes about, bytes

    def run(self, state: WorkerState) -> ReferenceReport:
        samples = cached_samples(state, self.samples)
        side_by_side = SideBySide.for_runs(len(samples) if self.rollout is None else 1, self.run_bytes)
        options = SessionOptions(self.provider, threads=side_by_side.threads)
        session = state.transient(partial(open_session, self.model, options))
        state.enter(Stage.RUN)
        outputs = outputs_of(session.run, samples, self.rollout, side_by_side.run)
        again = outputs_of(session.run, samples[: 1 if self.rollout is None else self.rollout.steps], self.rollout)[0]
        rows = check_rows(session, samples, self.dependent, outputs[0], self.run_bytes)
        save_samples(self.outputs, outputs)
        session.close()

        # What is a part is decided by what the search saw, for held-out samples, too.
        searched = load_parts(self.outputs.with_name(PARTS_JSON)) if self.is_held_out else None
        if searched is not None:
            parts = cover_held_out(searched, outputs)
        else:
            shapes = [{name: array.shape for name, array in sample.items()} for sample in samples]
            parts = find_parts(outputs, batch_sizes(shapes, len(outputs)))
        save_parts(parts_path(self.outputs), parts)

        is_compared = self.rollout is None and not self.is_held_out
        return ReferenceReport(
            provider=PROVIDERS[self.provider],
            outputs={
                name: _facts(samples, [values[name] for values in outputs], is_selected=name in self.dependent)
                for name in outputs[0]
            },
            repeat_error=max(value_error(again[name], outputs[0][name]) for name in again),
            rows=rows,
            optimisation_error=self._optimisation_error(state, samples[0], outputs[0]) if is_compared else {},
        )

    def _optimisation_error(
        self, state: WorkerState, sample: Feed, outputs: Mapping[str, np.ndarray]
    ) -> dict[str, float]:
        """Outputs whose shape differs are left out, as what selects values may select others."""
        options = SessionOptions(self.provider, "values")
        try:
            plain = state.transient(partial(open_session, self.model, options)).run(sample)
        except EngineError:  # some kernels exist for what the optimiser writes only
            return {}
        floats = {n: v for n, v in outputs.items() if n not in self.dependent and np.issubdtype(v.dtype, np.floating)}
        return {n: value_error(v, plain[n]) for n, v in floats.items() if v.shape == plain[n].shape}


def _facts(feeds: Sequence[Feed], values: Sequence[np.ndarray], *, is_selected: bool) -> dict[str, float]:
    """What ``ReferenceReport.outputs`` says of one output over all samples.

    Whole numbers of rows that were selected are classes and positions, where 0 is as good as any: no share of zeros.
    """
    count = sum(array.size for array in values)
    finite = [np.abs(array[np.isfinite(array)].astype(np.float64)) for array in values]
    zeros = float(sum(int((array == 0).sum()) for array in finite))
    facts = {
        "size": float(count),
        "non_finite": float(count - sum(array.size for array in finite)),
        "zero_fraction": 0.0 if is_selected and values[0].dtype.kind in "iub" else zeros / max(1, count),
        "absmax": max((float(array.max(initial=0.0)) for array in finite), default=0.0),
    }
    if facts["non_finite"]:
        bad = [k for k, array in enumerate(values) if not np.isfinite(array).all()]
        facts["bad_sample"] = float(bad[0] * (len(feeds) // len(values)))  # in a rollout, where the sequence begins
        facts["bad_samples"], facts["samples"] = float(len(bad)), float(len(values))
    # A sequence of a rollout has no other to differ from: outputs are fewer than samples then.
    elif count and not is_selected and values[0].dtype.kind == "f" and len(values) == len(feeds):
        is_same = all(np.array_equal(array, values[0]) for array in values[1:])
        if is_same and first_other(feeds) is not None:
            facts["constant"] = 1.0
    return facts


@dataclass(frozen=True)
class ObserveJob:
    """Run a model whose outputs are those of one part over the samples, and reduce them to ranges and facts."""

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
        options = SessionOptions(self.provider, "values", threads=side_by_side.threads)
        try:
            session = state.transient(partial(open_session, self.model, options))
        except EngineError:  # some kernels exist for what the optimiser writes only
            session = state.transient(partial(open_session, self.model, replace(options, preset="reference")))
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
