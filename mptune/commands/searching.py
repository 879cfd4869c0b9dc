"""``mptune search``, ``report`` and ``pick``: make a run, read it, choose a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mptune.commands.common import (
    JsonOption,
    ModelArgument,
    OpenOption,
    RecordedMetricOption,
    RunArgument,
    StorageOption,
    at_most_one,
    finish,
    open_page,
    print_csv,
    print_json,
    resumable,
)
from mptune.commands.options import (
    BatchOption,
    EngineOption,
    HelpAllOption,
    IgnoreOption,
    KneeOption,
    LimitOption,
    MaxDiskOption,
    MaxErrorOption,
    MaxLatencyOption,
    MaxMemoryOption,
    MetricOption,
    OpsetOption,
    PluginOption,
    TimeoutOption,
    ToleranceOption,
    option_of,
    parse_duration,
)
from mptune.errors import BaselineError, EndedEarlyError, SettingsError
from mptune.settings import DataSettings, SearchSettings, TensorRtSettings


def search(
    context: typer.Context,
    model: ModelArgument,
    data: Annotated[Path | None, option_of("data")] = None,
    batch: BatchOption = DataSettings.batch,
    shapes: Annotated[list[str] | None, option_of("shapes")] = None,
    target: Annotated[str, option_of("target")] = SearchSettings.target,
    engine: EngineOption = SearchSettings.engine,
    plugins: PluginOption = None,
    space: Annotated[str, option_of("space")] = SearchSettings.space,
    precisions: Annotated[str, option_of("precisions")] = ",".join(SearchSettings.precisions),
    opset: OpsetOption = None,
    metric: MetricOption = None,
    labels: Annotated[Path | None, option_of("labels")] = None,
    tolerance: ToleranceOption = None,
    ignore: IgnoreOption = None,
    feedback: Annotated[list[str] | None, option_of("feedback")] = None,
    steps: Annotated[int | None, option_of("steps")] = None,
    max_error: MaxErrorOption = None,
    max_latency_ms: MaxLatencyOption = None,
    max_memory_bytes: MaxMemoryOption = None,
    limits: LimitOption = None,
    knee: KneeOption = False,
    budget: Annotated[int, option_of("budget")] = SearchSettings.budget,
    timeout_s: TimeoutOption = None,
    max_disk_bytes: MaxDiskOption = None,
    gpus: Annotated[Any, option_of("gpus")] = None,
    out: Annotated[Path | None, option_of("out")] = None,
    fresh: Annotated[bool, option_of("fresh")] = False,
    storage: Annotated[str | None, option_of("storage")] = None,
    sampler: Annotated[str, option_of("sampler")] = SearchSettings.sampler,
    seed: Annotated[int, option_of("seed")] = SearchSettings.seed,
    tf32: Annotated[bool, option_of("tf32")] = False,
    workspace_mb: Annotated[int | None, option_of("workspace_mb")] = None,
    skip_checks: Annotated[bool, option_of("skip_checks")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Then show what breaks in FP16, and why groups stay FP32.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the answer alone: no progress, no table.")] = False,
    open_: OpenOption = False,
    json_: JsonOption = False,
    help_all: HelpAllOption = False,
) -> None:
    """Evaluate plans, show the trade-off, and write the chosen model.

    The same command resumes an interrupted search. Ctrl-C is safe at any time.

    \b
    Example:
      mptune search model.onnx --data samples.npz
      mptune search model.onnx --data samples.npz --max-error 1e-2 --budget 100
      mptune search model.onnx --target jetson-orin-nano-8gb --out nano.mptune
    """
    at_most_one({"--explain": explain, "--quiet": quiet, "--json": json_ and not quiet})
    try:
        with resumable(context, max_error, max_latency_ms, quiet=quiet) as listener:
            from mptune.api import searching

            front = searching.search(
                model,
                data=data,
                batch=batch,
                shapes=shapes,
                target=target,
                engine=engine,
                plugins=plugins,
                space=space,
                precisions=precisions,
                opset=opset,
                metric=metric,
                labels=labels,
                tolerance=tolerance,
                ignore=ignore,
                feedback=feedback or (),
                steps=steps,
                max_error=max_error,
                max_latency_ms=max_latency_ms,
                max_memory_bytes=max_memory_bytes,
                limits=limits or (),
                knee=knee,
                budget=budget,
                timeout_s=timeout_s,
                max_disk_bytes=max_disk_bytes,
                gpus=gpus or (),
                out=out,
                fresh=fresh,
                storage=storage,
                sampler=sampler,
                seed=seed,
                tf32=tf32,
                tensorrt=TensorRtSettings(workspace_mb=workspace_mb),
                skip_checks=skip_checks,
                listener=listener,
            )
    except (BaselineError, EndedEarlyError) as error:
        if json_ and (isinstance(error, EndedEarlyError) or error.findings):
            _print_stopped(model, out)
        raise
    if explain:
        from mptune.reporting.terminal.explanation import print_explanation

        print_explanation(front)
    if open_:
        open_page(front.run_dir)
    finish(front, json_, warned=listener.warned, quiet=quiet)


def _print_stopped(model: Path, out: Path | None) -> None:
    from mptune.api.arguments import run_path
    from mptune.rundir import read_run
    from mptune.tuning.fronts.stopped import stopped_document

    print_json(stopped_document(read_run(run_path(model, out))[1]))


def worker(
    context: typer.Context,
    run: RunArgument,
    storage: StorageOption = None,
    gpu: Annotated[int | None, typer.Option(metavar="N", min=0, help="Use this GPU of the machine.")] = None,
    metric: RecordedMetricOption = None,
    plugins: PluginOption = None,
    wait: Annotated[
        str,
        typer.Option(
            metavar="60s", help="How long to wait for a search that is not prepared yet, or whose budget is spent."
        ),
    ] = "60s",
) -> None:
    """Join a search, and evaluate its plans until it stops.

    RUN is the run directory of the search, or its unpacked `mptune export` on another host, which needs a database:
    start the search with --storage. The search writes the result: run the same `mptune search` again in the end.

    \b
    Example:
      mptune worker model.mptune --gpu 1
      mptune worker model.mptune --storage postgresql+psycopg://user@host/name
    """
    wait_s = parse_duration(wait)
    with resumable(context) as listener:
        from mptune.api import joining

        joining.worker(run, storage=storage, gpu=gpu, metric=metric, plugins=plugins, wait_s=wait_s, listener=listener)


def report(
    run: RunArgument,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the error and gain of each group, and why groups stay FP32.")
    ] = False,
    layers: Annotated[
        bool, typer.Option("--layers", help="Show which engine layer of the chosen plan computes which nodes.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Show all plans of the front. Default: at most a dozen.")
    ] = False,
    csv_: Annotated[bool, typer.Option("--csv", help="Print all plans of the front as CSV on stdout.")] = False,
    tolerance: ToleranceOption = None,
    ignore: IgnoreOption = None,
    storage: StorageOption = None,
    open_: OpenOption = False,
    json_: JsonOption = False,
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
    at_most_one({"--explain": explain, "--csv": csv_, "--layers": layers})
    at_most_one({"--json": json_, "--csv": csv_})
    from mptune.api import reading

    if layers:
        engine = reading.layers(run, storage=storage)
        if json_:
            print_json(engine.to_json())
        else:
            from mptune.reporting.terminal.listings import print_layers

            print_layers(engine)
        return
    front = reading.report(run, tolerance=tolerance, ignore=ignore, storage=storage)
    if open_:
        open_page(front.run_dir)
    if csv_:
        from mptune.tuning.front import front_records

        print_csv(front_records(front))
    elif not explain:
        finish(front, json_, every=every)
    elif json_:
        print_json(front.explanation.to_json(front.metric))
    else:
        from mptune.reporting.terminal.explanation import print_explanation

        print_explanation(front)


def pick(
    run: RunArgument,
    max_error: MaxErrorOption = None,
    max_latency_ms: MaxLatencyOption = None,
    max_memory_bytes: MaxMemoryOption = None,
    limits: LimitOption = None,
    tolerance: ToleranceOption = None,
    ignore: IgnoreOption = None,
    knee: KneeOption = False,
    plan: Annotated[
        str | None, typer.Option(metavar="ID", help="Choose the plan with this id, as the table shows it.")
    ] = None,
    storage: StorageOption = None,
    json_: JsonOption = False,
) -> None:
    """Choose another plan and write chosen/ anew. Nothing is measured again.

    The run's own --limit and --ignore hold on, unless others are given.

    \b
    Example:
      mptune pick model.mptune --max-error 1e-3
      mptune pick model.mptune --plan 3f2a91c04b1d
    """
    given = (max_error, max_latency_ms, max_memory_bytes, limits, tolerance)
    is_limited = any(limit is not None for limit in given)
    if at_most_one({"a limit": is_limited, "--knee": knee, "--plan": plan}) == 0:
        hint = "limits: --max-error, --max-latency-ms, --max-memory, --limit, --tolerance; or name the plan with --plan"
        raise SettingsError("give a limit or --knee", hint)
    from mptune.api import choosing

    front = choosing.pick(
        run,
        max_error=max_error,
        max_latency_ms=max_latency_ms,
        max_memory_bytes=max_memory_bytes,
        limits=limits,
        tolerance=tolerance,
        ignore=ignore,
        knee=knee,
        plan=plan,
        storage=storage,
    )
    finish(front, json_)
