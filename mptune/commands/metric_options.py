"""Options of a search that say what its error is."""

from __future__ import annotations

from typing import Annotated

import typer

from mptune.data.metrics.table import METRICS

MetricOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME|script.py:function[:max]",
        help=f"The error to minimise: {', '.join(METRICS)}; or a function of your own."
        " Repeatable: the first is optimised, the others are reported."
        "  [default: worst_part]",
    ),
]
