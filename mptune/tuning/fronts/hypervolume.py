"""The hypervolume of latency against error: its axes, the Pareto staircase, its area, and what a point adds to it.

The axes, both 0 to 1: the gain is the share of the base latency that a plan saves; the exactness falls with the
logarithm of the error, from 1 at the floor to 0 at the reference error.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

REFERENCE_ERROR = 3e-2
"""Relative L2 error past which a plan is worth nothing: the reference point of the hypervolume."""

ERROR_FLOOR = 1e-7
"""About the relative rounding error of FP32: smaller errors count as equal."""


def gains(latency_ms: Floats, base_ms: Floats | float) -> Floats:
    """Shares of the base latency that are saved; none of a base of 0, of a graph that does nothing."""
    if np.ndim(base_ms) == 0 and base_ms == 0:
        return np.zeros_like(latency_ms)
    saved: Floats = 1.0 - latency_ms / base_ms
    return saved


def exactness(error: Floats, reference_error: float = REFERENCE_ERROR, floor: float = ERROR_FLOOR) -> Floats:
    """Positions of errors on the log axis: 1 at the floor and below, 0 at the reference error, negative past it."""
    log_ratio = math.log(reference_error) - np.log(np.maximum(error, floor))
    exact: Floats = log_ratio / math.log(reference_error / floor)
    return exact


_ZERO = np.zeros(1)


def pareto_staircase(gain: Floats, exact: Floats) -> tuple[Floats, Floats]:
    """The front's ascending gains and falling exactness, shape (n_front,) each, of points inside the reference box."""
    inside = (gain > 0) & (exact > 0)
    order = np.argsort(gain[inside])
    front_gain, front_exact = gain[inside][order], exact[inside][order]
    front_exact = np.maximum.accumulate(front_exact[::-1])[::-1]
    kept = np.ones(len(front_exact), dtype=bool)
    kept[:-1] = front_exact[:-1] > front_exact[1:]
    return front_gain[kept], front_exact[kept]


def dominated_area(gain: Floats, exact: Floats) -> float:
    """The hypervolume: area that points dominate, 0 to 1. Both arguments have shape (n_points,)."""
    front_gain, front_exact = pareto_staircase(gain, exact)
    return float((np.diff(np.append(0.0, front_gain)) * front_exact).sum())


def hypervolume_improvement(gain: Floats, exact: Floats, front_gain: Floats, front_exact: Floats) -> Floats:
    """Area that each point alone adds to a Pareto staircase, shape (n_points,)."""
    ends = np.concatenate((_ZERO, front_gain))  # np.append and np.diff take as long as all the rest
    dominated = np.concatenate((_ZERO, np.cumsum((ends[1:] - ends[:-1]) * front_exact)))
    # A point only adds what lies to the right of the last front point that is at least as exact.
    first = np.searchsorted(-front_exact, -exact, side="right")
    begins = ends[first]
    added = np.zeros(len(gain))
    adds = np.flatnonzero((gain > begins) & (exact > 0.0))
    gain, begins = gain[adds], begins[adds]
    added[adds] = exact[adds] * (gain - begins) - (np.interp(gain, ends, dominated) - dominated[first[adds]])
    return added
