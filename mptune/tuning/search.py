"""One call of ``search`` on one run directory: every step in its order, each skipped where its result is recorded."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any

from mptune.engines.toolchains.choose import choose_target
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.engines.workers import Workers
from mptune.finding import Finding
from mptune.graph.grouping.groups import RANGE_KIND
from mptune.graph.loading.model import Model
from mptune.identity import check_data, check_target, identity_of
from mptune.run_json import DataSection
from mptune.rundir import LateFaults, RunDirectory, has_workers
from mptune.settings import SearchSettings
from mptune.targets.findings import TARGET_CODE, not_measured
from mptune.targets.target import Target
from mptune.tuning import beginning, copies, crew, facts, measuring, model_findings, samples, space
from mptune.tuning.front import Front
from mptune.tuning.listener import Listener
from mptune.tuning.reasons import group_findings, reasons
from mptune.tuning.record import study
from mptune.tuning.runs.result import front_of, has_evaluation
from mptune.tuning.steps import baseline, limits, remeasure, tuner


class Search:
    """A search on an opened, locked run directory.

    Attributes:
        file: the content of run.json.
        grouped: the layer groups that are searched.
        record: the study. These three are there once ``run`` has set them.
    """

    def __init__(
        self,
        run: RunDirectory,
        model: Model,
        settings: SearchSettings,
        listener: Listener,
        opener: measuring.OpenToolchain | None = None,
        engine_workers: Workers | None = None,
        variables: dict[str, str] | None = None,
    ) -> None:
        """``engine_workers`` were started ahead; ``variables`` are the environment of the workers on other GPUs."""
        self.directory = run
        self._model, self._settings, self._listener = model, settings, listener
        self._opener, self._engine_workers, self._variables = opener, engine_workers, variables or {}
        self._limits = limits.Limits(settings, run.path)
        self._stack = contextlib.ExitStack()
        self._engines = self._stack.enter_context(contextlib.ExitStack())
        self._target: Target | None = None
        self._toolchain: Toolchain | None = None

    def run(self) -> Front:
        """Everything that is not recorded yet, then the front. See ``mptune.search`` for what is raised."""
        run, listener = self.directory, self._listener
        named = space.load_space(self._settings.space)
        begun = beginning.begin(run, self._model, self._settings, named)
        self._settings, self.file, self.grouped = begun.settings, begun.file, begun.grouped
        sets = self._read_samples(named)
        observations = self._observe(sets)
        findings = self._check_data(sets, observations)
        searched = self._find_space(named, observations)
        if begun.url is not None and not has_evaluation(run, self.file, self._settings.storage):
            # The study of runs with this run's name and identity in the database is shared, or begun there.
            self._open_toolchain()
            self._save(study=study.settle_study(self.file.study, identity_of(self.file), begun.url))
        predicted = next((finding for finding in self.file.findings if finding.code == TARGET_CODE), None)
        about_model = model_findings.model_findings(
            self._context, self._target, observations, searched.hazards, predicted
        )
        self._save(findings=(*findings, *about_model))
        reasons.keep_grounds(searched.space, None, run.data)
        settings, is_shared = self._settings, has_workers(run)
        record = measuring.open_record(run, self.file, searched.space, settings, begun.url, is_shared=is_shared)
        self.record = record
        self._stack.callback(record.close)

        # Proposals: each is built, run and timed, here or by a worker on each GPU.
        is_over = record.spent >= settings.budget or tuner.is_exhausted(record, searched.space)
        if not is_over and not tuner.has_converged(record, settings):
            record.set_note(study.START_NOTE, time.time() - self._limits.elapsed_s)
            record.set_note(study.BUDGET_NOTE, settings.budget)
            toolchain = self._open_toolchain()
            if settings.gpus:
                toolchain.restart()  # the workers compare theirs with it, and take its GPU
                crew.run_workers(run, record, settings, begun.url, self._variables, listener)
            else:
                stop = measuring.make_tuner(run, self.file, record, toolchain, settings, listener, self._limits).run()
                listener.stage(f"stopped: {stop.value}")

        # The front once more: in fresh processes, and on the samples that only it meets.
        fp32 = record.baseline()
        if fp32 is None:
            raise measuring.ended_early(self._limits, run.path)
        rounds = remeasure.rounds_needed(settings, fp32.latency.source)
        if remeasure.to_measure(record, settings, rounds):
            remeasure.confirm(record, self._open_toolchain(), settings, listener, rounds, self._limits)
        self._engines.close()
        self._save(findings=measuring.with_engine_findings(self.file.findings, fp32, settings, "search"))

        faults, findings = LateFaults(run.logs), self.file.findings
        with faults.tolerated("the reasons for groups in FP32"):
            context, hazards = self._context, searched.hazards
            findings = group_findings.with_reasons(context, findings, hazards, settings.metric, fp32)
        host = () if self.file.environment is None else self.file.environment.warnings
        about_space = (*observations.kernels.warnings, *searched.space.warnings)
        warnings = dict.fromkeys((*sets.warnings, *observations.warnings, *host, *about_space))
        self._save(findings=findings, warnings=tuple(warnings))
        front = front_of(run, self.file, record, asked=begun.asked, is_again=True)
        return replace(front, warnings=(*front.warnings, *faults.warnings))

    def close(self) -> None:
        """End the worker processes of the engines and let go of the study. Idempotent."""
        self._stack.close()

    def _read_samples(self, named: space.NamedSpace) -> samples.SampleSets:
        """The samples, which must be those that the run began with; all that jobs need has a place from here on."""
        run, model = self.directory, self._model
        data = samples.load_data(self._settings, self.grouped)
        section = DataSection(
            source=data.source, sha256=data.sha256(), samples=len(data.samples), is_random=data.is_random
        )
        before = self.file.data
        is_other = before is not None and before.sha256 != section.sha256
        if is_other and not has_evaluation(run, self.file, self._settings.storage):
            run.forget()
        else:
            check_data(run.path, self.file, section)
        self._save(data=section)
        self._settings = samples.with_rollout(self._settings, model, len(data.samples))
        self._context = run.context(self.grouped, self._settings)
        copies.keep_inputs(run, self._settings.target, named.path, data.preprocessing)
        return samples.split_data(data, self._settings, model.inputs)

    def _observe(self, sets: samples.SampleSets) -> facts.Observations:
        """What the model shows on the samples. The file of it is written last, when all of the data are prepared."""
        run, context, listener = self.directory, self._context, self._listener
        observations = facts.Observations.load(run.observed_json)
        if observations is not None:
            samples.refuse_damaged(run.data)
            return observations
        for text in (*sets.warnings, *(finding.message for finding in sets.findings)):
            listener.warning(text)
        sets.save(context)
        toolchain = self._open_toolchain()
        copies.keep_model(run, self.grouped, context.bank)
        observations = facts.observe(
            toolchain,
            listener,
            self._model,
            {"search": sets.search.indices, "held_out": sets.held_out.indices},
            self._settings.precisions,
            skip=self._settings.skip_checks,
        )
        is_measured = toolchain.latency_source == "measured"
        observations = model_findings.check_memory(observations, self._model, self._target, measured=is_measured)
        observations.save(run.observed_json)
        return observations

    def _check_data(self, sets: samples.SampleSets, observations: facts.Observations) -> tuple[Finding, ...]:
        """What is wrong with the samples, or shows on them; stops at errors, also of a run that skipped them before."""
        observed = model_findings.observed_findings(observations, self.grouped, sets.search.indices)
        findings = (*sets.findings, *observed)
        if not self._settings.skip_checks:
            baseline.stop_at_errors(findings)
        for text in (*sets.warnings, *(finding.message for finding in findings), *observations.warnings):
            self._listener.warning(text)
        return (*findings, *sets.sizes)

    def _find_space(self, named: space.NamedSpace, observations: facts.Observations) -> model_findings.Searched:
        """What may be searched; nodes whose values leave FP16's range are groups of their own from here on."""
        searched = model_findings.search_space(self._context, named, observations)
        if searched.grouped is not self.grouped:
            self._engines.close()  # the toolchain is of the groups before
            self._toolchain, self.grouped = None, searched.grouped
            self._context = self.directory.context(self.grouped, self._settings)
        apart = (group for group in self.grouped.groups if group.kind == RANGE_KIND)
        self._save(nodes_apart=tuple(name for group in apart for name in group.nodes))
        for text in (*observations.kernels.warnings, *searched.space.warnings):
            self._listener.warning(text)
        return searched

    def _open_toolchain(self) -> Toolchain:
        """Open the toolchain where it is not open, and record what it measures on: a finished run needs none."""
        if self._toolchain is not None:
            return self._toolchain
        if self._target is None and self._opener is None:
            choice = choose_target(self._settings.target)
            self._target = choice.target
            if choice.why:
                self._listener.stage(choice.why)
        ahead, self._engine_workers = self._engine_workers, None  # they end with the first toolchain
        opened = measuring.Measuring.open(self._context, self._target, self._listener, self._opener, ahead)
        self._toolchain = opened.toolchain
        self._engines.callback(opened.toolchain.close)
        if has_evaluation(self.directory, self.file, self._settings.storage):
            check_target(self.directory.path, self.file, opened.section)
        findings = [finding for finding in self.file.findings if finding.code != TARGET_CODE]
        if opened.section.latency_source == "predicted":
            findings = [not_measured(opened.section.device), *findings]
            self._listener.warning(findings[0].message)
        for text in opened.environment.warnings:
            self._listener.warning(text)
        self._save(target=opened.section, environment=opened.environment, findings=tuple(findings))
        return self._toolchain

    def _save(self, **changes: Any) -> None:
        """Write run.json with some sections changed, if that changes anything."""
        changed = self.file.model_copy(update=changes)
        if changed != self.file:
            self.directory.save(changed)
            self.file = changed
