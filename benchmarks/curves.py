"""Curves of the hypervolume against the builds as one SVG: a panel a size, a line a sampler."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

PANEL, HEIGHT, LEFT, TOP, GAP, FLOOR = 300, 300, 52, 34, 26, 46
COLOURS = {
    "reachable": "#999999",
    "precision": "#0b6e4f",
    "profiled": "#54b399",
    "law known": "#7fd1c0",
    "one decade wrong": "#b8860b",
    "not emulated": "#3b7dd8",
    "no prior": "#7b4fbf",
    "prior only": "#c46210",
    "local": "#d36086",
    "tpe": "#aa3344",
    "nsga2": "#6b5b4b",
    "gp": "#222222",
    "random": "#bbaa99",
    "mptune": "#0b6e4f",
    "Optuna TPE": "#aa3344",
    "Optuna NSGA-II": "#6b5b4b",
    "Optuna GP": "#222222",
    "Optuna random": "#bbaa99",
}


def draw(runs: Mapping[tuple[int | str, str], Sequence[Mapping[str, Any]]], columns: int | None = None) -> str:
    """Medians over the seeds.

    Args:
        runs: (number of groups or name of a model, sampler) -> its runs, each with ``shares``, one for each build.
        columns: panels side by side; None puts all of them so.
    """
    sizes = list(dict.fromkeys(groups for groups, _ in runs))
    kinds = list(dict.fromkeys(kind for _, kind in runs))
    # plans that deviate from a law can be better than its own front
    top = max(1.0, math.ceil(10 * max(max(run["shares"]) for some in runs.values() for run in some)) / 10)
    across = min(len(sizes), columns or len(sizes))
    row_height = TOP + HEIGHT + FLOOR
    width, height = LEFT + across * (PANEL + GAP) + 150, math.ceil(len(sizes) / across) * row_height
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="12" role="img" '
        'aria-label="Share of the near-exact hypervolume against builds, for each sampler">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for index, groups in enumerate(sizes):
        mine = {kind: runs[groups, kind] for kind in kinds if (groups, kind) in runs}
        panel = _panel(LEFT + index % across * (PANEL + GAP), groups, mine, top, first=index % across == 0)
        parts += [f'<g transform="translate(0 {index // across * row_height})">', *panel, "</g>"]
    right = LEFT + across * (PANEL + GAP)
    for row, kind in enumerate(kinds):
        y = TOP + 12 + 20 * row
        parts.append(f'<path d="M{right} {y}h22" {_style(kind)}/>')
        parts.append(f'<text x="{right + 28}" y="{y + 4}">{escape(kind)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _style(kind: str) -> str:
    dashes = ' stroke-dasharray="4 3"' if kind == "reachable" else ""
    width = 2.6 if kind in ("precision", "mptune") else 1.5
    return f'fill="none" stroke="{COLOURS.get(kind, "#000000")}" stroke-width="{width}"{dashes}'


def _panel(
    left: float, groups: int | str, mine: Mapping[str, Sequence[Mapping[str, Any]]], top: float, *, first: bool
) -> list[str]:
    builds = max(len(run["shares"]) for some in mine.values() for run in some)
    floor = TOP + HEIGHT
    heading = f"{groups} groups" if isinstance(groups, int) else escape(groups)
    parts = [f'<text x="{left + PANEL / 2}" y="{TOP - 12}" text-anchor="middle" font-size="14">{heading}</text>']
    for share in ticks(0.0, top, 6):
        y = floor - share / top * HEIGHT
        parts.append(f'<path d="M{left} {y:.1f}h{PANEL}" stroke="#e4e4e4"/>')
        if first:
            parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{share:g}</text>')
    for count in ticks(0.0, builds, 5):
        x = left + count / builds * PANEL
        parts.append(f'<text x="{x:.1f}" y="{floor + 18}" text-anchor="middle">{count:g}</text>')
    parts.append(f'<text x="{left + PANEL / 2}" y="{floor + 38}" text-anchor="middle">builds</text>')
    if first:
        middle = TOP + HEIGHT / 2
        parts.append(
            f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">'
            "share of the near-exact hypervolume</text>"
        )
    for kind, some in reversed(mine.items()):  # the first on top
        medians = np.median([run["shares"] for run in some], axis=0)
        points = [
            f"{left + (b + 1) / builds * PANEL:.1f} {floor - m / top * HEIGHT:.1f}" for b, m in enumerate(medians)
        ]
        title = f"{kind}: {medians[-1]:.3f} after {builds} builds"
        parts.append(f'<path d="M{" L".join(points)}" {_style(kind)}><title>{escape(title)}</title></path>')
    return parts


def ticks(low: float, high: float, count: int = 7) -> list[float]:
    """Round numbers between two bounds, about ``count`` of them."""
    span = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(span))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= span)
    first = math.ceil(low / step - 1e-9)
    return [(first + i) * step for i in range(int((high - first * step) / step + 1e-9) + 1)]
