"""One call of ``search`` from its settings to the files of the finished run."""

from __future__ import annotations

import contextlib
from pathlib import Path

from mptune.api.arguments import ModelLike, check_batch, check_shapes, listening, loaded_model, placed_model
from mptune.api.joining import only_gpu, worker_starter
from mptune.files import full_disk_as_error
from mptune.reporting.run_files import write_run_files
from mptune.rundir import open_run
from mptune.settings import SearchSettings
from mptune.targets.target import load_target
from mptune.tuning.front import Front
from mptune.tuning.fronts.limits import check_tolerances
from mptune.tuning.fronts.stopped import findings_kept
from mptune.tuning.listener import Listener
from mptune.tuning.runs.measuring_run import OpenToolchain
from mptune.tuning.runs.search_run import SearchRun
from mptune.tuning.sampler.stock import check_sampler


def run_search(
    model: ModelLike,
    path: Path,
    settings: SearchSettings,
    *,
    listener: Listener | None,
    progress: bool | None,
    open_toolchain: OpenToolchain | None,
) -> Front:
    """Carry out a search, or read it where it is finished, and write what its run shows."""
    check_sampler(settings.sampler)
    if settings.target != "auto":
        load_target(settings.target)
    starter = worker_starter(settings, open_toolchain)
    with contextlib.ExitStack() as stack:
        loaded = stack.enter_context(loaded_model(model, settings.opset))
        outputs = [output.name for output in loaded.outputs]
        check_tolerances(settings.tolerance, settings.ignore, settings.metric, outputs)
        check_shapes(settings.shapes, loaded.inputs)
        check_batch(settings.data_settings.batch, loaded.inputs)
        listens = stack.enter_context(listening(progress, listener, settings.max_error, settings.max_latency_ms))
        stack.enter_context(full_disk_as_error(path))
        stack.enter_context(only_gpu(settings.gpus[0] if settings.gpus else None))
        run = stack.enter_context(open_run(path, fresh=settings.fresh))
        placed = placed_model(loaded, model, run)
        session = SearchRun(run, placed, settings, listens, open_toolchain, starter and starter(run))
        stack.enter_context(contextlib.closing(session))
        stack.enter_context(findings_kept(run))
        front = session.run()
        write_run_files(run, front, session.record, session.grouped, session.environment)
    return front
