"""A Front as a plot of error against latency. Imports matplotlib, so it is imported when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mptune.errors import MissingPackageError
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.fronts.content import FrontContent
from mptune.tuning.fronts.table import front_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_MARKERS = {"all-FP32": "s", "all-FP16": "^"}


def plot_front(front: FrontContent, ax: Axes | None, floor: float) -> Axes:
    """Draw the front on matplotlib Axes, a new figure's for None; errors below the floor are drawn there."""
    if ax is None:
        try:
            from matplotlib import pyplot
        except ImportError:
            raise MissingPackageError(
                "Front.plot needs matplotlib, which is not installed", "pip install matplotlib"
            ) from None
        _, ax = pyplot.subplots()

    def error(evaluation: Evaluation) -> float:
        return max(evaluation.judged_error, floor)

    points = sorted(front.points, key=lambda point: point.latency.median_ms)
    x, y = [point.latency.median_ms for point in points], [error(point) for point in points]
    ax.plot(x, y, drawstyle="steps-post", color="tab:blue", alpha=0.5, zorder=1)
    ax.scatter(x, y, color="tab:blue", label="front", zorder=2)
    for row in front_rows(front):
        name, marker = next((named for named in _MARKERS.items() if named[0] in row.marks), ("", ""))
        if name and row.evaluation.is_finite:
            place = (row.evaluation.latency.median_ms, error(row.evaluation))
            ax.scatter(*place, marker=marker, s=90, facecolors="none", edgecolors="black", label=name, zorder=3)
    if front.chosen is not None:
        place = (front.chosen.latency.median_ms, error(front.chosen))
        ax.scatter(*place, marker="*", s=160, color="tab:red", label="chosen", zorder=4)
    for beside in front.neighbours:
        place = (beside.evaluation.latency.median_ms, error(beside.evaluation))
        marker = "<" if beside.role == "faster" else "v"
        ax.scatter(*place, marker=marker, s=90, color="tab:orange", label=beside.role, zorder=3)
    ax.set_yscale("log")
    ax.set_xlabel(f"latency, ms ({front.fp32.latency.source})")
    clipped = any(point.judged_error < floor for point in (*points, front.fp32))
    ax.set_ylabel(f"error, {front.metric}" + (f" (below {floor:.0e}: drawn there)" if clipped else ""))
    ax.set_title(f"{front.model_path.stem} on {front.target}")
    ax.legend()
    return ax
