"""Options of a search that say what its error is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MetricOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME|script.py:function[:max]",
        help="relative_l2 (default), max_abs, map, top1_accuracy, ... or a function of your own. The first is"
        " optimised, further ones are reported.",
    ),
]
LabelsOption = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="Labels for metrics over all samples: .npz, rows in the order of the data."),
]
LimitOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME>=X", help="Limit on a metric's own value on held-out samples, such as map>=0.41."),
]
FeedbackOption = Annotated[
    list[str] | None,
    typer.Option(metavar="OUTPUT:INPUT", help="Feed this output back over the samples: errors after --steps count."),
]
StepsOption = Annotated[
    int | None, typer.Option(metavar="K", help="Samples of one recorded sequence. Default: all of them.")
]
