"""One call of ``search`` on one run directory: every step in its order, each skipped where its result is recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from mptune.choice import Choice
from mptune.data.images import PREPROCESS_JSON
from mptune.data.metrics.tasks import law_metric
from mptune.data.samples import CalibrationSet, size_findings
from mptune.engines.base import Failure, SampleSet
from mptune.engines.context import RunContext
from mptune.engines.toolchains.choose import choose_target, open_toolchain
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.engines.workers import Workers
from mptune.errors import RunError
from mptune.files import read_bytes, write_bytes, write_json, writing
from mptune.finding import Finding
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import RANGE_KIND, LayerGroup, find_fitting_groups, find_groups, groups_sha256
from mptune.graph.hazards.hazard import Hazard, hazard_findings
from mptune.graph.hazards.interface import interface_findings
from mptune.graph.loading.model import Model
from mptune.identity import check_data, check_same, check_target, identity_of, plugins_sha256, refuse_confirmation
from mptune.run_json import DataSection, FixedSettings, ModelSection, RunFile
from mptune.rundir import LateFaults, RunDirectory, has_workers
from mptune.settings import Granularity, SearchSettings
from mptune.targets.findings import (
    TARGET_CODE,
    already_mixed_findings,
    not_here_findings,
    not_measured,
    out_of_reach_findings,
    quantised_findings,
)
from mptune.tuning.front import Front
from mptune.tuning.fronts.searched_error import SearchedError
from mptune.tuning.listener import Listener
from mptune.tuning.reasons.group_findings import with_reasons
from mptune.tuning.reasons.reasons import keep_grounds
from mptune.tuning.record.storage import check_opens, check_storage, named_storage
from mptune.tuning.record.study import (
    BUDGET_NOTE,
    START_NOTE,
    check_metrics,
    open_study,
    settle_study,
    shared_granularity,
    study_name,
)
from mptune.tuning.runs.crew import Crew, StartWorker
from mptune.tuning.runs.measuring_run import MeasuringRun, OpenToolchain
from mptune.tuning.runs.model_copy import keep_model, keep_target
from mptune.tuning.runs.result import check_asked, front_of, has_evaluation
from mptune.tuning.runs.sample_files import damaged_file
from mptune.tuning.sample_sets import SampleSets, labels_sha256, load_data, rollout_of, split_data
from mptune.tuning.space import NamedSpace, SearchSpace, load_space
from mptune.tuning.steps.attempts import in_fresh_processes
from mptune.tuning.steps.baseline import stop_at_errors
from mptune.tuning.steps.emulated import PlanEmulator
from mptune.tuning.steps.guide import Guide
from mptune.tuning.steps.kernels import KERNELS_JSON, MissingKernels, keep_kernels
from mptune.tuning.steps.limits import Limits
from mptune.tuning.steps.prepare import (
    Observations,
    check_memory,
    describe_device,
    observe,
    observed_findings,
    search_space,
    split_groups,
)
from mptune.tuning.steps.remeasure import confirm, rounds_needed, to_measure
from mptune.tuning.steps.sensitivity import SENSITIVITY_JSON, OneGroupErrors
from mptune.tuning.steps.shared_errors import SharedErrors
from mptune.tuning.steps.tuner import Tuner, has_converged, is_exhausted

SPACE_FILE = "space.toml"
"""The search space, kept in the run's data directory for workers on other hosts."""


class SearchRun(MeasuringRun):
    """Runs a search on an opened, locked run directory."""

    _is_worker = False
    _model: Model

    def __init__(
        self,
        run: RunDirectory,
        model: Model | None,
        settings: SearchSettings,
        listener: Listener,
        opener: OpenToolchain | None = None,
        start_worker: StartWorker | None = None,
        workers: Workers | None = None,
    ) -> None:
        super().__init__(listener, opener)
        self._workers = workers
        self._start_worker = start_worker
        self.directory = run
        if model is not None:
            self._model = model
        self._settings = settings
        self._limits = Limits(settings, run.path)
        self._toolchain: Toolchain | None = None
        self._emulator: PlanEmulator | None = None
        self._url: str | None = None
        self._granularity: Granularity
        self._context: RunContext

    def run(self) -> Front:
        """Everything that is not recorded yet, then the front. See ``mptune.search`` for what is raised."""
        named = load_space(self._settings.space)
        self.grouped = GroupedModel(self._model, self._find_groups(named))
        self.file = self._begin(named)
        data = load_data(self._settings, self.grouped)
        self._keep(data, named)
        samples = split_data(data, self._settings)
        observations = self._observe(samples)
        one_size = size_findings(data.samples, self._model.inputs, self._settings.shapes)
        about_data = (*self._check_data(samples, observations), *one_size)
        hazards = self._split(observations)
        self._settle_study()
        space = search_space(self._context, named, hazards, observations, self._kernels)
        self._save(findings=(*about_data, *self._about_target(observations), *self._about_model(observations, hazards)))
        self._warn(*self._kernels.warnings, *space.warnings)
        keep_grounds(space, None, self._context.data_dir)
        self._open_study(space)
        self._tune()
        self._confirm()
        self._check_begun(self._limits)
        self._engines.close()
        self._check_engine(self._settings, "search")
        faults, reasons = LateFaults(self.directory.logs), self.file.findings
        with faults.tolerated("the reasons for groups in FP32"):
            reasons = with_reasons(self._context, reasons, hazards, self._settings.metric, self.record.baseline())
        host = () if self.environment is None else self.environment.warnings
        about_model = *self._kernels.warnings, *space.warnings
        warnings = (*samples.warnings, *observations.warnings, *host, *about_model)
        self._save(findings=reasons, warnings=tuple(dict.fromkeys(warnings)))
        front = self._front()
        return replace(front, warnings=(*front.warnings, *faults.warnings))

    def _front(self) -> Front:
        return front_of(self.directory, self.file, self.record, asked=self._asked, is_again=True)

    def _check_data(self, samples: SampleSets, observations: Observations) -> tuple[Finding, ...]:
        """What is wrong with the samples, or shows on them; stops at errors, also of a run that skipped them before."""
        observed = observed_findings(observations, self.grouped, samples.search.indices)
        findings = (*samples.findings, *observed)
        if not self._settings.skip_checks:
            stop_at_errors(findings)
        self._warn(*samples.warnings, *(finding.message for finding in findings), *observations.warnings)
        return findings

    def _about_target(self, observations: Observations) -> tuple[Finding, ...]:
        predicted = next((finding for finding in self.file.findings if finding.code == TARGET_CODE), None)
        if predicted is None:
            return ()
        tf32 = self._settings.tf32
        return not_here_findings(predicted, self.grouped, self._target, observations.shapes, tf32=tf32)

    def _about_model(self, observations: Observations, hazards: Sequence[Hazard]) -> tuple[Finding, ...]:
        rollout, shapes = self._settings.rollout, observations.shapes
        return (
            *self._kernels.findings(self.grouped),
            *already_mixed_findings(self.grouped, shapes, "search"),
            *quantised_findings(self.grouped, shapes, "search"),
            *interface_findings(self._model, "search", () if rollout is None else tuple(rollout.pairs)),
            *out_of_reach_findings(self.grouped, shapes, "search"),
            *hazard_findings(hazards, "search"),
        )

    def _find_groups(self, named: NamedSpace) -> tuple[LayerGroup, ...]:
        """The space's groups; ``auto`` fits the budget of the first search, so that a larger one resumes the run."""
        granularity: Granularity | None = named.file.granularity
        if granularity == "auto":
            recorded = self.directory.load()
            if recorded is not None and has_evaluation(self.directory, recorded, self._settings.storage):
                granularity = recorded.fixed_settings.granularity
            else:
                is_journal = recorded is not None and recorded.storage is None
                url = named_storage(self._settings.storage, is_journal=is_journal)
                shared = None if self._settings.fresh else url
                granularity = shared_granularity(self._name, shared, self._model.sha256, named.sha256)
        if granularity is None:
            self._granularity, groups = find_fitting_groups(self._model, self._settings.budget)
            return groups
        self._granularity = granularity
        return find_groups(self._model, granularity)

    def _begin(self, named: NamedSpace) -> RunFile:
        """Check run.json against what is asked for, or write the first one."""
        settings, model = self._settings, self._model
        fixed = FixedSettings.of(
            settings,
            space_sha256=named.sha256,
            granularity=self._granularity,
            groups_sha256=groups_sha256(self.grouped.groups),
            labels_sha256=labels_sha256(settings.labels),
            plugins_sha256=plugins_sha256(settings.plugins),
        )
        recorded = earlier = self.directory.load()
        place = self.directory.path
        refuse_confirmation(place, recorded)
        if recorded is not None:
            check = partial(check_same, place, recorded, model.sha256, fixed)
            recorded = recorded if self._holds(check, recorded) else None
        self._url = named_storage(settings.storage, is_journal=recorded is not None and recorded.storage is None)
        storage = None if self._url is None else check_opens(self._url)  # only what has opened is written down
        if recorded is not None and not self._holds(partial(check_storage, place, recorded.storage, storage), recorded):
            recorded = None
        given = Choice.of(settings)
        self._asked: Choice = given if recorded is None else recorded.choice.asked_again(given)
        self._settings = settings = self._asked.limit(settings)
        check_asked(self._asked, (settings.metric, *settings.reported_metrics), [o.name for o in model.outputs])
        begun = earlier.study if earlier is not None and earlier.storage == storage else self._name
        study = begun if storage is None else study_name(begun, is_new=settings.fresh)
        section = ModelSection(path=str(model.path.resolve()), sha256=model.sha256)
        file = RunFile.of(settings, section, fixed, storage, study)
        if recorded is not None:
            choice = self._asked if recorded.choice.chosen is None else recorded.choice  # till the end what it was
            file = recorded.model_copy(update={"search": file.search, "choice": choice, "model": file.model})
        if file != recorded:
            self.directory.save(file)
        return file

    @property
    def _name(self) -> str:
        return self.directory.path.resolve().name.removesuffix(".mptune")

    def _keep(self, data: CalibrationSet, named: NamedSpace) -> None:
        """Check and keep what the samples are, and the search space, which a worker may not find where it was."""
        path = self.directory.path
        section = DataSection(
            source=data.source, sha256=data.sha256(), samples=len(data.samples), is_random=data.is_random
        )
        self._holds(lambda: check_data(path, self.file, section), self.file)
        self._save(data=section)
        self._settings = rollout_of(self._settings, self._model, len(data.samples))
        self._context = self._make_context()
        place, content = self.directory.data / SPACE_FILE, read_bytes(named.path)
        if not place.exists() or read_bytes(place) != content:
            write_bytes(place, [content])
        keep_target(self.directory, self._settings.target)
        if data.preprocessing is not None:
            write_json(self.directory.data / PREPROCESS_JSON, dict(data.preprocessing))

    def _holds(self, check: Callable[[], None], recorded: RunFile) -> bool:
        """Whether what is asked for is what the run was made with; a run without an evaluation begins anew if not."""
        try:
            check()
        except RunError:
            if has_evaluation(self.directory, recorded, self._settings.storage):
                raise
            self.directory.forget()
            return False
        return True

    def _make_context(self) -> RunContext:
        return self.directory.context(self.grouped, self._settings)

    def _observe(self, samples: SampleSets) -> Observations:
        """What the model shows on the samples, looked at once; its file is written last, when the data are prepared."""
        context, skip, precisions = self._context, self._settings.skip_checks, self._settings.precisions
        kept = Observations.load(self.directory.observed_json)
        if kept is not None:
            lost = damaged_file(context.data_dir)
            if lost is None:
                return kept
            self._warn(f"{lost} is missing or damaged: the data are prepared again")
            with writing(self.directory.observed_json):
                self.directory.observed_json.unlink()
        self._warn(*samples.warnings, *(finding.message for finding in samples.findings))
        samples.save(context)
        toolchain = self._open_toolchain()

        def ask() -> None:
            keep_kernels(toolchain, precisions, context.data_dir)
            keep_model(self.directory, self.grouped, context.bank)

        indices: dict[SampleSet, tuple[int, ...]] = {
            "search": samples.search.indices,
            "held_out": samples.held_out.indices,
        }
        seen = observe(toolchain, self._listener, self._model, indices, skip=skip, meanwhile=ask)
        observations = check_memory(seen, self._model, self._target, measured=toolchain.latency_source == "measured")
        observations.save(self.directory.observed_json)
        return observations

    def _split(self, observations: Observations) -> tuple[Hazard, ...]:
        """Set nodes apart whose values leave FP16's range; the hazards of the groups as they are then."""
        grouped, hazards = split_groups(self._context, observations, self._kernels)
        if grouped is not self.grouped:
            self.grouped = grouped
            self._engines.close()  # its toolchain is of the groups before
            self._toolchain = None
            self._context = self._make_context()
        apart = [group for group in grouped.groups if group.kind == RANGE_KIND]
        self._save(nodes_apart=tuple(name for group in apart for name in group.nodes))
        return hazards

    def _settle_study(self) -> None:
        """Name the study, by an identity that is complete now."""
        if self._url is not None and not has_evaluation(self.directory, self.file, self._settings.storage):
            # The study of runs with this run's name and identity in the database is shared, or begun there.
            self._open_toolchain()
            self._save(study=settle_study(self.file.study, identity_of(self.file), self._url))

    @property
    def _kernels(self) -> MissingKernels:
        return MissingKernels.load(self._context.data_dir / KERNELS_JSON)

    def _open_study(self, space: SearchSpace) -> None:
        settings = self._settings
        self._hold(
            open_study(
                space,
                name=self.file.study,
                metric=settings.metric,
                identity=identity_of(self.file),
                journal=self.directory.journal,
                url=self._url,
                sampler=settings.sampler,
                seed=settings.seed,
                is_shared=self._is_worker or has_workers(self.directory),
            )
        )
        check_metrics(self.record, (settings.metric, *settings.reported_metrics))

    def _confirm(self) -> None:
        """Measure what is missing of the confirmed front."""
        record, settings = self.record, self._settings
        if (baseline := record.baseline()) is None:
            return
        rounds = rounds_needed(settings, baseline.latency.source)
        if to_measure(record, settings, rounds):
            confirm(record, self._open_toolchain(), settings, self._listener, rounds, self._limits)

    def _tune(self) -> None:
        """Evaluate plans until the search stops, here or in a worker on each GPU."""
        record, space, settings = self.record, self.record.space, self._settings
        if record.spent >= settings.budget or is_exhausted(record, space) or has_converged(record, settings):
            return
        if not self._is_worker:
            record.set_note(START_NOTE, time.time() - self._limits.elapsed_s)
            record.set_note(BUDGET_NOTE, settings.budget)
        toolchain = self._open_toolchain()
        if self._start_worker is not None:
            toolchain.restart()  # The workers check theirs against it, and take its GPU.
            Crew(self._start_worker, settings.gpus, record, settings, self._listener).run()
            return
        guide = self._guide(space) if settings.sampler == "precision" else None
        stop = Tuner(
            record,
            space,
            toolchain,
            settings,
            self._listener,
            emulated=None if self._emulator is None else self._emulator.recall,
            limits=self._limits,
            before_proposal=None if guide is None else guide.before_proposal,
            seeds_first=None if guide is None else guide.seeds_first,
        ).run()
        self._listener.stage(f"stopped: {stop.value}")

    def _guide(self, space: SearchSpace) -> Guide | None:
        """What gives the sampler one-group errors and the roofline's terms; None where it proposes nothing."""
        if not space.free or self._settings.budget <= len(space.seeds):
            return None
        toolchain, metric = self._open_toolchain(), self._settings.metric
        law = law_metric(
            metric, self._settings.metric_function, has_labels=self.file.fixed_settings.labels_sha256 is not None
        )
        path = self._context.data_dir / SENSITIVITY_JSON
        terms = in_fresh_processes(toolchain.latency_terms, toolchain, self._listener, "predicting latencies")
        if isinstance(terms, Failure):
            self._warn(f"no latency can be predicted, so the search learns it from builds alone: {terms.message}")
        latency_terms = None if isinstance(terms, Failure) else terms
        searched, limits = SearchedError.of_settings(self._settings, law), self._limits
        shared = SharedErrors(self.record, searched.kept_key)
        errors = OneGroupErrors(space, toolchain, law, path, self._listener, shared, searched=searched, limits=limits)
        if toolchain.error_source == "measured" and toolchain.emulation_holds:
            self._emulator = PlanEmulator(space, toolchain, law, self._listener, limits=limits, searched=searched)
        guide = Guide(
            self.record,
            space,
            toolchain,
            self._settings,
            self._listener,
            errors,
            latency_terms,
            self._emulator,
            searched,
        )
        keep_grounds(space, guide.prior, self._context.data_dir, latency_terms)
        return guide

    def _open_toolchain(self) -> Toolchain:
        """The toolchain, opened when it is first needed: a run that is finished already needs none."""
        if self._toolchain is None:
            opener = self._opener or self._open_by_target
            toolchain = opener(self._context)
            self._engines.callback(toolchain.close)
            toolchain.listen(self._listener.building)
            section = self._target_section(toolchain, self._settings.target)
            if not self._is_worker and has_evaluation(self.directory, self.file, self._settings.storage):
                check_target(self.directory.path, self.file, section)
            environment = describe_device(toolchain, self._target)
            self._warn(*environment.warnings)
            findings = [not_measured(toolchain.device)] if toolchain.latency_source == "predicted" else []
            self._warn(*(finding.message for finding in findings))
            findings += [finding for finding in self.file.findings if finding.code != TARGET_CODE]
            self._save(target=section, environment=environment, findings=tuple(findings))
            self._toolchain = toolchain
        return self._toolchain

    def _open_by_target(self, context: RunContext) -> Toolchain:
        target = self._target or self._settle(choose_target(context.settings.target))
        workers, self._workers = self._workers, None  # they end with the toolchain
        return open_toolchain(target, context, workers)
