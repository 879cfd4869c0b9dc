"""``mptune inspect``, ``apply``, ``compare`` and ``check``: models without a search and a run directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mptune.commands import common
from mptune.commands.common import JSON, ModelArgument, argument, flag, option, print_json
from mptune.commands.options import with_settings
from mptune.errors import EXIT_NOT_MET, EXIT_STOPPED, SettingsError

if TYPE_CHECKING:
    from mptune.diagnosis.comparing import Comparison


@with_settings("batch")
def inspect(
    model: ModelArgument,
    data: Path | None = option("PATH", "Calibration samples; with them, the values inside the model are checked, too."),
    space: str = option("NAME|FILE", "The search space whose groups and pins are shown.", "default"),
    strict: bool = flag("--strict", "Exit with code 4 if a finding is an error; all samples are run."),
    json_: bool = JSON,
    **settings: Any,
) -> None:
    """Show layer groups, operators, costs and hazards of a model.

    FLOPs and bytes of each group, where FP16 cannot be right, and which groups that pins.

    \b
    Example:
      mptune inspect model.onnx
      mptune inspect model.onnx --data samples.npz --strict
      mptune inspect model.onnx --json | jq '.groups[] | select(.pinned)'
    """
    from mptune.api import models
    from mptune.reporting.terminal.listings import print_inspection
    from mptune.reporting.terminal.progress import TerminalListener

    with TerminalListener() as listener:
        inspection = models.inspect(model, data=data, space=space, all_samples=strict, stage=listener.stage, **settings)
    if json_:
        print_json(inspection.to_json())
    else:
        print_inspection(inspection)
    if strict and any(finding.severity == "error" for finding in inspection.findings):
        raise typer.Exit(EXIT_STOPPED)


@with_settings("opset", "batch")
def apply(
    model: ModelArgument,
    out: Path = typer.Option(..., "--out", "-o", metavar="OUT.onnx", help="File to write the mixed model to."),
    plan: Path | None = argument("PLAN", "A plan.json, from a search or written by hand."),
    fp16_all: bool = flag("--fp16-all", "Without a PLAN: FP16 wherever FP16 can hold the values."),
    bf16_all: bool = flag("--bf16-all", "Without a PLAN: BF16 wherever BF16 can hold the values."),
    keep_fp32: list[str] | None = option(
        "PATTERN", "Keep these groups in FP32, with or without a PLAN: op:Softmax, kind:norm or a glob. Repeatable."
    ),
    keep_bf16: list[str] | None = option(
        "PATTERN", "Keep these groups in BF16, which holds values beyond FP16's range. Repeatable."
    ),
    data: Path | None = option("PATH", "Samples: a PLAN is checked on them, --fp16-all keeps in FP32 what they show."),
    io: str | None = option("fp32|fp16", "Type of FP32 inputs and outputs. Default: that of PLAN, else fp32."),
    force: bool = flag("--force", "Overwrite the output file."),
    **settings: Any,
) -> None:
    """Write the mixed-precision model of a plan or of a rule.

    A plan written by hand names nodes: {"nodes": {"*/attn/*": "fp16", "op:Softmax": "fp32"}}. If several lines
    name a node, the last one applies. Other nodes are FP32, and indivisible groups stay together.

    The plan of a search also fits a model with the same nodes and other weights, such as one that was trained again.
    With --data, groups are named that are FP16 in the plan and whose values FP16 cannot hold.

    \b
    Example:
      mptune apply retrained.onnx model.mptune/chosen/plan.json --data samples.npz -o mixed.onnx
      mptune apply model.onnx --fp16-all -o fp16.onnx
      mptune apply model.onnx --keep-fp32 kind:norm --keep-fp32 "head/*" -o mixed.onnx
      mptune apply model.onnx --fp16-all --keep-bf16 "decoder/*" --opset 22 -o mixed.onnx
    """
    if plan is None and not (fp16_all or bf16_all or keep_fp32 or keep_bf16):
        raise SettingsError("no plan given", "give a plan.json, --fp16-all or --keep-fp32 PATTERN")
    common.at_most_one({"PLAN": plan, "--fp16-all": fp16_all, "--bf16-all": bf16_all})
    from mptune.api import models

    written = models.apply(
        model,
        plan,
        out,
        keep_fp32=keep_fp32 or (),
        keep_bf16=keep_bf16 or (),
        data=data,
        force=force,
        reduced="bf16" if bf16_all else "fp16",
        io=io,
        warn=common.warn,
        **settings,
    )
    common.print_path(written)


@with_settings("ignore", "batch")
def compare(
    model: ModelArgument,
    data: Path = option("PATH", "Samples that both sides compute.", ...),
    candidate: Path | None = argument("CANDIDATE", "Another ONNX model, or a TensorRT engine for the GPU here."),
    outputs: Path | None = option(
        "FILE",
        "Outputs that a deployment recorded, rows in the order of the data: .npz with one array per output, JSON of"
        " trtexec or Polygraphy, or a folder with one file per run.",
    ),
    reference_outputs: Path | None = option("FILE", "Outputs to compare with, instead of those of MODEL in FP32."),
    tolerance: list[str] | None = option(
        "OUTPUT[COLUMNS]=X",
        "Limit the error of an output, or of columns of it; abs:X limits the absolute difference. Repeatable. Default:"
        " twice the emulated error of all-FP16, at most 0.1.",
    ),
    trace: bool = flag("--trace", "Find the first group whose values differ between two ONNX models."),
    repeat: int = option("N", "Run CANDIDATE (or MODEL) N times, and compare the runs.", 1),
    stress: bool = flag("--stress", "Run it in several threads at once, and compare with single runs."),
    extract: Path | None = option(
        "DIR", "Write the group that makes the difference to DIR: a model, its inputs and its expected outputs."
    ),
    json_: bool = JSON,
    **settings: Any,
) -> None:
    """Name what makes outputs differ from a model in FP32.

    Compares recorded outputs, another model or an engine with MODEL in true FP32. Causes are FP16, TF32, stale or torn
    rows, a different order or sign, different preprocessing, or what two models differ in. Exit code 0: the outputs
    agree. Exit code 3: they differ beyond the tolerance, or by more than rounding. Exit code 1: CANDIDATE does not
    load.

    \b
    Example:
      mptune compare model.onnx other.onnx --data val.npz --trace
      mptune compare model.onnx model.engine --data val.npz --repeat 3 --stress
      mptune compare model.onnx --data val.npz --outputs deployed.npz --tolerance boxes=abs:0.5 --json
    """
    from mptune.api import models
    from mptune.reporting.terminal.progress import TerminalListener

    with TerminalListener() as listener:
        comparison = models.compare(
            model,
            candidate,
            data=data,
            outputs=outputs,
            reference_outputs=reference_outputs,
            tolerance=tolerance or (),
            trace=trace,
            repeat=repeat,
            stress=stress,
            extract=extract,
            listener=listener,
            **settings,
        )
    _finish(comparison, as_json=json_)


@with_settings("batch")
def check(
    mixed: Path = typer.Argument(..., metavar="MIXED", help="The mixed-precision model."),
    against: Path = option("MODEL", "The FP32 model that it was made from.", ...),
    data: Path = option("PATH", "Samples, such as a validation set.", ...),
    max_error: str = option("X", "Limit on the error of every output, such as 1e-2 or 1%.", ...),
    explain: bool = flag("--explain", "Where an output is beyond the limit, name the cause, as compare does."),
    json_: bool = JSON,
    **settings: Any,
) -> None:
    """Check a mixed-precision model against its FP32 model.

    For continuous integration. Exit code 0: every output is within the limit. Exit code 3: one is beyond it.
    Exit code 1: MIXED does not load.

    \b
    Example:
      mptune check mixed.onnx --against model.onnx --data val.npz --max-error 1e-2
    """
    from mptune.api import models
    from mptune.reporting.terminal.progress import TerminalListener

    with TerminalListener() as listener:
        comparison = models.check(
            mixed, against=against, data=data, max_error=max_error, explain=explain, listener=listener, **settings
        )
    _finish(comparison, as_json=json_, hint="" if explain else "hint: --explain names what makes the difference")


def _finish(comparison: Comparison, *, as_json: bool, hint: str = "") -> None:
    from mptune.reporting.terminal.listings import print_comparison

    if as_json:
        print_json(comparison.to_json())
    else:
        print_comparison(comparison)
        if hint and not comparison.agrees:
            print(hint)
    if not comparison.agrees:
        raise typer.Exit(EXIT_NOT_MET)
