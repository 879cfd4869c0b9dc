"""One call of ``confirm`` on one run: the front of a search, built and measured anew on the device that is here.

A confirmation is a run directory of its own, ``RUN/confirmed/DEVICE``, with a study of its own whose plans are the
front's and the seeds': nothing is proposed. Each is evaluated once, and rounds of fresh processes follow on the
held-out samples, as for the front of a measured search. What is done is recorded when it is done, so that an
interrupted confirmation goes on where it was.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import replace

from mptune._version import __version__
from mptune.choice import Choice
from mptune.engines.context import RunContext
from mptune.engines.toolchains import choose
from mptune.errors import TargetError
from mptune.identity import identity_of, plugins_sha256
from mptune.run_json import RunFile
from mptune.rundir import HOME, RunDirectory, open_run
from mptune.settings import SearchSettings
from mptune.targets.detect import detect_gpus
from mptune.targets.findings import TARGET_CODE
from mptune.targets.target import Target, load_target, other_mode
from mptune.tuning import copies, measuring, samples
from mptune.tuning.confirmation import Confirmation, read_confirmation, read_searched
from mptune.tuning.listener import Listener
from mptune.tuning.space import SearchSpace, Seed
from mptune.tuning.steps import limits, remeasure, tuner

_ELSEWHERE = "run it on the device (`mptune doctor` says what is missing there); --target cpu measures on this CPU"


class Confirm:
    """Confirms a run that was read; its own run directory lies below that of the search.

    ``directory``, ``file``, ``record`` and ``grouped`` are those of the confirmation, as of ``Search``.
    """

    file: RunFile

    def __init__(
        self,
        run: RunDirectory,
        file: RunFile,
        settings: SearchSettings,
        listener: Listener,
        opener: measuring.OpenToolchain | None = None,
    ) -> None:
        """``settings`` are what ``confirm`` is asked for; all that the search measured with is added from ``file``."""
        self._run, self._search, self._listener, self._opener = run, file, listener, opener
        self._settings = replace(settings, **file.measured_settings)
        self._began_s = time.monotonic()
        self._stack = contextlib.ExitStack()

    def close(self) -> None:
        """Let go of the study and of the run directory. Idempotent."""
        self._stack.close()

    def run(self) -> Confirmation:
        """Everything that is not recorded yet, then the comparison. See ``mptune.confirm`` for what is raised."""
        run, search, settings = self._run, self._search, self._settings
        searched = read_searched(run, search, settings.storage, settings.metric)
        self.grouped = copies.load_grouped(run, search)
        count = 0 if search.data is None else search.data.samples
        settings = samples.with_rollout(settings, self.grouped.model, count)
        target = self._choose_target() if self._opener is None else None

        # What measures here: no process is started to find that out.
        context = RunContext(self.grouped, settings, run.weights, run.data, run.engines, run.logs)
        here = measuring.Measuring.open(context, target, self._listener, self._opener)
        here.toolchain.close()
        if here.section.latency_source != "measured":
            text = f"{here.section.device} cannot be measured here, and a confirmation is measured"
            raise TargetError(text, _ELSEWHERE)
        asked = self._begin(here, target)

        groups, seeds = self.grouped.groups, tuple(Seed(each.origin, each.plan) for each in searched)
        space = SearchSpace(search.model.sha256, groups, tuple(group.id for group in groups), {}, seeds)
        self.record = record = measuring.open_record(self.directory, self.file, space, settings)
        self._stack.callback(record.close)
        done = {each.plan for each in record.evaluations()} | {plan for plan, _, _ in record.failures()}
        left, rounds = [seed for seed in seeds if seed.plan not in done], remeasure.rounds_needed(settings, "measured")
        if left or remeasure.to_measure(record, settings, rounds, all_plans=True):
            # Each plan is evaluated once, then measured in rounds of fresh processes, on the held-out samples.
            listener, path = self._listener, self.directory.path
            settings = replace(settings, budget=max(1, record.spent + len(left)))
            context = self.directory.context(self.grouped, settings)
            toolchain = measuring.Measuring.open(context, target, listener, self._opener).toolchain
            with contextlib.closing(toolchain):
                limit = limits.Limits(settings, path, elapsed_s=time.monotonic() - self._began_s)
                listener.stage(f"measuring {len(seeds)} plans on {toolchain.device}")
                if left:
                    tuner.Tuner(record, toolchain, settings, listener, limit).run()
                if (fp32 := record.baseline()) is None:
                    raise measuring.ended_early(limit, path)
                remeasure.remeasure(record, toolchain, settings, listener, rounds, limit, all_plans=True)
            findings = measuring.with_engine_findings(self.file.findings, fp32, settings, "confirm")
            self.file = self.file.model_copy(update={"findings": findings})
            self.directory.save(self.file)
        storage = settings.storage
        return read_confirmation(self.directory, self.file, record, storage, searched=searched, asked=asked)

    def _choose_target(self) -> Target:
        """The target that is named; else the search's own where it is here, else what is here."""
        if self._settings.target != "auto":
            return load_target(self._settings.target)
        gpus, named, searched = detect_gpus(), self._search.fixed_settings.target, self._search.target
        if named == "auto" and searched is not None:
            named = searched.name
        with contextlib.suppress(TargetError):  # it is a file of which the run has no copy
            profile = load_target(copies.target_copy(self._run, named))
            if profile.kind == "cpu" or any(choose.is_here(profile, gpu) for gpu in gpus):
                return profile
            named = profile.title
        if not gpus:
            choose.refuse_hidden_gpu("measures elsewhere")
            raise TargetError(f"no GPU was found, and the search was for {named}", _ELSEWHERE)
        choice = choose.choose_target("auto")
        self._listener.stage(choice.why)
        return choice.target

    def _begin(self, here: measuring.Measuring, target: Target | None) -> Choice:
        """Make or open the confirmation's own run directory; one of another device or search is moved aside.

        Returns the choice to make of its front.
        """
        section, environment, search = here.section, here.environment, self._search
        plugins = self._settings.plugins
        place = {"target": section.name, "engine": self._settings.engine, "plugins_sha256": plugins_sha256(plugins)}
        named = {"metric": self._settings.metric, "plugins": tuple(map(str, plugins))}
        file = search.model_copy(
            update={
                "mptune": __version__,
                "fixed_settings": search.fixed_settings.model_copy(update=place),
                "search": search.search.model_copy(update=named),
                "storage": None,
                "study": "confirm",
                "target": section,
                "environment": environment,
                "choice": search.choice.again().model_copy(update={"search_limits": None, "replaced": None}),
                "warnings": (*self._about_search(here), *environment.warnings),
                "findings": tuple(finding for finding in search.findings if finding.code != TARGET_CODE),
                "confirms": HOME,
            }
        )
        # A device, an engine and a Jetson's power mode each have a confirmation of their own.
        device = section.name if target is not None and target.kind != "cpu" else section.device
        mode = "" if environment.jetson is None else environment.jetson.mode.name
        name = re.sub(r"[^a-z0-9.]+", "-", f"{device} {section.engine} {mode}".lower()).strip("-.")
        path = self._run.confirmed / name
        self.directory = RunDirectory(path, path / HOME)
        is_other = identity_of(self.directory.load() or file) != identity_of(file)
        self._stack.enter_context(open_run(path, fresh=is_other))
        recorded, asked = self.directory.load(), file.choice
        if recorded is not None:
            if recorded.choice.search_limits is not None:  # it was picked; else it follows that of the search
                asked = recorded.choice.asked_again(asked)
            else:
                asked = asked.model_copy(update={"replaced": recorded.choice.chosen})
            # Modes of one name may differ, as users edit nvpmodel's file.
            cure = "latencies of both cannot be compared: set the mode that it began in (sudo nvpmodel -m ID)"
            before = None if recorded.environment is None else recorded.environment.jetson
            warnings = (*recorded.warnings, *other_mode(before, environment.jetson, "this confirmation began", cure))
            file = recorded.model_copy(update={"warnings": tuple(dict.fromkeys(warnings))})
        self.file = file
        for text in (*file.warnings, *(f.message for f in file.findings if not f.is_about_model)):
            self._listener.warning(text)
        self.directory.save(file)
        return asked

    def _about_search(self, here: measuring.Measuring) -> Iterator[str]:
        """What the search measured or predicted that is not as it is here."""
        searched, before = self._search.target, self._search.environment
        if searched is not None and searched.latency_source == "measured" and before is not None:
            cure = "what it chose holds for its own mode: set that one (sudo nvpmodel -m ID), or search in this one"
            yield from other_mode(before.jetson, here.environment.jetson, "the search measured", cure)
        if searched is not None and searched.latency_source == "predicted" and searched.name != here.section.name:
            yield (
                f"the search predicted {searched.name}, and this is {here.section.name}: its ranking was made for "
                "another device; `mptune search --target` with this one predicts it"
            )
