"""One call of ``search`` on one run directory: every step in its order, each skipped where its result is recorded."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from mptune import run_json, rundir
from mptune.choice import Choice
from mptune.data.samples import CalibrationSet, size_findings
from mptune.engines.context import RunContext
from mptune.engines.toolchains import choose, reference, toolchain
from mptune.errors import RunError, SettingsError
from mptune.files import files_sha256, write_json
from mptune.finding import Finding
from mptune.findings.engine import TARGET_CODE, TOLD_FIRST
from mptune.graph import groups, interface
from mptune.graph.loading.model import Model
from mptune.processes.parent import Worker
from mptune.settings import Granularity, SearchSettings
from mptune.targets.target import Target
from mptune.tuning import baseline, copies, explanation, facts, measuring, remeasure, result, space, tuner, worker
from mptune.tuning.bench import Bench, Limits, Listener
from mptune.tuning.front import Front
from mptune.tuning.plan_limits import check_asked
from mptune.tuning.record import storage, study
from mptune.tuning.refining import keep_culprits
from mptune.tuning.stopping import finished


class Search:
    """A search on an opened, locked run directory.

    ``file``, the content of run.json, ``grouped``, the layer groups, and ``record``, the study, are there once ``run``
    has set them.
    """

    file: run_json.RunFile
    grouped: groups.GroupedModel
    _context: RunContext

    def __init__(
        self,
        run: rundir.RunDirectory,
        model: Model,
        settings: SearchSettings,
        listener: Listener,
        opener: measuring.OpenToolchain | None = None,
        engine_workers: reference.Workers | None = None,
        variables: dict[str, str] | None = None,
    ) -> None:
        """``engine_workers`` were started ahead; ``variables`` are the environment of the workers on other GPUs."""
        self._run, self._model, self._settings, self._listener = run, model, settings, listener
        self._opener, self._engine_workers, self._variables = opener, engine_workers, variables or {}
        self._limits = Limits(settings, run.path)
        self._stack = contextlib.ExitStack()
        self._engines = self._stack.enter_context(contextlib.ExitStack())
        self._target: Target | None = None
        self._toolchain: toolchain.Toolchain | None = None

    @property
    def worker(self) -> Worker | None:
        """The worker process of the engines, as long as this is open; None where none were opened."""
        return getattr(self._toolchain, "worker", None)

    def close(self) -> None:
        """End the worker processes of the engines and let go of the study. Idempotent."""
        self._stack.close()

    def run(self) -> Front:
        """Everything that is not recorded yet, then the front. See ``mptune.search`` for what is raised."""
        run, listener = self._run, self._listener
        named = space.load_space(self._settings.space)
        asked, url = self._begin(named)

        # What the model shows on the samples; errors stop also a run that skipped them before.
        samples, sizes, observations = self._observe(named)
        findings, settings = (*samples.findings, *observations.findings), self._settings
        if not settings.skip_checks:
            baseline.stop_at_errors(findings)
        self._warn(*samples.warnings, *(finding.message for finding in findings), *observations.warnings)
        self._warn(*interface.interface_lines(self.grouped, samples.samples))

        # What may be searched; parts of refined groups are groups of their own from here on.
        searched, hazards, free = facts.find_space(self._context, named, observations)
        self._context = replace(self._context, grouped=searched, ranges=observations.observed.ranges)
        if searched is not self.grouped:
            self.grouped = searched
            if self._opener is None and self._toolchain is not None:
                self._toolchain = self._toolchain.regrouped(self._context)
                self._engines.callback(self._toolchain.close)
            else:
                self._engines.close()
                self._toolchain = None
        self._save(nodes_apart=observations.nodes_apart)
        self._warn(*observations.kernels.warnings, *free.warnings)
        if not self._is_evaluated:
            self._open_toolchain()  # the identity of the study that is begun holds its target
        predicted = next((finding for finding in self.file.findings if finding.code == TARGET_CODE), None)
        about_model = facts.model_findings(self._context, self._target, observations, hazards, predicted)
        if not self._is_evaluated:  # once per run, and before it takes time
            self._warn(*(f.message for f in about_model if f.code in TOLD_FIRST))
        self._save(findings=(*findings, *sizes, *about_model))
        explanation.keep_grounds(free, None, run.data)
        record = measuring.open_record(run, self.file, free, settings, url, is_shared=rundir.has_workers(run))
        self.record = record
        self._stack.callback(record.close)
        self._save(study=record.name)

        # Proposals: each is built, run and timed, here or by a worker on each GPU.
        if finished(record, settings) is None:
            record.set_note(study.START_NOTE, self._limits.start_s)
            record.set_note(study.BUDGET_NOTE, settings.budget)
            tools = self._open_toolchain()
            if settings.gpus:
                tools.restart()  # the workers compare theirs with it, and take its GPU
                worker.run_workers(run, record, settings, url, self._variables, listener)
            else:
                bench = Bench(record, tools, settings, listener, self._limits)
                stop = tuner.make_tuner(bench, run.data, has_labels=settings.labels is not None).run()
                listener.stage(f"stopped: {stop.value}")
                if self._limits.reached() is None:
                    blamed = keep_culprits(tools, self._context, observations.observed, run.data, self.file.findings)
                    self._save(findings=(*self.file.findings, *blamed))

        # The front once more: in fresh processes, and on the samples that only it meets.
        fp32 = self._limits.baseline_of(record)
        rounds = remeasure.rounds_needed(settings, fp32.latency.source)
        if remeasure.to_measure(record, settings, rounds):
            bench = Bench(record, self._open_toolchain(), settings, listener, self._limits)
            remeasure.remeasure(bench, rounds)
        host = () if self.file.environment is None else self.file.environment.warnings
        about_space = (*observations.kernels.warnings, *free.warnings)
        warnings = dict.fromkeys((*samples.warnings, *observations.warnings, *host, *about_space))
        checked = baseline.checked_findings(self.file.findings, fp32, settings, "search")
        self._save(findings=checked, warnings=tuple(warnings))
        front = result.front_of(run, self.file, record, asked=asked, is_again=True)
        if front.chosen is not None and front.choice.replaced not in (None, self.file.choice.replaced):
            self._warn(f"{front.chosen.plan.fingerprint} replaces {front.choice.replaced}, which was chosen before")
        return front

    def _begin(self, named: space.NamedSpace) -> tuple[Choice, str | None]:
        """Group the model, and hold run.json against what is asked for, or write the first one.

        A run without an evaluation begins anew where something differs; any other is refused. Returns the choice to
        make of the front, and the URL of the study's database.
        """
        run, model, settings = self._run, self._model, self._settings
        recorded = earlier = run.load()
        if recorded is not None and recorded.confirms is not None:
            raise RunError(f"{run.path} is a confirmation", "resume it: `mptune confirm` with the run around it")
        self._is_evaluated = recorded is not None and study.has_evaluation(run, recorded, settings.storage)
        name = run.path.resolve().name.removesuffix(".mptune")
        url = storage.named_storage(settings.storage, is_journal=recorded is not None and recorded.storage is None)

        # ``auto`` fits the budget of the first search, here or in the study that is shared: a larger one resumes it.
        granularity: Granularity | None = named.file.granularity
        if granularity == "auto" and recorded is not None and self._is_evaluated:
            granularity = recorded.fixed_settings.granularity
        elif granularity == "auto":
            granularity = study.shared_granularity(name, None if settings.fresh else url, model.sha256, named.sha256)
        if granularity is None:
            granularity, every = groups.find_fitting_groups(model, settings.budget)
        else:
            every = groups.find_groups(model, granularity)
        self.grouped = groups.GroupedModel(model, every, io=settings.io)
        labels = settings.labels
        fixed = run_json.FixedSettings.from_settings(
            settings,
            space_sha256=named.sha256,
            granularity=granularity,
            groups_sha256=groups.groups_sha256(every),
            # One that cannot be read is reported where the labels are loaded.
            labels_sha256=files_sha256(labels) if labels is not None and labels.is_file() else None,
            plugins_sha256=run_json.plugins_sha256(settings.plugins),
        )
        section = run_json.ModelSection(path=str(model.path.resolve()), sha256=model.sha256)
        place = None if url is None else storage.check_opens(url)  # only what has opened is written down
        new = {"model": section, "fixed_settings": fixed, "search": run_json.SearchSection.from_settings(settings)}
        if recorded is not None and not self._is_same(recorded, **new, storage=place):
            recorded = None

        given = Choice.from_settings(settings)
        asked = given if recorded is None else recorded.choice.asked_again(given)
        self._settings = settings = asked.limit(settings)
        outputs = [output.name for output in model.outputs]
        check_asked(asked, (settings.metric, *settings.reported_metrics), outputs)
        is_earlier = earlier is not None and earlier.storage == place
        begun = earlier.study if earlier and is_earlier else study.study_name(name, is_new=settings.fresh)
        # With the limits that stand.
        search, choice = run_json.SearchSection.from_settings(settings), Choice.from_settings(settings)
        self.file = run_json.RunFile(
            model=section, fixed_settings=fixed, search=search, storage=place, study=begun, choice=choice
        )
        if recorded is not None:
            choice = asked if recorded.choice.chosen is None else recorded.choice  # till the end what it was
            now = {"search": self.file.search, "choice": choice, "model": section}
            self.file = recorded.model_copy(update=now)
        if self.file != recorded:
            run.save(self.file)
        return asked, url

    def _is_same(self, recorded: run_json.RunFile, **changes: Any) -> bool:
        """Whether this search goes on with what is recorded; another one is refused once a plan was evaluated."""
        run, now = self._run, recorded.model_copy(update=changes)
        try:
            run_json.check_same(run.path, recorded, now)
            storage.check_storage(run.path, recorded.storage, now.storage)
        except RunError:
            if self._is_evaluated:
                raise
            run.forget()
            return False
        return True

    def _observe(self, named: space.NamedSpace) -> tuple[CalibrationSet, tuple[Finding, ...], facts.Observations]:
        """The samples, which must be those that the run began with, and what the model shows on them, asked once.

        All that jobs need has a place from here on. The file of the observations is written last. Returns the search
        samples, the finding that all samples have one size, where others are possible, and the observations.
        """
        run, model, settings = self._run, self._model, self._settings
        options, data = settings.data_settings, measuring.load_data(settings, self.grouped)
        section = run_json.DataSection(
            source=data.source, sha256=data.sha256(), samples=len(data.samples), is_random=data.is_random
        )
        self._is_same(self.file, data=section)
        self._save(data=section)
        self._settings = settings = measuring.with_rollout(settings, model, len(data.samples))
        self._context = context = run.context(self.grouped, settings)
        copies.keep_inputs(run, settings.target, named.path, data.preprocessing)
        if settings.rollout is not None and settings.labels is not None:
            raise SettingsError("cannot be given where a state is fed back", "give only one of them", setting="labels")

        # Whole sequences are split where outputs are fed back.
        steps = 1 if settings.rollout is None else settings.rollout.steps
        parts = data.split(settings.seed, options.held_out_fraction, options.max_search_samples, steps)
        if (observations := facts.Observations.load(run.observed_json)) is None:
            self._warn(*parts[0].warnings, *(finding.message for finding in parts[0].findings))
            measuring.save_parts(context, parts, len(data.samples))
            tools = self._open_toolchain()
            copies.keep_model(run, self.grouped, context.bank)
            of_parts, skip = (parts[0].indices, parts[1].indices), settings.skip_checks
            observations = facts.observe(
                tools, self._listener, model, self._target, of_parts, settings.precisions, skip=skip
            )
            observations = facts.with_refined(observations, tools, self._listener, context)
            write_json(run.observed_json, observations.to_json())
        return parts[0], size_findings(data.samples, model.inputs, settings.shapes), observations

    def _open_toolchain(self) -> toolchain.Toolchain:
        """Open the toolchain where it is not open, and record what it measures on: a finished run needs none."""
        if self._toolchain is not None:
            return self._toolchain
        if self._target is None and self._opener is None:
            choice = choose.choose_target(self._settings.target)
            self._target = choice.target
            if choice.why:
                self._listener.stage(choice.why)
        ahead, self._engine_workers = self._engine_workers, None  # they end with the first toolchain
        here = measuring.Measuring.open(self._context, self._target, self._listener, self._opener, ahead)
        self._toolchain = here.toolchain
        self._engines.callback(here.toolchain.close)
        if self._is_evaluated:
            run_json.check_same(self._run.path, self.file, self.file.model_copy(update={"target": here.section}))
        findings = (f for f in self.file.findings if f.code != TARGET_CODE)
        self._warn(*here.environment.warnings)
        self._save(target=here.section, environment=here.environment, findings=(*here.findings, *findings))
        return here.toolchain

    def _warn(self, *texts: str) -> None:
        for text in texts:
            self._listener.warning(text)

    def _save(self, **changes: Any) -> None:
        """Write run.json with some sections changed, if that changes anything."""
        changed = self.file.model_copy(update=changes)
        if changed != self.file:
            self._run.save(changed)
            self.file = changed
