"""``mptune inspect`` and ``apply``: inspect a model, apply a plan to it. No search, no run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mptune.commands.common import JsonOption, ModelArgument, at_most_one, complain, print_json, say
from mptune.commands.options import BatchOption, OpsetOption
from mptune.errors import EXIT_STOPPED, SettingsError
from mptune.settings import DataSettings, SearchSettings


def inspect(
    model: ModelArgument,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Calibration samples; with them, the values inside the model are checked, too."
        ),
    ] = None,
    space: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="The search space whose groups and pins are shown.")
    ] = SearchSettings.space,
    batch: BatchOption = DataSettings.batch,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with code 4 if a finding is an error; all samples are run.")
    ] = False,
    json_: JsonOption = False,
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
    from mptune.reporting.terminal.progress import TerminalListener

    with TerminalListener() as listener:
        inspection = models.inspect(
            model, data=data, space=space, batch=batch, all_samples=strict, stage=listener.stage
        )
    if json_:
        print_json(inspection.to_json())
    else:
        from mptune.reporting.terminal.inspection import print_inspection

        print_inspection(inspection)
    if strict and any(finding.severity == "error" for finding in inspection.findings):
        raise typer.Exit(EXIT_STOPPED)


def apply(
    model: ModelArgument,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="OUT.onnx", help="File to write the mixed model to.")],
    plan: Annotated[
        Path | None,
        typer.Argument(metavar="PLAN", help="A plan.json, from a search or written by hand.", show_default=False),
    ] = None,
    fp16_all: Annotated[
        bool, typer.Option("--fp16-all", help="Without a PLAN: FP16 wherever FP16 can hold the values.")
    ] = False,
    bf16_all: Annotated[
        bool, typer.Option("--bf16-all", help="Without a PLAN: BF16 wherever BF16 can hold the values.")
    ] = False,
    keep_fp32: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Keep these groups in FP32, with or without a PLAN: op:Softmax, kind:norm or a glob. Repeatable.",
        ),
    ] = None,
    keep_bf16: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Keep these groups in BF16, which holds values beyond FP16's range. Repeatable."
        ),
    ] = None,
    opset: OpsetOption = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Samples; with them, the plan is checked on the values inside the model."),
    ] = None,
    batch: BatchOption = DataSettings.batch,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output file.")] = False,
) -> None:
    """Write the mixed-precision model of a plan or of a rule.

    A plan written by hand names nodes: {"nodes": {"*/attn/*": "fp16", "op:Softmax": "fp32"}}. If several lines
    name a node, the last one applies. Other nodes are FP32, and indivisible groups stay together.

    The plan of a search also fits a model with the same nodes and other weights, such as one that was trained again.
    With --data, groups are named that are FP16 in the plan and whose values FP16 cannot hold.

    \b
    Example:
      mptune apply model.onnx model.mptune/chosen/plan.json -o mixed.onnx
      mptune apply retrained.onnx model.mptune/chosen/plan.json --data samples.npz -o mixed.onnx
      mptune apply model.onnx --fp16-all -o fp16.onnx
      mptune apply model.onnx --keep-fp32 kind:norm --keep-fp32 "head/*" -o mixed.onnx
      mptune apply model.onnx --fp16-all --keep-bf16 "decoder/*" --opset 22 -o mixed.onnx
    """
    if plan is None and not (fp16_all or bf16_all or keep_fp32 or keep_bf16):
        raise SettingsError("nothing says which plan to apply", "give a plan.json, --fp16-all or --keep-fp32 PATTERN")
    at_most_one({"PLAN": plan, "--fp16-all": fp16_all, "--bf16-all": bf16_all})
    from mptune.api import models

    written = models.apply(
        model,
        plan,
        out,
        keep_fp32=keep_fp32 or (),
        keep_bf16=keep_bf16 or (),
        opset=opset,
        data=data,
        batch=batch,
        force=force,
        reduced="bf16" if bf16_all else "fp16",
        warn=lambda text: complain(f"warning: {text}"),
    )
    say(written)
