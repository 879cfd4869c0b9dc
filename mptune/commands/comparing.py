"""``mptune compare`` and ``check``: two models, or what a deployment recorded, against a model in FP32."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mptune.commands.common import JsonOption, ModelArgument, print_json
from mptune.commands.options import BatchOption, IgnoreOption
from mptune.errors import EXIT_NOT_MET
from mptune.settings import DataSettings

if TYPE_CHECKING:
    from mptune.diagnosis.comparison import Comparison


def compare(
    model: ModelArgument,
    data: Annotated[
        Path,
        typer.Option(metavar="PATH", help="Samples that both sides compute."),
    ],
    candidate: Annotated[
        Path | None,
        typer.Argument(
            metavar="CANDIDATE",
            help="Another ONNX model, or a TensorRT engine for the GPU here.",
            show_default=False,
        ),
    ] = None,
    outputs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Outputs that a deployment recorded: .npz, one array per output, rows in the order of the data.",
        ),
    ] = None,
    reference_outputs: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Outputs to compare with, instead of those of MODEL in FP32.")
    ] = None,
    tolerance: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OUTPUT[COLUMNS]=X",
            help="Limit the error of an output, or of columns of it; abs:X limits the"
            " absolute difference. Repeatable."
            " Default: twice the emulated error of all-FP16, at most 0.1.",
        ),
    ] = None,
    ignore: IgnoreOption = None,
    trace: Annotated[
        bool,
        typer.Option("--trace", help="Find the first group whose values differ between two ONNX models."),
    ] = False,
    repeat: Annotated[
        int, typer.Option(metavar="N", help="Run CANDIDATE (or MODEL) N times, and compare the runs.")
    ] = 1,
    stress: Annotated[
        bool, typer.Option("--stress", help="Run it in several threads at once, and compare with single runs.")
    ] = False,
    batch: BatchOption = DataSettings.batch,
    json_: JsonOption = False,
) -> None:
    """Name what makes outputs differ from a model in FP32.

    Compares recorded outputs, another model or an engine with MODEL in true FP32. Causes are FP16, TF32, stale or torn
    rows, another order or sign, other preprocessing, or what two models differ in. Exit code 0: the outputs agree. Exit
    code 3: they differ beyond the tolerance, or by more than rounding. Exit code 1: CANDIDATE does not load.

    \b
    Example:
      mptune compare model.onnx --data val.npz --outputs deployed.npz
      mptune compare model.onnx other.onnx --data val.npz --trace
      mptune compare model.onnx model.engine --data val.npz --repeat 3 --stress
      mptune compare model.onnx --data val.npz --outputs deployed.npz --tolerance boxes=abs:0.5 --json
    """
    from mptune.api import comparing
    from mptune.reporting.terminal.progress import TerminalListener

    with TerminalListener() as listener:
        comparison = comparing.compare(
            model,
            candidate,
            data=data,
            outputs=outputs,
            reference_outputs=reference_outputs,
            tolerance=tolerance or (),
            ignore=ignore or (),
            trace=trace,
            repeat=repeat,
            stress=stress,
            batch=batch,
            listener=listener,
        )
    _finish(comparison, as_json=json_)


def check(
    mixed: Annotated[Path, typer.Argument(metavar="MIXED", help="The mixed-precision model.")],
    against: Annotated[Path, typer.Option(metavar="MODEL", help="The FP32 model that it was made from.")],
    data: Annotated[
        Path,
        typer.Option(metavar="PATH", help="Samples, such as a validation set."),
    ],
    max_error: Annotated[
        str, typer.Option(metavar="X", help="Limit on the error of every output, such as 1e-2 or 1%.")
    ],
    batch: BatchOption = DataSettings.batch,
    explain: Annotated[
        bool, typer.Option("--explain", help="Where an output is beyond the limit, name the cause, as compare does.")
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Check a mixed-precision model against its FP32 model.

    For continuous integration. Exit code 0: every output is within the limit. Exit code 3: one is beyond it.
    Exit code 1: MIXED does not load.

    \b
    Example:
      mptune check mixed.onnx --against model.onnx --data val.npz --max-error 1e-2
    """
    from mptune.api import comparing
    from mptune.reporting.terminal.progress import TerminalListener

    with TerminalListener() as listener:
        comparison = comparing.check(
            mixed,
            against=against,
            data=data,
            max_error=max_error,
            batch=batch,
            explain=explain,
            listener=listener,
        )
    _finish(comparison, as_json=json_, hint="" if explain else "--explain names what makes the difference")


def _finish(comparison: Comparison, *, as_json: bool, hint: str = "") -> None:
    if as_json:
        print_json(comparison.to_json())
    else:
        from mptune.reporting.terminal.comparison import print_comparison

        print_comparison(comparison)
        if hint and not comparison.agrees:
            print(f"hint: {hint}")
    if not comparison.agrees:
        raise typer.Exit(EXIT_NOT_MET)
