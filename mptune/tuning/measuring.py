"""What a search, its workers and a confirmation share: an open toolchain, an open study, what evaluates plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mptune.data.scripts import law_metric
from mptune.engines.context import RunContext
from mptune.engines.environment import Environment
from mptune.engines.toolchains.choose import open_toolchain
from mptune.engines.toolchains.reference import Workers
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.errors import EndedEarlyError
from mptune.finding import Finding, FindingOrigin
from mptune.run_json import RunFile, TargetSection, identity_of
from mptune.rundir import RunDirectory
from mptune.settings import SearchSettings
from mptune.targets.target import Target, profile_warnings
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.explanation import keep_grounds
from mptune.tuning.listener import Listener
from mptune.tuning.output_findings import with_suspects
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.record.study import check_metrics, open_study
from mptune.tuning.space import SearchSpace
from mptune.tuning.steps import baseline, knowledge, limits, tuner

OpenToolchain = Callable[[RunContext], Toolchain]
"""What a caller brings in place of the toolchain of a target."""


@dataclass(frozen=True)
class Measuring:
    """An open toolchain, and what its figures are taken on."""

    toolchain: Toolchain
    section: TargetSection
    environment: Environment

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


def ended_early(limit: limits.Limits, run: Path) -> EndedEarlyError:
    """The error of a run without a front: a limit was reached before all-FP32 was measured."""
    stop = limit.reached()
    return EndedEarlyError(
        f"{'a limit was reached' if stop is None else stop.value}, and all-FP32 was not measured yet: there is no "
        "front, and no plan is chosen",
        f"what was computed is kept in {run}: the same command goes on with it; if it ends here again, give it a "
        "larger --timeout or --max-disk",
    )


def with_engine_findings(
    findings: tuple[Finding, ...], fp32: Evaluation, settings: SearchSettings, origin: FindingOrigin
) -> tuple[Finding, ...]:
    """The findings of a run, with what the all-FP32 engine shows against the reference; errors stop (BaselineError)."""
    differing = baseline.check_baseline(fp32.error, tf32=settings.tf32, origin=origin, skip=settings.skip_checks)
    return with_suspects((*(finding for finding in findings if finding.code != baseline.ENGINE_CODE), *differing))


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


def make_tuner(
    run: RunDirectory,
    file: RunFile,
    record: StudyRecord,
    toolchain: Toolchain,
    settings: SearchSettings,
    listener: Listener,
    limit: limits.Limits,
) -> tuner.Tuner:
    """What proposes plans and evaluates them; it asks first for what the sampler has to know, if that proposes any."""
    sampler_knowledge = None
    if settings.sampler == "precision" and record.space.free and settings.budget > len(record.space.seeds):
        has_labels = file.fixed_settings.labels_sha256 is not None
        law = law_metric(settings.metric, settings.metric_function, has_labels=has_labels)
        sampler_knowledge = knowledge.Knowledge(record, toolchain, settings, listener, law, run.data, limit)
        keep_grounds(record.space, sampler_knowledge.prior, run.data)
    return tuner.Tuner(record, toolchain, settings, listener, limit, sampler_knowledge)
