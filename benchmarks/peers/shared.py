"""How many independent observations the spread between processes rests on, where plans share what a process does.

A process chooses kernels once, and every plan that runs them is faster or slower in it: of the digits model on an H200,
28 plans in four processes, one pattern had 85 % of the squares by which plans differed from process to process. Then
the residuals of all plans say little more than those of one, and the degrees of freedom of their mean square are nearer
to the processes' than to the timings'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from mptune.engines.spread import SessionTiming


def shared_degrees(timings: Mapping[str, Sequence[SessionTiming]]) -> float:
    """Degrees of freedom of the spread between processes.

    In the residuals of plans and processes, shape (plans, processes), ``n = processes - 1`` patterns are possible.
    Where each plan varies by itself they are about equally strong; where all plans follow one pattern, that one has
    everything. The sum of the squared shares, scaled to 0 and 1 at these two ends, divides ``n``; the result is never
    less than ``n`` and never more than the residuals there are.

    Args:
        timings: of every plan; ``baseline`` names the process.

    Returns:
        ``n`` for two processes, of which nobody can tell. Processes that timed less than half of the plans are left
        out; 1 where fewer than two are left, and infinite for a single process, which says nothing of others.
    """
    rows = [{timing.baseline: timing.log_ratio for timing in sessions} for sessions in timings.values()]
    counts: dict[str, int] = {}
    for row in rows:
        for process in row:
            counts[process] = counts.get(process, 0) + 1
    processes = [process for process, count in counts.items() if 2 * count >= len(rows)]
    values = np.array([[row[one] for one in processes] for row in rows if set(processes) <= set(row)])
    n = len(processes) - 1
    if n < 1 or len(values) < 2:
        return 1.0 if len(counts) > 1 else math.inf
    residuals = values - values.mean(0) - values.mean(1, keepdims=True) + values.mean()
    strengths = np.linalg.svd(residuals, compute_uv=False)[:n] ** 2
    if n == 1 or strengths.sum() <= 0.0:
        return float(n)
    squared = float(np.sum((strengths / strengths.sum()) ** 2))
    alike = (squared - 1.0 / n) / (1.0 - 1.0 / n)
    return n / max(alike, 1.0 / (len(values) - 1))
