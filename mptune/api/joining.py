"""``worker``, the call that joins a search."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from mptune.api.arguments import listening, recorded_metric, recorded_plugins
from mptune.data.metrics.accuracy import TaskMetric
from mptune.errors import TargetError
from mptune.files import full_disk_as_error
from mptune.rundir import RunDirectory, joined_run, read_search
from mptune.settings import SearchSettings
from mptune.targets.detect import detect_gpus, gpu_variables
from mptune.tuning.crew import end_with_search
from mptune.tuning.listener import Listener
from mptune.tuning.measuring import OpenToolchain
from mptune.tuning.record.storage import storage_url
from mptune.tuning.worker import work

WAIT_S = 60.0
"""So long a worker waits for a search that has no work for it yet."""

_POLL_S = 0.2


def worker(
    run: str | os.PathLike[str],
    *,
    storage: str | None = None,
    gpu: int | None = None,
    metric: str | TaskMetric | Sequence[str | TaskMetric] | None = None,
    plugins: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    wait_s: float = WAIT_S,
    progress: bool | None = None,
    listener: Listener | None = None,
    open_toolchain: OpenToolchain | None = None,
) -> None:
    """Join a search: evaluate plans of it until it stops. Any number of workers may, on several hosts with a database.

    The search must have been started. When the workers have ended, the call that started it confirms the front.

    A host with another device, engine or version is refused: its figures cannot be compared.

    Args:
        run: The run directory of the search, or its unpacked ``export`` on another host.
        storage: Optuna storage URL of the search. By default what the run names, or its journal.
        gpu: Use this GPU of those that CUDA shows, counted by their PCI addresses.
        metric: The search's metric, where it is a function or a script; several where reported metrics are scripts.
        plugins: The search's libraries with TensorRT plugins.
        wait_s: Wait up to so many seconds for a search that is not prepared yet, or whose budget is spent.
        progress: Show progress on stderr, as in ``search``.
        listener: Is called at each step.
        open_toolchain: Opens what evaluates plans, in place of the toolchain of the search's target and engine.

    Raises:
        RunError: It is no run directory, the search was not started, this host differs from the one that started it,
            or the storage does not answer.
        TargetError: The target or engine is not available here.
        KeyboardInterrupt: The worker was interrupted; its plan has been given back.
    """
    end_with_search()
    check_gpus("gpu", () if gpu is None else (gpu,), open_toolchain)
    with contextlib.ExitStack() as stack:
        listens = stack.enter_context(listening(progress, listener))
        wait_s = _wait_for_run(Path(run), wait_s, listens)
        directory, file = read_search(Path(run))
        named = recorded_metric((file.search.metric, *file.search.reported_metrics), metric, directory.path, "worker")
        loaded = recorded_plugins(file, plugins, directory.path, "worker")
        for context in (full_disk_as_error(directory.path), only_gpu(gpu), joined_run(directory)):
            stack.enter_context(context)
        # An exported run names no storage: its journal is a copy.
        url = storage if storage is not None else storage_url(file.storage)
        own = SearchSettings(metric=named[0], metric_function=named[1], plugins=loaded, storage=url)
        work(directory, own, listens, open_toolchain, wait_s)


def _wait_for_run(path: Path, wait_s: float, listener: Listener) -> float:
    """Wait until a run directory has its run.json; how many seconds of ``wait_s`` are left."""
    run_json, until_s = RunDirectory(path).run_json, time.monotonic() + wait_s
    if wait_s > 0 and not run_json.exists():
        listener.stage(f"waiting up to {wait_s:.0f} s for {run_json}")
    while not run_json.exists() and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    return max(0.0, until_s - time.monotonic())


def check_gpus(setting: str, wanted: Sequence[int], open_toolchain: OpenToolchain | None) -> None:
    """Refuse GPUs that are not here, unless the caller brings what measures."""
    if not wanted or open_toolchain is not None:
        return
    count = len(detect_gpus())
    if max(wanted) >= count:
        here = f"{count or 'no'} GPU{'' if count == 1 else 's'} found here"
        raise TargetError(f"names GPU {max(wanted)}: {here}", "leave it away, or give fewer", setting=setting)


@contextlib.contextmanager
def only_gpu(index: int | None) -> Iterator[None]:
    """Let this process and its children see one GPU alone meanwhile; None changes nothing."""
    wanted = {} if index is None else gpu_variables(index)
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
