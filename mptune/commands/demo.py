"""``mptune demo``: a search of the model that comes with mptune, and its page in a browser."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from mptune.commands.common import OPEN_HELP, complain, finish, open_page, resumable

_BUDGET = 20


def demo(
    context: typer.Context,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Run directory.")] = Path("demo.mptune"),
    open_: Annotated[bool, typer.Option("--open/--no-open", help=OPEN_HELP)] = True,
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
    complain("the model is an attention network for 8x8 images of digits; the same search is")
    complain(f"  mptune search {shlex.quote(str(model))} --data {shlex.quote(str(data))} --budget {_BUDGET}")
    with resumable(context) as listener:
        from mptune.api import searching

        front = searching.search(model, data=data, out=out, budget=_BUDGET, listener=listener)
    if open_:
        open_page(front.run_dir)
    finish(front, as_json=False, warned=listener.warned)
