"""The workers that a search starts on the GPUs of its machine: ``mptune worker`` as processes of their own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

from mptune.data.metrics.table import script_of
from mptune.engines.base import Failure
from mptune.errors import RunError
from mptune.files import RESUME_HINT, writing
from mptune.graph.plan import PrecisionPlan
from mptune.processes.parent import absolute_sys_path, kill_tree
from mptune.rundir import RunDirectory
from mptune.settings import SearchSettings
from mptune.tuning.bench import Listener, announce, tell_outcome
from mptune.tuning.evaluation import Evaluation, Origin
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.record.storage import STORAGE_VARIABLE

PROGRAM = (sys.executable, "-m", "mptune")
_PARENT = "MPTUNE_SEARCH_PID"
_POLL_S, _END_TIMEOUT_S = 0.2, 30.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


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
    environment |= {_PARENT: str(os.getpid()), STORAGE_VARIABLE: url or ""}
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
            outcomes: list[tuple[PrecisionPlan, Origin, Evaluation | Failure]]
            outcomes = [(each.plan, each.origin, each) for each in record.evaluations()]
            for plan, origin, outcome in (*outcomes, *record.failures()):
                if plan not in reported:
                    reported.add(plan)
                    tell_outcome(listener, plan, origin, outcome, len(reported), settings.budget)
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
    parent = os.environ.pop(_PARENT, None)
    if parent is not None and sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if parent is not None and os.getppid() != int(parent):
        raise KeyboardInterrupt
