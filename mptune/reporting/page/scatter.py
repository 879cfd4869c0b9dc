"""The scatter of latency against error as inline SVG: every plan faint, the front and its staircase on top."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mptune.printable import printable_html as escape
from mptune.reporting.text import Row, format_error, format_ms, format_speedup, front_rows, group_counts
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.front import Front

WIDTH, HEIGHT = 1000, 470
LEFT, RIGHT, TOP, BOTTOM = 84, 30, 26, 58
BAND = 34
"""Height of the bands for errors that a log axis cannot show: exactly 0, and not finite."""


@dataclass(frozen=True)
class Axes:
    """Where values lie in the drawing.

    Attributes:
        low_ms: left end of the latency axis.
        high_ms: right end.
        low_decade: lower end of the error axis, as a power of ten.
        high_decade: upper end.
        has_zero: there is a band for errors of exactly 0, below the axis.
        has_broken: there is a band for plans that are not finite, above it.
    """

    low_ms: float
    high_ms: float
    low_decade: int
    high_decade: int
    has_zero: bool
    has_broken: bool

    @property
    def top(self) -> float:
        """Upper end of the log axis in the drawing."""
        return TOP + (BAND if self.has_broken else 0)

    @property
    def bottom(self) -> float:
        """Lower end of the log axis in the drawing."""
        return HEIGHT - BOTTOM - (BAND if self.has_zero else 0)

    def x(self, latency_ms: float) -> float:
        """Horizontal place of a latency."""
        share = (latency_ms - self.low_ms) / (self.high_ms - self.low_ms)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, error: float) -> float:
        """Vertical place of an error: in a band where the log axis has none."""
        if not math.isfinite(error):
            return TOP + BAND / 2 - 4
        if error <= 0:
            return HEIGHT - BOTTOM - BAND / 2 + 4
        share = (math.log10(error) - self.low_decade) / (self.high_decade - self.low_decade)
        return self.bottom - share * (self.bottom - self.top)


def scatter(front: Front, evaluations: Sequence[Evaluation]) -> str:
    """Draw all evaluations, the front and the baselines.

    Args:
        front: the front.
        evaluations: every plan of the search; those of the front may be among them.
    """
    rows = front_rows(front)
    shown = [e for e in (*evaluations, *(row.evaluation for row in rows)) if math.isfinite(e.latency.median_ms)]
    axes = _axes(shown)
    on_table = {row.evaluation.plan for row in rows}
    parts = [
        f'<svg class="scatter" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="Latency against error of {len(shown)} plans">',
        *_grid(axes, front),
        *(_faint(axes, e) for e in evaluations if e.plan not in on_table and math.isfinite(e.latency.median_ms)),
        _staircase(axes, front.points),
        *(_point(axes, row) for row in sorted(rows, key=lambda row: row.is_chosen)),
        *_labels(axes, rows),
        "</svg>",
    ]
    return "\n".join(part for part in parts if part)


def plotted_error(evaluation: Evaluation) -> float:
    """The error that the choice goes by; infinite where any value was not finite."""
    return evaluation.judged_error if evaluation.is_finite else math.inf


def _axes(shown: Sequence[Evaluation]) -> Axes:
    times = [e.latency.median_ms for e in shown] or [0.0, 1.0]
    bounds = [b for e in shown for b in e.latency.ci95_ms if math.isfinite(b)]
    low, high = min(times), max([*times, *bounds])
    pad = (high - low) * 0.06 or max(high, 1e-3) * 0.1
    errors = [plotted_error(e) for e in shown]
    decades = [math.log10(e) for e in errors if math.isfinite(e) and e > 0] or [-4.0, -1.0]
    bottom, top = math.floor(min(decades) - 0.05), math.ceil(max(decades) + 0.05)
    return Axes(
        max(low - pad, 0.0),
        high + pad,
        bottom,
        max(top, bottom + 1),
        any(e == 0 for e in errors),
        any(not math.isfinite(e) for e in errors),
    )


def ticks(low: float, high: float, count: int = 7) -> list[float]:
    """Round numbers between two bounds, about ``count`` of them."""
    span = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(span))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= span)
    first = math.ceil(low / step - 1e-9)
    return [(first + i) * step for i in range(int((high - first * step) / step + 1e-9) + 1)]


def _grid(axes: Axes, front: Front) -> Iterable[str]:
    right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
    for value in ticks(axes.low_ms, axes.high_ms):
        x = axes.x(value)
        yield f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{floor}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{floor + 20}" text-anchor="middle">{value:g}</text>'
    every = max(1, (axes.high_decade - axes.low_decade) // 8)
    for decade in range(axes.low_decade, axes.high_decade + 1):
        y = axes.y(10.0**decade)
        yield f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>'
        if (decade - axes.low_decade) % every == 0:
            exponent = str(decade).replace("-", "\N{MINUS SIGN}")
            power = f'10<tspan dy="-6" font-size="10">{exponent}</tspan>'
            yield f'<text class="tick" x="{LEFT - 10}" y="{y + 4:.1f}" text-anchor="end">{power}</text>'
    for wanted, y, text in (
        (axes.has_zero, HEIGHT - BOTTOM - BAND / 2 + 4, "0, exact"),
        (axes.has_broken, TOP + BAND / 2 - 4, "not finite"),
    ):
        if wanted:
            yield f'<rect class="band" x="{LEFT}" y="{y - 11:.1f}" width="{right - LEFT}" height="22"/>'
            yield f'<text class="tick" x="{LEFT - 10}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    source = front.fp32.latency.source
    title = f"latency, ms ({source}{f' for {front.target}' if source == 'predicted' else ''})"
    yield f'<text class="axis" x="{(LEFT + right) / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(title)}</text>'
    middle = (TOP + floor) / 2
    yield (
        f'<text class="axis" x="20" y="{middle}" text-anchor="middle" transform="rotate(-90 20 {middle})">'
        f"error, {escape(front.metric)}</text>"
    )


def describe(evaluation: Evaluation) -> str:
    """What a plan's hover title says, unescaped, a fact per line."""
    held_out = evaluation.held_out_value
    lines = [
        f"{format_ms(evaluation.latency.median_ms)} ms {evaluation.latency.source}, "
        f"{format_speedup(evaluation.speedup)}",
        f"error {format_error(evaluation.error_value)} {evaluation.error_source}"
        + (f", held-out {format_error(held_out)}" if held_out is not None else ""),
        f"{group_counts(evaluation.plan)} groups FP16/FP32",
        f"{evaluation.origin}, plan {evaluation.plan.fingerprint}",
    ]
    return "\n".join(lines)


def _circle(axes: Axes, evaluation: Evaluation, style: str, radius: float) -> str:
    x, y = axes.x(evaluation.latency.median_ms), axes.y(plotted_error(evaluation))
    title = f"<title>{escape(describe(evaluation))}</title>"
    if not evaluation.is_finite:
        cross = f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"
        return f'<path class="broken" d="{cross}">{title}</path>'
    return f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">{title}</circle>'


def _faint(axes: Axes, evaluation: Evaluation) -> str:
    return _circle(axes, evaluation, "faint", 4)


def _point(axes: Axes, row: Row) -> str:
    evaluation = row.evaluation
    if row.is_chosen:
        style, radius = "chosen", 8.5
    elif row.on_front:
        style, radius = "front", 5.5
    else:
        style, radius = "baseline", 5.5
    low, high = evaluation.latency.ci95_ms
    whisker = ""
    if math.isfinite(high - low) and axes.x(high) - axes.x(low) > 2 * radius and evaluation.is_finite:
        y = axes.y(plotted_error(evaluation))
        whisker = f'<line class="whisker" x1="{axes.x(low):.1f}" y1="{y:.1f}" x2="{axes.x(high):.1f}" y2="{y:.1f}"/>'
    return whisker + _circle(axes, evaluation, style, radius)


def _staircase(axes: Axes, points: Sequence[Evaluation]) -> str:
    """From each point to the right until the next, more exact one: what can be had at that latency."""
    if len(points) < 2:
        return ""
    ordered = sorted(points, key=lambda point: point.latency.median_ms)
    x, y = axes.x(ordered[0].latency.median_ms), axes.y(plotted_error(ordered[0]))
    path = [f"M{x:.1f} {y:.1f}"]
    for point in ordered[1:]:
        path.append(f"H{axes.x(point.latency.median_ms):.1f}V{axes.y(plotted_error(point)):.1f}")
    return f'<path class="staircase" d="{"".join(path)}"/>'


def _labels(axes: Axes, rows: Sequence[Row]) -> Iterable[str]:
    """Names beside the chosen plan and the baselines, moved down where they would cover each other."""
    taken: list[tuple[float, float]] = []
    for row in sorted(rows, key=lambda row: not row.is_chosen):
        names = [mark for mark in row.marks if mark in ("chosen", "all-FP32", "all-FP16")]
        if not names:
            continue
        x, y = axes.x(row.evaluation.latency.median_ms), axes.y(plotted_error(row.evaluation))
        right_half = x > WIDTH - 190
        place = y - 12 if y > TOP + 24 else y + 22
        while any(abs(place - other_y) < 16 and abs(x - other_x) < 120 for other_x, other_y in taken):
            place += 17
        taken.append((x, place))
        where = f'x="{x - 9:.1f}" text-anchor="end"' if right_half else f'x="{x + 9:.1f}"'
        style = "label chosen-label" if row.is_chosen else "label"
        yield f'<text class="{style}" {where} y="{place:.1f}">{escape(", ".join(names))}</text>'
