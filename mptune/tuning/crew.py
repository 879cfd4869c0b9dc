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
from pathlib import Path

from mptune.data.metrics.tasks import script_of
from mptune.errors import BaselineError, MptuneError, RunError
from mptune.files import RESUME_HINT, read_text, writing
from mptune.processes.parent import absolute_sys_path, kill_tree
from mptune.rundir import RunDirectory
from mptune.settings import SearchSettings
from mptune.tuning.listener import Listener
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.record.storage import STORAGE_VARIABLE
from mptune.tuning.steps.remeasure import announce

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
    """Run a worker on each GPU until all have ended. Their outcomes, and those of other hosts, come from the study.

    One that ends early is reported in a line, and the others go on.

    Args:
        url: of the study's database, which goes to them in their environment: a command line may be read by anyone.
        variables: the environment, before it was limited to one GPU.

    Raises:
        MptuneError: that of the first worker, where none came to its end.
    """
    environment = {**variables, "PYTHONPATH": os.pathsep.join(absolute_sys_path()), "PYTHONSAFEPATH": "1"}
    environment |= {_PARENT: str(os.getpid()), STORAGE_VARIABLE: url or ""}
    command = [*PROGRAM, "worker", str(run.path.resolve()), "--wait", "0s"]
    command += [f"--metric={name}" for name in (settings.metric, *settings.reported_metrics) if script_of(name)]
    command += [f"--plugin={path}" for path in settings.plugins]
    logs = {gpu: run.logs / f"worker-gpu{gpu}.log" for gpu in settings.gpus}
    told = dict.fromkeys(settings.gpus, 0)
    running: dict[int, subprocess.Popen[bytes]] = {}
    seen, failed = {evaluation.number for evaluation in record.evaluations()}, len(record.failures())
    errors: list[MptuneError] = []
    try:
        for gpu, log in logs.items():
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

            # Outcomes that are new in the study.
            before = done = failed + len(seen)
            for evaluation in record.evaluations():
                if evaluation.number in seen:
                    continue
                seen.add(evaluation.number)
                done += 1
                if evaluation.is_finite:
                    listener.evaluated(evaluation, done, settings.budget)
                else:
                    text = f"its {evaluation.metric} is {evaluation.error_value}"
                    listener.failed(evaluation.plan, evaluation.origin, text, done, settings.budget)
            for plan, origin, failure in record.failures()[failed:]:
                failed += 1
                done += 1
                listener.failed(plan, origin, failure, done, settings.budget)
            if done > before:
                announce(listener, record, settings)

            for gpu, log in logs.items():
                lines = [line for line in read_text(log).splitlines(keepends=True) if line.endswith("\n")]
                for line in lines[told[gpu] :]:
                    if line.startswith("warning: "):
                        listener.warning(f"GPU {gpu}: {line.removeprefix('warning: ').rstrip()}")
                told[gpu] = len(lines)
            for gpu in ended:
                process = running.pop(gpu)
                kill_tree(process)  # what it may have left
                if process.returncode:
                    errors.append(_error_of(gpu, process.returncode, logs[gpu]))
                    listener.warning(errors[-1].message)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_TIMEOUT_S)
            kill_tree(process)
    if len(errors) == len(logs):
        raise errors[0]


def _error_of(gpu: int, status: int, log: Path) -> MptuneError:
    """What a worker ended with: the last error in its log, if it wrote one."""
    lines = read_text(log).splitlines()
    places = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    if status < 0 or not places:
        text = f"the worker on GPU {gpu} died (exit status {status}); its log is {log}"
        return RunError(text, f"when that is repaired, {RESUME_HINT}")
    text, *rest = lines[places[-1] :]
    hint = next((line.removeprefix("hint: ") for line in rest if line.startswith("hint: ")), RESUME_HINT)
    kind = BaselineError if status == BaselineError.exit_code else RunError
    return kind(f"the worker on GPU {gpu} stopped: {text.removeprefix('error: ')}", hint)


def end_with_search() -> None:
    """Interrupt this process when the search that started it ends, however that ends; nothing where none did."""
    parent = os.environ.pop(_PARENT, None)
    if parent is None:
        return
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != int(parent):
        raise KeyboardInterrupt
