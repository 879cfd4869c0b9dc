"""What a search, its workers and a confirmation open: the samples, a toolchain, and a study."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mptune.data.archive import labels_beside, load_labels, save_samples
from mptune.data.calibration import load_calibration
from mptune.data.samples import CalibrationSet, Rollout
from mptune.engines.context import RunContext
from mptune.engines.environment import Environment
from mptune.engines.toolchains.choose import open_toolchain
from mptune.engines.toolchains.reference import Workers
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.finding import Finding
from mptune.graph.groups import GroupedModel
from mptune.graph.hazards.static import state_inputs
from mptune.graph.loading.model import Model
from mptune.run_json import RunFile, TargetSection, identity_of
from mptune.rundir import RunDirectory
from mptune.settings import SearchSettings
from mptune.targets.findings import not_measured, nothing_to_tune
from mptune.targets.target import Target, profile_warnings
from mptune.tuning.bench import Listener
from mptune.tuning.plan_limits import PlanLimits
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.record.study import check_metrics, open_study
from mptune.tuning.space import SearchSpace

OpenToolchain = Callable[[RunContext], Toolchain]
"""What a caller brings in place of the toolchain of a target."""


@dataclass(frozen=True)
class Measuring:
    """An open toolchain, and what its figures are taken on."""

    toolchain: Toolchain
    section: TargetSection
    environment: Environment

    @property
    def findings(self) -> tuple[Finding, ...]:
        """That the target is not here, where it is not."""
        return (not_measured(self.section.device),) if self.section.latency_source == "predicted" else ()

    @classmethod
    def open(
        cls,
        context: RunContext,
        target: Target | None,
        listener: Listener,
        opener: OpenToolchain | None = None,
        workers: Workers | None = None,
    ) -> Measuring:
        """Open the toolchain of a target, or the caller's, for which there need be no target.

        The environment has warnings where the device is not what the profile's figures hold for.
        """
        if opener is not None:
            toolchain = opener(context)
        else:
            assert target is not None
            toolchain = open_toolchain(target, context, workers)
        toolchain.listen(listener.building)
        toolchain.limit = PlanLimits.from_settings(context.settings).sole_limit
        is_measured = toolchain.latency_source == "measured"
        profile = None if is_measured else getattr(toolchain, "target", target)
        section = TargetSection(
            name=context.settings.target if target is None else target.name,
            engine=toolchain.name,
            device=toolchain.device,
            latency_source=toolchain.latency_source,
            error_source=toolchain.error_source,
            profile_sha256=None if profile is None else profile.figures_sha256,
        )
        environment = toolchain.environment()
        if target is not None and environment.jetson is not None and is_measured:
            environment = environment.with_warnings(*profile_warnings(target, environment.jetson))
        return cls(toolchain, section, environment)


def save_parts(context: RunContext, parts: Sequence[CalibrationSet], count: int) -> None:
    """Write the search samples and the held-out ones, of so many in all, each with their labels."""
    path = context.settings.labels
    labels = () if path is None else load_labels(path, count)
    for place, part in zip((context.samples("search"), context.samples("held_out")), parts, strict=True):
        save_samples(place, part.samples)
        labels_beside(place).unlink(missing_ok=True)  # of a search before
        if labels:
            save_samples(labels_beside(place), [labels[k] for k in part.indices])


def open_record(
    run: RunDirectory,
    file: RunFile,
    space: SearchSpace,
    settings: SearchSettings,
    url: str | None = None,
    *,
    is_shared: bool = False,
) -> StudyRecord:
    """Open the study of a run, or begin it, in a database or else the run's journal, which others may write, too.

    A script under the name of a metric must be what it was.
    """
    record = open_study(
        space,
        name=file.study,
        metric=settings.metric,
        identity=identity_of(file),
        journal=run.journal,
        url=url,
        sampler=settings.sampler,
        seed=settings.seed,
        is_shared=is_shared,
    )
    check_metrics(record, (settings.metric, *settings.reported_metrics))
    return record


def load_data(settings: SearchSettings, grouped: GroupedModel) -> CalibrationSet:
    """The samples of a search. A finding comes first where the model has nothing to tune."""
    inputs, fed = grouped.model.inputs, {pair.rpartition(":")[2] for pair in settings.feedback}
    states = state_inputs(grouped.model) | fed & {info.name for info in inputs}
    data = load_calibration(settings.data, inputs, settings.data_settings, settings.seed, states)
    return replace(data, findings=(*nothing_to_tune(grouped, "search"), *data.findings))


def with_rollout(settings: SearchSettings, model: Model, samples: int) -> SearchSettings:
    """The settings with ``rollout`` as the model and the data have it."""
    inputs, outputs = ([tensor.name for tensor in tensors] for tensors in (model.inputs, model.outputs))
    return replace(settings, rollout=Rollout.parse(settings.feedback, settings.steps, inputs, outputs, samples))
