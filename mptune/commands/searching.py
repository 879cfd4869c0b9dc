"""The commands of runs: ``mptune search``, ``demo``, ``worker``, ``report``, ``pick``, ``confirm`` and ``export``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import typer

from mptune.commands import common
from mptune.commands.common import flag, option
from mptune.commands.options import SEARCH_OPTIONS, HelpAllOption, parse_duration, with_settings
from mptune.errors import BaselineError, EndedEarlyError, SettingsError
from mptune.settings import TensorRtSettings


@with_settings(*SEARCH_OPTIONS)
def search(
    context: typer.Context,
    model: common.ModelArgument,
    explain: bool = flag("--explain", "Then show what breaks in FP16, why groups stay FP32, and where the time went."),
    quiet: bool = flag("--quiet", "Print the answer alone: no progress, no table."),
    open_: bool = common.OPEN,
    json_: bool = common.JSON,
    help_all: HelpAllOption = False,
    **settings: Any,
) -> None:
    """Evaluate plans, show the trade-off, and write the chosen model.

    The same command resumes an interrupted search. Ctrl-C is safe at any time.

    \b
    Example:
      mptune search model.onnx --data samples.npz
      mptune search model.onnx --data samples.npz --max-error 1e-2 --budget 100
      mptune search model.onnx --target jetson-orin-nano-8gb --out nano.mptune
    """
    common.at_most_one({"--explain": explain, "--quiet": quiet, "--json": json_ and not quiet})
    tensorrt = TensorRtSettings(workspace_mb=settings.pop("workspace_mb"))
    try:
        with common.resumable(context, settings["max_error"], settings["max_latency_ms"], quiet=quiet) as listener:
            from mptune.api import searching

            # Options have the names of the arguments: all of them are passed on as they are.
            front = searching.search(model, tensorrt=tensorrt, listener=listener, **settings)
    except (BaselineError, EndedEarlyError) as error:
        if json_ and (isinstance(error, EndedEarlyError) or error.findings):
            from mptune.api.arguments import run_path
            from mptune.rundir import read_run
            from mptune.tuning.result import stopped_document

            common.print_json(stopped_document(read_run(run_path(model, settings["out"]))[1]))
        raise
    common.finish(front, json_, explained=explain, opened=open_, quiet=quiet, warned=listener.warned)


def demo(
    context: typer.Context,
    out: Path = typer.Option(Path("demo.mptune"), "--out", "-o", metavar="DIR", help="Run directory."),
    open_: bool = typer.Option(True, "--open/--no-open", help=common.OPEN_HELP),
) -> None:
    """Search a small model that comes with mptune, in 20 plans, and open the report.

    The model takes noise out of images; with all of it in FP16 its outputs are NaN. No GPU is needed: without one,
    latency is predicted for a Jetson Orin Nano, and the errors of FP16 are emulated.

    \b
    Example:
      mptune demo
      mptune demo --out /tmp/demo.mptune --no-open
    """
    from mptune.resources import small_model

    model, data = small_model("denoiser")
    options = ["--data", str(data), "--max-error", "1e-5", "--budget", "20"]
    common.complain("the model takes noise out of the images of a 12-bit camera; the same search is")
    common.complain(f"  {shlex.join(['mptune', 'search', str(model), *options])}")
    with common.resumable(context) as listener:
        from mptune.api import searching

        front = searching.search(model, data=data, out=out, max_error=1e-5, budget=20, listener=listener)
    common.finish(front, as_json=False, opened=open_, warned=listener.warned)


@with_settings("plugins")
def worker(
    context: typer.Context,
    run: common.RunArgument,
    storage: str | None = common.STORAGE,
    gpu: int | None = typer.Option(None, metavar="N", min=0, help="Use this GPU of the machine."),
    metric: list[str] | None = common.RECORDED_METRIC,
    wait_s: Any = typer.Option(
        "60s",
        "--wait",
        metavar="60s",
        parser=parse_duration,
        help="How long to wait for a search that is not prepared yet, or whose budget is spent.",
    ),
    **settings: Any,
) -> None:
    """Join a search, and evaluate its plans until it stops.

    RUN is the run directory of the search, or its unpacked `mptune export` on another host, which needs a database:
    start the search with --storage. The search writes the result: run the same `mptune search` again in the end.

    \b
    Example:
      mptune worker model.mptune --gpu 1
      mptune worker model.mptune --storage postgresql+psycopg://user@host/name
    """
    with common.resumable(context) as listener:
        from mptune.api import deploying

        deploying.worker(run, storage=storage, gpu=gpu, metric=metric, wait_s=wait_s, listener=listener, **settings)


@with_settings("tolerance", "ignore")
def report(
    run: common.RunArgument,
    explain: bool = flag("--explain", "Show the error and gain of each group, and why groups stay FP32."),
    layers: bool = flag("--layers", "Show which engine layer of the chosen plan computes which nodes."),
    every: bool = flag("--all", "Show all plans of the front. Default: at most a dozen."),
    csv_: bool = flag("--csv", "Print all plans of the front as CSV on stdout."),
    storage: str | None = common.STORAGE,
    open_: bool = common.OPEN,
    json_: bool = common.JSON,
    **settings: Any,
) -> None:
    """Show the front of a search, from its run directory alone.

    \b
    Example:
      mptune report model.mptune --explain
      mptune report model.mptune --csv > front.csv
      mptune report model.mptune --json | jq '.points[].latency.median_ms'
    """
    common.at_most_one({"--explain": explain, "--csv": csv_, "--layers": layers})
    common.at_most_one({"--json": json_, "--csv": csv_})
    from mptune.api import reading

    if layers:
        engine = reading.layers(run, storage=storage)
        if json_:
            common.print_json(engine.to_json())
        else:
            from mptune.reporting.terminal.listings import print_layers

            print_layers(engine)
        return
    front = reading.report(run, storage=storage, **settings)
    if open_:
        common.open_page(front.run_dir)
    if csv_:
        from mptune.tuning.front import front_records

        common.print_csv(front_records(front))
    elif not explain:
        common.finish(front, json_, every=every)
    elif json_:
        common.print_json(front.explanation.to_json(front.metric))
    else:
        from mptune.reporting.terminal.front import print_explanation

        print_explanation(front)


_LIMITS = ("max_error", "max_latency_ms", "max_memory_bytes", "limits", "tolerance")


@with_settings(*_LIMITS, "ignore", "knee")
def pick(
    run: common.RunArgument,
    plan: str | None = option("ID", "Choose the plan with this id, as the table shows it."),
    storage: str | None = common.STORAGE,
    json_: bool = common.JSON,
    **settings: Any,
) -> None:
    """Choose another plan and rewrite chosen/. Nothing is measured again.

    The run's own --limit and --ignore still apply unless others are given.

    \b
    Example:
      mptune pick model.mptune --max-error 1e-3
      mptune pick model.mptune --plan 3f2a91c04b1d
    """
    if plan is None and not settings["knee"] and all(settings[name] is None for name in _LIMITS):
        hint = "limits: --max-error, --max-latency-ms, --max-memory, --limit, --tolerance; or name the plan with --plan"
        raise SettingsError("give a limit or --knee", hint)
    from mptune.api import reading

    common.finish(reading.pick(run, plan=plan, storage=storage, **settings), json_)


@with_settings("engine", "plugins", "tolerance", "ignore", "timeout_s", "max_disk_bytes")
def confirm(
    context: typer.Context,
    run: common.RunArgument,
    target: str = option(
        "auto|NAME|FILE", "Device to measure on; auto is the target of the search if it is here, else the GPU.", "auto"
    ),
    metric: list[str] | None = common.RECORDED_METRIC,
    storage: str | None = common.STORAGE,
    json_: bool = common.JSON,
    **settings: Any,
) -> None:
    """Measure the front of a search on this device.

    Reports whether the ranking of the search held. Needs only the run directory, of a search on any machine. Builds the
    plans of the front, and the first plans of the search, with what is installed here, measures latency and held-out
    error in fresh processes, and writes the confirmed front, its page and the chosen model and engine to
    RUN/confirmed/DEVICE. The same command resumes.

    \b
    Example:
      mptune confirm model.mptune
      mptune confirm model.mptune --target cpu --json | jq .agreement
      mptune pick model.mptune/confirmed/h200-onnxruntime --max-latency-ms 2.5
    """
    with common.resumable(context) as listener:
        from mptune.api import deploying
        from mptune.reporting.terminal.front import print_confirmation

        settings |= {"target": target, "metric": metric, "storage": storage, "listener": listener}
        confirmation = deploying.confirm(run, **settings)
    if json_:
        common.print_json(confirmation.to_json())
    else:
        print_confirmation(confirmation, warned=listener.warned)
    common.leave_unmet(confirmation.front, as_json=json_)


def export(
    run: common.RunArgument,
    out: Path | None = typer.Option(
        None,
        "--out",
        "-o",
        metavar="RUN.tar.gz",
        help="File to write, or folder with --for. Default: the run's name + .tar.gz here; with --for RUN/weak.",
    ),
    for_: str | None = typer.Option(
        None, "--for", metavar="TENSORRT", help="Write one plan for a TensorRT without strong typing: tensorrt-8."
    ),
    plan: str | None = option("ID", "With --for: the plan with this id. Default: the chosen one."),
    force: bool = flag("--force", "Overwrite the output."),
    storage: str | None = common.STORAGE,
) -> None:
    """Pack a run into one file to take to a device.

    Contains what `mptune confirm` needs: the record, the samples with their references, the model and its weights. No
    engines, no logs. With --for tensorrt-8 it writes a folder with one plan instead, for JetPack 5 and 6.0: the model
    in FP32, a script that builds it with trtexec and layer precisions, and README.txt.

    \b
    Example:
      mptune export model.mptune -o run.tar.gz
      mptune export model.mptune --for tensorrt-8 --out weak
      scp run.tar.gz device: && ssh device "tar xzf run.tar.gz && mptune confirm model.mptune"
    """
    from mptune.api import deploying

    path = deploying.export(run, out, for_=for_, plan=plan, force=force, storage=storage, warn=common.warn)
    common.print_path(path)
