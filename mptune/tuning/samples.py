"""Search and held-out samples with their labels; whole sequences of them where outputs are fed back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mptune.data.archive import load_labels, save_labels
from mptune.data.calibration import load_calibration
from mptune.data.samples import CalibrationSet, Rollout, size_findings
from mptune.engines.context import RunContext
from mptune.errors import SettingsError
from mptune.finding import Finding
from mptune.graph.groups import GroupedModel
from mptune.graph.hazards.static import state_inputs
from mptune.graph.loading.model import Model
from mptune.graph.loading.tensors import TensorInfo
from mptune.settings import SearchSettings
from mptune.targets.findings import nothing_to_tune


@dataclass(frozen=True)
class SampleSets:
    """What plans are evaluated on, what only the front meets, and the labels of both, if any.

    ``sizes`` is the finding that all samples have one size, where others are possible.
    """

    search: CalibrationSet
    held_out: CalibrationSet
    warnings: tuple[str, ...]
    findings: tuple[Finding, ...]
    sizes: tuple[Finding, ...]
    labels: tuple[Sequence[dict[str, np.ndarray]], ...] = ((), ())

    def save(self, context: RunContext) -> None:
        """Write samples and labels where jobs find them."""
        self.search.save(context.samples("search"))
        self.held_out.save(context.samples("held_out"))
        save_labels(context.samples("search"), self.labels[0])
        save_labels(context.samples("held_out"), self.labels[1])


def load_data(settings: SearchSettings, grouped: GroupedModel) -> CalibrationSet:
    """The samples of a search. A finding comes first where the model has nothing to tune."""
    model, inputs = grouped.model, grouped.model.inputs
    fed = {info.name for info in inputs if any(pair.endswith(f":{info.name}") for pair in settings.feedback)}
    data = load_calibration(settings.data, inputs, settings.data_settings, settings.seed, state_inputs(model) | fed)
    return replace(data, findings=(*nothing_to_tune(grouped, "search"), *data.findings))


def split_data(data: CalibrationSet, settings: SearchSettings, inputs: Sequence[TensorInfo]) -> SampleSets:
    """Split the samples by seed (``CalibrationSet.split``); of a rollout whole sequences, and no label."""
    options = settings.seed, settings.data_settings.held_out_fraction, settings.data_settings.max_search_samples
    if settings.rollout is not None and settings.labels is not None:
        raise SettingsError("cannot be given where a state is fed back", "leave one of them away", setting="labels")
    parts = search, held_out = data.split(*options, 1 if settings.rollout is None else settings.rollout.steps)
    every = [] if settings.labels is None else load_labels(settings.labels, len(data.samples))
    labels = [[every[k] for k in part.indices] if every else () for part in parts]
    return SampleSets(
        search,
        held_out,
        tuple(dict.fromkeys((*search.warnings, *held_out.warnings))),
        tuple(dict.fromkeys((*search.findings, *held_out.findings))),
        size_findings(data.samples, inputs, settings.shapes),
        tuple(labels),
    )


def with_rollout(settings: SearchSettings, model: Model, samples: int) -> SearchSettings:
    """The settings with ``rollout`` as the model and the data have it."""
    inputs, outputs = ([tensor.name for tensor in tensors] for tensors in (model.inputs, model.outputs))
    return replace(settings, rollout=Rollout.parse(settings.feedback, settings.steps, inputs, outputs, samples))
