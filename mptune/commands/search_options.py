"""The options of ``mptune search``; some of them are those of ``confirm`` and ``worker``, too."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class Engine(str, Enum):
    """The toolchain families that ``--engine`` takes."""

    AUTO = "auto"
    TENSORRT = "tensorrt"
    TENSORRT_RTX = "tensorrt-rtx"
    ONNXRUNTIME = "onnxruntime"


BudgetOption = Annotated[
    int, typer.Option(metavar="N", help="Number of plans to evaluate, those of common rules included.")
]
DataOption = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="PATH",
        help="Calibration samples: .npz, .npy, or a folder. Default: random inputs. Repeatable, for samples"
        " of other sizes: the search uses the first (or the usual size of --shapes), the plan is tried on the others.",
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Run directory. Default: the model's name + .mptune, in the working directory."),
]
TargetOption = Annotated[
    str,
    typer.Option(
        metavar="auto|NAME|FILE", help="Device to tune for; auto is the GPU here. `mptune targets` lists the names."
    ),
]
SpaceOption = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE",
        help="Which groups may be FP16, and which plans to try first; `mptune spaces` lists the names.",
    ),
]
PrecisionsOption = Annotated[
    str,
    typer.Option(
        metavar="LIST",
        help="Precisions that groups may have: fp32,fp16 or fp32,bf16 or fp32,fp16,bf16. With all three, groups"
        " whose values leave FP16's range may be BF16.",
    ),
]
EngineOption = Annotated[Engine, typer.Option(help="What builds and runs the engines.")]
BatchOption = Annotated[int, typer.Option(metavar="N", help="Rows per sample if the batch is dynamic.")]
TimeoutOption = Annotated[
    str | None,
    typer.Option(
        metavar="8h", help="Start no new evaluation after this time: 8h, 90m, 30s or seconds. Default: no limit."
    ),
]
MaxDiskOption = Annotated[
    str | None,
    typer.Option(
        metavar="20GiB", help="Start no new evaluation once the run directory is this large. Default: no limit."
    ),
]
SearchStorageOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Optuna storage, to share the search. Default: $MPTUNE_STORAGE, else a file in the run directory.",
    ),
]
GpusOption = Annotated[
    str | None,
    typer.Option(metavar="0,1", help="Share the search among these GPUs, one worker process each. Default: one GPU."),
]
AllowMixedOption = Annotated[
    bool,
    typer.Option(
        "--allow-mixed", help="Accept GPUs or hosts that differ; each gets a front of its own. Default: refuse them."
    ),
]
WaitOption = Annotated[
    str,
    typer.Option(
        metavar="60s", help="How long to wait for a search that is not prepared yet, or whose budget is spent."
    ),
]
SeedOption = Annotated[int, typer.Option(metavar="N", help="Seed of the data split, the sampler and random inputs.")]
FreshOption = Annotated[bool, typer.Option("--fresh", help="Start a new search; the old run directory is moved aside.")]
ShapesOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME:MIN,OPT,MAX",
        help="Shapes that a TensorRT engine accepts, such as x:1x32,4x32,8x32; once for"
        " each dynamic input. Default:"
        " the shapes of the data.",
    ),
]
SamplerOption = Annotated[
    str,
    typer.Option(
        metavar="precision|tpe",
        help="What proposes plans: precision models error and latency group by group, tpe is Optuna's TPESampler.",
    ),
]
WorkspaceOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Limit on the scratch memory of a TensorRT kernel, such as 2GiB. Default:"
        " all memory of a GPU, a quarter"
        " of a Jetson's.",
    ),
]
SkipChecksOption = Annotated[
    bool,
    typer.Option("--skip-checks", help="Search even if a check finds the FP32 model, its data or its engine wrong."),
]
Tf32Option = Annotated[
    bool, typer.Option("--tf32", help="Allow TF32 in the FP32 groups of candidates. The reference never uses it.")
]

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
