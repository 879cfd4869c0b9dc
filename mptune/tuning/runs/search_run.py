"""One call of ``search`` on one run directory: every step in its order, each skipped where its result is recorded."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mptune.data.calibration import CalibrationSet, load_calibration
from mptune.engines.base import Failure, Toolchain
from mptune.engines.environment import Environment
from mptune.engines.toolchains.choose import choose_target, open_toolchain
from mptune.engines.workload import Workload
from mptune.errors import RunError
from mptune.finding import Finding
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import (
    Granularity,
    LayerGroup,
    find_fitting_groups,
    find_groups,
    groups_sha256,
)
from mptune.graph.hazards.find import Hazard, find_hazards
from mptune.graph.hazards.hazard import hazard_findings
from mptune.graph.loading.model import Model
from mptune.run_json import (
    ChoiceSection,
    DataSection,
    FixedSettings,
    ModelSection,
    RunFile,
    SearchSection,
    SeedSection,
    TargetSection,
    check_data,
    check_same,
    check_storage,
    check_target,
)
from mptune.rundir import RunDirectory
from mptune.settings import SearchSettings
from mptune.targets.mismatch import TARGET_CODE, not_measured
from mptune.targets.target import Target
from mptune.tuning.front import Front
from mptune.tuning.listener import Listener
from mptune.tuning.reasons.reasons import keep_grounds
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.record.storage import without_password
from mptune.tuning.record.study import open_study
from mptune.tuning.runs.result import Choice, Facts, build_front
from mptune.tuning.space import NamedSpace, SearchSpace, load_space, make_space
from mptune.tuning.steps.baseline import check_baseline
from mptune.tuning.steps.emulated import EMULATED_JSON, PlanEmulator
from mptune.tuning.steps.prepare import (
    Observations,
    check_memory,
    describe_device,
    observe,
    samples_sha256,
    save_samples,
)
from mptune.tuning.steps.remeasure import confirm, missing, points_to_confirm, rounds_needed
from mptune.tuning.steps.sensitivity import SENSITIVITY_JSON, find_sensitivity, make_prior
from mptune.tuning.steps.tuner import Tuner, has_converged, is_exhausted

STORAGE_VARIABLE = "MPTUNE_STORAGE"
"""Environment variable with the storage URL, where run.json holds it without its password."""

OpenToolchain = Callable[[Workload, SearchSettings], Toolchain]


class Session:
    """Runs a search on an opened, locked run directory. ``close`` ends the worker and lets go of the study."""

    groups: tuple[LayerGroup, ...]
    record: StudyRecord

    def __init__(
        self,
        run: RunDirectory,
        model: Model,
        settings: SearchSettings,
        listener: Listener,
        opener: OpenToolchain | None = None,
    ) -> None:
        self._run = run
        self._model = model
        self._settings = settings
        self._listener = listener
        self._opener = opener
        self._stack = contextlib.ExitStack()
        self._toolchain: Toolchain | None = None
        self._emulator: PlanEmulator | None = None
        self._target: Target | None = None
        self._told: set[str] = set()
        self._file: RunFile
        self._granularity: Granularity
        self._workload: Workload

    @property
    def environment(self) -> Environment | None:
        """Where the figures were taken; None before anything ran."""
        return self._file.environment

    def close(self) -> None:
        """End the worker and let go of the study. Idempotent."""
        self._stack.close()

    def run(self) -> Front:
        """Everything that is not recorded yet, then the front. See ``mptune.api.search`` for what is raised."""
        named = load_space(self._settings.space)
        self._granularity, self.groups = self._find_groups(named)
        self._file = self._begin(named)
        data = load_calibration(
            self._settings.data, self._model.inputs, self._settings.data_settings, self._settings.seed
        )
        self._check_data(data)
        grouped = GroupedModel(self._model, self.groups)
        self._workload = Workload(grouped, self._run.workspace(self._model.path.resolve()))
        observations, data_warnings, data_findings = self._observations(data)
        self._warn(*data_warnings, *(finding.message for finding in data_findings), *observations.warnings)
        space, hazards = self._space(named, observations)
        about_target = [finding for finding in self._file.findings if finding.code == TARGET_CODE]
        self._save(findings=(*data_findings, *about_target, *hazard_findings(hazards, "search")))
        self._warn(*space.warnings)
        keep_grounds(space, None, self._workload.workspace.data_dir)
        repaired = self._open_study(space, named)
        self._warn(*repaired)
        self._search(space)
        baseline = self.record.baseline()
        about_baseline = () if baseline is None else check_baseline(baseline.error, tf32=self._settings.tf32)
        environment = self.environment
        about = () if environment is None else environment.warnings
        warnings = (*data_warnings, *observations.warnings, *about, *space.warnings, *about_baseline, *repaired)
        self._save(warnings=tuple(dict.fromkeys(warnings)))
        return front_of(self._run, self._file, self.record)

    def _find_groups(self, named: NamedSpace) -> tuple[Granularity, tuple[LayerGroup, ...]]:
        """The space's groups; ``auto`` fits the budget of the first search, so that a larger one resumes the run."""
        granularity: Granularity = named.file.granularity
        if granularity == "auto":
            known = self._run.load()
            if known is None:
                return find_fitting_groups(self._model, self._settings.budget)
            granularity = known.fixed_settings.granularity
        return granularity, find_groups(self._model, granularity)

    # -- run.json -----------------------------------------------------------------------------------------------

    def _begin(self, named: NamedSpace) -> RunFile:
        """Check run.json against what is asked for, or write the first one."""
        settings, model = self._settings, self._model
        fixed = FixedSettings.of(
            settings,
            space_sha256=named.sha256,
            granularity=self._granularity,
            groups_sha256=groups_sha256(self.groups),
        )
        storage = None if settings.storage is None else without_password(settings.storage)
        search = SearchSection.of(settings)
        choice = ChoiceSection(max_error=settings.max_error, max_latency_ms=settings.max_latency_ms)
        known = self._run.load()
        if known is None:
            file = RunFile(
                model=ModelSection(path=str(model.path.resolve()), sha256=model.sha256),
                fixed_settings=fixed,
                search=search,
                seeds=SeedSection(split=settings.seed, sampler=settings.seed, random_inputs=settings.seed),
                storage=storage,
                study=self._run.path.resolve().name.removesuffix(".mptune"),
                choice=choice,
            )
        else:
            check_same(self._run.path, known, model.sha256, fixed)
            check_storage(self._run.path, known, storage)
            path = ModelSection(path=str(model.path.resolve()), sha256=model.sha256)
            file = known.model_copy(update={"search": search, "choice": choice, "model": path})
        if file != known:
            self._run.save(file)
        return file

    def _save(self, **changes: Any) -> None:
        changed = self._file.model_copy(update=changes)
        if changed != self._file:
            self._run.save(changed)
            self._file = changed

    def _check_data(self, data: CalibrationSet) -> None:
        section = DataSection(
            source=data.source, sha256=samples_sha256(data), samples=len(data.samples), is_random=data.is_random
        )
        check_data(self._run.path, self._file, section)
        self._save(data=section)

    # -- the parts ----------------------------------------------------------------------------------------------

    def _observations(self, data: CalibrationSet) -> tuple[Observations, tuple[str, ...], tuple[Finding, ...]]:
        """What the model showed on the samples, with the warnings and the findings about the samples."""
        settings = self._settings.data_settings
        search, held_out = data.split(self._settings.seed, settings.held_out_fraction, settings.max_search_samples)
        warnings = tuple(dict.fromkeys((*search.warnings, *held_out.warnings)))
        findings = tuple(dict.fromkeys((*search.findings, *held_out.findings)))
        known = Observations.load(self._run.observed_json)
        if known is not None:
            return known, warnings, findings
        self._warn(*warnings, *(finding.message for finding in findings))
        save_samples(self._workload.workspace, search, held_out)
        seen = observe(self._open_toolchain(), self._listener)
        observations = check_memory(seen, self._model, self._target)
        observations.save(self._run.observed_json)
        return observations, warnings, findings

    def _space(self, named: NamedSpace, observations: Observations) -> tuple[SearchSpace, tuple[Hazard, ...]]:
        roundings = self._workload.bank.roundings
        hazards = find_hazards(self._model, self.groups, observations.absmax, roundings)
        return make_space(self._model, self.groups, named, hazards, observations.absmax), hazards

    def _open_study(self, space: SearchSpace, named: NamedSpace) -> tuple[str, ...]:
        settings = self._settings
        self.record, repaired = open_study(
            space,
            name=self._file.study,
            metric=settings.metric,
            identity={"model": self._model.sha256, "layer_groups": self._file.fixed_settings.groups_sha256},
            journal=self._run.journal,
            url=settings.storage,
            sampler=settings.sampler,
            seed=settings.seed,
        )
        self._stack.callback(self.record.close)
        return repaired

    def _search(self, space: SearchSpace) -> None:
        record, settings = self.record, self._settings
        done = is_exhausted(record, space) or has_converged(record, settings)
        if record.spent < settings.budget and not done:
            if settings.sampler == "precision":
                self._guide(space)
            emulated = None if self._emulator is None else self._emulator.recall
            stop = Tuner(record, space, self._open_toolchain(), settings, self._listener, emulated=emulated).run()
            self._listener.stage(f"stopped: {stop.value}")
        baseline = record.baseline()
        if baseline is None:
            return
        rounds = rounds_needed(settings, baseline.latency.source)
        if missing(record, points_to_confirm(record, settings, rounds), rounds):
            confirm(record, self._open_toolchain(), settings, self._listener, rounds)

    def _guide(self, space: SearchSpace) -> None:
        """Give the sampler what is known before any build: one-group errors and the roofline's terms."""
        if not space.free or self._settings.budget <= len(space.seeds):
            return
        toolchain, metric = self._open_toolchain(), self._settings.metric
        path = self._workload.workspace.data_dir / SENSITIVITY_JSON
        sensitivity = find_sensitivity(space, toolchain, metric, path, self._listener)
        terms = toolchain.latency_terms()
        if isinstance(terms, Failure):
            self._warn(f"no latency can be predicted, so the search learns it from builds alone: {terms.message}")
        exact = toolchain.latency_source == "predicted"
        known = None if isinstance(terms, Failure) else terms
        prior = make_prior(space, sensitivity, known, exact=exact)
        keep_grounds(space, prior, self._workload.workspace.data_dir)
        if toolchain.error_source == "measured" and toolchain.emulation_holds:
            path = self._workload.workspace.data_dir / EMULATED_JSON
            self._emulator = PlanEmulator(space, toolchain, metric, path, self._listener, sensitivity.errors)
        self.record.guide(prior, self._settings.seed, self._emulator)
        self._listener.stage("searching")

    def _open_toolchain(self) -> Toolchain:
        """The toolchain, opened when it is first needed: a run that is finished already needs none."""
        if self._toolchain is None:
            opener = self._opener or self._open_by_target
            toolchain = self._stack.enter_context(opener(self._workload, self._settings))
            toolchain.listen(self._listener.building)
            section = TargetSection(
                name=self._settings.target if self._target is None else self._target.name,
                engine=toolchain.name,
                device=toolchain.device,
                latency_source=toolchain.latency_source,
                error_source=toolchain.error_source,
            )
            check_target(self._run.path, self._file, section)
            environment = describe_device(toolchain, self._target)
            self._warn(*environment.warnings)
            findings = [not_measured(toolchain.device)] if toolchain.latency_source == "predicted" else []
            self._warn(*(finding.message for finding in findings))
            findings += [finding for finding in self._file.findings if finding.code != TARGET_CODE]
            self._save(target=section, environment=environment, findings=tuple(findings))
            self._toolchain = toolchain
        return self._toolchain

    def _open_by_target(self, workload: Workload, settings: SearchSettings) -> Toolchain:
        choice = choose_target(settings.target)
        self._target = choice.target
        if choice.why:
            self._listener.stage(choice.why)
        return open_toolchain(settings.engine, choice.target, workload, settings)

    def _warn(self, *texts: str) -> None:
        """Tell each warning once."""
        for text in texts:
            if text not in self._told:
                self._told.add(text)
                self._listener.warning(text)


def front_of(run: RunDirectory, file: RunFile, record: StudyRecord) -> Front:
    """The front of a run, from its run.json and its record.

    Raises:
        RunError: nothing has been evaluated yet.
        PlanError: the chosen plan was never evaluated, or is not feasible.
    """
    target = file.target
    if target is None:
        raise RunError(f"{run.path} holds no evaluation yet", "let `mptune search` go on with it first")
    facts = Facts(
        run_dir=run.path,
        model_path=Path(file.model.path),
        model_sha256=file.model.sha256,
        target=target.name,
        engine=target.engine,
        device=target.device,
        warnings=file.warnings,
        findings=file.findings,
        data_dir=run.data,
    )
    settings = SearchSettings(confirm_rounds=file.search.confirm_rounds, latency=file.fixed_settings.latency.settings())
    choice = Choice(file.choice.max_error, file.choice.max_latency_ms, file.choice.plan)
    return build_front(record, facts, choice, settings, every=file.confirms is not None)


def storage_url(recorded: str | None) -> str | None:
    """The URL of a run's storage; from ``MPTUNE_STORAGE`` where run.json hides its password.

    Raises:
        RunError: the password is needed and not there.
    """
    if recorded is None or "***" not in recorded:
        return recorded
    url = os.environ.get(STORAGE_VARIABLE)
    if url is None or without_password(url) != recorded:
        raise RunError(
            f"the run is kept in {recorded}, and its password is not stored",
            f"set {STORAGE_VARIABLE} to the whole URL",
        )
    return url
