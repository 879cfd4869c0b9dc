"""``mptune search``, ``report`` and ``pick``: make a run, read it, choose a plan."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from mptune.commands.common import (
    IgnoreOption,
    JsonOption,
    MaxErrorOption,
    MaxLatencyOption,
    MaxMemoryOption,
    ModelArgument,
    OpsetOption,
    RecordedMetricOption,
    RunArgument,
    StorageOption,
    ToleranceOption,
    at_most_one,
    complain,
    finish,
    guarded,
    interrupted,
    print_csv,
    print_json,
    resume_command,
    start_no_blas_threads,
)
from mptune.commands.metric_options import FeedbackOption, LabelsOption, LimitOption, MetricOption, StepsOption
from mptune.commands.option_values import memory_limit, parse_duration, parse_gpus, parse_size, tensorrt_settings
from mptune.errors import BaselineError, EndedEarlyError, SettingsError
from mptune.settings import (
    DataSettings,
    SearchSettings,
    ShapeRange,
    Tolerance,
    check_limits,
)

_SEARCH = SearchSettings()
_DATA = DataSettings()


class Engine(str, Enum):
    """The toolchain families that ``--engine`` takes."""

    AUTO = "auto"
    TENSORRT = "tensorrt"
    TENSORRT_RTX = "tensorrt-rtx"
    ONNXRUNTIME = "onnxruntime"


_ENGINE = Engine(_SEARCH.engine)

BudgetOption = Annotated[int, typer.Option(metavar="N", help="Plans to evaluate, seeds included.")]
DataOption = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="PATH",
        help="Calibration samples: .npz, a folder of .npz or .npy. Default: random inputs. Once for each size: the"
        " search is on the first, or on the usual size of --shapes; the chosen plan is tried on the others.",
    ),
]
OutOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Run directory. Default: the model's name + .mptune, here.")
]
TargetOption = Annotated[
    str, typer.Option(metavar="auto|NAME|FILE", help="The device to tune for; `mptune targets` lists the names.")
]
SpaceOption = Annotated[
    str, typer.Option(metavar="NAME|FILE", help="Which groups may be FP16; `mptune spaces` lists the names.")
]
_PRECISIONS = ",".join(_SEARCH.precisions)
PrecisionsOption = Annotated[
    str,
    typer.Option(
        metavar="LIST",
        help="What groups may be: fp32,fp16 or fp32,bf16 or fp32,fp16,bf16. With all three, groups whose values leave"
        " FP16's range may be BF16.",
    ),
]
EngineOption = Annotated[Engine, typer.Option(help="Toolchain that builds and runs the candidates.")]
BatchOption = Annotated[int, typer.Option(metavar="N", help="Rows per sample where the batch is dynamic.")]
TimeoutOption = Annotated[
    str | None, typer.Option(metavar="8h", help="Start no new evaluation after 8h, 90m, 30s or plain seconds.")
]
MaxDiskOption = Annotated[
    str | None, typer.Option(metavar="20GiB", help="Start no new evaluation once the run directory is this large.")
]
SearchStorageOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help="Optuna storage to share. Default: $MPTUNE_STORAGE, else a journal in the run directory."
    ),
]
GpusOption = Annotated[
    str | None, typer.Option(metavar="0,1", help="GPUs that share the search, a worker process each.")
]
AllowMixedOption = Annotated[
    bool, typer.Option("--allow-mixed", help="A device or versions that differ get a front of their own.")
]
WaitOption = Annotated[
    str, typer.Option(metavar="60s", help="Wait so long for a search that is not prepared, or whose budget is spent.")
]
SeedOption = Annotated[int, typer.Option(metavar="N", help="Seed of the data split, the sampler and random inputs.")]
FreshOption = Annotated[bool, typer.Option("--fresh", help="Start again; the old run directory is moved aside.")]
ShapesOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME:MIN,OPT,MAX",
        help="Shapes that a TensorRT engine takes, such as x:1x32,4x32,8x32; once for each dynamic input. Default: the"
        " data's.",
    ),
]
SamplerOption = Annotated[
    str,
    typer.Option(
        metavar="precision|tpe",
        help="What proposes plans: precision models error and latency by group, tpe is Optuna's TPESampler.",
    ),
]
WorkspaceOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Most scratch memory of a TensorRT kernel. Default: all of a GPU's, a quarter of a Jetson's.",
    ),
]
SkipChecksOption = Annotated[
    bool, typer.Option("--skip-checks", help="Search although a finding says that no plan repairs what is wrong.")
]
Tf32Option = Annotated[bool, typer.Option("--tf32", help="Allow TF32 in FP32 groups. The reference never uses it.")]

_PRECISION_OPTIONS = ("--precisions", "--opset")
SEARCH_PANELS = {
    "Model, data and target": ("--data", "--batch", "--shapes", "--target", "--engine", "--space", *_PRECISION_OPTIONS),
    "Error": ("--metric", "--labels", "--tolerance", "--ignore", "--feedback", "--steps"),
    "Choice among the plans": ("--max-error", "--max-latency-ms", "--max-memory", "--limit"),
    "Budget": ("--budget", "--timeout", "--max-disk", "--gpus"),
    "Run directory": ("--out", "--fresh", "--storage", "--json"),
    "Advanced": ("--sampler", "--seed", "--tf32", "--workspace", "--allow-mixed", "--skip-checks"),
}
"""Headings of `mptune search --help`, with their options."""


@guarded
def search(
    context: typer.Context,
    model: ModelArgument,
    budget: BudgetOption = _SEARCH.budget,
    data: DataOption = None,
    out: OutOption = None,
    target: TargetOption = _SEARCH.target,
    space: SpaceOption = _SEARCH.space,
    precisions: PrecisionsOption = _PRECISIONS,
    opset: OpsetOption = None,
    engine: EngineOption = _ENGINE,
    max_error: MaxErrorOption = None,
    max_latency_ms: MaxLatencyOption = None,
    max_memory: MaxMemoryOption = None,
    tolerance: ToleranceOption = None,
    ignore: IgnoreOption = None,
    metric: MetricOption = None,
    labels: LabelsOption = None,
    limit: LimitOption = None,
    feedback: FeedbackOption = None,
    steps: StepsOption = None,
    batch: BatchOption = _DATA.batch,
    timeout: TimeoutOption = None,
    max_disk: MaxDiskOption = None,
    storage: SearchStorageOption = None,
    gpus: GpusOption = None,
    allow_mixed: AllowMixedOption = False,
    seed: SeedOption = _SEARCH.seed,
    json_: JsonOption = False,
    fresh: FreshOption = False,
    sampler: SamplerOption = _SEARCH.sampler,
    tf32: Tf32Option = False,
    shapes: ShapesOption = None,
    workspace: WorkspaceOption = None,
    skip_checks: SkipChecksOption = False,
) -> None:
    """Search: evaluate plans, keep the front, write the chosen model.

    The same command resumes an interrupted search. Ctrl-C is safe at any time.

    \b
    Example:
      mptune search model.onnx --data samples.npz
      mptune search model.onnx --data samples.npz --max-error 1e-2 --budget 100
      mptune search model.onnx --target jetson-orin-nano-8gb --out nano.mptune
    """
    settings: dict[str, Any] = {
        "budget": budget,
        "out": out,
        "target": target,
        "space": space,
        "engine": engine.value,
        "max_error": max_error,
        "max_latency_ms": max_latency_ms,
        "max_memory_bytes": memory_limit(max_memory),
        "tolerance": tuple(map(Tolerance.parse, tolerance or ())),
        "ignore": tuple(ignore or ()),
        **({"limits": tuple(limit)} if limit else {}),
        "labels": labels,
        "feedback": tuple(feedback or ()),
        "steps": steps,
        "timeout_s": None if timeout is None else parse_duration(timeout),
        "max_disk_bytes": None if max_disk is None else parse_size(max_disk),
        "storage": storage,
        "gpus": parse_gpus(gpus),
        "allow_mixed": allow_mixed,
        "seed": seed,
        "fresh": fresh,
        "sampler": sampler,
        "tf32": tf32,
        "precisions": tuple(word.strip() for word in precisions.split(",")),
        "opset": opset,
        "skip_checks": skip_checks,
        "shapes": tuple(ShapeRange.parse(text) for text in shapes or ()),
        "tensorrt": tensorrt_settings(workspace),
    }
    # A value out of range is refused before heavy imports.
    SearchSettings(**settings, data_settings=DataSettings(batch=batch))
    if metric:
        settings["metric"] = metric
    if data:
        settings["data"] = data if len(data) > 1 else data[0]
    try:
        from mptune import searching
        from mptune.reporting.terminal.progress import TerminalListener

        with TerminalListener(max_error=max_error, max_latency_ms=max_latency_ms) as listener:
            front = searching.search(model, batch=batch, listener=listener, **settings)
    except KeyboardInterrupt:
        raise typer.Exit(interrupted(resume_command(context))) from None
    except (BaselineError, EndedEarlyError) as error:
        if json_ and (isinstance(error, EndedEarlyError) or error.findings):
            _print_stopped(model, out)
        raise
    finish(front, json_, said=listener.warned)


def _print_stopped(model: Path, out: Path | None) -> None:
    from mptune.run_path import run_path
    from mptune.rundir import read_run
    from mptune.tuning.fronts.stopped import stopped_document

    print_json(stopped_document(read_run(run_path(model, out))[1]))


@guarded
def worker(
    context: typer.Context,
    run: RunArgument,
    storage: StorageOption = None,
    gpu: Annotated[int | None, typer.Option(metavar="N", min=0, help="Use this GPU of the machine.")] = None,
    metric: RecordedMetricOption = None,
    allow_mixed: AllowMixedOption = False,
    wait: WaitOption = "60s",
) -> None:
    """Join a search, and evaluate plans of it until it stops.

    RUN is the run directory of the search, or its unpacked `mptune export` on another host, which needs a database:
    start the search with --storage. The search writes the result: run the same `mptune search` again in the end.

    \b
    Example:
      mptune worker model.mptune --gpu 1
      mptune worker model.mptune --storage postgresql+psycopg://user@host/name
    """
    wait_s = parse_duration(wait, "--wait")
    try:
        from mptune import joining
        from mptune.reporting.terminal.progress import TerminalListener

        with TerminalListener() as listener:
            joining.worker(
                run,
                storage=storage,
                gpu=gpu,
                metric=metric,
                allow_mixed=allow_mixed,
                wait_s=wait_s,
                listener=listener,
            )
    except KeyboardInterrupt:
        raise typer.Exit(interrupted(resume_command(context))) from None


@guarded
def report(
    run: RunArgument,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show what each group costs and gains, and why groups stay FP32.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="Show all plans of the front, not a dozen of them.")] = False,
    csv_: Annotated[bool, typer.Option("--csv", help="Print all plans of the front as CSV on stdout.")] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="First set damaged lines of the record aside, and keep the rest.")
    ] = False,
    tolerance: ToleranceOption = None,
    ignore: IgnoreOption = None,
    storage: StorageOption = None,
    json_: JsonOption = False,
) -> None:
    """Show the front of a search, from its run directory alone.

    \b
    Example:
      mptune report model.mptune
      mptune report model.mptune --explain
      mptune report model.mptune --csv > front.csv
      mptune report model.mptune --json | jq '.points[].latency.median_ms'
    """
    at_most_one({"--explain": explain, "--csv": csv_})
    at_most_one({"--json": json_, "--csv": csv_})
    start_no_blas_threads()
    from mptune import reading

    if repair:
        from mptune.rundir import repair_run

        copy = repair_run(run)
        complain("nothing in the journal is damaged" if copy is None else f"the journal as it was is {copy} now")
    front = reading.report(run, tolerance=tolerance, ignore=ignore, storage=storage)
    if csv_:
        from mptune.tuning.fronts.table import front_records

        print_csv(front_records(front))
    elif not explain:
        finish(front, json_, every=every)
    elif json_:
        print_json(front.explanation.to_json(front.metric))
    else:
        from mptune.reporting.terminal.explanation import print_explanation

        print_explanation(front)


@guarded
def pick(
    run: RunArgument,
    max_error: MaxErrorOption = None,
    max_latency_ms: MaxLatencyOption = None,
    max_memory: MaxMemoryOption = None,
    limit: LimitOption = None,
    tolerance: ToleranceOption = None,
    ignore: IgnoreOption = None,
    knee: Annotated[bool, typer.Option("--knee", help="Choose the knee of the front.")] = False,
    plan: Annotated[str | None, typer.Option(metavar="ID", help="Choose the plan with this id in the table.")] = None,
    storage: StorageOption = None,
    json_: JsonOption = False,
) -> None:
    """Choose another point of the front and write chosen/ anew. Nothing is measured again.

    The run's own --limit and --ignore hold on, unless others are given.

    \b
    Example:
      mptune pick model.mptune --max-error 1e-3
      mptune pick model.mptune --plan 3f2a91c04b1d
    """
    max_memory_bytes = memory_limit(max_memory)
    limits = (max_error, max_latency_ms, max_memory_bytes, tolerance or None, limit or None)
    asked = next((one for one in limits if one is not None), None)
    if at_most_one({"a limit": asked, "--knee": knee, "--plan": plan}) == 0:
        hint = "give --max-error, --max-latency-ms, --max-memory, --limit, --tolerance, --knee or --plan"
        raise SettingsError("nothing says which plan to pick", hint)
    check_limits(max_error, max_latency_ms, max_memory_bytes)
    for text in tolerance or ():
        Tolerance.parse(text)
    from mptune import api

    front = api.pick(
        run,
        max_error=max_error,
        max_latency_ms=max_latency_ms,
        max_memory_bytes=max_memory_bytes,
        limits=limit or None,
        tolerance=tolerance,
        ignore=ignore,
        knee=knee,
        plan=plan,
        storage=storage,
    )
    finish(front, json_)
