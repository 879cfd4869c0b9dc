"""Boundaries between groups, by the groups' positions, and which of them a plan crosses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mptune.tuning.sampler.cuts.casts import CastCounts, Casts
from mptune.tuning.sampler.plan_rows import Bools


@dataclass(frozen=True)
class Boundary:
    """Groups that share a tensor: its Cast is paid once, unless all of them have the same precision.

    Attributes:
        members: positions of the groups, each once.
        fp32: something that is FP32 under every plan shares the tensor.
        fp16: something that is FP16 under every plan shares the tensor.
    """

    members: tuple[int, ...]
    fp32: bool = False
    fp16: bool = False

    def crossed(self, plans: Bools) -> Bools:
        """Whether each plan crosses the boundary, shape (n_plans,), for ``plans`` of shape (n_plans, n_groups)."""
        part = plans[:, list(self.members)]
        crossed: Bools = np.logical_or(part.any(axis=1), self.fp16) & ~np.logical_and(part.all(axis=1), not self.fp32)
        return crossed


class Crossings:
    """Which boundaries are crossed, for many plans at a time."""

    def __init__(self, boundaries: Sequence[Boundary | Casts]) -> None:
        """Sort the boundaries by shape, so that those of one shape are one array operation."""
        casts = [one for one in boundaries if isinstance(one, Casts)]
        self._casts = CastCounts(casts) if casts else None  # then all are
        self._count = len(boundaries)
        shapes: dict[tuple[int, bool, bool], list[int]] = {}
        for index, boundary in enumerate(boundaries):
            if isinstance(boundary, Boundary):
                shapes.setdefault((len(boundary.members), boundary.fp32, boundary.fp16), []).append(index)
        self._shapes = [
            (rows, np.array([boundaries[row].members for row in rows]).T, fp32, fp16)
            for (_, fp32, fp16), rows in shapes.items()
        ]

    def of(self, columns: Bools) -> NDArray[Any]:
        """Which boundaries each plan crosses; of three precisions, how often each tensor is cast.

        Args:
            columns: shape (n_groups, n_plans), True is FP16; C-contiguous is fastest.

        Returns:
            Shape (n_boundaries, n_plans).
        """
        if self._casts is not None:
            return self._casts.of(columns)
        crossed = np.empty((self._count, columns.shape[1]), dtype=bool)
        for rows, members, fp32, fp16 in self._shapes:
            some, every = columns[members[0]], columns[members[0]]  # (n_boundaries of this shape, n_plans)
            for others in members[1:]:
                some, every = some | columns[others], every & columns[others]
            crossed[rows] = (True if fp16 else some) & (True if fp32 else ~every)
        return crossed
