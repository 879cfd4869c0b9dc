"""The job that takes the reference outputs of the untouched model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from mptune.data.archive import save_samples
from mptune.data.metrics.parts import OutputParts, cover_held_out, find_parts, load_parts, save_parts
from mptune.data.rollout import Rollout, outputs_of
from mptune.engines.base import EngineError, ReferenceReport, Stage
from mptune.engines.jobs.outputs import value_error
from mptune.engines.jobs.rows import check_rows, first_other
from mptune.engines.jobs.samples import Feed, batch_sizes, cached_samples
from mptune.engines.ort.cuda_session import open_session
from mptune.engines.ort.session import PROVIDERS, Provider, SessionOptions
from mptune.engines.ort.side_by_side import SideBySide
from mptune.graph.loading.shapes import Units
from mptune.processes.child import WorkerState


@dataclass(frozen=True)
class ReferenceJob:
    """Run the untouched model over a set of samples in FP32 without TF32 and write the outputs to a file."""

    model: Path
    samples: Path
    outputs: Path
    provider: Provider
    dependent: frozenset[str] = frozenset()
    unoptimised: bool = False
    rollout: Rollout | None = None
    parts: Path | None = None
    """File to write the parts of the outputs to; None writes none."""
    searched_parts: Path | None = None
    """The parts found on the search samples, for held-out samples; None finds them here."""
    units: Mapping[str, Units] = field(default_factory=dict)
    run_bytes: int | None = None

    def run(self, state: WorkerState) -> ReferenceReport:
        samples = cached_samples(state, self.samples)
        side_by_side = SideBySide()
        if self.provider == "cpu" and self.rollout is None:
            side_by_side = SideBySide.of(len(samples), self.run_bytes)
        options = SessionOptions(self.provider, threads=side_by_side.threads)
        session = state.transient(partial(open_session, self.model, options))
        state.enter(Stage.RUN)
        outputs = outputs_of(session.run, samples, self.rollout, side_by_side.run)
        again = outputs_of(session.run, samples[: 1 if self.rollout is None else self.rollout.steps], self.rollout)[0]
        rows = check_rows(session, samples, self.dependent, outputs[0], self.run_bytes)
        save_samples(self.outputs, outputs)
        session.close()
        if self.parts is not None:
            save_parts(self.parts, self._parts_of(samples, outputs))
        return ReferenceReport(
            provider=PROVIDERS[self.provider],
            outputs=_facts_of(samples, outputs, self.dependent),
            repeat_error=max(value_error(again[name], outputs[0][name]) for name in again),
            rows=rows,
            optimisation_error=self._optimisation_error(state, samples[0], outputs[0])
            if self.unoptimised and self.rollout is None
            else {},
        )

    def _parts_of(self, samples: Sequence[Feed], outputs: Sequence[Mapping[str, np.ndarray]]) -> dict[str, OutputParts]:
        searched = None if self.searched_parts is None else load_parts(self.searched_parts)
        if searched is not None:
            return cover_held_out(searched, outputs)
        shapes = [{name: array.shape for name, array in sample.items()} for sample in samples]
        return find_parts(outputs, batch_sizes(shapes, len(outputs)), self.units)

    def _optimisation_error(
        self, state: WorkerState, sample: Feed, outputs: Mapping[str, np.ndarray]
    ) -> dict[str, float]:
        """Outputs whose shape differs are left out, as what selects values may select others."""
        options = SessionOptions(self.provider, "values")
        try:
            plain = state.transient(partial(open_session, self.model, options)).run(sample)
        except EngineError:  # some kernels exist for what the optimiser writes only
            return {}
        return {
            name: value_error(values, plain[name])
            for name, values in outputs.items()
            if name not in self.dependent
            and np.issubdtype(values.dtype, np.floating)
            and values.shape == plain[name].shape
        }


def _facts_of(
    feeds: Sequence[Feed], outputs: Sequence[Mapping[str, np.ndarray]], dependent: Collection[str]
) -> dict[str, dict[str, float]]:
    """``ReferenceReport.outputs``."""
    return {
        name: _facts(feeds, [values[name] for values in outputs], is_selected=name in dependent) for name in outputs[0]
    }


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
    elif count and not is_selected and values[0].dtype.kind == "f" and _is_constant(feeds, values):
        facts["constant"] = 1.0
    return facts


def _is_constant(feeds: Sequence[Feed], values: Sequence[np.ndarray]) -> bool:
    """Whether an output is the same on all samples although these are not: one that differs is enough to tell.

    False in a rollout, whose outputs are those of sequences: a single sequence would always be the same.
    """
    if len(values) != len(feeds):
        return False
    same = all(np.array_equal(array, values[0]) for array in values[1:])
    return same and first_other(feeds) is not None
