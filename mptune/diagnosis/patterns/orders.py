"""Outputs that are right but in another order: columns, rows; with another sign, or as a complement."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mptune.diagnosis.patterns.scaled import CLEAR, Compared, column_axis, rms

_MAX_ORDERED = 2048
"""Entries along an axis up to which another order of them is looked for."""
_SAMPLED = 2048
"""Values of each entry that are compared first."""


@dataclass(frozen=True)
class Order:
    """What was done to an output.

    Attributes:
        kind: ``sign``, ``complement``, ``columns`` (an order along an axis that is not the rows') or ``rows``.
        axis: along which the order differs, or the columns lie; None for the whole output.
        entries: 0-based columns whose sign differs or that are complements; or the order: entry k is the reference's
            entry ``entries[k]``.
        left: share of the difference that is left when it is undone.
    """

    kind: str
    axis: int | None
    entries: tuple[int, ...] | None
    left: float


def find_order(compared: Compared) -> Order | None:
    """What undoes the difference; None where none of these does."""
    total = compared.distance
    if total <= compared.exact:
        return None
    got, wanted, scale = compared.got, compared.wanted, compared.scale
    for kind, pattern in (("sign", -wanted), ("complement", (1 - wanted * scale) / scale)):
        if compared.explains(pattern):
            return Order(kind, None, None, rms(got - pattern) / total)
    found = _of_columns(compared)
    if found is not None:
        return found
    for axis in range(1, got.ndim):
        order = permutation(got * scale, wanted * scale, axis)
        if order is not None:
            undone = np.take(wanted * scale, order, axis) / scale
            if compared.explains(undone):
                return Order("columns", axis, order, rms(got - undone) / total)
    return None


def find_row_order(compared: Compared) -> Order | None:
    """An order of the rows that undoes the difference; None where there is none."""
    order = permutation(compared.got, compared.wanted, 0)
    if order is None:
        return None
    undone = compared.wanted[list(order)]
    if not compared.explains(undone):
        return None
    return Order("rows", 0, order, rms(compared.got - undone) / compared.distance)


def _of_columns(compared: Compared) -> Order | None:
    """Some columns with another sign, or as complements."""
    got, wanted, scale = compared.got, compared.wanted, compared.scale
    axis = column_axis(got.shape)
    if axis is None or got.shape[axis] < 2:
        return None
    others = tuple(k for k in range(got.ndim) if k != axis)

    def per_column(values: np.ndarray) -> np.ndarray:
        sizes: np.ndarray = np.sqrt(np.mean(values**2, axis=others))
        return sizes

    own = per_column(got - wanted)
    is_off = own > max(compared.half, compared.exact)
    for kind, pattern in (("sign", -wanted), ("complement", (1 - wanted * scale) / scale)):
        is_turned = is_off & (per_column(got - pattern) <= CLEAR * own)
        if is_off.any() and is_turned[is_off].all():
            columns = tuple(int(k) for k in np.flatnonzero(is_turned))
            shape = [1] * got.ndim
            shape[axis] = -1
            undone = np.where(is_turned.reshape(shape), pattern, wanted)
            if compared.explains(undone):
                return Order(kind, axis, columns, rms(got - undone) / compared.distance)
    return None


def permutation(got: np.ndarray, wanted: np.ndarray, axis: int) -> tuple[int, ...] | None:
    """The order along an axis that brings the reference nearest to the output; None where it is the order as it is.

    Entry k of the output is the reference's entry ``order[k]``.
    """
    count = got.shape[axis]
    if not 2 <= count <= _MAX_ORDERED:
        return None
    from scipy.optimize import linear_sum_assignment

    a = np.moveaxis(got, axis, 0).reshape(count, -1)
    b = np.moveaxis(wanted, axis, 0).reshape(count, -1)
    chosen = spread_positions(a.shape[1], _SAMPLED)
    cost = distances(a[:, chosen], b[:, chosen])
    # Among equals each stays where it is.
    cost[np.arange(count), np.arange(count)] *= 1 - 1e-9
    order = linear_sum_assignment(cost)[1]
    if (order == np.arange(count)).all():
        return None
    return tuple(int(k) for k in order)


def distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Squared distances between the rows of two matrices, (rows of a, rows of b), at least 0."""
    squares = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None, :] - 2 * (a @ b.T)
    gaps: np.ndarray = np.maximum(squares, 0.0)
    return gaps


def spread_positions(size: int, most: int) -> np.ndarray:
    """At most so many positions of a row, the same ones each time, drawn without order."""
    if size <= most:
        return np.arange(size)
    return np.sort(np.random.default_rng(0).choice(size, most, replace=False))
