"""Search and held-out samples with their labels; whole sequences of them where outputs are fed back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np

from mptune.data.archive import load_labels, save_labels
from mptune.data.calibration import load_calibration
from mptune.data.forms.samples import CalibrationSet
from mptune.data.rollout import Rollout
from mptune.diagnosis.sizes import size_text, sizes_of
from mptune.engines.base import SampleSet, Toolchain, Workspace
from mptune.errors import DataError, SettingsError
from mptune.files import files_sha256, writing
from mptune.finding import Finding
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.hazards.interface import state_inputs
from mptune.graph.loading.model import Model
from mptune.run_json import RunFile
from mptune.settings import SearchSettings
from mptune.targets.unsearched import nothing_to_tune
from mptune.tuning.runs.seals import damaged, seal
from mptune.tuning.steps.baseline import check_reference
from mptune.tuning.steps.kernels import KERNELS_JSON, keep_kernels
from mptune.tuning.steps.prepare import save_samples

Labels = Sequence[dict[str, np.ndarray]]

_PER_SIZE = 4
"""Samples of each further size at which the chosen plan is looked at."""


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

    def save(self, workspace: Workspace) -> None:
        """Write samples and labels where jobs find them."""
        save_samples(workspace, self.search, self.held_out)
        save_labels(workspace.samples("search"), self.labels[0])
        save_labels(workspace.samples("held_out"), self.labels[1])

    def repair(
        self,
        workspace: Workspace,
        open_toolchain: Callable[[], Toolchain],
        *,
        skip: bool,
        precisions: Sequence[str] = ("fp32", "fp16"),
    ) -> tuple[str, ...]:
        """Write data anew that are gone or damaged: jobs would fail on them, plan after plan."""
        lost = damaged(workspace.data_dir)
        if not lost:
            return ()
        self.save(workspace)
        for which in get_args(SampleSet):
            if workspace.reference(which).name in lost:
                with writing(workspace.reference(which)):
                    workspace.reference(which).unlink(missing_ok=True)
                check_reference(open_toolchain().reference_model.reference(which), skip=skip)
        if KERNELS_JSON in lost:
            keep_kernels(open_toolchain(), precisions, workspace.data_dir)
        seal(workspace.data_dir)
        return (f"{', '.join(lost)} in {workspace.data_dir} had been lost or damaged, and is written anew",)


def load_data(
    settings: SearchSettings, grouped: GroupedModel
) -> tuple[CalibrationSet, tuple[tuple[Mapping[str, np.ndarray], ...], ...]]:
    """The samples that are searched on, and a few of each further size.

    Of several data sets, one for each size, that of the usual size of ``--shapes`` is searched on, else the first. A
    finding comes first where the model has nothing to tune.
    """
    sources = [settings.data, *settings.more_data]
    model, inputs = grouped.model, grouped.model.inputs
    fed = {info.name for info in inputs if any(pair.endswith(f":{info.name}") for pair in settings.feedback)}
    states = state_inputs(model) | fed
    every = [load_calibration(source, inputs, settings.data_settings, settings.seed, states) for source in sources]
    untunable = nothing_to_tune(grouped, "search")
    every = [replace(samples, findings=(*untunable, *samples.findings)) for samples in every]
    if len(every) == 1:
        return every[0], ()
    sizes = [sizes_of(part.samples[0], inputs) for part in every]
    usual = {shape.name: shape.usual for shape in settings.shapes}
    searched = next((k for k, size in enumerate(sizes) if usual and usual.items() <= size.items()), 0)
    for number, (part, size) in enumerate(zip(every, sizes, strict=True)):
        twin = sizes.index(size)
        if twin != number:
            raise DataError(
                f"{every[twin].source} and {part.source} hold samples of one size"
                f" ({size_text(size) or 'the only one'})",
                "give --data once for each size; put samples of one size into one folder",
            )
        for declared in settings.shapes:
            shape = size.get(declared.name)
            if shape is not None and not declared.holds(shape):
                raise DataError(
                    f"{part.source}: input {declared.name!r} is {'x'.join(map(str, shape))}, beyond --shapes"
                    f" {declared}",
                    "widen --shapes, or leave these samples away",
                )
    others = [part.samples for k, part in enumerate(every) if k != searched]
    return every[searched], tuple(tuple(s[k] for k in range(min(_PER_SIZE, len(s)))) for s in others)


def split_data(data: CalibrationSet, settings: SearchSettings) -> SampleSets:
    """Split the samples by seed (``CalibrationSet.split``); of a rollout whole sequences, and no label."""
    options = settings.seed, settings.data_settings.held_out_fraction, settings.data_settings.max_search_samples
    if settings.rollout is not None:
        if settings.labels is not None:
            raise SettingsError("cannot be given where a state is fed back", "leave one of them away", setting="labels")
        steps = settings.rollout.steps
        starts: list[Mapping[str, np.ndarray]] = [{"": np.array(k)} for k in range(len(data.samples) // steps)]
        search, held_out = replace(data, samples=tuple(starts)).split(*options)
        return SampleSets(_steps_of(data, search, steps), _steps_of(data, held_out, steps))
    search, held_out = data.split(*options)
    if settings.labels is None:
        return SampleSets(search, held_out)
    labels = load_labels(settings.labels, len(data.samples))
    of_search, of_held_out = ([labels[k] for k in part.indices or range(len(labels))] for part in (search, held_out))
    return SampleSets(search, held_out, (of_search, of_held_out))


def _steps_of(data: CalibrationSet, sequences: CalibrationSet, steps: int) -> CalibrationSet:
    firsts = [int(sample[""]) * steps for sample in sequences.samples]
    indices = tuple(first + k for first in firsts for k in range(steps))
    return replace(sequences, samples=tuple(data.samples[k] for k in indices), indices=indices)


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
