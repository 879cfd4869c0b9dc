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
from mptune.engines.toolchains import choose
from mptune.errors import TargetError
from mptune.findings.engine import TARGET_CODE
from mptune.graph.groups import GroupedModel
from mptune.run_json import HOME, RunFile, identity_of, plugins_sha256
from mptune.rundir import RunDirectory, open_run
from mptune.settings import SearchSettings
from mptune.targets.detect import detect_gpus
from mptune.targets.target import Target, load_target, other_mode
from mptune.tuning import baseline, copies, measuring, remeasure
from mptune.tuning.bench import Bench, Limits, Listener
from mptune.tuning.confirmation import Confirmation, read_confirmation, read_searched
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.space import SearchSpace, Seed
from mptune.tuning.tuner import Tuner

_ELSEWHERE = "run it on the device (`mptune doctor` says what is missing there); --target cpu measures on this CPU"


def confirm(
    run: RunDirectory,
    search: RunFile,
    settings: SearchSettings,
    listener: Listener,
    stack: contextlib.ExitStack,
    opener: measuring.OpenToolchain | None = None,
) -> tuple[Confirmation, RunDirectory, RunFile, StudyRecord, GroupedModel]:
    """Everything that is not recorded yet, then the comparison. See ``mptune.confirm`` for what is raised.

    Args:
        search: the content of the run's run.json.
        settings: what is asked for; all that the search measured with is added from ``search``.
        stack: holds the confirmation's run directory and study open.

    Returns:
        The comparison; the run directory of the confirmation, its run.json, study and layer groups.
    """
    began_s, settings = time.monotonic(), replace(settings, **search.measured_settings)
    searched = read_searched(run, search, settings.storage, settings.metric)
    grouped = copies.load_grouped(run, search)
    settings = measuring.with_rollout(settings, grouped.model, 0 if search.data is None else search.data.samples)
    target = _choose_target(run, search, settings.target, listener) if opener is None else None

    # What measures here: no process is started to find that out.
    here = measuring.Measuring.open(run.context(grouped, settings), target, listener, opener)
    here.toolchain.close()
    if here.section.latency_source != "measured":
        text = f"{here.section.device} cannot be measured here, and a confirmation is measured"
        raise TargetError(text, _ELSEWHERE)
    directory, file, asked = _begin(run, search, settings, here, target, stack)
    for text in (*file.warnings, *(finding.message for finding in file.findings if not finding.is_about_model)):
        listener.warning(text)

    seeds = tuple(Seed(each.origin, each.plan) for each in searched)
    space = SearchSpace(search.model.sha256, grouped.groups, tuple(group.id for group in grouped.groups), {}, seeds)
    record = measuring.open_record(directory, file, space, settings)
    stack.callback(record.close)
    done = {each.plan for each in record.evaluations()} | {plan for plan, _, _ in record.failures()}
    left, rounds = [seed for seed in seeds if seed.plan not in done], remeasure.rounds_needed(settings, "measured")
    if left or remeasure.to_measure(record, settings, rounds, all_plans=True):
        # Each plan is evaluated once, then measured in rounds of fresh processes, on the held-out samples.
        settings = replace(settings, budget=max(1, record.spent + len(left)))
        context = directory.context(grouped, settings)
        toolchain = measuring.Measuring.open(context, target, listener, opener).toolchain
        with contextlib.closing(toolchain):
            limits = Limits(settings, directory.path, elapsed_s=time.monotonic() - began_s)
            bench = Bench(record, toolchain, settings, listener, limits)
            listener.stage(f"measuring {len(seeds)} plans on {toolchain.device}")
            if left:
                Tuner(bench).run()
            fp32 = limits.baseline_of(record)
            remeasure.remeasure(bench, rounds, all_plans=True)
        findings = baseline.checked_findings(file.findings, fp32, settings, "confirm")
        file = file.model_copy(update={"findings": findings})
        directory.save(file)
    result = read_confirmation(directory, file, record, settings.storage, searched=searched, asked=asked)
    return result, directory, file, record, grouped


def _choose_target(run: RunDirectory, search: RunFile, asked: str, listener: Listener) -> Target:
    """The target that is named; else the search's own where it is here, else what is here."""
    if asked != "auto":
        return load_target(asked)
    gpus, named, searched = detect_gpus(), search.fixed_settings.target, search.target
    if named == "auto" and searched is not None:
        named = searched.name
    with contextlib.suppress(TargetError):  # it is a file of which the run has no copy
        profile = load_target(copies.target_copy(run, named))
        if profile.kind == "cpu" or any(choose.is_here(profile, gpu) for gpu in gpus):
            return profile
        named = profile.title
    if not gpus:
        choose.refuse_hidden_gpu("measures elsewhere")
        raise TargetError(f"no GPU was found, and the search was for {named}", _ELSEWHERE)
    choice = choose.choose_target("auto")
    listener.stage(choice.why)
    return choice.target


def _begin(
    run: RunDirectory,
    search: RunFile,
    settings: SearchSettings,
    here: measuring.Measuring,
    target: Target | None,
    stack: contextlib.ExitStack,
) -> tuple[RunDirectory, RunFile, Choice]:
    """Make or open the confirmation's own run directory; one of another device or search is moved aside.

    Returns it, its run.json, and the choice to make of its front.
    """
    section, environment, plugins = here.section, here.environment, settings.plugins
    place = {"target": section.name, "engine": settings.engine, "plugins_sha256": plugins_sha256(plugins)}
    named = {"metric": settings.metric, "plugins": tuple(map(str, plugins))}
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
            "warnings": (*_about_search(search, here), *environment.warnings),
            "findings": tuple(finding for finding in search.findings if finding.code != TARGET_CODE),
            "confirms": HOME,
        }
    )
    # A device, an engine and a Jetson's power mode each have a confirmation of their own.
    device = section.name if target is not None and target.kind != "cpu" else section.device
    mode = "" if environment.jetson is None else environment.jetson.mode.name
    name = re.sub(r"[^a-z0-9.]+", "-", f"{device} {section.engine} {mode}".lower()).strip("-.")
    path = run.confirmed / name
    directory = RunDirectory(path, confirms=True)
    is_other = identity_of(directory.load() or file) != identity_of(file)
    stack.enter_context(open_run(path, fresh=is_other))
    recorded, asked = directory.load(), file.choice
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
    directory.save(file)
    return directory, file, asked


def _about_search(search: RunFile, here: measuring.Measuring) -> Iterator[str]:
    """What the search measured or predicted that is not as it is here."""
    searched, before = search.target, search.environment
    if searched is not None and searched.latency_source == "measured" and before is not None:
        cure = "its choice is for its own mode: set that mode (sudo nvpmodel -m ID), or search in this one"
        yield from other_mode(before.jetson, here.environment.jetson, "the search measured", cure)
    if searched is not None and searched.latency_source == "predicted" and searched.name != here.section.name:
        yield (
            f"the search predicted {searched.name}, and this is {here.section.name}: its ranking was made for another"
            " device; `mptune search --target` with this one predicts it"
        )
