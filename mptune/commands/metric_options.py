"""Options of a search that say what its error is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

METRIC_NAMES = (
    *("worst_part", "relative_l2", "max_abs", "mean_abs", "median_abs", "p99_abs", "max_rel", "cosine_distance"),
    *("sqnr_db", "non_finite", "top1_disagreement", "endpoint_error"),
    *("top1_accuracy", "top5_accuracy", "map", "miou", "cosine", "psnr", "ssim"),
)
"""Every metric by its name, in the order of the help; written out, since the help must not import numpy."""

MetricOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME|script.py:function[:max]",
        help=f"The error to minimise: {', '.join(METRIC_NAMES)}; or a function of your own."
        " Repeatable: the first is optimised, the others are reported."
        "  [default: worst_part]",
    ),
]
LabelsOption = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="Labels for metrics that need them: .npz, rows in the order of the data."),
]
LimitOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME>=X",
        help="Limit the value of a metric, on search and on held-out samples, such as map>=0.41. Repeatable.",
    ),
]
FeedbackOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="OUTPUT:INPUT",
        help="Feed OUTPUT back as INPUT over recorded sequences; the error at the end of a sequence counts.",
    ),
]
StepsOption = Annotated[
    int | None,
    typer.Option(metavar="K", help="Number of samples in one recorded sequence, for --feedback. Default: all."),
]
