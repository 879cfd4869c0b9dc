"""Search and held-out samples with their labels; whole sequences of them where outputs are fed back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mptune.data.archive import load_labels, save_labels
from mptune.data.calibration import load_calibration
from mptune.data.rollout import Rollout
from mptune.data.samples import CalibrationSet
from mptune.engines.context import RunContext
from mptune.errors import SettingsError
from mptune.files import files_sha256
from mptune.finding import Finding
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.hazards.interface import state_inputs
from mptune.graph.loading.model import Model
from mptune.run_json import RunFile
from mptune.settings import SearchSettings
from mptune.targets.findings import nothing_to_tune
from mptune.tuning.steps.prepare import save_samples

Labels = Sequence[dict[str, np.ndarray]]


@dataclass(frozen=True)
class SampleSets:
    """What plans are evaluated on, what only the front meets, and the labels of both, if any."""

    search: CalibrationSet
    held_out: CalibrationSet
    labels: tuple[Labels, Labels] = ((), ())

    @property
    def warnings(self) -> tuple[str, ...]:
        """Of both sets, each once."""
        return tuple(dict.fromkeys((*self.search.warnings, *self.held_out.warnings)))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Of both sets, each once."""
        return tuple(dict.fromkeys((*self.search.findings, *self.held_out.findings)))

    def save(self, context: RunContext) -> None:
        """Write samples and labels where jobs find them."""
        save_samples(context, self.search, self.held_out)
        save_labels(context.samples("search"), self.labels[0])
        save_labels(context.samples("held_out"), self.labels[1])


def load_data(settings: SearchSettings, grouped: GroupedModel) -> CalibrationSet:
    """The samples of a search. A finding comes first where the model has nothing to tune."""
    model, inputs = grouped.model, grouped.model.inputs
    fed = {info.name for info in inputs if any(pair.endswith(f":{info.name}") for pair in settings.feedback)}
    states = state_inputs(model) | fed
    data = load_calibration(settings.data, inputs, settings.data_settings, settings.seed, states)
    return replace(data, findings=(*nothing_to_tune(grouped, "search"), *data.findings))


def split_data(data: CalibrationSet, settings: SearchSettings) -> SampleSets:
    """Split the samples by seed (``CalibrationSet.split``); of a rollout whole sequences, and no label."""
    options = settings.seed, settings.data_settings.held_out_fraction, settings.data_settings.max_search_samples
    if settings.rollout is not None and settings.labels is not None:
        raise SettingsError("cannot be given where a state is fed back", "leave one of them away", setting="labels")
    search, held_out = data.split(*options, 1 if settings.rollout is None else settings.rollout.steps)
    if settings.labels is None:
        return SampleSets(search, held_out)
    labels = load_labels(settings.labels, len(data.samples))
    of_search, of_held_out = ([labels[k] for k in part.indices] for part in (search, held_out))
    return SampleSets(search, held_out, (of_search, of_held_out))


def rollout_of(settings: SearchSettings, model: Model, samples: int) -> SearchSettings:
    """The settings with ``rollout`` as the model and the data have it."""
    inputs = [tensor.name for tensor in model.inputs]
    outputs = [tensor.name for tensor in model.outputs]
    rollout = Rollout.parse(settings.feedback, settings.steps, inputs, outputs, samples)
    return replace(settings, rollout=rollout)


def recorded_rollout(settings: SearchSettings, file: RunFile, model: Model) -> SearchSettings:
    """The settings of a run that another process began, with ``rollout``."""
    return rollout_of(settings, model, 0 if file.data is None else file.data.samples)


def labels_sha256(path: Path | None) -> str | None:
    """A hash of the file of labels; None where there is none, or it cannot be read (which is said later)."""
    if path is None or not path.is_file():
        return None
    return files_sha256(path)
