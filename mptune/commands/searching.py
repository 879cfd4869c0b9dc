"""``mptune search``, ``demo``, ``worker``, ``report`` and ``pick``: make a run, join it, read it, choose a plan."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import typer

from mptune.commands import common
from mptune.commands.options import SEARCH_OPTIONS, HelpAllOption, parse_duration, with_settings
from mptune.errors import BaselineError, EndedEarlyError, SettingsError
from mptune.settings import TensorRtSettings


@with_settings(*SEARCH_OPTIONS)
def search(
    context: typer.Context,
    model: common.ModelArgument,
    explain: bool = typer.Option(False, "--explain", help="Then show what breaks in FP16, and why groups stay FP32."),
    quiet: bool = typer.Option(False, "--quiet", help="Print the answer alone: no progress, no table."),
    open_: common.OpenOption = False,
    json_: common.JsonOption = False,
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
    if explain:
        from mptune.reporting.terminal.front import print_explanation

        print_explanation(front)
    if open_:
        common.open_page(front.run_dir)
    common.finish(front, json_, warned=listener.warned, quiet=quiet)


_DEMO_BUDGET = 20


def demo(
    context: typer.Context,
    out: Path = typer.Option(Path("demo.mptune"), metavar="DIR", help="Run directory."),
    open_: bool = typer.Option(True, "--open/--no-open", help=common.OPEN_HELP),
) -> None:
    """Search a small model that comes with mptune, in 20 plans, and open the report.

    It takes less than a minute, and needs no GPU: without one, latency is predicted for a Jetson Orin Nano, and the
    errors of FP16 are emulated.

    \b
    Example:
      mptune demo
      mptune demo --out /tmp/demo.mptune --no-open
    """
    from mptune.resources import demo_model

    model, data = demo_model()
    common.complain("the model is an attention network for 8x8 images of digits; the same search is")
    common.complain(
        f"  mptune search {shlex.quote(str(model))} --data {shlex.quote(str(data))} --budget {_DEMO_BUDGET}"
    )
    with common.resumable(context) as listener:
        from mptune.api import searching

        front = searching.search(model, data=data, out=out, budget=_DEMO_BUDGET, listener=listener)
    if open_:
        common.open_page(front.run_dir)
    common.finish(front, as_json=False, warned=listener.warned)


@with_settings("plugins")
def worker(
    context: typer.Context,
    run: common.RunArgument,
    storage: common.StorageOption = None,
    gpu: int | None = typer.Option(None, metavar="N", min=0, help="Use this GPU of the machine."),
    metric: common.RecordedMetricOption = None,
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
    explain: bool = typer.Option(
        False, "--explain", help="Show the error and gain of each group, and why groups stay FP32."
    ),
    layers: bool = typer.Option(
        False, "--layers", help="Show which engine layer of the chosen plan computes which nodes."
    ),
    every: bool = typer.Option(False, "--all", help="Show all plans of the front. Default: at most a dozen."),
    csv_: bool = typer.Option(False, "--csv", help="Print all plans of the front as CSV on stdout."),
    storage: common.StorageOption = None,
    open_: common.OpenOption = False,
    json_: common.JsonOption = False,
    **settings: Any,
) -> None:
    """Show the front of a search, from its run directory alone.

    \b
    Example:
      mptune report model.mptune
      mptune report model.mptune --explain
      mptune report model.mptune --layers
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
    plan: str | None = typer.Option(None, metavar="ID", help="Choose the plan with this id, as the table shows it."),
    storage: common.StorageOption = None,
    json_: common.JsonOption = False,
    **settings: Any,
) -> None:
    """Choose another plan and write chosen/ anew. Nothing is measured again.

    The run's own --limit and --ignore hold on, unless others are given.

    \b
    Example:
      mptune pick model.mptune --max-error 1e-3
      mptune pick model.mptune --plan 3f2a91c04b1d
    """
    is_limited = any(settings[name] is not None for name in _LIMITS)
    if common.at_most_one({"a limit": is_limited, "--knee": settings["knee"], "--plan": plan}) == 0:
        hint = "limits: --max-error, --max-latency-ms, --max-memory, --limit, --tolerance; or name the plan with --plan"
        raise SettingsError("give a limit or --knee", hint)
    from mptune.api import reading

    common.finish(reading.pick(run, plan=plan, storage=storage, **settings), json_)
