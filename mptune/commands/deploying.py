"""``mptune confirm`` and ``export``: bring a run to a device, and measure its front there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from mptune.commands.common import (
    JsonOption,
    RecordedMetricOption,
    RunArgument,
    StorageOption,
    leave_unmet,
    print_json,
    resumable,
    seen_with_stdout,
    warn,
)
from mptune.commands.options import with_settings
from mptune.printable import printable


@with_settings("engine", "plugins", "tolerance", "ignore", "timeout_s", "max_disk_bytes")
def confirm(
    context: typer.Context,
    run: RunArgument,
    target: str = typer.Option(
        "auto",
        metavar="auto|NAME|FILE",
        help="Device to measure on; auto is the target of the search if it is here, else the GPU here.",
    ),
    metric: RecordedMetricOption = None,
    storage: StorageOption = None,
    json_: JsonOption = False,
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
    with resumable(context) as listener:
        from mptune.api import deploying

        confirmation = deploying.confirm(
            run, target=target, metric=metric, storage=storage, listener=listener, **settings
        )
    if json_:
        print_json(confirmation.to_json())
    else:
        from mptune.reporting.terminal.front import print_confirmation

        print_confirmation(confirmation, warned=seen_with_stdout(listener.warned))
    leave_unmet(confirmation.front, as_json=json_)


def export(
    run: RunArgument,
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
    plan: str | None = typer.Option(
        None, metavar="ID", help="With --for: the plan with this id. Default: the chosen one."
    ),
    force: bool = typer.Option(False, "--force", help="Overwrite the output."),
    storage: StorageOption = None,
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

    print(printable(deploying.export(run, out, for_=for_, plan=plan, force=force, storage=storage, warn=warn)))
