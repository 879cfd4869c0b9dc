"""One call of ``confirm`` on one run: the front of a search, built and measured anew on the device that is here.

A confirmation is a run directory of its own, ``RUN/confirmed/DEVICE``, with a study of its own whose plans are the
front's and the seeds': nothing is proposed. The tuner evaluates each once, and rounds of fresh processes follow on the
held-out samples, as for the front of a measured search. What is done is recorded when it is done, so that an
interrupted confirmation goes on where it was.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mptune.choice import Choice
from mptune.engines.context import RunContext
from mptune.engines.environment import Environment
from mptune.engines.toolchains.choose import (
    TargetChoice,
    choose_target,
    is_here,
    open_toolchain,
    refuse_hidden_gpu,
)
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.errors import RunError, TargetError
from mptune.files import link_or_copy, writing
from mptune.graph.grouping.grouped import GroupedModel
from mptune.identity import identity_of, plugins_sha256
from mptune.run_json import RunFile, TargetSection
from mptune.rundir import HOME, RunDirectory, open_run, read_run
from mptune.settings import SearchSettings
from mptune.targets.detect import detect_gpus
from mptune.targets.findings import TARGET_CODE
from mptune.targets.target import Target, load_target, other_mode
from mptune.tuning.evaluation import ORIGIN_FP32, Evaluation
from mptune.tuning.listener import Listener
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.record.study import check_metrics, compare_metric, open_study
from mptune.tuning.runs.confirmation import Confirmation, compare, searched_plans
from mptune.tuning.runs.measuring_run import MeasuringRun, OpenToolchain
from mptune.tuning.runs.model_copy import group_as_searched, load_copy, target_copy
from mptune.tuning.runs.result import front_of, read_record
from mptune.tuning.runs.sample_files import refuse_damaged, sample_files
from mptune.tuning.sample_sets import recorded_rollout
from mptune.tuning.space import SearchSpace, Seed
from mptune.tuning.steps.limits import Limits
from mptune.tuning.steps.prepare import describe_device
from mptune.tuning.steps.remeasure import measure_again, missing, rounds_needed
from mptune.tuning.steps.tuner import Tuner

STUDY = "confirm"

_ELSEWHERE = "run it on the device (`mptune doctor` says what is missing there); --target cpu measures on this CPU"


class ConfirmRun(MeasuringRun):
    """Confirms a run that was read; its own run directory lies below that of the search."""

    def __init__(
        self,
        run: RunDirectory,
        file: RunFile,
        settings: SearchSettings,
        listener: Listener,
        opener: OpenToolchain | None = None,
    ) -> None:
        """``settings`` are what ``confirm`` is asked for; all that the search measured with is added from ``file``."""
        super().__init__(listener, opener)
        self._began_s = time.monotonic()
        self._run = run
        self._search = file
        self._settings = replace(settings, **file.measured_settings)
        self._metric = settings.metric

    def run(self) -> Confirmation:
        """Everything that is not recorded yet, then the comparison. See ``mptune.confirm`` for what is raised."""
        searched = read_searched(self._run, self._search, self._settings.storage, self._metric)
        self.grouped = group_as_searched(load_copy(self._run, self._search), self._search)
        if self._opener is None:
            self._settle(self._choice())
        section, environment = self._identify()
        self._begin(section, environment)
        seeds = tuple(Seed(e.origin, e.plan) for e in searched)
        groups = self.grouped.groups
        space = SearchSpace(self._search.model.sha256, groups, tuple(group.id for group in groups), {}, seeds)
        self._open_study(space)
        self._measure(space)
        search = (self._run, self._search)
        return read_confirmation(self.directory, self.file, self.record, search, searched, asked=self._asked)

    # -- before anything is measured ----------------------------------------------------------------------------

    def _choice(self) -> TargetChoice:
        """The target that is named; else the search's own where it is here, else what is here."""
        if self._settings.target != "auto":
            return TargetChoice(load_target(self._settings.target))
        gpus, named, searched = detect_gpus(), self._search.fixed_settings.target, self._search.target
        if named == "auto" and searched is not None:
            named = searched.name
        with contextlib.suppress(TargetError):  # It is a file of which the run has no copy.
            profile = load_target(target_copy(self._run, named))
            if profile.kind == "cpu" or any(is_here(profile, gpu) for gpu in gpus):
                return TargetChoice(profile)
            named = profile.title
        if gpus:
            return choose_target("auto")
        refuse_hidden_gpu("measures elsewhere")
        raise TargetError(f"no GPU was found, and the search was for {named}", _ELSEWHERE)

    def _identify(self) -> tuple[TargetSection, Environment]:
        """What measures here. Nothing is started to find that out."""
        run = self._run
        context = RunContext(self.grouped, self._recorded(1), run.weights, run.data, run.engines, run.logs)
        with contextlib.closing(self._open(context)) as toolchain:
            section = self._target_section(toolchain, self._settings.target)
            environment = describe_device(toolchain, self._target)
        if section.latency_source != "measured":
            raise TargetError(f"{section.device} cannot be measured here, and a confirmation is measured", _ELSEWHERE)
        return section, environment

    def _open(self, context: RunContext) -> Toolchain:
        if self._opener is not None:
            return self._opener(context)
        assert self._target is not None
        return open_toolchain(self._target, context)

    def _recorded(self, budget: int) -> SearchSettings:
        return recorded_rollout(replace(self._settings, budget=budget), self._search, self.grouped.model)

    def _begin(self, section: TargetSection, environment: Environment) -> None:
        """Make or open the confirmation's own run directory; one of another device or search is moved aside."""
        path = self._run.confirmed / directory_name(section, self._target, environment)
        file = self._fresh_file(section, environment)
        self.directory = RunDirectory(path, path / HOME)
        earlier = self.directory.load()
        is_other = earlier is not None and identity_of(earlier) != identity_of(file)
        self._stack.enter_context(open_run(path, fresh=is_other))
        recorded = self.directory.load()
        if recorded is None:
            self._asked, self.file = file.choice, file
        else:
            made, asked = recorded.choice, file.choice
            is_picked = made.search_limits is not None  # else it follows that of the search
            self._asked = made.asked_again(asked) if is_picked else asked.model_copy(update={"replaced": made.chosen})
            warnings = (*recorded.warnings, *_goes_on(recorded.environment, environment))
            self.file = recorded.model_copy(update={"warnings": tuple(dict.fromkeys(warnings))})
        about_data = (finding.message for finding in self.file.findings if not finding.is_about_model)
        self._warn(*self.file.warnings, *about_data)
        self.directory.save(self.file)

    def _fresh_file(self, section: TargetSection, environment: Environment) -> RunFile:
        search, plugins = self._search, self._settings.plugins
        place = {"target": section.name, "engine": self._settings.engine, "plugins_sha256": plugins_sha256(plugins)}
        named = {"metric": self._settings.metric, "plugins": tuple(map(str, plugins))}
        return RunFile(
            model=search.model,
            fixed_settings=search.fixed_settings.model_copy(update=place),
            search=search.search.model_copy(update=named),
            study=STUDY,
            data=search.data,
            target=section,
            environment=environment,
            nodes_apart=search.nodes_apart,
            choice=search.choice.again().model_copy(update={"search_limits": None, "replaced": None}),
            warnings=(*self._about_search(section, environment), *environment.warnings),
            findings=tuple(finding for finding in search.findings if finding.code != TARGET_CODE),
            confirms=HOME,
        )

    def _about_search(self, section: TargetSection, environment: Environment) -> Iterator[str]:
        searched, before = self._search.target, self._search.environment
        if searched is not None and searched.latency_source == "measured" and before is not None:
            cure = "what it chose holds for its own mode: set that one (sudo nvpmodel -m ID), or search in this one"
            yield from other_mode(before.jetson, environment.jetson, "the search measured", cure)
        if searched is not None and searched.latency_source == "predicted" and searched.name != section.name:
            yield (
                f"the search predicted {searched.name}, and this is {section.name}: its ranking was made for another "
                "device; `mptune search --target` with this one predicts it"
            )

    def _open_study(self, space: SearchSpace) -> None:
        self._hold(
            open_study(
                space,
                name=STUDY,
                metric=self._settings.metric,
                identity=identity_of(self.file),
                journal=self.directory.journal,
            )
        )
        check_metrics(self.record, [self._metric])

    # -- measuring ----------------------------------------------------------------------------------------------

    def _measure(self, space: SearchSpace) -> None:
        record = self.record
        done = {e.plan.fingerprint for e in record.evaluations()} | {p.fingerprint for p, _, _ in record.failures()}
        left = [seed for seed in space.seeds if seed.plan.fingerprint not in done]
        settings = self._recorded(max(1, record.spent + len(left)))
        rounds = rounds_needed(settings, "measured")
        if not left and not missing(record, self._sound(), rounds):
            return
        limits = Limits(settings, self.directory.path, elapsed_s=time.monotonic() - self._began_s)
        with (
            lent_samples(self._run, self.directory, self.grouped, settings) as context,
            contextlib.closing(self._open(context)) as toolchain,
        ):
            toolchain.listen(self._listener.building)
            self._listener.stage(f"measuring {len(space.seeds)} plans on {toolchain.device}")
            if left:
                Tuner(record, space, toolchain, settings, self._listener, limits=limits).run()
                self._check_begun(limits)
            failed: set[str] = set()
            for number in range(rounds):
                wanted = (p for p in self._sound() if p.plan.fingerprint not in failed)
                todo = [entry for entry in missing(record, wanted, rounds) if entry[0] == number]
                if todo and (limit := limits.reached()) is not None:
                    self._listener.stage(f"stopped confirming: {limit.value}; the same command goes on with it")
                    break
                if todo:
                    self._listener.stage(f"round {number + 1} of {rounds}: a fresh process, held-out samples")
                    failed |= measure_again(todo, record, toolchain, settings, self._listener, limits)
        self._check_engine(settings, "confirm")

    def _sound(self) -> list[Evaluation]:
        """What is worth measuring again, the baseline first and the rest by its latency."""
        sound = [e for e in self.record.evaluations() if e.is_finite]
        return sorted(sound, key=lambda e: (e.origin != ORIGIN_FP32, e.latency.median_ms))


def _goes_on(before: Environment | None, now: Environment) -> tuple[str, ...]:
    """The warning where a confirmation goes on in another power mode, whose name is the same or unknown."""
    cure = "latencies of both cannot be compared: set the mode that it began in (sudo nvpmodel -m ID)"
    return () if before is None else other_mode(before.jetson, now.jetson, "this confirmation began", cure)


def read_searched(
    run: RunDirectory,
    file: RunFile,
    storage: str | None = None,
    metric: str | None = None,
) -> tuple[Evaluation, ...]:
    """The plans of a search that are confirmed, as the search saw them; first arguments as of ``read_record``."""
    with contextlib.closing(read_record(run, file, storage)) as record:
        if metric is not None:
            compare_metric(record, file.search.metric, metric)
        return searched_plans(front_of(run, file, record), record.evaluations())


def read_confirmation(
    directory: RunDirectory,
    file: RunFile,
    record: StudyRecord,
    search: tuple[RunDirectory, RunFile],
    searched: Sequence[Evaluation],
    *,
    asked: Choice | None = None,
) -> Confirmation:
    """The comparison that a confirmation's record holds."""
    target = search[1].target
    if target is None:
        raise RunError(f"{search[0].path} holds no evaluation yet", "let `mptune search` go on with it first")
    settings = SearchSettings(**file.measured_settings)
    rounds = rounds_needed(settings, "measured")
    front = front_of(directory, file, record, asked=asked, is_again=True)
    return compare(searched, target, front, record, rounds, settings.latency)


def known_confirmation(
    directory: RunDirectory, file: RunFile, record: StudyRecord, storage: str | None = None
) -> Confirmation:
    """What a confirmation has found already; arguments as of ``read_confirmation``, the storage that of the search."""
    search = read_run(directory.path / str(file.confirms))
    return read_confirmation(directory, file, record, search, read_searched(*search, storage))


def directory_name(section: TargetSection, target: Target | None, environment: Environment) -> str:
    """What the directory of a confirmation is called: a device, an engine and a Jetson's power mode each have one."""
    named = target is not None and target.kind != "cpu"
    power_mode = "" if environment.jetson is None else environment.jetson.mode.name
    words = " ".join((section.name if named else section.device, section.engine, power_mode))
    return re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-.")


@contextlib.contextmanager
def lent_samples(
    run: RunDirectory, directory: RunDirectory, grouped: GroupedModel, settings: SearchSettings
) -> Iterator[RunContext]:
    """What the engines of a confirmation work on: samples and references are lent by the search.

    They lie in a folder of the confirmation, beside what the toolchain notes there of this device and power mode.
    """
    own = [directory.path.resolve() / name for name in ("data", "engines", "logs")]
    context = RunContext(grouped, settings, run.weights, *own)
    refuse_damaged(run.data)
    lent = [(path, context.data_dir / path.name) for path in sample_files(run.data)]
    try:
        with writing(directory.path):
            for folder in own:
                folder.mkdir(exist_ok=True)
            for source, place in lent:
                place.unlink(missing_ok=True)
                link_or_copy(str(source), str(place))
        yield context
    finally:
        for _, place in lent:
            with contextlib.suppress(OSError):
                place.unlink(missing_ok=True)
