"""The workers of a search that another process prepared, and how a search starts some on the GPUs of its machine.

A worker opens the run's own copies, and writes to the study alone.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

from mptune.data.metrics.table import script_of
from mptune.engines.environment import Environment, engine_packages
from mptune.engines.toolchains.choose import choose_target
from mptune.errors import RunError
from mptune.files import RESUME_HINT, writing
from mptune.processes.child import end_with
from mptune.processes.parent import absolute_sys_path, kill_tree
from mptune.run_json import TARGET, differences
from mptune.rundir import RunDirectory
from mptune.settings import SearchSettings, Tolerance
from mptune.tuning import copies, facts, measuring
from mptune.tuning.bench import Bench, Limits, Listener, announce, tell_outcome
from mptune.tuning.record import storage, study
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.space import load_space
from mptune.tuning.stopping import finished
from mptune.tuning.tuner import make_tuner

PROGRAM = (sys.executable, "-m", "mptune")
_PARENT = "MPTUNE_SEARCH_PID"
_PREPARE = "start it where the model and the data are: `mptune search` with the same storage"
_POLL_S, _END_TIMEOUT_S = 0.2, 30.0


def work(
    run: RunDirectory,
    settings: SearchSettings,
    listener: Listener,
    opener: measuring.OpenToolchain | None = None,
    wait_s: float = 0.0,
) -> None:
    """Evaluate plans of the search of a run directory, or of its unpacked export, until it stops.

    Args:
        settings: metric, plugins and storage of this worker; all else is as the run has it.
        wait_s: wait up to this many seconds for a search that is not prepared yet, or whose budget is spent.

    Raises:
        RunError: the search is not prepared, the run is incomplete, or this host differs from that of the search.
    """
    for _ in _pauses(wait_s, listener):
        file = run.load()
        if file is not None and file.target is not None and run.observed_json.exists():
            break
    else:
        raise RunError(f"{run.path} is not prepared for workers yet", _PREPARE)
    observations = facts.Observations.load(run.observed_json)
    model_groups = copies.load_grouped(run, file)
    fixed, search = file.fixed_settings, file.search
    named = load_space(str(run.data / copies.SPACE_FILE))
    if observations is None or named.sha256 != fixed.space_sha256:
        raise RunError(f"the copies in {run.data} are not those that are searched", "copy the run directory again")
    bounds = ("max_error", "max_latency_ms", "max_memory_bytes")  # what is proposed, and when it ends, follows from all
    of_search = ("budget", "sampler", "timeout_s", "max_disk_bytes", "ignore", *bounds)
    settings = replace(
        settings,
        **{**file.measured_settings, **{name: getattr(search, name) for name in of_search}},
        tolerance=tuple(map(Tolerance.parse, search.tolerance)),
        limits=file.choice.limits,
        knee=file.choice.knee,
        target=fixed.target,
        engine=fixed.engine,
    )
    settings = measuring.with_rollout(settings, model_groups.model, 0 if file.data is None else file.data.samples)
    context = replace(run.context(model_groups, settings), ranges=observations.observed.ranges)

    with contextlib.ExitStack() as stack:
        # By the run's copy: a file of this name may be another one here.
        target = None if opener else choose_target(copies.target_copy(run, fixed.target)).target
        here = measuring.Measuring.open(context, target, listener, opener)
        stack.callback(here.toolchain.close)
        for text in here.environment.warnings:
            listener.warning(text)
        prepared = {TARGET: str(file.target), **_versions(file.environment)}
        own = {TARGET: str(here.section), **_versions(here.environment)}
        for name, values in differences(prepared, own, "there", "here").items():
            raise RunError(
                f"this host differs from the one that the search was prepared on: another {name}{values}",
                "install the same versions on the same kind of device, or search in a run directory of its own here",
            )
        _, _, space = facts.find_space(context, replace(named, name=fixed.space), observations)
        record = measuring.open_record(run, file, space, settings, settings.storage, is_shared=True)
        stack.callback(record.close)

        # Whoever prepares a search with a small budget, then searches with the real one, starts workers between.
        for _ in _pauses(wait_s, listener):
            budget = record.note(study.BUDGET_NOTE)
            if budget is not None and record.spent < budget:
                break
        else:
            if budget is None:
                raise RunError(f"the storage holds no search of {run.path} yet", _PREPARE)
            listener.stage(f"nothing to do: the search's budget of {budget} plans is spent")
            return
        settings, start_s = replace(settings, budget=int(budget)), record.note(study.START_NOTE)
        elapsed_s = 0.0 if start_s is None else time.time() - start_s  # the time limit is that of the search
        limits = Limits(settings, run.path, elapsed_s=elapsed_s)
        if finished(record, settings) is None:
            bench = Bench(record, here.toolchain, settings, listener, limits)
            stop = make_tuner(bench, run.data, has_labels=fixed.labels_sha256 is not None).run()
            listener.stage(f"stopped: {stop.value}")


def _pauses(wait_s: float, listener: Listener) -> Iterator[None]:
    """Once at first, then again and again for as long as a worker waits, which the listener is told."""
    until_s = time.monotonic() + wait_s
    yield
    if wait_s > 0:
        listener.stage(f"waiting up to {wait_s:.0f} s for the search to have work")
    while (left_s := until_s - time.monotonic()) > 0:
        time.sleep(min(_POLL_S, left_s))
        yield


def _versions(environment: Environment | None) -> dict[str, str]:
    """The versions that change figures, and the drivers of the GPUs."""
    if environment is None:
        return {}
    names = {"mptune", "cuda driver", *engine_packages()}
    drivers = ", ".join(sorted({gpu.driver for gpu in environment.gpus if gpu.driver}))
    return {"driver": drivers, **{name: version for name, version in environment.versions.items() if name in names}}


def run_workers(
    run: RunDirectory,
    record: StudyRecord,
    settings: SearchSettings,
    url: str | None,
    variables: Mapping[str, str],
    listener: Listener,
) -> None:
    """Run a worker on each GPU until all have ended. What they evaluate, as those of other hosts, the study has.

    One that ends early is reported in a line, and the others go on. All that they print is in ``logs/``.

    Args:
        url: of the study's database, which goes to them in their environment: a command line may be read by anyone.
        variables: the environment, before it was limited to one GPU.

    Raises:
        RunError: none of them came to its end.
    """
    environment = {**variables, "PYTHONPATH": os.pathsep.join(absolute_sys_path()), "PYTHONSAFEPATH": "1"}
    environment |= {_PARENT: str(os.getpid()), storage.STORAGE_VARIABLE: url or ""}
    command = [*PROGRAM, "worker", str(run.path.resolve()), "--wait", "0s"]
    command += [f"--metric={name}" for name in (settings.metric, *settings.reported_metrics) if script_of(name)]
    command += [f"--plugin={path}" for path in settings.plugins]
    running: dict[int, subprocess.Popen[bytes]] = {}
    reported = {each.plan for each in record.evaluations()} | {plan for plan, _, _ in record.failures()}
    errors: list[RunError] = []
    try:
        for gpu in settings.gpus:
            log = run.logs / f"worker-gpu{gpu}.log"
            with writing(log), log.open("wb") as output:
                running[gpu] = subprocess.Popen(
                    [*command, f"--gpu={gpu}"],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    start_new_session=True,  # Ctrl-C reaches this process, which ends them in order
                )
        while running:
            time.sleep(_POLL_S)
            ended = [gpu for gpu, process in running.items() if process.poll() is not None]
            before = len(reported)
            for evaluation in record.evaluations():
                if evaluation.plan not in reported:
                    reported.add(evaluation.plan)
                    origin = evaluation.origin
                    tell_outcome(listener, evaluation.plan, origin, evaluation, len(reported), settings.budget)
            for plan, origin, failure in record.failures():
                if plan not in reported:
                    reported.add(plan)
                    tell_outcome(listener, plan, origin, failure, len(reported), settings.budget)
            if len(reported) > before:
                announce(listener, record, settings)
            for gpu in ended:
                process = running.pop(gpu)
                kill_tree(process)  # what it may have left
                if process.returncode:
                    log = run.logs / f"worker-gpu{gpu}.log"
                    text = f"the worker on GPU {gpu} ended with exit status {process.returncode}: see {log}"
                    errors.append(RunError(text, f"when what it names is repaired, {RESUME_HINT}"))
                    listener.warning(text)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_TIMEOUT_S)
            kill_tree(process)
    if len(errors) == len(settings.gpus):
        raise errors[0]


def end_with_search() -> None:
    """Interrupt this process when the search that started it ends, however that ends; nothing where none did."""
    if (parent := os.environ.pop(_PARENT, None)) is not None:
        end_with(int(parent))
