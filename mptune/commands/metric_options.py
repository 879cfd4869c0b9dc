"""Options of a search that say what its error is."""

from __future__ import annotations

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
